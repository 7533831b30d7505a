"""What `serve` does with its settings: the key, a word of warning, and the server."""

import os
from collections.abc import Mapping

from budgetformer.cli.speaking import echo_unless
from budgetformer.errors import UsageError
from budgetformer.settings import ServeSettings

KEY = "BUDGETFORMER_API_KEY"


def serve(settings: ServeSettings, sources: Mapping[str, str]) -> int:
    """Serve a model until Ctrl-C or SIGTERM."""
    from budgetformer.ports.server.listen import run

    key, echo = _key(settings), echo_unless(settings.quiet)
    if key is None and settings.host not in ("127.0.0.1", "::1", "localhost"):
        echo(f"{settings.host} can be reached by others, and no key is asked for; set {KEY} or --api-key-file")
    run(settings, key=key, echo=echo)
    return 0


def _key(settings: ServeSettings) -> str | None:
    """The key that clients must give. A header can hold it: no spaces, no line ends, ASCII."""
    where, key = KEY, os.environ.get(KEY)
    if settings.api_key_file is not None:
        where = settings.api_key_file
        with open(where, "rb") as file:
            key = file.read(4096).decode("utf-8", "replace").strip()
    if key is None:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"{where}: the key must be one word of printable ASCII, at most 4,096 of them")
    return key
