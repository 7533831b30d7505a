"""The engine's process as the server sees it: started, watched, started again when it dies."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

from budgetformer.errors import BudgetFormerError, ModelFolderError, UsageError
from budgetformer.ports.server.worker import LENGTHS, Arrays, pack, unpack

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


class EngineProcess:
    """A `Backend` in a process of its own.

    options: of `worker.load`. limit_s: a batch that takes longer has hung, and the process is killed.
    """

    def __init__(self, options: dict[str, Any], *, limit_s: float, echo: Callable[[str], None]) -> None:
        self.facts: dict[str, Any] = {}
        self.restarts = 0
        self._options, self._limit_s, self._echo = options, limit_s, echo
        self._up = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._reply: asyncio.Future[tuple[dict[str, Any], Arrays]] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether a batch would be computed at once."""
        return self._up.is_set()

    @property
    def pid(self) -> int | None:
        """The process that computes; None while there is none."""
        return self._process.pid if self._process is not None and self.ready else None

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
        process = self._process
        if process is None or process.stdin is None or not self.ready:
            raise EngineLost("the engine's process ended")
        self._reply = asyncio.get_running_loop().create_future()
        try:
            process.stdin.write(pack({"detail": detail}, arrays))
            async with asyncio.timeout(self._limit_s):
                table, found = await self._reply
        except TimeoutError:
            self._kill()
            raise EngineLost(f"the engine did not answer in {self._limit_s:g} s") from None
        finally:
            self._reply = None
        if "error" in table:
            raise EngineFailed(table["error"])
        return table["seconds"], found

    async def _spawn(self) -> None:
        # The key is for the other side of the house, and a path is not to be searched for modules.
        environment = {name: value for name, value in os.environ.items() if name != KEY}
        command = (sys.executable, "-P", "-m", "budgetformer.ports.server.worker", json.dumps(self._options))
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment)
        try:
            async with asyncio.timeout(START_S):
                table, _ = await self._read()
        except (asyncio.IncompleteReadError, TimeoutError):
            await self._end()
            raise BudgetFormerError("the engine's process ended before it was ready; is there enough memory?") from None
        if "error" in table:
            await self._end()
            kinds = {kind.exit_code: kind for kind in (UsageError, ModelFolderError)}
            raise kinds.get(table["exit_code"], BudgetFormerError)(table["error"])
        self.facts = table
        self._up.set()

    async def _watch(self) -> None:
        """Hand out replies until the process ends; then start another, for as long as it takes."""
        while True:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    reply = await self._read()
                    if self._reply is not None and not self._reply.done():
                        self._reply.set_result(reply)
            self._up.clear()
            if self._reply is not None and not self._reply.done():
                self._reply.set_exception(EngineLost("the engine's process ended"))
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

    async def _read(self) -> tuple[dict[str, Any], Arrays]:
        assert self._process is not None
        source = self._process.stdout
        assert source is not None
        head, body = LENGTHS.unpack(await source.readexactly(LENGTHS.size))
        return unpack(await source.readexactly(head), await source.readexactly(body))

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _end(self) -> None:
        self._up.clear()
        self._kill()
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            await self._process.wait()
