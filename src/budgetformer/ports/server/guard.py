"""What every request passes before and after its route: the key, the limits, the count, and errors without texts."""

import hmac
import ipaddress
import re
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from budgetformer.errors import UsageError
from budgetformer.ports.server.protocol import Refused
from budgetformer.ports.server.service import HungUp, Service

OPEN = frozenset({"/", "/style.css", "/page.js", "/icon.svg", "/health", "/v2/health/live", "/v2/health/ready"})
HUNG_UP = 499  # nginx's number for a client that is gone; nobody reads it
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
NAME = re.compile(r"[a-z0-9_-][a-z0-9._-]*|[0-9a-f.]*:[0-9a-f:.]*", re.I)  # of a host, or an IPv6 address
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::\d*)?", re.I)  # such a name, and perhaps a port

Handler = Callable[[Request], Awaitable[Response]]


def hosts_of(address: str, asked: str, named: str | None) -> frozenset[str] | None:
    """The names that requests to this server may be for; None is any.

    A page of a foreign site can have its own name point to 127.0.0.1 (DNS rebinding), and then read what a server says
    there as if it were its own. But its requests tell the name. address: where the server listens. asked: the same in
    the words of the setting. named: further names, with commas between.

    Raises:
        UsageError: what is named is no host.
    """
    names = [name.strip().lower() for name in named.split(",")] if named is not None else []
    for name in names:
        if not NAME.fullmatch(name):
            raise UsageError(f"allow_host is {named!r:.80}; give names of hosts with commas between, without ports")
    if ipaddress.ip_address(address).is_loopback:
        return LOCAL | {address, asked.lower(), *names}
    return LOCAL | {*names} if names else None


class Guard:
    """An ASGI application around another. key: asked of all but the page's files and the health of the server.

    hosts: the names that a request may be for, as `hosts_of` gives them. direct: what is posted to these paths is
    handled without the other application, whose routing and middleware would take a tenth of all that the server does
    for one text.
    """

    def __init__(
        self,
        app: ASGIApp,
        direct: Mapping[str, Handler],
        service: Service,
        *,
        key: str | None,
        hosts: frozenset[str] | None,
        echo: Callable[[str], None],
    ) -> None:
        self.app, self.direct, self.service, self.echo = app, direct, service, echo
        self._key, self._hosts = None if key is None else f"Bearer {key}".encode(), hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens."""
        if scope["type"] != "http":
            return
        service, began, status, route = self.service, time.perf_counter(), None, "other"

        async def sending(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        service.in_progress += 1
        try:
            self._check(scope)
            handler = self.direct.get(scope["path"]) if scope["method"] == "POST" else None
            if handler is None:
                await self.app(scope, receive, sending)
            else:
                route = scope["path"]
                await (await handler(Request(scope, receive)))(scope, receive, sending)
        except Exception as error:
            if status is None:
                await answer_to(error)(scope, receive, sending)
            if not isinstance(error, Refused | HungUp):
                self.echo(_where(error))
        finally:
            service.in_progress -= 1
            route = getattr(scope.get("route"), "path", route)
            service.measures.requests.labels(route, str(status or HUNG_UP)).inc()
            service.measures.request_seconds.observe(time.perf_counter() - began)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if self._hosts is not None and _name(headers.get(b"host", b"")) not in self._hosts:
            raise Refused(421, "Validation", "Host: not a name of this server; --allow-host NAME makes it one")
        # Compared in constant time, so that the time does not tell how much of a guess was right.
        known = self._key is None or hmac.compare_digest(headers.get(b"authorization", b""), self._key)
        if not known and scope["path"] not in OPEN:
            raise Refused(401, "Unauthorized", "give the key: Authorization: Bearer KEY")
        if scope["method"] == "POST":
            self.service.admit()
            length = headers.get(b"content-length", b"0")
            if length.isdigit() and int(length[:20]) > self.service.limits.body:
                raise too_large(self.service.limits.body)


def _name(host: bytes) -> str | None:
    """The name in a Host header, without the port; None where it is none."""
    found = HOST.fullmatch(host.decode("latin-1"))
    return None if found is None else (found[1] or found[2]).lower()


def answer_to(error: Exception) -> Response:
    """What is answered when a handler raised."""
    if isinstance(error, HungUp):
        return Response(status_code=HUNG_UP)
    if isinstance(error, Refused):
        return failure(error)
    return failure(Refused(500, "Backend", f"the server failed ({type(error).__name__})"))


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
