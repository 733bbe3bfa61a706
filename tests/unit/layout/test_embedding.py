"""Which embeddings are looked up on the CPU, until bytes of a first step decide."""

import pytest

from hf_patrickstar.layout.embedding import MIN_ROWS, choose_embeddings
from hf_patrickstar.layout.specs import TensorSpec

EMBEDDINGS = frozenset({1, 2})
"""Module 1 looks words up, module 2 positions; module 3 is a head."""


def spec(index, name, rows=MIN_ROWS, aliases=(), owners=(1,)):
    return TensorSpec(index, name, (rows, 8), True, aliases, owners)


HEAD = spec(2, "head.weight", owners=(3,))
POSITIONS = spec(1, "positions.weight", MIN_ROWS - 1, owners=(2,))
UNTIED = [spec(0, "words.weight"), POSITIONS, HEAD]
TIED = [spec(0, "words.weight", aliases=("head.weight",), owners=(1, 3)), POSITIONS]
WITH_A_SCALE = [*UNTIED, TensorSpec(3, "words.scale", (MIN_ROWS,), True, (), (1,))]
HEAD_FIRST = [spec(0, "head.weight", aliases=("words.weight",), owners=(0, 1))]
TO_EACH_OTHER = [spec(0, "words.weight", aliases=("positions.weight",), owners=(1, 2))]
ON, TOO_FEW = "on for words.weight, until the first step", f"no untied embedding has {MIN_ROWS} rows or more"


@pytest.mark.parametrize(
    ("tensors", "setting", "everything_fits", "chosen", "apart", "is_final", "why"),
    [
        (UNTIED, "auto", False, {0}, {0}, False, ON),
        (TO_EACH_OTHER, "auto", False, {0}, {0}, False, ON),
        (UNTIED, "auto", True, set(), set(), True, "auto: off, all model data fits on the device"),
        (TIED, "auto", False, set(), set(), True, TOO_FEW),
        (UNTIED, False, False, set(), set(), True, "false: embeddings move in chunks"),
        (UNTIED, True, False, {0, 1}, {0, 1}, True, "true: lookups on the CPU"),
        (WITH_A_SCALE, True, False, {0, 1}, {0, 1}, True, "true: lookups on the CPU"),
        (TO_EACH_OTHER, True, False, {0}, {0}, True, "true: lookups on the CPU"),
        (TIED, True, False, {0, 1}, {1}, True, "words.weight also moves, for the modules that it is tied to"),
        (HEAD_FIRST, True, False, {0}, set(), True, "head.weight also moves, for the modules that it is tied to"),
    ],
)
def test_embeddings_that_are_looked_up_at_home(tensors, setting, everything_fits, chosen, apart, is_final, why):
    choice = choose_embeddings(tensors, EMBEDDINGS, setting, everything_fits)
    assert (choice.tensor_indices, choice.apart, choice.is_final) == (chosen, apart, is_final)
    assert why in choice.reason
    assert ("also moves" in choice.reason) is ("also moves" in why)
