import pytest

from hf_patrickstar.layout.embedding import MIN_ROWS, choose_embeddings
from hf_patrickstar.layout.specs import TensorSpec

LARGE, SMALL = MIN_ROWS, MIN_ROWS - 1
EMBEDDINGS = frozenset({1, 2})
"""Module 1 looks words up, module 2 positions; module 3 is a head."""

UNTIED = [
    TensorSpec(0, "words.weight", (LARGE, 8), True, (), (1,)),
    TensorSpec(1, "positions.weight", (SMALL, 8), True, (), (2,)),
    TensorSpec(2, "head.weight", (LARGE, 8), True, (), (3,)),
]
TIED = [
    TensorSpec(0, "words.weight", (LARGE, 8), True, ("head.weight",), (1, 3)),
    TensorSpec(1, "positions.weight", (SMALL, 8), True, (), (2,)),
]
HEAD_FIRST = [TensorSpec(0, "head.weight", (LARGE, 8), True, ("words.weight",), (0, 1))]


def choose(tensors, setting, everything_fits=False):
    return choose_embeddings(tensors, EMBEDDINGS, setting, everything_fits)


def test_auto_takes_untied_embeddings_with_many_rows_until_the_first_step_has_shown_more():
    choice = choose(UNTIED, "auto")
    assert (choice.tensor_indices, choice.apart, choice.is_final) == ({0}, {0}, False)
    assert choice.reason.startswith("cpu_embedding=auto: on for words.weight, until the first step")


def test_auto_is_off_if_everything_fits():
    choice = choose(UNTIED, "auto", everything_fits=True)
    assert (choice.tensor_indices, choice.apart, choice.is_final) == (frozenset(), frozenset(), True)
    assert choice.reason == "cpu_embedding=auto: off, all model data fits on the device"


@pytest.mark.parametrize("tensors", [TIED, HEAD_FIRST])
def test_auto_leaves_tied_embeddings_alone(tensors):
    choice = choose(tensors, "auto")
    assert (choice.tensor_indices, choice.apart, choice.is_final) == (frozenset(), frozenset(), True)
    assert "no untied embedding has 4096 rows or more" in choice.reason


def test_false_takes_none():
    choice = choose(UNTIED, False)
    assert (choice.tensor_indices, choice.apart, choice.is_final) == (frozenset(), frozenset(), True)
    assert choice.reason == "cpu_embedding=false: embeddings move in chunks"


@pytest.mark.parametrize("everything_fits", [False, True])
def test_true_takes_all_of_any_size(everything_fits):
    choice = choose(UNTIED, True, everything_fits)
    assert (choice.tensor_indices, choice.apart, choice.is_final) == ({0, 1}, {0, 1}, True)
    assert choice.reason == "cpu_embedding=true: lookups on the CPU"


@pytest.mark.parametrize("everything_fits", [False, True])
def test_true_takes_a_tied_embedding_too_but_leaves_it_in_a_chunk_that_moves(everything_fits):
    choice = choose(TIED, True, everything_fits)
    assert (choice.tensor_indices, choice.apart, choice.is_final) == ({0, 1}, {1}, True)
    assert choice.reason == (
        "cpu_embedding=true: lookups on the CPU; words.weight also moves, for the modules that it is tied to"
    )


def test_an_embedding_whose_head_comes_first_is_tied_as_well():
    choice = choose(HEAD_FIRST, True)
    assert (choice.tensor_indices, choice.apart) == ({0}, frozenset())
    assert "head.weight also moves" in choice.reason


@pytest.mark.parametrize("setting", [True, "auto"])
def test_embeddings_tied_to_each_other_need_no_device(setting):
    tensors = [TensorSpec(0, "words.weight", (LARGE, 8), True, ("positions.weight",), (1, 2))]
    choice = choose(tensors, setting)
    assert (choice.tensor_indices, choice.apart) == ({0}, {0})


def test_other_parameters_of_an_embedding_module_stay():
    tensors = [*UNTIED, TensorSpec(3, "words.scale", (LARGE,), True, (), (1,))]
    choice = choose(tensors, True)
    assert (choice.tensor_indices, choice.apart) == ({0, 1}, {0, 1})


@pytest.mark.parametrize("setting", [True, "auto"])
def test_a_model_without_embeddings(setting):
    choice = choose_embeddings(UNTIED, frozenset(), setting, False)
    assert (choice.tensor_indices, choice.apart, choice.is_final) == (frozenset(), frozenset(), True)
