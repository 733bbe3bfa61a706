"""Bad input ends in one sentence that says what is missing, what was found and what to do; before any training."""

import json

import pytest
from support.hub import Hub
from support.running import COMMON, start_recipe, write_rows

DO = "--do_train --train_file {data}/train.jsonl"
FILES = {
    "empty.parquet": "",
    "broken.jsonl": '{"text": "fine"}\n{"text": \n',
    "folder/test.jsonl": [{"text": "a"}],
    "one.jsonl": [{"text": "the fox"}],
    "kind.jsonl": [{"text": "a", "kind": 1}] * 4,
    "same.jsonl": [{"text": "a", "label": "x"}] * 4,
    "ugly.jsonl": [{"text": "a", "label": "ugly"}],
}
"""What the directory {tmp} holds: texts, or rows."""
TIGHT = '{"device_budget": "1MiB"}'
KNOWN = "--do_eval --validation_file {data}/validation.jsonl"
CASES = [
    # Options
    ("clm", f"{DO} --model_name_or_path {{tmp}}/absent", "--model_name_or_path: there is no directory '.*absent'"),
    ("mlm", f"{DO} --model_name_or_path {{data}}/train.txt", "train.txt' is a file; give the directory"),
    ("clm", "--do_train", "give --dataset_name, or --train_file"),
    ("clm", f"{DO} --dataset_name someone/tiny-text", "--dataset_name and --train_file are both given; keep one"),
    ("clm", "--do_train --validation_file {data}/validation.txt", "--do_train needs --train_file"),
    ("clm", f"{DO} --max_train_samples 0", "--max_train_samples is 0.*give "),
    ("mlm", f"{DO} --mlm_probability 1.5", "--mlm_probability is 1.5; give"),
    ("clm", f"{DO} --do_predict", "--do_predict: this recipe has nothing to predict"),
    ("clm", f"{DO} --resume_from_checkpoint true", "has no checkpoint-N directory; leave the option out"),
    # Data
    ("clm", "--do_train --train_file {tmp}/empty.parquet", "is empty; give a file with data"),
    ("clm", "--do_train --train_file {tmp}/broken.jsonl", "check that the file can be parsed"),
    ("clm", "--do_train --dataset_name {tmp}/folder", r"no 'train' split, which --do_train needs \(it has: test\)"),
    ("classification", f"{DO} --do_predict", r"no 'test' split, .* \(it has: train\); .* --test_file"),
    ("clm", "--do_train --do_eval --train_file {tmp}/one.jsonl", "5.* of its 1 training rows .*--validation_file"),
    ("classification", f"{DO} --text_column_names body", "no column 'body'; its columns are 'text', 'label', 'score'"),
    ("clm", f"{DO} --text_column_name score", "column 'score' holds .*float.*, not text"),
    ("clm", "--do_train --train_file {tmp}/one.jsonl --block_size 32", r"32 tokens .* in 1 rows; lower --block_size"),
    ("clm", f"{DO} --block_size 64", "--block_size is 64, and the model takes at most 32 tokens"),
    # Labels
    ("classification", "--do_train --train_file {tmp}/kind.jsonl", "columns are 'text', 'kind'; .*--label_column_name"),
    ("classification", "--do_train --train_file {tmp}/same.jsonl", "are 'x'; give data with at least two"),
    ("classification", f"{DO} --do_eval --validation_file {{tmp}}/ugly.jsonl", "'ugly' .*'bad', 'good', 'neutral'"),
    ("classification", KNOWN, "'bad', 'good', 'neutral', and the checkpoint knows only '0', '1', '2'"),
    ("classification", f"{KNOWN} --label_column_name score", "decimal numbers, .* checkpoint tells 3 labels apart"),
    ("classification", "--do_train --dataset_name {tmp}/hidden", "1 of 2 rows of split 'train' have the label -1"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with data that no recipe can use."""
    import datasets

    folder = tmp_path_factory.mktemp("bad")
    for place in ("folder", "hidden"):
        (folder / place).mkdir()
    for name, held in FILES.items():
        (folder / name).write_text(held) if isinstance(held, str) else write_rows(folder / name, held)
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [-1, 1]}, features=features)
    rows.to_parquet(str(folder / "hidden" / "train.parquet"))
    return folder


@pytest.fixture
def refuse(recipe, checkpoints, tmp_path):
    """Runs a recipe that has to fail, and makes sure that it did so before training."""

    def run(name, match, *argv):
        with pytest.raises((ValueError, FileNotFoundError), match=match):
            recipe(name, "--model_name_or_path", checkpoints / name, *COMMON, "--output_dir", tmp_path / "out", *argv)
        assert not recipe.trainers
        assert not (tmp_path / "out").exists()

    return run


@pytest.mark.parametrize(("name", "argv", "said"), CASES)
def test_bad_input_is_one_sentence(name, argv, said, refuse, data, folder):
    refuse(name, said, *argv.format(data=data, tmp=folder).split())


def test_no_checkpoint_and_no_options(recipe, data):
    with pytest.raises(ValueError, match="--model_name_or_path is missing; give the hub id or the directory"):
        recipe("clm", *DO.format(data=data).split(), *COMMON)
    with pytest.raises(FileNotFoundError, match="there is no file of options 'absent"):
        recipe("clm", "absent.json")


@pytest.mark.parametrize(
    ("name", "missing", "said"),
    [
        ("mlm", ["mask_token"], "no mask token"),
        ("classification", ["pad_token", "eos_token"], "no padding and no end-of-text token"),
        ("clm", ["eos_token"], "--append_eos: the tokenizer has no"),
    ],
)
def test_a_tokenizer_that_lacks_tokens(name, missing, said, refuse, tokenizer, data, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k not in missing}))
    argv = [*DO.format(data=data).split(), "--tokenizer_name", tmp_path / "tokenizer"]
    refuse(name, said, *argv, *(["--append_eos"] if name == "clm" else []))


def run_as_users_do(words, checkpoints, tmp_path, hub=None):
    """Runs a recipe in a process that has to fail; returns what it says at its end."""
    argv = ["--model_name_or_path", str(checkpoints / "clm"), *COMMON, "--output_dir", str(tmp_path / "out"), *words]
    process = start_recipe("clm", argv, tmp_path / "home", hub)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "finetune_clm.py: error: " in stderr
    assert "Traceback" not in stderr
    return stderr


@pytest.mark.long
def test_what_is_unknown_on_the_hub(checkpoints, tmp_path):
    with Hub(tmp_path) as hub:
        words = ["--dataset_name", "someone/absent", "--do_train"]
        assert "someone/absent" in run_as_users_do(words, checkpoints, tmp_path, hub)


def test_an_expected_error_ends_without_a_traceback(checkpoints, data, tmp_path):
    tight = ["--patrickstar", "--per_device_train_batch_size", "64", "--patrickstar_config", TIGHT]
    words = [*DO.format(data=data).split(), *tight]
    assert "device_budget is too small" in run_as_users_do(words, checkpoints, tmp_path)
