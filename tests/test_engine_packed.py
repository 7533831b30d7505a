"""Batches without padding: how they are put together, and what no path would compute."""

import numpy as np
import pytest

from budgetformer.engine.packed import Packed, checked
from budgetformer.errors import UsageError
from budgetformer.tokens import Tokens
from core_helpers import HEADS, INNER, LAYERS, POSITIONS, VOCABULARY, encoder_config


def tokens(ids, types=None):
    return Tokens(ids=ids, types=types, truncated=False)


def test_inputs_lie_one_after_the_other():
    packed = Packed.of([tokens([5, 6, 7]), tokens([8]), tokens([9, 10])])
    assert packed.ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert packed.offsets.tolist() == [0, 3, 4, 6]
    assert packed.lengths.tolist() == [3, 1, 2]
    assert len(packed) == 3
    assert packed.types is None
    assert packed.ids.dtype == packed.offsets.dtype == packed.lengths.dtype == np.int32


def test_types_are_kept_and_0_where_an_input_has_none():
    packed = Packed.of([tokens([5, 6], [0, 1]), tokens([7]), tokens([8, 9], [1, 1])])
    assert packed.types is not None
    assert packed.types.tolist() == [0, 1, 0, 1, 1]
    assert packed.types.dtype == np.int32


def test_a_batch_of_nothing_and_an_input_of_nothing():
    packed = Packed.of([])
    assert (len(packed), packed.offsets.tolist(), packed.ids.tolist()) == (0, [0], [])
    checked(packed, encoder_config())
    with pytest.raises(UsageError, match="input 1 has no token"):
        Packed.of([tokens([5]), tokens([])])


def ints(values):
    return np.array(values, np.int32)


GOOD = Packed(ints([5, 6, 7, 8]), ints([0, 3, 4]), ints([0, 1, 1, 0]))
LAST = VOCABULARY - 1
# fmt: off
BAD = {
    "offsets": (Packed(ints([5, 6]), ints([0, 1])), {}, UsageError, "offsets must rise from 0"),
    "offsets start": (Packed(ints([5, 6]), ints([1, 2])), {}, UsageError, "offsets must rise from 0"),
    "an empty input": (Packed(ints([5, 6]), ints([0, 2, 2])), {}, UsageError, "at least one token"),
    "too long": (Packed(np.full(32, 5, np.int32), ints([0, 32])), {}, UsageError, "an input has 32 tokens, the model has 31"),  # noqa: E501
    "a large id": (Packed(ints([5, LAST + 1]), ints([0, 2])), {}, UsageError, "token id 97: the model knows ids from 0 to 96"),  # noqa: E501
    "a negative id": (Packed(ints([5, -1]), ints([0, 2])), {}, UsageError, "token id -1"),
    "a large type": (Packed(ints([5, 6]), ints([0, 2]), ints([0, 2])), {}, UsageError, "token type 2: the model knows types from 0 to 1"),  # noqa: E501
    "few types": (Packed(ints([5, 6]), ints([0, 2]), ints([0])), {}, UsageError, r"types has the shape \(1,\)"),
    "counts": (GOOD, {"counts": np.ones((2, LAYERS + 1), np.int32)}, UsageError, r"counts has the shape \(2, 4\): it must be \(2, 3\)"),  # noqa: E501
    "gates": (GOOD, {"gates": np.ones((2, LAYERS), np.uint8)}, UsageError, r"gates has the shape \(2, 3\): it must be \(2, 3, 7\)"),  # noqa: E501
    "both": (GOOD, {"counts": np.ones((2, LAYERS), np.int32), "gates": np.ones((2, LAYERS, HEADS), np.uint8)}, UsageError, "not both"),  # noqa: E501
    "blocks": (GOOD, {"blocks": np.ones((3, LAYERS, 1), np.uint8)}, UsageError, r"blocks has the shape \(3, 3, 1\)"),
    "blocks of no shape": (GOOD, {"blocks": np.ones((), np.uint8)}, UsageError, r"blocks has the shape \(\)"),
    "uneven blocks": (GOOD, {"blocks": np.ones((2, LAYERS, 2), np.uint8)}, UsageError, "2 blocks do not divide the 53"),
    "no blocks": (GOOD, {"blocks": np.ones((2, LAYERS, 0), np.uint8)}, UsageError, "0 blocks do not divide"),
}
# fmt: on


def test_what_fits_passes():
    longest = Packed(np.full(POSITIONS, LAST, np.int32), ints([0, POSITIONS]))
    checked(longest, encoder_config())
    checked(GOOD, encoder_config(), counts=np.ones((2, LAYERS), np.int32))
    checked(GOOD, encoder_config(), gates=np.ones((2, LAYERS, HEADS)), blocks=np.ones((2, LAYERS, INNER)))
    # A model without token types does not look at them.
    assert checked(Packed(ints([5]), ints([0, 1]), ints([9])), encoder_config(token_types=0)).types is None


@pytest.mark.parametrize("name", BAD)
def test_what_no_path_computes_is_refused(name):
    batch, options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        checked(batch, encoder_config(), **options)
