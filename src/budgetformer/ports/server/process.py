"""The engine's process as the server sees it: started, watched, started again when it dies."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol, cast

from budgetformer.errors import BudgetFormerError, ModelFolderError, UsageError
from budgetformer.ports.server.worker import HEAD, Arrays, Frame, pack, size_of, unpack

START_S = 120.0  # a large model on a slow disk
LONGEST_PAUSE_S = 5.0  # between attempts to start an engine that does not come up
KEY = "BUDGETFORMER_API_KEY"


class EngineLost(Exception):
    """The engine's process ended, or was ended because it hung, with a batch in it."""


class EngineFailed(Exception):
    """The engine could not compute a batch; the message is the kind of error."""


class Backend(Protocol):
    """What computes batches, one after the other. ready: it can now. restarts: how often it had to be started again."""

    facts: dict[str, Any]

    @property
    def ready(self) -> bool: ...  # noqa: D102

    @property
    def restarts(self) -> int: ...  # noqa: D102

    async def up(self) -> None:
        """Wait until it is ready."""
        ...

    async def compute(self, arrays: Arrays, *, detail: bool) -> tuple[float, Arrays]:
        """Seconds and answers of one batch, as `worker.answer` takes and gives them.

        Raises:
            EngineLost: the batch may be tried again.
            EngineFailed: it would fail again.
        """
        ...


class _Pipes(asyncio.SubprocessProtocol):
    """What comes out of a process: whole frames, handed to `take` as they come; `end` is called when no more can come.

    closed: that has been. exited: the process is gone, and was waited for.
    """

    def __init__(self, take: Callable[[Frame], None], end: Callable[[], None]) -> None:
        self.closed, self.exited = asyncio.Event(), asyncio.Event()
        self._take, self._end, self._held = take, end, b""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Mostly a frame at a time, which then is copied no more than it has to be."""
        held = self._held + data if self._held else data
        while len(held) >= HEAD.size and len(held) >= (end := HEAD.size + size_of(held[: HEAD.size])):
            self._take(unpack(held[: HEAD.size], held[HEAD.size : end]))
            held = held[end:]
        self._held = held

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Its output ends with it; its input may end before."""
        if fd == 1 and not self.closed.is_set():
            self.closed.set()
            self._end()

    def process_exited(self) -> None:
        """No zombie is left."""
        self.exited.set()


class EngineProcess:
    """A `Backend` in a process of its own.

    options: of `worker.load`. limit_s: a batch that takes longer has hung, and the process is killed.
    """

    def __init__(self, options: dict[str, Any], *, limit_s: float, echo: Callable[[str], None]) -> None:
        self.facts: dict[str, Any] = {}
        self.restarts = 0
        self._options, self._limit_s, self._echo = options, limit_s, echo
        self._up = asyncio.Event()
        self._process: asyncio.SubprocessTransport | None = None
        self._pipes: _Pipes | None = None
        self._stdin: asyncio.WriteTransport | None = None
        self._reply: asyncio.Future[Frame] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether a batch would be computed at once."""
        return self._up.is_set()

    async def start(self) -> None:
        """Load the model; `facts` are known then.

        Raises:
            BudgetFormerError: what `Engine.load` says of the folder and the options.
        """
        await self._spawn()
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End the process; it has no batch any more."""
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        await self._end()

    async def up(self) -> None:
        """Wait until it is ready."""
        await self._up.wait()

    async def compute(self, arrays: Arrays, *, detail: bool) -> tuple[float, Arrays]:
        """As `Backend.compute`."""
        if self._stdin is None or not self.ready:
            raise EngineLost("the engine's process ended")
        loop = asyncio.get_running_loop()
        self._reply = loop.create_future()
        limit = loop.call_later(self._limit_s, self._hung)
        try:
            self._stdin.write(pack(Frame(float(detail), arrays)))
            answer = await self._reply
        finally:
            limit.cancel()
            self._reply = None
        if answer.table is not None:
            raise EngineFailed(answer.table["error"])
        return answer.number, answer.arrays

    async def _spawn(self) -> None:
        # The key is for the other side of the house, and a path is not to be searched for modules.
        environment = {name: value for name, value in os.environ.items() if name != KEY}
        command = (sys.executable, "-P", "-m", "budgetformer.ports.server.worker", json.dumps(self._options))
        loop, pipe = asyncio.get_running_loop(), asyncio.subprocess.PIPE
        self._reply = loop.create_future()
        try:
            self._process, self._pipes = await loop.subprocess_exec(
                lambda: _Pipes(self._came, self._ended), *command, stdin=pipe, stdout=pipe, stderr=None, env=environment
            )
            self._stdin = cast(asyncio.WriteTransport, self._process.get_pipe_transport(0))
            async with asyncio.timeout(START_S):
                table = (await self._reply).table
        except (EngineLost, TimeoutError):
            await self._end()
            raise BudgetFormerError("the engine's process ended before it was ready; is there enough memory?") from None
        finally:
            self._reply = None
        assert table is not None
        if "error" in table:
            await self._end()
            kinds = {kind.exit_code: kind for kind in (UsageError, ModelFolderError)}
            raise kinds.get(table["exit_code"], BudgetFormerError)(table["error"])
        self.facts = table
        self._up.set()

    async def _watch(self) -> None:
        """Start another process whenever one has ended, for as long as it takes."""
        while True:
            assert self._pipes is not None
            await self._pipes.closed.wait()
            await self._end()
            self.restarts += 1
            self._echo("the engine's process ended and is started again")
            pause = 0.0
            while not self.ready:
                await asyncio.sleep(pause)
                try:
                    await self._spawn()
                except (BudgetFormerError, OSError) as error:
                    pause = min(2 * pause + 0.1, LONGEST_PAUSE_S)
                    self._echo(f"the engine does not start: {error}")

    def _came(self, frame: Frame) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(frame)

    def _lost(self, reason: str) -> None:
        self._up.clear()
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(EngineLost(reason))

    def _ended(self) -> None:
        self._lost("the engine's process ended")

    def _hung(self) -> None:
        self._lost(f"the engine did not answer in {self._limit_s:g} s")
        self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.get_returncode() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _end(self) -> None:
        self._up.clear()
        self._kill()
        if self._process is not None and self._pipes is not None:
            await self._pipes.exited.wait()
            self._process.close()
            await self._pipes.closed.wait()
