"""Many callers, many threads, forks: the right answers, nothing left behind, no work while idle, no fault in memory."""

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from budgetformer.engine.kernels import build as builder
from budgetformer.engine.native import NativePath
from budgetformer.errors import UsageError
from engine_helpers import NATIVE, in_python, loaded, random_batch, random_weights

pytestmark = pytest.mark.skipif(not NATIVE, reason="needs the compiled library: make native")
linux = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads and pages in /proc")


def test_callers_at_once_get_their_own_answers():
    """Four threads share one model and two have one of their own; each call is answered as if it were alone."""
    weights = random_weights(0, max_positions=64)
    batches = [random_batch(weights, [seed + 1, 40, 3], seed) for seed in range(12)]
    expected = [loaded(weights, "fp32", NATIVE[0]).run(batch).logits for batch in batches]
    shared, own = NativePath(weights, "fp32", threads=2), NativePath(weights, "fp32", threads=2)

    def call(number: int) -> bool:
        path = own if number % 3 == 0 else shared
        return all((path.run(batch).logits == logits).all() for batch, logits in zip(batches, expected, strict=True))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(24)))


def test_a_refusal_is_told_to_the_caller_it_concerns():
    """Errors are kept for each thread: a bad call beside good ones, and beside another bad one."""
    weights = random_weights(0)
    path = NativePath(weights, "fp32", threads=2)
    good = random_batch(weights, [5])
    blocks = {cut: np.ones((1, 3, cut), np.uint8) for cut in (2, 5, 10, 25)}
    start = threading.Barrier(len(blocks) + 1)

    def call(cut: int) -> None:
        start.wait()
        for _ in range(200):
            with pytest.raises(UsageError, match=f"engine: {cut} blocks"):
                path.run(good, blocks=blocks[cut])

    with ThreadPoolExecutor(len(blocks)) as pool:
        calls = [pool.submit(call, cut) for cut in blocks]
        start.wait()
        expected = path.run(good).logits
        for _ in range(100):
            np.testing.assert_array_equal(path.run(good).logits, expected)
        for done in calls:
            done.result()


def test_more_threads_than_work():
    """Eleven threads and one token: those without work get out of the way, and no bit changes."""
    weights = random_weights(0)
    many = NativePath(weights, "fp32", threads=11)
    for lengths in ([1], [1, 1], [31], [5] * 40):
        batch = random_batch(weights, lengths)
        np.testing.assert_array_equal(many.run(batch).logits, loaded(weights, "fp32", NATIVE[0]).run(batch).logits)


@linux
def test_threads_end_with_the_model():
    def running() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    weights = random_weights(0)
    before = running()
    path = NativePath(weights, "fp32", threads=7)
    assert running() == before + 6
    path.run(random_batch(weights, [3]))
    assert running() == before + 6
    del path
    gc.collect()
    assert running() == before


FORK = """
import os, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from engine_helpers import loaded, random_batch, random_weights

weights = random_weights(0, max_positions=512)
batch = random_batch(weights, [9, 30, 200])
paths = [loaded(weights, dtype, "plain", threads) for dtype in ("fp32", "int8") for threads in (1, 3)]
expected = [path.run(batch).logits for path in paths]
if sys.argv[1] == "busy":
    def work():
        while True:
            paths[1].run(batch)
    threading.Thread(target=work, daemon=True).start()


def right():
    return all((path.run(batch).logits == logits).all() for path, logits in zip(paths, expected) for _ in range(3))


def child(deep):
    signal.alarm(60)  # a child that hangs ends, and is told from one that is right
    with ThreadPoolExecutor(4) as pool:
        good = all(pool.map(lambda _: right(), range(8)))
    if deep:
        number = os.fork()
        if number == 0:
            child(False)
        good &= os.waitpid(number, 0)[1] == 0
    loaded.cache_clear()
    paths.clear()
    os._exit(0 if good else 3)


for _ in range(5):
    number = os.fork()
    if number == 0:
        child(True)
    assert right()
    print(os.waitpid(number, 0)[1])
"""


@pytest.mark.parametrize("parent", ["idle", "busy"])
def test_a_forks_child_and_its_parent_both_go_on(parent):
    """Threads stay with the parent; the child, its own callers, and its child start others. Freeing is no hazard."""
    done = in_python(FORK, parent, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0"] * 5


LOADS = """
import gc, os, resource
from engine_helpers import random_batch, random_weights
from budgetformer.engine.native import NativePath

weights = random_weights(0, hidden_size=192, num_heads=4, intermediate_size=384)
batch = random_batch(weights, [31] * 3)


def load(times):
    for number in range(times):
        path = NativePath(weights, ("fp32", "int8")[number % 2], threads=1 + number % 3)
        for _ in range(5):
            path.run(batch)
    size = path.resident_bytes
    del path
    gc.collect()
    return size


def held():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 1e6


size = load(30)
before = held()
load(90)
print(size / 1e6, held() - before)
path = NativePath(weights, "fp32", threads=2)
path.run(batch)
before = held()
for _ in range(3000):
    path.run(batch)
print(held() - before)
"""


@linux
def test_loading_and_running_again_and_again_takes_no_more_memory():
    """90 loads of a model of a megabyte, and 3,000 runs."""
    done = in_python(LOADS)
    assert done.returncode == 0, done.stderr
    size, loads, runs = map(float, done.stdout.split())
    assert size > 0.5
    assert loads < 4
    assert runs < 2


UNLIKE = """
from engine_helpers import COMPUTED, part, random_batch, random_weights
from budgetformer.engine.native import NativePath

weights = random_weights(0, max_positions=512, num_layers=1)
kept = []
for path, dtype in COMPUTED:
    for lengths in [[32 * panels + 1, 32 * panels] for panels in range(1, 16)] + [[512, *range(31, 512, 32)]]:
        model = NativePath(weights, dtype, path, threads=2)
        batch = random_batch(weights, lengths)
        logits = model.run(batch).logits
        for i in range(len(batch)):
            assert (NativePath(weights, dtype, path).run(part(batch, [i])).logits == logits[i]).all()
        kept.append(model)  # side by side in memory: what one writes past its own end is another's
print(len(kept) == 16 * len(COMPUTED))
"""


def test_a_shorter_input_may_need_more_memory():
    """Scores are computed for as many queries as fit into a cache, so for more of them where there are fewer keys."""
    done = in_python(UNLIKE)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]


IDLE = """
import sys, threading, time
from engine_helpers import random_batch, random_weights
from budgetformer.engine.native import NativePath

weights = random_weights(0)
paths = [NativePath(weights, "fp32", threads=threads) for threads in (1, 2, 4)]
for path in paths:
    path.run(random_batch(weights, [31] * 20))
time.sleep(0.05)
before = time.process_time()
time.sleep(0.5)
print(time.process_time() - before)
"""


def test_an_idle_engine_uses_no_processor():
    done = in_python(IDLE)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.02


AT_WORK = """
import threading, time
from engine_helpers import random_batch, random_weights
from budgetformer.engine.native import NativePath

weights = random_weights(0, max_positions=512)
path = NativePath(weights, "fp32", threads=2)
batch = random_batch(weights, [512] * 100)


def work():
    while True:
        path.run(batch)


threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
print("the end")
"""


def test_the_interpreter_ends_while_a_thread_is_at_work():
    for _ in range(3):
        done = in_python(AT_WORK)
        assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


def test_python_runs_on_while_the_kernels_are_at_work():
    """The interpreter's lock is free meanwhile: another thread gets its turn before the call comes back."""
    weights = random_weights(0, max_positions=512)
    path = loaded(weights, "fp32", "plain")
    batch = random_batch(weights, [512] * 60)
    inside, turns = threading.Event(), []

    def call() -> None:
        inside.set()
        path.run(batch)
        turns.append("the call came back")

    caller = threading.Thread(target=call)
    caller.start()
    inside.wait()
    turns.append("a turn")
    caller.join()
    assert turns == ["a turn", "the call came back"]


# ------------------------------------------------------------------------------------------------------ sanitizers

MIXED = """
import sys
import numpy as np
from budgetformer.config import ACTIVATIONS, ESTIMATORS, NORMS, POOLINGS, ROUTER_VIEWS
from budgetformer.engine.native import NativePath
from engine_helpers import COMPUTED, random_batch, random_weights

# width, heads, neurons
SHAPES = [(36, 3, 50), (40, 5, 96), (8, 1, 1), (5, 5, 3), (66, 2, 128), (1, 1, 32), (96, 2, 256)]
BATCHES = ([1], [1, 1, 1], [33, 2, 64, 5, 7], [131, 1, 17] + [3] * 20, [449, 448])
rng = np.random.default_rng(0)
runs = 0
for path, dtype in COMPUTED:
    for i, (width, heads, neurons) in enumerate(SHAPES):
        weights = random_weights(
            i,
            budget=dict(estimator=ESTIMATORS[i % 5], view=ROUTER_VIEWS[i % 3], min_units=i % 3),
            norm=NORMS[i % 2],
            activation=ACTIVATIONS[i % 5],
            pooling=POOLINGS[i // 2 % 2],
            head_hidden=(None, "tanh", "gelu")[i % 3],
            token_types=(2, 0, 1)[i % 3],
            position_offset=i % 2 * 2,
            embedding_size=(None, 7, 36)[i % 3],
            labels=1 + i,
            max_positions=512,
            **dict(hidden_size=width, num_heads=heads, intermediate_size=neurons),
        )
        for threads in (1, 3):
            model = NativePath(weights, dtype, path, threads=threads)
            for lengths in BATCHES if i < 2 else BATCHES[:-1]:
                batch = random_batch(weights, lengths, i)
                shape = (len(lengths), 3, heads)
                cuts = [cut for cut in {1, neurons // 32} if cut and (cut == 1 or neurons % 32 == 0)]
                blocks = [(rng.random((*shape[:2], cut)) < q).astype(np.uint8) for cut in cuts for q in (0, 0.5, 1)]
                gates = [np.zeros(shape, np.uint8), (rng.random(shape) < 0.4).astype(np.uint8)]
                counts = rng.integers(0, heads + 1, shape[:2]).astype(np.int32)
                calls = [{}, {"counts": counts}, {"gates": gates[1], "blocks": blocks[-2]}]
                calls += [{"gates": one} for one in gates] + [{"blocks": one} for one in blocks]
                for options in calls:
                    output = model.run(batch, need_hidden=True, **options)
                    assert np.isfinite(output.logits).all()
                    assert np.isfinite(output.hidden).all()
                    runs += 1
print(runs)
"""


def sanitizer(name: str) -> str:
    """The compiler's own library of a sanitizer, to be loaded before Python."""
    words, _ = builder._compiler(None)
    found = subprocess.run([*words, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).is_absolute():
        pytest.skip(f"the compiler has no {name}")
    return found.stdout.strip()


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory) -> dict[str, str]:
    """The environment in which the kernels check themselves."""
    if not sys.platform.startswith("linux"):
        pytest.skip("loads the sanitizer before Python, as on Linux")
    library = builder.build(tmp_path_factory.mktemp("sanitized"), extra_flags=builder.SANITIZE)
    return {
        "BUDGETFORMER_LIBRARY": str(library),
        "LD_PRELOAD": sanitizer("libasan.so"),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves much behind; our own leaks are tested above
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


@pytest.mark.slow
def test_the_kernels_run_clean_under_the_sanitizers(sanitized):
    """Addresses and undefined behaviour, over every path and type, tiny widths, odd lengths, no heads, no blocks."""
    done = in_python(MIXED, timeout=560, **sanitized)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    assert int(done.stdout) > 1000


SHORT = """
import ctypes
import numpy as np
from budgetformer.engine import native
from engine_helpers import random_batch, random_weights

weights = random_weights(0)
path = native.NativePath(weights, "fp32", "plain")
lib = native.library()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
short = libc.malloc(4 * 2)  # two ids, and the batch says three
ctypes.memset(short, 0, 8)
out = [np.empty(100, np.float32) for _ in range(3)]
chosen, offsets = np.empty(100, np.uint8), np.array([0, 3], np.int32)
batch = native._Batch(3, 1, 1, ids=short, offsets=offsets.ctypes.data, chosen=chosen.ctypes.data)
batch.wanted, batch.logits = (array.ctypes.data for array in out[:2])
lib.bf_run(path._handle, ctypes.byref(batch))
"""


@pytest.mark.slow
def test_the_sanitizers_see_a_fault(sanitized):
    """Ids that end one token early, given past the checks of Python: reported, so the silence above counts."""
    done = in_python(SHORT, timeout=560, **sanitized)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
