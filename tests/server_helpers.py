"""A server without a network and without a second process: the same application, the engine behind the same face."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np

from budgetformer.engine import Engine
from budgetformer.ports.server.app import create_app
from budgetformer.ports.server.policy import Policy
from budgetformer.ports.server.service import Service
from budgetformer.ports.server.worker import HEAD, Frame, answer, facts, pack, size_of, unpack


class Local:
    """A backend in this process. open: batches wait while it is closed. errors: raised by the batches to come."""

    def __init__(self, engine):
        self.engine, self.facts, self.ready, self.restarts = engine, facts(engine), True, 0
        self.open = asyncio.Event()
        self.open.set()
        self.batches, self.errors, self.spoil = [], [], False

    async def up(self):
        while not self.ready:
            await asyncio.sleep(0.001)

    async def compute(self, arrays, *, detail):
        self.batches.append(arrays)
        await self.open.wait()
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        frame = answer(self.engine, self.through_a_pipe(Frame(float(detail), arrays)))
        if self.spoil:
            frame.arrays["logits"] = frame.arrays["logits"] * np.float32("nan")
        frame = self.through_a_pipe(frame)
        return frame.number, frame.arrays

    @staticmethod
    def through_a_pipe(frame):
        packed = pack(frame)
        head, body = packed[: HEAD.size], packed[HEAD.size :]
        assert size_of(head) == len(body)
        return unpack(head, body)

    @property
    def lengths(self):
        """Tokens of each text, batch by batch."""
        return [arrays["lengths"].tolist() for arrays in self.batches]


@contextlib.asynccontextmanager
async def serving(engine, *, budget=None, key=None, hosts=None, echo=lambda line: None, **options):
    """A client, the service and its backend."""
    backend = Local(engine)
    service = Service("tiny", engine.tokenizer, backend, Policy.parse(budget), **options)
    computing = asyncio.create_task(service.queue.run())
    app = create_app(service, key=key, hosts=hosts, echo=echo)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as client:
            yield client, service, backend
    finally:
        computing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await computing


def load(folder):
    """The engine of a folder, on one thread."""
    return Engine.load(folder, threads=1)


@contextlib.contextmanager
def process(folder, *arguments, **environment):
    """`budgetformer serve` in a process of its own, on a free port: (process, address)."""
    command = [sys.executable, "-m", "budgetformer", "serve", "--model", str(folder), "--port", "0", "--threads", "1"]
    inherited = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with subprocess.Popen(
        [*command, *arguments], env=inherited, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            lines = []
            while not lines or "http://" not in lines[-1]:
                line = running.stderr.readline()
                assert line, f"it did not start: {lines}"
                lines.append(line)
            yield running, lines[-1].split()[-1]
        finally:
            if running.poll() is None:
                running.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(15)
            running.kill()


def engine_of(pid):
    """The process that computes for a server."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                if b"ports.server.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        time.sleep(0.02)
    raise AssertionError("there is no engine")
