"""The server as it runs: a socket, uvicorn, the engine's process; SIGTERM lets what was begun be finished."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from budgetformer.engine.tokenizer import FolderTokenizer
from budgetformer.ports.server.app import create_app
from budgetformer.ports.server.guard import hosts_of
from budgetformer.ports.server.policy import Policy
from budgetformer.ports.server.process import EngineProcess
from budgetformer.ports.server.service import Limits, Service
from budgetformer.settings import ServeSettings

ENGINE_OPTIONS = ("max_length", "dtype", "path", "threads", "batch_tokens")
MAX_HEAD = 65_536  # bytes of a request before its body


class Protocol(HttpToolsProtocol):
    """uvicorn's fast parser, which would read headers without an end."""

    _head: int | None = 0

    def data_received(self, data: bytes) -> None:
        """Count what comes before the headers are complete."""
        if self._head is not None:
            self._head += len(data)
            if self._head > MAX_HEAD + len(data):
                self.send_400_response("The headers are too long.")
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """From here on the body is counted, by the application."""
        self._head = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """What comes next is another head."""
        self._head = 0
        super().on_message_complete()


def run(settings: ServeSettings, *, key: str | None, echo: Callable[[str], None]) -> None:
    """Serve until a signal.

    Raises:
        BudgetFormerError: what `Engine.load` says of the folder and the options.
        OSError: the address cannot be had.
        KeyboardInterrupt: the signal, once what was begun is finished.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.create_server((settings.host, settings.port), family=family, backlog=2048) as listening:
        config = uvicorn.Config(
            _nothing,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_level="critical",  # its errors may quote; ours are said by `Guard`
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(settings.timeout) + 1,
        )
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_serve(config, listening, settings, key, echo))


async def _serve(
    config: uvicorn.Config,
    listening: socket.socket,
    settings: ServeSettings,
    key: str | None,
    echo: Callable[[str], None],
) -> None:
    policy = Policy.parse(settings.budget)
    hosts = hosts_of(listening.getsockname()[0], settings.host, settings.allow_host)
    options = {name: getattr(settings, name) for name in ("model", *ENGINE_OPTIONS)}
    backend = EngineProcess({**options, "calibrated": policy.word == "calibrated"}, limit_s=settings.timeout, echo=echo)
    await backend.start()
    try:
        service = Service(
            settings.name or Path(settings.model).resolve().name,
            FolderTokenizer.load(settings.model),
            backend,
            policy,
            batch_tokens=settings.batch_tokens,
            queue_tokens=settings.max_queue_tokens,
            limits=Limits(
                texts=settings.max_client_batch_size,
                body=settings.payload_limit,
                requests=settings.max_concurrent_requests,
                seconds=settings.timeout,
            ),
        )
        config.app = create_app(service, key=key, hosts=hosts, echo=echo)
        computing = asyncio.create_task(service.queue.run())
        echo(backend.facts["note"])
        echo(f"{service.name}: http://{_shown(listening)}")
        try:
            await uvicorn.Server(config).serve(sockets=[listening])
        finally:
            computing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await computing
    finally:
        await backend.close()


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    """Stands in until the model is loaded: uvicorn wants an application before its loop is chosen."""


def _shown(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
