"""How a server stands under load, each part a server of its own on 127.0.0.1, driven by an asyncio client.

    python benchmarks/server.py --model runs/demo --output server.json            all of it, some minutes
    python benchmarks/server.py --model runs/demo --parts overhead,kill --small   to see that all works

With --parts, what --output already holds of the other parts stays there.

steady    50 requests a second: none may fail.
overload  several times what it can answer: 200 or 429 alone, each in a bounded time.
memory    20,000 requests of mixed length: the resident memory of both processes after a tenth of them, and at the end.
kill      SIGKILL of the engine under load: seconds until healthy, and what clients saw.
overhead  one text at a time: the engine's time, as it measures it itself, and the client's around it.
budgets   1.5 times what a fixed budget can answer: fixed against load-following, latency and accuracy.

Arrivals are a Poisson process, drawn before, and latency counts from when a request was due: a server that falls behind
cannot hide it. Client and server share the machine's cores, so the figures are lower bounds.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from budgetformer.data import read_rows
from budgetformer.environment import environment
from budgetformer.outputs import write_aside

PARTS = ("steady", "overload", "memory", "kill", "overhead", "budgets")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Server:
    """A server that runs: its address, its process and that of its engine."""

    address: str
    pid: int

    @property
    def engine(self) -> int:
        """The process that computes; it changes when one dies."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(children[-1])

    def cpu_s(self) -> tuple[float, float]:
        """CPU time so far, of the server and of its engine."""
        server, engine = (_stat(pid)[11:13] for pid in (self.pid, self.engine))
        return sum(map(int, server)) / TICKS, sum(map(int, engine)) / TICKS

    def resident_mib(self) -> tuple[float, float]:
        """Resident memory of the server and of its engine."""
        server, engine = (int(_stat(pid)[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20 for pid in (self.pid, self.engine))
        return server, engine


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


@contextlib.contextmanager
def serving(model: str, *arguments: str) -> Iterator[Server]:
    """`budgetformer serve` on a free port of this machine."""
    with started("-m", "budgetformer", "serve", "--model", model, "--port", "0", *arguments) as server:
        yield server


@contextlib.contextmanager
def started(*command: str) -> Iterator[Server]:
    """A Python program that says on stderr at which address it serves."""
    with subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "http://" in line:
                break
        else:
            raise SystemExit("the server did not start")
        try:
            yield Server(line.split()[-1], process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@dataclass(frozen=True)
class Seen:
    """One answer: its status (0 where the connection broke), the text, seconds since it was due, and what it said."""

    status: int
    place: int
    seconds: float
    label: str | None = None
    budget: str | None = None
    engine_ms: float = 0.0
    total_ms: float = 0.0


@contextlib.asynccontextmanager
async def clients(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    """A session of keep-alive connections, as many as are needed."""
    limits = aiohttp.TCPConnector(limit=0, force_close=False)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(server.address, connector=limits, timeout=timeout) as session:
        yield session


async def ask(session: aiohttp.ClientSession, texts: Sequence[str], place: int, due: float) -> Seen:
    """Classify one text."""
    try:
        async with session.post("/predict", json={"inputs": texts[place], "top": 1}) as answered:
            said = await answered.json()
            seconds = time.perf_counter() - due
            if answered.status != 200:
                return Seen(answered.status, place, seconds)
            parts = dict(part.split(";dur=") for part in answered.headers["server-timing"].split(", "))
            budget = answered.headers["x-budget"]
            return Seen(200, place, seconds, said[0]["label"], budget, float(parts["inference"]), float(parts["total"]))
    except (aiohttp.ClientError, TimeoutError):
        return Seen(0, place, time.perf_counter() - due)


async def open_loop(server: Server, texts: Sequence[str], rate: float, seconds: float, seed: int = 0) -> list[Seen]:
    """Requests at `rate` a second, whether earlier ones are answered or not."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, max(1, round(rate * seconds)))
    async with clients(server) as session:
        began, tasks = time.perf_counter(), []
        for number, due in enumerate(np.cumsum(gaps).tolist()):
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(session, texts, number % len(texts), began + due)))
        return await asyncio.gather(*tasks)


async def closed_loop(
    server: Server,
    texts: Sequence[str],
    count: int,
    together: int,
    each: Callable[[int], None] = lambda number: None,
) -> list[Seen]:
    """`count` requests, `together` at a time, each as soon as another is answered."""
    seen: list[Seen] = []
    numbers = iter(range(count))
    async with clients(server) as session:

        async def client() -> None:
            for number in numbers:
                each(number)
                seen.append(await ask(session, texts, number % len(texts), time.perf_counter()))

        await asyncio.gather(*(client() for _ in range(together)))
    return seen


async def saturation(server: Server, texts: Sequence[str], count: int) -> float:
    """Requests a second that it answers when there are always some waiting."""
    began = time.perf_counter()
    await closed_loop(server, texts, count, 64)
    return count / (time.perf_counter() - began)


def summary(seen: Sequence[Seen]) -> dict[str, Any]:
    """Statuses, and the latency of those that were answered, in milliseconds."""
    answered = sorted(1e3 * one.seconds for one in seen if one.status == 200)
    statuses = {str(status): number for status, number in sorted(Counter(one.status for one in seen).items())}
    quantiles = {f"p{q}": round(float(np.percentile(answered, q)), 2) for q in (50, 95, 99)} if answered else {}
    longest = {
        f"longest_{s}": round(1e3 * max(one.seconds for one in seen if str(one.status) == s), 1) for s in statuses
    }
    return {"requests": len(seen), "statuses": statuses, **quantiles, **longest}


# ---------------------------------------------------------------------- the parts


def steady(options: argparse.Namespace, texts: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """50 requests a second."""
    seconds = 3 if options.small else 30
    with serving(options.model, *options.serve) as server:
        seen = asyncio.run(open_loop(server, texts, 50, seconds))
    return {"rate": 50, "seconds": seconds, **summary(seen), "ok": all(one.status == 200 for one in seen)}


def overload(options: argparse.Namespace, texts: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """Three times what it can answer."""
    seconds, count, queue = (2, 300, 256) if options.small else (20, 3000, 4096)
    with serving(options.model, *options.serve, "--max-queue-tokens", str(queue)) as server:
        most = asyncio.run(saturation(server, texts, count))
        seen = asyncio.run(open_loop(server, texts, 3 * most, seconds))
    found = summary(seen)
    return {
        "saturation": round(most, 1),
        "rate": round(3 * most, 1),
        **found,
        "ok": set(found["statuses"]) <= {"200", "429"},
    }


def memory(options: argparse.Namespace, texts: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """Many requests of mixed length: log-normal, mean 60 words, up to more than the model reads."""
    count, rng = 1000 if options.small else 20_000, np.random.default_rng(0)
    words = " ".join(texts).split()
    lengths = np.minimum(rng.lognormal(3.4, 1.1, 997).astype(int) + 1, 2000)
    mixed = [" ".join(rng.choice(words, length)) for length in lengths]
    samples: list[tuple[float, float]] = []
    with serving(options.model, *options.serve) as server:

        def each(number: int) -> None:
            if number and number % (count // 10) == 0:
                samples.append(server.resident_mib())

        seen = asyncio.run(closed_loop(server, mixed, count, 16, each))
        samples.append(server.resident_mib())
    totals = [sum(sample) for sample in samples]
    growth = totals[-1] / totals[0] - 1
    return {
        **summary(seen),
        "server_mib": [round(server, 1) for server, _ in samples],
        "engine_mib": [round(engine, 1) for _, engine in samples],
        "growth": round(growth, 4),
        "ok": growth <= 0.05 and all(one.status == 200 for one in seen),
    }


def kill(options: argparse.Namespace, texts: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """SIGKILL of the engine while requests come."""
    seconds = 6 if options.small else 20

    async def scenario(server: Server) -> tuple[list[Seen], float]:
        load = asyncio.create_task(open_loop(server, texts, 30, seconds))
        await asyncio.sleep(2)
        async with clients(server) as session:
            os.kill(server.engine, signal.SIGKILL)
            began, down = time.perf_counter(), False
            while time.perf_counter() - began < 60:
                async with session.get("/health") as answered:
                    down = down or answered.status == 503
                    if down and answered.status == 200:
                        break
                await asyncio.sleep(0.005)
            took = time.perf_counter() - began
            return await load, took

    with serving(options.model, *options.serve) as server:
        seen, took = asyncio.run(scenario(server))
    found = summary(seen)
    return {"healthy_s": round(took, 2), **found, "ok": took < 10 and set(found["statuses"]) <= {"200", "503"}}


WORDS = (10, 25, 50, 100, 200, 400)
LONGEST = 512  # tokens; the model may have been made for fewer, and this is about time


class Line:
    """One keep-alive connection, one request after another, each sent in one piece and ready before the clock runs.

    An asyncio client takes longer to send and to read than all of a short text's overhead; that would be its own.
    """

    def __init__(self, server: Server, text: str) -> None:
        host, port = server.address.removeprefix("http://").split(":")
        self.connection = socket.create_connection((host, int(port)))
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body = json.dumps({"inputs": text}).encode()
        lines = (
            "POST /predict HTTP/1.1",
            f"Host: {host}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        )
        self.request = "\r\n".join((*lines, "\r\n")).encode() + body

    def ask(self) -> tuple[float, bytes, bytes]:
        """Milliseconds until the last byte of the answer, its head and its body."""
        began = time.perf_counter()
        self.connection.sendall(self.request)
        head, mark, body = self.connection.recv(1 << 20), b"\r\n\r\n", b""
        while mark not in head:
            head += self._more()
        head, _, body = head.partition(mark)
        length = int(head.lower().partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])
        while len(body) < length:
            body += self._more()
        return 1e3 * (time.perf_counter() - began), head, body

    def _more(self) -> bytes:
        more = self.connection.recv(1 << 20)
        if not more:
            raise SystemExit("the server hung up")
        return more


@contextlib.contextmanager
def awake() -> Iterator[None]:
    """No core sleeps: on each there is a loop that runs only where nothing else would.

    A core that has slept for some milliseconds begins with cold caches, and in a virtual machine somebody else may have
    had it. Whoever waits for 5 ms, as a server does for its engine, then needs a multiple of the time for what comes
    next, whatever it is. A server that has more to do than one request at a time does not sleep.
    """
    code = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); "
    code += "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-c", code, str(core)]) for core in sorted(os.sched_getaffinity(0))]
    try:
        time.sleep(0.5)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower one, the median, the upper one."""
    return [round(value, 3) for value in np.percentile(values, (25, 50, 75)).tolist()]


def overhead(options: argparse.Namespace, texts: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """One text at a time, short to long, on cores that sleep while nothing is to be done, and on cores that do not.

    The overhead is the client's time less the engine's, request by request. floor: the same client, and a server that
    always gives the same answer of the same size, asked whenever the other has answered, so that it has waited as long
    and its caches are as cold.
    """
    words, found = " ".join(texts).split(), {}
    with serving(options.model, *options.serve, "--max-length", str(LONGEST)) as server:
        first = Line(server, words[0])
        size = max(len(first.ask()[2]) for _ in range(500))  # so many, as the first requests to a server are slower
        with started(str(Path(__file__).with_name("server_floor.py")), str(size)) as constant:
            for state, kept in (("asleep", contextlib.nullcontext()), ("awake", awake())):
                with kept:
                    found[state] = [_row(options, server, constant, " ".join(words[:n])) for n in WORDS]
    under = {state: [row["tokens"] for row in rows if row["overhead"] <= 0.1] for state, rows in found.items()}
    return {
        **found,
        "tokens_of_the_first_within_a_tenth": {state: min(tokens, default=None) for state, tokens in under.items()},
        "ok": all(row["overhead"] <= 0.1 for row in found["asleep"]),
    }


def _row(options: argparse.Namespace, server: Server, constant: Server, text: str) -> dict[str, Any]:
    line, floor = Line(server, text), Line(constant, text)
    each = statistics.median(line.ask()[0] for _ in range(20))  # which warms up, too
    seconds, before = (0.2 if options.small else 2.5), server.cpu_s()
    count = max(20, round(1e3 * seconds / each))
    asked = [line.ask() for _ in range(count)]
    after = server.cpu_s()
    parts = [dict(_timing(head)) for _, head, _ in asked]
    engine, around = [part["inference"] for part in parts], [part["total"] - part["inference"] for part in parts]
    beyond = [wall - part["inference"] for (wall, _, _), part in zip(asked, parts, strict=True)]
    alone = []
    for _ in range(20 + count // 4):
        line.ask()
        alone.append(floor.ask()[0])
    head = asked[0][1].decode("latin-1").lower()
    median = statistics.median(engine)
    return {
        "words": len(text.split()),
        "tokens": int(head.partition("x-compute-tokens: ")[2].partition("\r\n")[0]),
        "requests": count,
        "engine_ms": quartiles(engine),
        "overhead_ms": quartiles(beyond),  # HTTP on both sides, tokens, queue, pipe, answer
        "inside_ms": quartiles(around),  # of that, from the parsed request to the answer's headers
        "floor_ms": quartiles(alone[20:]),
        "server_cpu_ms": round(1e3 * (after[0] - before[0]) / count, 3),
        "overhead": round(statistics.median(beyond) / median, 3),
        "overhead_over_floor": round((statistics.median(beyond) - statistics.median(alone[20:])) / median, 3),
    }


def _timing(head: bytes) -> Iterator[tuple[str, float]]:
    """The parts of `Server-Timing`, in milliseconds."""
    said = head.lower().partition(b"\r\nserver-timing: ")[2].partition(b"\r\n")[0].decode()
    for part in said.split(", "):
        name, _, took = part.partition(";dur=")
        yield name, float(took)


def budgets(options: argparse.Namespace, texts: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """1.5 times what every unit on can answer, with every unit on and with fewer the more wait."""
    seconds, count, found = 2 if options.small else 30, 300 if options.small else 3000, {}
    with serving(options.model, *options.serve, "--budget", "1.0") as server:
        most = asyncio.run(saturation(server, texts, count))
    for name, budget in (("fixed", "1.0"), ("following", "0.2:1.0")):
        with serving(options.model, *options.serve, "--budget", budget) as server:
            seen = asyncio.run(open_loop(server, texts, 1.5 * most, seconds))
        right = [one.label == labels[one.place] for one in seen if one.status == 200]
        used = [float(one.budget) for one in seen if one.budget is not None]
        found[name] = {
            **summary(seen),
            "accuracy": round(statistics.mean(right), 4) if right else None,
            "mean_budget": round(statistics.mean(used), 3) if used else None,
        }
    return {"saturation": round(most, 1), "rate": round(1.5 * most, 1), **found}


def _before(parser: argparse.ArgumentParser, output: str | None, found: dict[str, Any]) -> dict[str, Any]:
    """The parts that were measured before, of the same model, flags and processor."""
    if output is None or not Path(output).exists():
        return {}
    before = json.loads(Path(output).read_text(encoding="utf-8"))
    for name in ("model", "serve"):
        if before[name] != found[name]:
            parser.error(f"{output}: {name} was {before[name]}, is {found[name]}; give another --output")
    if before["environment"]["cpu"] != found["environment"]["cpu"]:
        parser.error(f"{output}: measured on another processor; give another --output")
    return before


def main() -> None:
    """Run the parts that are asked for, print them, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", default="demo", help="labelled texts; the test split of demo")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, with commas between")
    parser.add_argument("--small", action="store_true", help="few requests, to see that all works")
    parser.add_argument("--serve", default="", help="more flags for the server, as one string")
    parser.add_argument("--output", help="JSON to write")
    options = parser.parse_args()
    options.serve = options.serve.split()
    wanted = options.parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    split = "test" if options.data == "demo" else None
    rows = read_rows(options.data, require_labels=True, split=split).good()
    texts, labels = [text or "" for text in rows.texts], [label or "" for label in rows.labels or []]
    found: dict[str, Any] = {
        "model": Path(options.model).name,
        "serve": options.serve,
        "environment": {k: v for k, v in environment().items() if k != "engine_library"},
    }
    before = _before(parser, options.output, found) if len(wanted) < len(PARTS) else {}
    for part in wanted:
        found[part] = globals()[part](options, texts, labels)
        print(part, json.dumps(found[part]), file=sys.stderr, flush=True)
    if options.output:
        with write_aside(options.output) as aside:
            aside.write_text(json.dumps({**before, **found}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
