"""What an engine cannot compute is refused in one line that says so, and the process and the engine live on."""

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from budgetformer.engine import native
from budgetformer.engine.engine import Engine, choose
from budgetformer.engine.packed import Packed
from budgetformer.engine.saved import Point, Saved, read_saved, write_saved
from budgetformer.errors import BudgetFormerError, ModelFolderError, UsageError
from engine_helpers import NATIVE, in_python, loaded, random_batch, random_weights
from tiny import make_folder

PATHS = [*NATIVE, "torch"]
WEIGHTS = random_weights(0, intermediate_size=96)
GOOD = random_batch(WEIGHTS, [3, 5])
needs_library = pytest.mark.skipif(not NATIVE, reason="needs the compiled library: make native")


def made(path: str) -> Any:
    from budgetformer.engine.torch_path import TorchPath

    return TorchPath(WEIGHTS) if path == "torch" else loaded(WEIGHTS, "fp32", path, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def batch(ids: Any, offsets: Any, types: Any = None) -> Packed:
    def as_given(values: Any) -> Any:
        return np.array(values, np.int32) if isinstance(values, list) else values

    return Packed(as_given(ids), as_given(offsets), as_given(types))


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    assert len(text) < 300
    return text


# ------------------------------------------------------------------------------------------------------------- batches

FEW = [1, 2, 3]
# fmt: off
BAD_BATCHES: dict[str, tuple[Packed, str]] = {
    "an id past the vocabulary": (batch([1, 97], [0, 2]), r"\b97\b.*\b96\b"),
    "a negative id": (batch([1, -1], [0, 2]), "-1"),
    "the lowest id there is": (batch([1, -(2**31)], [0, 2]), "-2147483648"),
    "an id of 64 bits": (batch(np.array([1, 2**32 + 5]), [0, 2]), "4294967301"),
    "ids with a fraction": (batch(np.array([1.7, 2.2]), [0, 2]), "whole numbers"),
    "a type past the table": (batch(FEW, [0, 3], [0, 1, 2]), r"type.*\b2\b"),
    "a negative type": (batch(FEW, [0, 3], [0, -1, 1]), "type.*-1"),
    "few types": (batch(FEW, [0, 3], [0, 1]), "types has the shape"),
    "an input without a token": (batch(FEW, [0, 0, 3]), "at least one token"),
    "a last input without a token": (batch(FEW, [0, 3, 3]), "at least one token"),
    "offsets that fall": (batch(FEW, [0, 2, 1, 3]), "offsets must rise"),
    "offsets that begin late": (batch(FEW, [1, 3]), "offsets must rise"),
    "offsets that begin before 0": (batch(FEW, [-1, 3]), "offsets must rise"),
    "offsets that end early": (batch(FEW, [0, 2]), "offsets must rise"),
    "offsets that end late": (batch(FEW, [0, 30]), "offsets must rise"),
    "offsets out of the range of 32 bits": (batch(FEW, np.array([0, 2**32 + 3])), "offsets must rise"),
    "offsets without a number": (batch(FEW, []), "offsets"),
    "offsets that are one number": (batch(FEW, np.array(3)), "offsets"),
    "offsets in a table": (batch(FEW, [[0, 3]]), "offsets"),
    "offsets with a fraction": (batch(FEW, np.array([0, 3.0])), "whole numbers"),
    "ids in a table": (batch([FEW], [0, 3]), "ids"),
    "tokens without an input": (batch(FEW, [0]), "offsets must rise"),
    "more tokens than positions": (random_batch(WEIGHTS, [2, 32]), r"32 tokens.*31 positions"),
}
ONES = np.ones((2, 3, 3), np.uint8)
BAD_OPTIONS: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "counts of other layers": ({"counts": np.ones((2, 2), np.int32)}, "counts has the shape"),
    "counts of other inputs": ({"counts": np.ones((3, 3), np.int32)}, "counts has the shape"),
    "counts with a fraction": ({"counts": np.full((2, 3), 1.5)}, "whole numbers"),
    "gates of another number of heads": ({"gates": np.ones((2, 3, 4), np.uint8)}, "gates has the shape"),
    "gates of one input": ({"gates": ONES[0]}, "gates has the shape"),
    "counts and gates": ({"counts": np.ones((2, 3), np.int32), "gates": ONES}, "not both"),
    "blocks of another batch": ({"blocks": np.ones((3, 3, 3), np.uint8)}, "blocks has the shape"),
    "blocks of no shape": ({"blocks": np.array(1, np.uint8)}, "blocks has the shape"),
    "no blocks": ({"blocks": np.ones((2, 3, 0), np.uint8)}, "0 blocks"),
    "blocks that do not divide": ({"blocks": np.ones((2, 3, 7), np.uint8)}, "7 blocks"),
}
# fmt: on


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_bad_batch_is_refused(path, name):
    """The same words on every path, and the next batch is answered as before."""
    bad, message = BAD_BATCHES[name]
    runner = made(path)
    before = runner.run(GOOD).logits
    with pytest.raises(UsageError, match=message) as caught:
        runner.run(bad)
    one_line(caught.value)
    np.testing.assert_array_equal(runner.run(GOOD).logits, before)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_heads_and_blocks_are_refused(path, name):
    options, message = BAD_OPTIONS[name]
    with pytest.raises(UsageError, match=message) as caught:
        made(path).run(GOOD, **options)
    one_line(caught.value)


@pytest.mark.parametrize("path", NATIVE)
def test_the_kernels_want_blocks_of_whole_panels(path):
    """96 neurons in 2 blocks of 48: torch computes that, the kernels say what they can."""
    with pytest.raises(UsageError, match=r"2 blocks .* multiples of 32"):
        made(path).run(GOOD, blocks=np.ones((2, 3, 2), np.uint8))


@pytest.mark.parametrize("path", PATHS)
def test_a_batch_of_nothing_has_an_answer_of_nothing(path):
    output = made(path).run(Packed.of([]), need_hidden=True)
    assert output.hidden is not None
    assert [output.logits.shape, output.gates.shape] == [(0, 5), (0, 3, 3)]
    assert [output.wanted.shape, output.hidden.shape] == [(0, 3), (0, 36)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("policy", [{}, {"budget": 0.5}, {"margin": 0.5}], ids=str)
def test_no_texts_have_the_arrays_of_some_texts_without_their_rows(tmp_path, path, blocks, policy):
    engine = Engine.load(make_folder(tmp_path / "tiny", routed=True, blocks=blocks), path=path, threads=1)
    some = engine.predict(["card", "lost card"], **policy).output
    nothing = engine.predict([], **policy).output
    for name, array in vars(some).items():
        none = getattr(nothing, name)
        assert (none is None) == (array is None), name
        if array is not None:
            assert (none.shape, none.dtype) == ((0, *array.shape[1:]), array.dtype), name
    assert (some.blocks is None) == (blocks == 1)


@pytest.mark.parametrize("path", PATHS)
def test_counts_outside_the_range_are_brought_into_it(path):
    """A count below `min_units` or above the number of heads is the nearest that there is."""
    counts = np.array([[-5, 99, 2], [0, 3, 1]], np.int32)
    assert made(path).run(GOOD, counts=counts).gates.sum(2).tolist() == [[1, 3, 2], [1, 3, 1]]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [bool, np.float32, np.int64])
def test_a_gate_is_on_when_it_is_not_0(path, kind):
    gates = np.zeros((2, 3, 3), kind)
    gates[0, 1, 2], gates[1, 2, 0] = 1, True if kind is bool else 256
    if kind is np.float32:
        gates[0, 0, 0] = 0.25
    output = made(path).run(GOOD, gates=gates)
    np.testing.assert_array_equal(output.gates, gates != 0)


@pytest.mark.parametrize("path", PATHS)
def test_types_are_not_looked_at_without_a_table(path):
    """A tokenizer may give types that the model has no use for; its training path passes over them, too."""
    from budgetformer.engine.torch_path import TorchPath

    weights = random_weights(1, token_types=0)
    runner = TorchPath(weights) if path == "torch" else loaded(weights, "fp32", path)
    plain, typed = batch(FEW, [0, 1, 3]), batch(FEW, [0, 1, 3], [0, 1, 7])
    np.testing.assert_array_equal(runner.run(typed).logits, runner.run(plain).logits)


@pytest.mark.parametrize("path", PATHS)
def test_arrays_in_another_order_are_read_as_they_are(path):
    """Views with steps and Fortran's order: the numbers count, not how they lie."""
    runner = made(path)
    rng = np.random.default_rng(0)
    gates = (rng.random((2, 3, 3)) < 0.5).astype(np.uint8)
    wide = np.repeat(GOOD.ids, 2)
    other = Packed(wide[::2], GOOD.offsets.astype(np.int64), GOOD.types)
    expected = runner.run(GOOD, gates=gates)
    for layout in (np.asfortranarray(gates), np.repeat(gates, 2, axis=1)[:, ::2]):
        np.testing.assert_array_equal(runner.run(other, gates=layout).logits, expected.logits)


# -------------------------------------------------------------------------------------------------------------- loading


@needs_library
def test_weights_in_another_layout_are_read_as_they_are():
    """`read_weights` gives float32 in C order; a model put together by hand may not."""
    expected = made(NATIVE[0]).run(GOOD).logits
    for change in (np.asfortranarray, lambda tensor: tensor.astype(np.float64)):
        other = replace(WEIGHTS, tensors={name: change(tensor) for name, tensor in WEIGHTS.tensors.items()})
        np.testing.assert_array_equal(native.NativePath(other, "fp32").run(GOOD).logits, expected)


@needs_library
def test_tensors_that_do_not_fit_are_refused_by_name():
    name = "layers.1.feed_forward.up.weight"
    less = {key: tensor for key, tensor in WEIGHTS.tensors.items() if key != name}
    with pytest.raises(UsageError, match=f"missing: {name}"):
        native.NativePath(replace(WEIGHTS, tensors=less), "fp32")
    small = {**WEIGHTS.tensors, name: WEIGHTS.tensors[name][:-1]}
    with pytest.raises(UsageError, match=f"{name} has 3420 numbers, not 3456"):
        native.NativePath(replace(WEIGHTS, tensors=small), "fp32")


@pytest.mark.parametrize("options", [{"path": "avx1024"}, {"dtype": "fp64"}, {"batch_tokens": 0}, {"threads": 0}])
def test_options_outside_their_range_are_refused(folder, options):
    (name, value) = next(iter(options.items()))
    with pytest.raises(UsageError, match=rf"{name}\b.*{value}") as caught:
        Engine.load(folder, **options)
    one_line(caught.value)


@needs_library
def test_a_path_that_this_processor_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(native, "paths", lambda: ["plain"])
    with pytest.raises(UsageError, match=r"avx2.*this processor has plain"):
        choose(WEIGHTS, "fp32", "avx2")


@needs_library
def test_a_type_that_the_path_lacks_falls_back_with_a_line():
    path, note = choose(WEIGHTS, "bf16", "plain")
    assert (path.name, path.dtype) == ("plain", "fp32")
    assert "bf16 needs instructions that plain does not have, so fp32 is used" in note
    with pytest.raises(UsageError, match="bf16"):
        native.NativePath(WEIGHTS, "bf16", "plain")
    path, note = choose(WEIGHTS, "int8", "torch")
    assert (path.name, path.dtype) == ("torch", "fp32")
    assert "int8 needs the compiled kernels, so fp32 is used" in note


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(copy, value):
    tensors = load_file(copy / "model.safetensors")
    name = "budgetformer.encoder.layers.1.attention.out_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 5] = value
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"layers\.1\.attention\.out_proj\.weight .*no finite number") as caught:
        Engine.load(copy)
    one_line(caught.value)


def test_a_folder_of_a_newer_format_is_refused(copy):
    path = copy / "config.json"
    path.write_text(path.read_text().replace("{", '{"format": 2,', 1))
    with pytest.raises(ModelFolderError, match="format 2 was made by a newer version"):
        Engine.load(copy)


def test_texts_that_cannot_be_read_are_refused(folder):
    engine = Engine.load(folder)
    assert len(engine.predict([])) == 0
    assert len(engine.predict([""])) == 1
    for texts in (["card", 5], ["card", None], ["\ud800"]):
        with pytest.raises(TypeError):
            engine.predict(texts)
    with pytest.raises((UsageError, ValueError)):
        engine.predict(["card", "lost"], ["one"])
    for budget in (0.0, 1.5, -1, float("nan"), [0.5], [0.5, 2.0]):
        with pytest.raises(UsageError, match="budget") as caught:
            engine.predict(["card", "lost"], budget=budget)
        one_line(caught.value)
    assert len(engine.predict(["card", "lost"], budget=[0.5, 1.0])) == 2


# ---------------------------------------------------------------------------------------------------------- engine.json

DAMAGED = {
    "cut short": '{"dtype": "bf16"',
    "no object": "[1, 2]",
    "no UTF-8": b'\xff\xfe{"dtype": null}',
    "another word": '{"dtype": "bf16", "speed": 3}',
    "another type": '{"dtype": "fp64"}',
    "a type that is a list": '{"dtype": ["bf16"]}',
    "agreement in words": '{"agreement": "all"}',
    "agreement NaN": '{"agreement": NaN}',
    "a curve of words": '{"curve": "steep"}',
    "a curve of nothing": '{"curve": null}',
    "a point without a number": '{"curve": [{"budget": 0.5}]}',
    "a point in words": '{"curve": [{"budget": "x", "head_share": 1, "ms_per_text": 1, "agreement": 1}]}',
    "a point without an end": '{"curve": [{"budget": 0.5, "head_share": 1, "ms_per_text": Infinity, "agreement": 1}]}',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_engine_file_is_refused_by_name(copy, name):
    text = DAMAGED[name]
    (copy / "engine.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelFolderError, match=r"engine\.json") as caught:
        Engine.load(copy)
    assert caught.value.exit_code == 4
    one_line(caught.value)


def test_an_engine_file_comes_back_as_it_was_written(copy):
    assert read_saved(copy) == Saved()
    point = Point(budget=None, head_share=0.31, units_share=0.32, ms_per_text=0.5, agreement=0.98, accuracy=0.9)
    saved = Saved(dtype="int8", agreement=0.995, curve=(point, replace(point, budget=1.0)), tuned_on={"texts": 7})
    write_saved(copy, saved)
    assert read_saved(copy) == saved
    write_saved(copy, Saved())
    assert read_saved(copy) == Saved()
    assert [path.name for path in copy.iterdir() if path.name.startswith(".")] == []


@needs_library
def test_the_type_in_an_engine_file_is_what_auto_means(copy):
    write_saved(copy, Saved(dtype="int8"))
    assert Engine.load(copy).path.dtype == "int8"
    assert Engine.load(copy, dtype="fp32").path.dtype == "fp32"


# ---------------------------------------------------------------------------------------------------------- the library

LOAD = """
import sys
import budgetformer.engine
from budgetformer.engine import Engine
engine = Engine.load(sys.argv[1], threads=1)
answer = engine.predict(["where is my card", "top up"])
print(engine.note)
print(engine.path.name, len(answer.labels), "transformers" in sys.modules, "torch" in sys.modules)
"""


def test_without_a_library_the_engine_runs_on_torch_and_says_why(folder):
    done = in_python(LOAD, folder, BUDGETFORMER_LIBRARY="/nonexistent/libbudgetformer.so")
    assert done.returncode == 0, done.stderr
    note, rest = done.stdout.splitlines()
    assert note.startswith("engine: torch, fp32, 1 thread; ")
    assert "not installed" in note
    assert "python -m budgetformer.engine.kernels.build" in note
    assert rest == "torch 2 False True"


NO_LIBRARY = """
from budgetformer.engine import native
try:
    native.library()
except native.NoLibrary as error:
    print(error)
print(native.paths(), native.has("plain", "fp32"))
"""


@pytest.mark.parametrize("kind", ["garbage", "empty", "a folder", "not ours"])
def test_a_library_that_does_not_load_is_no_crash(tmp_path, kind):
    """It is as if there were none, with another reason."""
    import math  # in a shared library, which is none of ours

    path = tmp_path / "libbudgetformer.so"
    if kind == "a folder":
        path.mkdir()
    elif kind == "not ours":
        other = getattr(math, "__file__", None)
        if other is None:
            pytest.skip("this Python has no module in a shared library of its own")
        shutil.copy(other, path)
    else:
        path.write_bytes(b"" if kind == "empty" else b"this is no library" * 100)
    done = in_python(NO_LIBRARY, BUDGETFORMER_LIBRARY=str(path))
    assert done.returncode == 0, done.stderr
    reason, rest = done.stdout.splitlines()
    assert ("is not installed" in reason) if kind == "a folder" else ("does not load here" in reason)
    assert len(reason) < 300
    assert rest == "[] False"


def test_a_named_path_without_a_library_is_refused(folder):
    code = "import sys; from budgetformer.engine import Engine; Engine.load(sys.argv[1], path='plain')"
    done = in_python(code, folder, BUDGETFORMER_LIBRARY="/nonexistent/libbudgetformer.so")
    assert done.returncode == 1
    assert "UsageError: path is 'plain'; " in done.stderr.splitlines()[-1]


@needs_library
def test_with_the_library_neither_torch_nor_transformers_is_loaded(folder):
    done = in_python(LOAD, folder)
    assert done.returncode == 0, done.stderr
    note, rest = done.stdout.splitlines()
    assert note == f"engine: {NATIVE[0]}, fp32, 1 thread"
    assert rest == f"{NATIVE[0]} 2 False False"


@needs_library
def test_a_library_of_another_version_is_refused(monkeypatch):
    """It reads a description of another length: said, not misread."""
    real = native.library()

    class Older:
        def __getattr__(self, name):
            return getattr(real, name)

        def bf_new(self, name, spec, count, eps, threads):
            return real.bf_new(name, spec, count - 1, eps, threads)

    monkeypatch.setattr(native, "library", lambda: Older())
    with pytest.raises(BudgetFormerError, match="another version of this library") as caught:
        native.NativePath(WEIGHTS, "fp32", NATIVE[-1])
    one_line(caught.value)


@needs_library
def test_calls_in_the_wrong_order_and_nonsense_are_answered_by_the_library(monkeypatch):
    """The C interface by itself: what Python never sends does not end the process either."""
    lib = native.library()
    weights = random_weights(0, num_layers=1)
    path = native.NativePath(weights, "fp32", "plain")
    new, sent = lib.bf_new, []

    class Listening:
        def __getattr__(self, name):
            return getattr(lib, name)

        def bf_new(self, name, spec, count, eps, threads):
            sent.append(np.ctypeslib.as_array(ctypes.cast(spec, ctypes.POINTER(ctypes.c_int32)), (count,)).copy())
            return new(name, spec, count, eps, threads)

    monkeypatch.setattr(native, "library", lambda: Listening())
    native.NativePath(weights, "fp32", "plain")
    spec = sent[0]
    assert not lib.bf_new(b"avx9", spec.ctypes.data, len(spec), 1e-12, 1)
    assert b"no such path" in lib.bf_error()
    handle = lib.bf_new(b"plain", spec.ctypes.data, len(spec), 1e-12, 1)
    assert handle
    assert lib.bf_build(handle) == 1
    assert b"tensor missing: embeddings.word.weight" in lib.bf_error()
    nothing = native._Batch(1, 1, 1)
    assert lib.bf_run(handle, ctypes.byref(nothing)) == 1
    assert b"bf_build" in lib.bf_error()
    assert lib.bf_run(path._handle, ctypes.byref(native._Batch(0, 0, 1))) == 1
    assert b"empty" in lib.bf_error()
    lib.bf_free(handle)
    assert not lib.bf_has(b"avx9", 0)
    assert not lib.bf_has(b"plain", 7)


# --------------------------------------------------------------------------------------------------------------- memory

TOO_MUCH = """
import resource, sys
import numpy as np
from engine_helpers import random_batch, random_weights
from budgetformer.engine.native import NativePath

weights = random_weights(0, hidden_size=256, num_heads=2, intermediate_size=512, max_positions=512, num_layers=1)
path = NativePath(weights, sys.argv[1], sys.argv[2], threads=2)
small = random_batch(weights, [5, 9])
before = path.run(small).logits
huge = random_batch(weights, [512] * 1000)
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (100 << 20), -1))
try:
    path.run(huge)
except MemoryError as error:
    print("refused:", error)
assert (path.run(small).logits == before).all()
for lengths in ([512] * 8, [512] * 1000, [3]):
    try:
        path.run(random_batch(weights, lengths))
    except MemoryError:
        pass
assert (path.run(small).logits == before).all()
try:
    made = [NativePath(weights, sys.argv[1], sys.argv[2]) for _ in range(200)]
except MemoryError as error:
    print("refused:", error)
assert (path.run(small).logits == before).all()
print("alive")
"""


@needs_library
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_a_batch_that_does_not_fit_is_refused_and_the_next_one_runs(dtype):
    """Under a limit of memory, in a process of its own: MemoryError from batches and from models, no crash."""
    done = in_python(TOO_MUCH, dtype, NATIVE[0])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "refused: engine: not enough memory"
    assert lines[-1] == "alive"


MANY_THREADS = """
import resource, sys
from engine_helpers import random_batch, random_weights
from budgetformer.engine.native import NativePath
from budgetformer.errors import BudgetFormerError

weights = random_weights(0)
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (300 << 20), -1))
try:
    NativePath(weights, "fp32", threads=100_000)
except (BudgetFormerError, MemoryError) as error:
    print("refused:", error)
NativePath(weights, "fp32", threads=2).run(random_batch(weights, [3]))
print("alive")
"""


@needs_library
def test_more_threads_than_the_system_gives_are_refused():
    done = in_python(MANY_THREADS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["refused: engine: cannot start 100000 threads", "alive"]
