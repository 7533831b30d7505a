"""What `/metrics` tells: requests, queue, batches, latency, the share of units that ran, the budget."""

from collections.abc import Callable, Iterator

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SHARES = tuple(step / 10 for step in range(1, 11))
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Now:
    """Numbers that are read when they are asked for."""

    def __init__(self, read: Callable[[], dict[str, float | None]], restarts: Callable[[], int]) -> None:
        self.read, self.restarts = read, restarts

    def collect(self) -> Iterator[Metric]:
        for name, value in self.read().items():
            if value is not None:
                yield GaugeMetricFamily(f"budgetformer_{name}", name.replace("_", " "), value=value)
        yield CounterMetricFamily("budgetformer_engine_restarts", "engines that ended", value=self.restarts())


class Measures:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"budgetformer_{name}", help, buckets=buckets, registry=self.registry)

        names = ["route", "status"]
        self.requests = Counter("budgetformer_requests", "requests", names, registry=self.registry)
        self.request_seconds = histogram("request_seconds", "from the request to its answer", SECONDS)
        self.queue_seconds = histogram("queue_seconds", "until the first text of a request is taken", SECONDS)
        self.engine_seconds = histogram("engine_seconds", "of a batch in the engine", SECONDS)
        self.batch_tokens = histogram("batch_tokens", "tokens of a batch", TOKENS)
        self.units_share = histogram("units_share", "share of what has a budget that ran for a text", SHARES)

    def watch(self, read: Callable[[], dict[str, float | None]], restarts: Callable[[], int]) -> None:
        """Tell the numbers that `read` gives, and the restarts, too."""
        self.registry.register(_Now(read, restarts))  # pyright: ignore[reportArgumentType]

    def batch(self, tokens: int, seconds: float, shares: np.ndarray) -> None:
        """A batch was computed."""
        self.batch_tokens.observe(tokens)
        self.engine_seconds.observe(seconds)
        for share in shares.tolist():
            self.units_share.observe(share)

    def text(self) -> bytes:
        """All of it, in Prometheus' format."""
        return generate_latest(self.registry)
