"""The commands that run a user's script, with recipes and in processes as users start them."""

import os

import pytest
from support.running import CHUNKS, COMMON, finish_recipe, recipe_path, start


@pytest.fixture
def words(checkpoints, data, tmp_path):
    """The script and its arguments, which would write to ``mine``."""
    argv = ["--model_name_or_path", checkpoints / "mlm", "--train_file", data / "train.txt", "--do_train", *COMMON]
    return [str(word) for word in [recipe_path("mlm"), *argv, "--output_dir", tmp_path / "mine", *CHUNKS]]


@pytest.mark.long
def test_check(words, tmp_path):
    """Collators that draw masks draw the same ones; the head is drawn alike."""
    process = start(["-m", "hf_patrickstar", "check", *words], tmp_path / "home")
    assert finish_recipe(process).startswith("same bits\n  2 steps, 2 losses, 2 gradient norms, ")
    assert not os.path.exists(tmp_path / "mine")
