"""Bad input ends in one sentence that says what is missing, what was found and what to do; before any training."""

import json

import pytest
from hub import Hub
from running import COMMON, SENTENCES, start_recipe, write_rows

DO = "--do_train --train_file {data}/train.jsonl"
TEXTS = [{"text": text} for text in SENTENCES]
FILES = {
    "train.docx": "text",
    "empty.parquet": "",
    "no_rows.csv": "text,label\n",
    "broken.jsonl": '{"text": "fine"}\n{"text": \n',
    "folder/test.jsonl": [{"text": "a"}],
    "one.jsonl": [{"text": "the fox"}],
    "more.jsonl": TEXTS,
    "body.jsonl": [{"body": "a", "label": number} for number in range(4)],
    "half.jsonl": [{"text": "a"}, {"text": None}],
    "blank.txt": " \n \n",
    "kind.jsonl": [{"text": "a", "kind": 1}] * 4,
    "no_label.jsonl": [{"text": "a", "label": number or None} for number in range(4)],
    "same.jsonl": [{"text": "a", "label": "x"}] * 4,
    "lists.jsonl": [{"text": "a", "label": [1, 2]}] * 4,
    "ugly.jsonl": [{"text": "a", "label": "ugly"}],
    "three.jsonl": [{"a": "a", "b": "b", "c": "c", "label": number} for number in range(4)],
}
"""What the directory {tmp} holds: texts, or rows."""
TIGHT = '{"device_budget": "1MiB"}'
KNOWN = "--do_eval --validation_file {data}/validation.jsonl"
CASES = [
    # Options
    ("classification", "--train_file {data}/train.jsonl", "add --do_train"),
    ("clm", f"{DO} --model_name_or_path {{tmp}}/absent", "--model_name_or_path: there is no directory '.*absent'"),
    ("clm", f"{DO} --model_name_or_path {{data}}", r"has no config.json \(it holds: pairs.csv, "),
    ("mlm", f"{DO} --model_name_or_path {{data}}/train.txt", "train.txt' is a file; give the directory"),
    ("clm", f"{DO} --tokenizer_name ./nowhere", "--tokenizer_name: there is no directory './nowhere'"),
    ("clm", "--trian_file x", "--trian_file"),
    ("clm", "--do_train", "give --dataset_name, or --train_file"),
    ("clm", f"{DO} --dataset_name someone/tiny-text", "--dataset_name and --train_file are both given; keep one"),
    ("mlm", "--do_train --dataset_name {tmp}/absent", "--dataset_name: there is no directory '.*absent'"),
    ("classification", "--do_train --train_file absent.txt", "--train_file: there is no file 'absent.txt'"),
    ("clm", "--do_train --train_file {tmp}/train.docx", "convert it to one of .csv, .json, .jsonl, .parquet, .txt"),
    ("clm", "--do_train --validation_file {data}/validation.txt", "--do_train needs --train_file"),
    ("clm", f"{DO} --max_train_samples 0", "--max_train_samples is 0.*give "),
    ("clm", f"{DO} --validation_split_percentage 100", "--validation_split_percentage is 100.*give "),
    ("mlm", f"{DO} --mlm_probability 1.5", "--mlm_probability is 1.5; give"),
    ("clm", f"{DO} --do_predict", "--do_predict: this recipe has nothing to predict"),
    ("clm", f"{DO} --resume_from_checkpoint checkpoint-9", "there is no directory 'checkpoint-9'"),
    ("clm", f"{DO} --resume_from_checkpoint true", "has no checkpoint-N directory; leave the option out"),
    # Data
    ("clm", "--do_train --train_file {tmp}/empty.parquet", "is empty; give a file with data"),
    ("clm", "--do_train --train_file {tmp}/no_rows.csv", "check that the file can be parsed and has rows"),
    ("clm", "--do_train --train_file {tmp}/broken.jsonl", "check that the file can be parsed"),
    ("clm", "--do_train --dataset_name {tmp}/folder", r"no 'train' split, which --do_train needs \(it has: test\)"),
    ("classification", f"{DO} --do_predict", r"no 'test' split, .* \(it has: train\); .* --test_file"),
    ("clm", "--do_train --do_eval --train_file {tmp}/one.jsonl", "5.* of its 1 training rows .*--validation_file"),
    (
        "clm",
        "--do_train --do_eval --train_file {tmp}/more.jsonl --validation_split_percentage 0",
        "0.* of its 48 training rows cannot be split off",
    ),
    (
        "mlm",
        "--do_train --train_file {tmp}/body.jsonl",
        "are 'body', 'label'; name one with --text_column_name",
    ),
    (
        "classification",
        f"{DO} --text_column_names body",
        "no column 'body'; its columns are 'text', 'label', 'score'; name one with --text_column_names",
    ),
    ("clm", f"{DO} --text_column_name score", "column 'score' holds .*float.*, not text"),
    ("mlm", "--do_train --train_file {tmp}/half.jsonl", "1 of 2 rows have no value in column 'text'"),
    ("clm", "--do_train --train_file {tmp}/one.jsonl --block_size 32", r"32 tokens .* in 1 rows; lower --block_size"),
    ("mlm", "--do_train --train_file {tmp}/one.jsonl", "32 tokens .* lower --max_seq_length"),
    ("mlm", "--do_train --train_file {tmp}/blank.txt --line_by_line", "all 2 rows are blank"),
    ("clm", f"{DO} --block_size 64", "--block_size is 64, and the model takes at most 32 tokens"),
    ("classification", f"{DO} --max_seq_length 1", "--max_seq_length is 1; give at least 2 tokens"),
    # Labels
    ("classification", "--do_train --train_file {tmp}/kind.jsonl", "columns are 'text', 'kind'; .*--label_column_name"),
    ("classification", "--do_train --train_file {tmp}/no_label.jsonl", "1 of 4 rows have no value in column 'label'"),
    ("classification", "--do_train --train_file {tmp}/same.jsonl", "are 'x'; give data with at least two"),
    ("classification", "--do_train --train_file {tmp}/lists.jsonl", "column 'label' holds "),
    ("classification", f"{DO} --do_eval --validation_file {{tmp}}/ugly.jsonl", "'ugly' .*'bad', 'good', 'neutral'"),
    ("classification", KNOWN, "'bad', 'good', 'neutral', and the checkpoint knows only '0', '1', '2'"),
    (
        "classification",
        f"{KNOWN} --label_column_name score",
        "decimal numbers, .* checkpoint tells 3 labels apart",
    ),
    ("classification", f"{DO} --label_column_name score", r"1 label\(s\); pass --ignore_mismatched_sizes"),
    ("classification", "--do_train --dataset_name {tmp}/hidden", "1 of 2 rows of split 'train' have the label -1"),
    (
        "classification",
        "--do_train --train_file {tmp}/three.jsonl --text_column_names a,b,c",
        "'a', 'b', 'c' are 3 columns; give one or two",
    ),
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


def test_what_is_unknown_on_the_hub(checkpoints, tmp_path):
    with Hub(tmp_path) as hub:
        words = ["--dataset_name", "someone/absent", "--do_train"]
        assert "someone/absent" in run_as_users_do(words, checkpoints, tmp_path, hub)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--patrickstar_config", "{}"], "patrickstar_config is given but patrickstar is not"),
        (
            ["--patrickstar", "--per_device_train_batch_size", "64", "--patrickstar_config", TIGHT],
            "device_budget is too small",
        ),
    ],
    ids=["arguments", "engine"],
)
def test_an_expected_error_ends_without_a_traceback(words, sentence, checkpoints, data, tmp_path):
    assert sentence in run_as_users_do([*DO.format(data=data).split(), *words], checkpoints, tmp_path)


def test_a_mistake_of_a_program_keeps_its_traceback():
    import common

    def main():
        return {}["absent"]

    with pytest.raises(KeyError):
        common.run(main)
