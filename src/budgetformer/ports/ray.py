"""Files answered by many machines: a pool of Ray actors, each with an engine of its own.

What travels between processes is the names of files and what became of them. Texts and answers go from file to engine
to file where they are, so that neither Ray's object store nor the driver holds any, however many there are.
"""

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from budgetformer.engine.engine import physical_cores
from budgetformer.errors import BudgetFormerError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # else it calls the restart of workers an error, beforehand
LOCAL = "RAY_ADDRESS" not in os.environ
if LOCAL:
    # Ray listens on the machine's outer address unless it was told, before it is imported, that it has no cluster.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

try:
    import ray
    from ray.data import ActorPoolStrategy, DataContext
    from ray.exceptions import RayError
except ImportError as error:
    raise UsageError(f"engine ray: {error.name} is not installed; pip install 'budgetformer[ray]'") from None

STORE_BYTES = 100 << 20  # Ray's smallest is 75 MiB, and names are all that is stored
Work = Callable[..., Mapping[str, Any]]


def map_files(
    start: Callable[..., Work],
    arguments: Mapping[str, Any],
    files: Sequence[Mapping[str, str]],
    *,
    workers: int | None = None,
    threads: int = 1,
) -> Iterator[dict[str, Any]]:
    """What `start(**arguments)(**file)` returns for each file, as they are done.

    A worker calls `start` once and has one file at a time; one that dies is replaced, and its file begun again, so the
    work must bear being done twice. The cluster is the one at RAY_ADDRESS, else one on this machine that nobody else
    can reach, and that ends with the iteration.

    Args:
        start: a class or function of a module that all machines have; what it returns and what that returns is plain.
        arguments: for `start`, once in each worker.
        files: for the work, once for each; those that take long should come first.
        workers: how many work at once; None is as many as the processors allow.
        threads: processors of each.

    Raises:
        BudgetFormerError: a worker could not start, or Ray failed.
    """
    with _cluster(workers, threads):
        room = max(1, int(ray.cluster_resources().get("CPU", 1)) // threads)
        pool = ActorPoolStrategy(size=min(workers or room, len(files)), max_tasks_in_flight_per_actor=1)
        done = ray.data.from_items([json.dumps(file) for file in files], override_num_blocks=len(files)).map_batches(
            _Worker,
            fn_constructor_args=[start, dict(arguments)],
            batch_size=1,
            batch_format="pyarrow",
            num_cpus=threads,
            compute=pool,
        )
        try:
            batch: Any
            for batch in done.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                yield from map(json.loads, batch["done"].to_pylist())
        except RayError as error:
            raise BudgetFormerError(f"engine ray: {_last_line(error)}") from error


class _Worker:
    """An actor: batches of file names in, batches of results out, as Arrow tables."""

    def __init__(self, start: Callable[..., Work], arguments: Mapping[str, Any]):
        self._work = start(**arguments)

    def __call__(self, batch: "pa.Table") -> "pa.Table":
        import pyarrow as pa

        return pa.table({"done": [json.dumps(self._work(**json.loads(file))) for file in batch["item"].to_pylist()]})


@contextlib.contextmanager
def _cluster(workers: int | None, threads: int) -> Iterator[None]:
    """Join the cluster at RAY_ADDRESS, or start one here; one that was joined before stays."""
    if ray.is_initialized():
        yield
        return
    main = threading.current_thread() is threading.main_thread()
    on_terminate = signal.getsignal(signal.SIGTERM)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if LOCAL:
        processors = threads * (workers or max(1, physical_cores() // threads))
        options |= {"address": "local", "num_cpus": processors}
        options |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        with _unheard():
            ray.init(**options)
    except Exception as error:  # of no class of its own, and of several
        raise BudgetFormerError(f"engine ray: no cluster was to be had: {_last_line(error)}") from error
    try:
        if main:
            signal.signal(signal.SIGTERM, on_terminate)  # Ray has put its own in place
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        DataContext.get_current().enable_progress_bars = False
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Keep from stderr what Ray's C++ says there about its log level; failures come as exceptions."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def _last_line(error: BaseException) -> str:
    """The line that says what happened: of an error in a worker that is the last of its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
