"""HTTP alone: the server's own loop and parser in front of an answer that is always the same.

    python benchmarks/server_floor.py BYTES

There is no tokenizer, no queue and no engine behind it, so what it takes no server on this stack can do without. It
prints its address and serves until a signal. `benchmarks/server.py` starts it.
"""

import asyncio
import socket
import sys
from typing import Any

import uvicorn

from budgetformer.ports.server.listen import Protocol

# As many, and as long, as the server sends with an answer.
HEADERS = [(b"content-type", b"application/json"), *[(b"x-constant-number-%d" % n, b"0.123456") for n in range(11)]]


def constant(size: int) -> Any:
    """An application that reads a request and answers with `size` bytes."""
    start = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-length", b"%d" % size), *HEADERS],
    }
    body = {"type": "http.response.body", "body": b"x" * size}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send(start)
        await send(body)

    return app


def main() -> None:
    """Serve."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listening:
        config = uvicorn.Config(
            constant(int(sys.argv[1])),
            http=Protocol,
            ws="none",
            lifespan="off",
            log_level="critical",
            access_log=False,
            server_header=False,
        )
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", file=sys.stderr, flush=True)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(uvicorn.Server(config).serve(sockets=[listening]))


if __name__ == "__main__":
    main()
