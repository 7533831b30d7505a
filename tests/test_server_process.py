"""The server as it runs: two processes, a socket, signals. Nothing is simulated, so it takes a while."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

import server_helpers
import tiny
from budgetformer.engine import Engine

pytestmark = pytest.mark.slow
TEXT = {"inputs": "where is my card"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_folder(tmp_path_factory.mktemp("process"), routed=True)


async def until_healthy(client, seconds=30.0):
    """Seconds until the server says that it is well."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if (await client.get("/health")).status_code == 200:
            return time.monotonic() - began
        await asyncio.sleep(0.05)
    raise AssertionError("not healthy")


def test_answers_are_those_of_the_engine(folder):
    with server_helpers.process(folder) as (_, address):
        answered = httpx.post(f"{address}/predict", json=TEXT).json()
    expected = Engine.load(folder, threads=1).predict([TEXT["inputs"]])
    assert {one["label"]: one["score"] for one in answered} == pytest.approx(
        dict(zip(expected.names, expected.probabilities[0].tolist(), strict=True)), abs=1e-6
    )


def test_a_killed_engine_is_replaced_under_load(folder):
    async def scenario(running, address):
        statuses = []
        async with httpx.AsyncClient(base_url=address, timeout=30) as client:

            async def load():
                while not stop:
                    statuses.append((await client.post("/predict", json=TEXT)).status_code)

            stop = []
            tasks = [asyncio.create_task(load()) for _ in range(4)]
            while len(statuses) < 20:
                await asyncio.sleep(0.01)
            first = server_helpers.engine_of(running.pid)
            os.kill(first, signal.SIGKILL)
            while (await client.get("/health")).status_code == 200:
                await asyncio.sleep(0.001)
            took = await until_healthy(client)
            done = len(statuses)
            while len(statuses) < done + 20:
                await asyncio.sleep(0.01)
            stop.append(True)
            await asyncio.gather(*tasks)
            return took, statuses, (await client.get("/health")).json(), first, server_helpers.engine_of(running.pid)

    with server_helpers.process(folder) as (running, address):
        took, statuses, health, first, second = asyncio.run(scenario(running, address))
    assert took < 10
    assert set(statuses) <= {200, 503}
    assert statuses.count(503) <= 4
    assert statuses[-20:] == [200] * 20
    assert health["engine_restarts"] == 1
    assert first != second


def test_sigterm_finishes_what_was_begun(folder):
    async def scenario(running, address):
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=address, timeout=30, limits=limits) as client:
            tasks = [asyncio.create_task(client.post("/predict", json={"inputs": ["card"] * 60})) for _ in range(60)]
            while "requests_in_progress 6" not in (await client.get("/metrics")).text.replace(".0", ""):
                await asyncio.sleep(0.002)
                if all(task.done() for task in tasks):
                    break
            running.send_signal(signal.SIGTERM)
            return [answered.status_code for answered in await asyncio.gather(*tasks)]

    with server_helpers.process(folder, "--max-queue-tokens", "100000") as (running, address):
        os.kill(server_helpers.engine_of(running.pid), signal.SIGSTOP)
        engine = server_helpers.engine_of(running.pid)
        statuses = asyncio.run(_with_engine_going_on(scenario(running, address), engine))
        assert running.wait(20) == 143
    assert statuses == [200] * 60


async def _with_engine_going_on(work, engine):
    """The engine stands still until the signal has been sent, so that everything waits when it comes."""
    task = asyncio.create_task(work)
    await asyncio.sleep(2)
    os.kill(engine, signal.SIGCONT)
    return await task


def test_a_hung_engine_is_replaced(folder):
    with server_helpers.process(folder, "--timeout", "2") as (running, address):
        os.kill(server_helpers.engine_of(running.pid), signal.SIGSTOP)
        assert httpx.post(f"{address}/predict", json=TEXT, timeout=30).status_code == 503
        with httpx.Client(base_url=address, timeout=30) as client:
            deadline = time.monotonic() + 30
            while client.post("/predict", json=TEXT).status_code != 200:
                assert time.monotonic() < deadline
            assert client.get("/health").json()["engine_restarts"] == 1


def test_the_engine_ends_with_its_server(folder):
    with server_helpers.process(folder) as (running, _):
        engine = server_helpers.engine_of(running.pid)
        running.kill()
        running.wait()
        deadline = time.monotonic() + 20
        while Path(f"/proc/{engine}").exists() and "Z (zombie)" not in Path(f"/proc/{engine}/status").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_key_is_seen_by_nobody_else(folder, tmp_path):
    file = tmp_path / "key"
    file.write_text("from-the-file\n")
    for arguments, environment, key in (
        ((), {"BUDGETFORMER_API_KEY": "from-the-environment"}, "from-the-environment"),
        (("--api-key-file", str(file)), {}, "from-the-file"),
    ):
        with server_helpers.process(folder, *arguments, **environment) as (running, address):
            engine = server_helpers.engine_of(running.pid)
            seen = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (running.pid, engine)]
            seen.append(Path(f"/proc/{engine}/environ").read_bytes())
            assert not any(key.encode() in one for one in seen)
            assert httpx.post(f"{address}/predict", json=TEXT).status_code == 401
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.post(f"{address}/predict", json=TEXT, headers=headers).status_code == 200


def test_a_name_that_points_here_is_no_way_in(folder):
    """A page that had its own name point to 127.0.0.1 gets nothing, unless that name is let through."""
    foreign = {"host": "attacker.example:8000"}
    for arguments, environment, expected in (
        ((), {}, 421),
        (("--allow-host", "attacker.example,other.example"), {}, 200),
        ((), {"BUDGETFORMER_ALLOW_HOST": "attacker.example"}, 200),
        (("--host", "0.0.0.0"), {}, 200),
        (("--host", "0.0.0.0", "--allow-host", "other.example"), {}, 421),
    ):
        with server_helpers.process(folder, *arguments, **environment) as (_, address):
            address = address.replace("0.0.0.0", "127.0.0.1")
            assert httpx.post(f"{address}/predict", json=TEXT, headers=foreign).status_code == expected
            assert httpx.get(address, headers=foreign).status_code == expected
            assert httpx.post(f"{address}/predict", json=TEXT).status_code == 200
            named = address.replace("127.0.0.1", "localhost")
            assert httpx.post(f"{named}/predict", json=TEXT).status_code == 200


def test_headers_without_an_end_are_cut(folder):
    with server_helpers.process(folder) as (_, address):
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
            sent = 0
            with pytest.raises(ConnectionError):  # noqa: PT012
                while sent < 64_000_000:
                    connection.sendall(b"y" * 65_536)
                    sent += 65_536
            assert sent < 16_000_000
        assert httpx.get(f"{address}/health").status_code == 200


def fails(*arguments):
    command = [sys.executable, "-m", "budgetformer", "serve", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    (line,) = done.stderr.splitlines()
    return done.returncode, line


def test_what_keeps_it_from_starting_is_one_line(folder, tmp_path):
    code, line = fails("--model", tmp_path, "--port", "0")
    assert code == 4
    assert str(tmp_path) in line
    code, line = fails("--model", folder, "--port", "0", "--budget", "calibrated")
    assert code == 2
    assert "calibrate" in line
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, line = fails("--model", folder, "--port", taken.getsockname()[1])
    assert code == 1
    assert "in use" in line
    code, line = fails("--model", folder, "--port", "0", "--allow-host", "http://box")
    assert code == 2
    assert "allow_host is 'http://box'" in line
    code, line = fails("--model", folder, "--budget", "0.9:0.1")
    assert code == 2
    assert "LOW:HIGH" in line
