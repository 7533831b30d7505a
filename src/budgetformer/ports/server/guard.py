"""What every request passes before and after its route: the key, the limits, the count, and errors without texts."""

import hmac
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from budgetformer.ports.server.protocol import Refused
from budgetformer.ports.server.service import Service

OPEN = frozenset({"/", "/style.css", "/page.js", "/icon.svg", "/health", "/v2/health/live", "/v2/health/ready"})
HUNG_UP = 499  # nginx's number for a client that is gone; nobody reads it


class Guard:
    """An ASGI application around another. key: asked of all but the page's files and the health of the server."""

    def __init__(self, app: ASGIApp, service: Service, key: str | None, echo: Callable[[str], None]) -> None:
        self.app, self.service, self.echo = app, service, echo
        self._key = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens."""
        if scope["type"] != "http":
            return
        service, began, status = self.service, time.perf_counter(), None

        async def sending(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        service.in_progress += 1
        try:
            self._check(scope)
            await self.app(scope, receive, sending)
        except Refused as refused:
            await failure(refused)(scope, receive, sending)
        except Exception as error:
            # Starlette has answered by now, and hands it on for the log.
            self.echo(_where(error))
        finally:
            service.in_progress -= 1
            route = getattr(scope.get("route"), "path", "other")
            service.measures.requests.labels(route, str(status or HUNG_UP)).inc()
            service.measures.request_seconds.observe(time.perf_counter() - began)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        # Compared in constant time, so that the time does not tell how much of a guess was right.
        known = self._key is None or hmac.compare_digest(headers.get(b"authorization", b""), self._key)
        if not known and scope["path"] not in OPEN:
            raise Refused(401, "Unauthorized", "give the key: Authorization: Bearer KEY")
        if scope["method"] == "POST":
            self.service.admit()
            length = headers.get(b"content-length", b"0")
            if length.isdigit() and int(length[:20]) > self.service.limits.body:
                raise too_large(self.service.limits.body)


def too_large(limit: int) -> Refused:
    """A body over the limit."""
    return Refused(413, "Validation", f"the body is larger than {limit:,} bytes")


def failure(refused: Refused) -> Response:
    """The reason, in text-embeddings-inference's shape."""
    headers = {} if refused.retry_s is None else {"retry-after": str(refused.retry_s)}
    headers |= {"www-authenticate": "Bearer"} if refused.status == 401 else {}
    body = to_json({"error": refused.reason, "error_type": refused.kind})
    return Response(body, refused.status, headers, "application/json")


def _where(error: Exception) -> str:
    """The kind of error and its place. Its message may quote a text, and stays here."""
    last = traceback.extract_tb(sys.exc_info()[2])[-1]
    return f"a request failed: {type(error).__name__} in {Path(last.filename).name}, line {last.lineno}"
