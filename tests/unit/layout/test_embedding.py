import pytest

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.layout.embedding import ASSUMED_TOKENS, choose_embeddings
from hf_patrickstar.layout.specs import TensorSpec

LARGE, SMALL = ASSUMED_TOKENS + 1, ASSUMED_TOKENS
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


def choose(tensors, setting, everything_fits=False):
    return choose_embeddings(tensors, EMBEDDINGS, setting, everything_fits)


def test_auto_takes_untied_embeddings_with_more_rows_than_tokens():
    choice = choose(UNTIED, "auto")
    assert choice.tensor_indices == {0}
    assert choice.reason.startswith("cpu_embedding=auto: on for words.weight, more rows than the 16384 tokens")


def test_auto_is_off_if_everything_fits():
    choice = choose(UNTIED, "auto", everything_fits=True)
    assert choice.tensor_indices == frozenset()
    assert choice.reason == "cpu_embedding=auto: off, all model data fits on the device"


def test_auto_leaves_tied_embeddings_alone():
    choice = choose(TIED, "auto")
    assert choice.tensor_indices == frozenset()
    assert "no untied embedding has more than 16384 rows" in choice.reason


def test_false_takes_none():
    choice = choose(UNTIED, False)
    assert (choice.tensor_indices, choice.reason) == (
        frozenset(),
        "cpu_embedding=false: embeddings move in chunks",
    )


@pytest.mark.parametrize("everything_fits", [False, True])
def test_true_takes_all_of_any_size(everything_fits):
    assert choose(UNTIED, True, everything_fits).tensor_indices == {0, 1}


def test_true_refuses_a_tied_embedding_and_names_both():
    message = r"cpu_embedding=true: 'words.weight' is tied to 'head.weight'.*use cpu_embedding='auto' or false"
    with pytest.raises(ConfigError, match=message):
        choose(TIED, True)


def test_true_refuses_an_embedding_whose_head_comes_first():
    tensors = [TensorSpec(0, "head.weight", (LARGE, 8), True, ("words.weight",), (0, 1))]
    with pytest.raises(ConfigError, match="is tied to"):
        choose(tensors, True)


def test_the_refusal_names_the_head_not_another_embedding():
    tensors = [TensorSpec(0, "words.weight", (LARGE, 8), True, ("positions.weight", "head.weight"), (1, 2, 3))]
    with pytest.raises(ConfigError, match=r"'words.weight' is tied to 'head.weight'"):
        choose(tensors, True)


def test_embeddings_tied_to_each_other_are_both_looked_up_on_the_cpu():
    tensors = [TensorSpec(0, "words.weight", (LARGE, 8), True, ("positions.weight",), (1, 2))]
    assert choose(tensors, True).tensor_indices == {0}
    assert choose(tensors, "auto").tensor_indices == {0}


def test_other_parameters_of_an_embedding_module_stay():
    tensors = [*UNTIED, TensorSpec(3, "words.scale", (LARGE,), True, (), (1,))]
    assert choose(tensors, True).tensor_indices == {0, 1}


def test_a_model_without_embeddings():
    assert choose_embeddings(UNTIED, frozenset(), True, False).tensor_indices == frozenset()
