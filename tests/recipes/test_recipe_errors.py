"""Bad input ends in one sentence that says what is missing, what was found and what to do; before any training."""

import json

import pytest
from hub import Hub
from running import COMMON, SENTENCES, start_recipe, write_rows

ANY = pytest.mark.parametrize("name", ["clm", "classification", "mlm"])


@pytest.fixture
def refuse(recipe, checkpoints, tmp_path):
    """Runs a recipe that has to fail, and makes sure that it did so before training."""

    def run(name, error, match, *argv, model=None):
        model = model or checkpoints / name
        with pytest.raises(error, match=match):
            recipe(name, "--model_name_or_path", model, *COMMON, "--output_dir", tmp_path / "out", *argv)
        assert not recipe.trainers
        assert not (tmp_path / "out").exists()

    return run


@pytest.fixture
def train(data):
    return ["--do_train", "--train_file", data / "train.jsonl"]


# Options


@ANY
def test_nothing_to_do(name, refuse, data):
    refuse(name, ValueError, "nothing to do; add --do_train", "--train_file", data / "train.jsonl")


@ANY
def test_missing_checkpoint_directory(name, refuse, train, tmp_path):
    missing = tmp_path / "no-such-model"
    refuse(name, FileNotFoundError, f"--model_name_or_path: there is no directory '{missing}'", *train, model=missing)


def test_no_checkpoint(recipe, train):
    with pytest.raises(ValueError, match="--model_name_or_path is missing; give the hub id or the directory"):
        recipe("clm", *train, *COMMON)


def test_directory_that_is_no_checkpoint(refuse, train, data):
    match = r"has no config.json \(it holds: pairs.csv, .*give a directory that save_pretrained wrote"
    refuse("clm", FileNotFoundError, match, *train, model=data)


def test_file_in_place_of_a_checkpoint(refuse, train, data):
    refuse("mlm", ValueError, "train.txt' is a file; give the directory", *train, model=data / "train.txt")


def test_missing_tokenizer(refuse, train):
    match = "--tokenizer_name: there is no directory './nowhere'"
    refuse("clm", FileNotFoundError, match, *train, "--tokenizer_name", "./nowhere")


def test_missing_file_of_options(recipe):
    with pytest.raises(FileNotFoundError, match="there is no file of options 'absent"):
        recipe("clm", "absent.json")


def test_misspelt_option(recipe):
    with pytest.raises(ValueError, match="--trian_file"):
        recipe("clm", "--trian_file", "x")


def test_no_data(refuse):
    refuse("clm", ValueError, "there is no data; give --dataset_name, or --train_file", "--do_train")


def test_two_kinds_of_data(refuse, train):
    match = "--dataset_name and --train_file are both given; keep one"
    refuse("clm", ValueError, match, *train, "--dataset_name", "someone/tiny-text")


def test_missing_data_directory(refuse, tmp_path):
    match = "--dataset_name: there is no directory '.*absent'; give a hub id or a directory"
    refuse("mlm", FileNotFoundError, match, "--do_train", "--dataset_name", tmp_path / "absent")


@ANY
def test_missing_data_file(name, refuse):
    match = "--train_file: there is no file 'absent.txt'; give the path"
    refuse(name, FileNotFoundError, match, "--do_train", "--train_file", "absent.txt")


def test_unknown_extension(refuse, tmp_path):
    (tmp_path / "train.docx").write_text("text")
    match = "unknown extension '.docx'; convert it to one of .csv, .json, .jsonl, .parquet, .txt"
    refuse("clm", ValueError, match, "--do_train", "--train_file", tmp_path / "train.docx")


def test_training_without_training_data(refuse, data):
    match = "--do_train needs --train_file; found only --validation_file"
    refuse("clm", ValueError, match, "--do_train", "--validation_file", data / "validation.txt")


@pytest.mark.parametrize(("option", "value"), [("--max_train_samples", 0), ("--validation_split_percentage", 100)])
def test_impossible_numbers(option, value, refuse, train):
    refuse("clm", ValueError, f"{option} is {value}.*give ", *train, option, value)


def test_impossible_mask_probability(refuse, train):
    refuse("mlm", ValueError, "--mlm_probability is 1.5; give", *train, "--mlm_probability", 1.5)


@pytest.mark.parametrize("name", ["clm", "mlm"])
def test_nothing_to_predict(name, refuse, train):
    refuse(name, ValueError, "--do_predict: this recipe has nothing to predict", *train, "--do_predict")


def test_missing_checkpoint_to_resume(refuse, train, tmp_path):
    match = "--resume_from_checkpoint: there is no directory 'checkpoint-9'"
    refuse("clm", FileNotFoundError, match, *train, "--resume_from_checkpoint", "checkpoint-9")
    match = "out' has no checkpoint-N directory; leave the option out"
    refuse("clm", FileNotFoundError, match, *train, "--resume_from_checkpoint", "true")


# Data


@pytest.mark.parametrize("extension", ["txt", "jsonl", "csv", "parquet"])
def test_empty_file(extension, refuse, tmp_path):
    path = tmp_path / f"empty.{extension}"
    path.touch()
    refuse("clm", ValueError, "is empty; give a file with data", "--do_train", "--train_file", path)


def test_no_rows(refuse, tmp_path):
    (tmp_path / "train.csv").write_text("text,label\n")
    match = "train.csv' cannot be read: .*check that the file can be parsed and has rows"
    refuse("clm", ValueError, match, "--do_train", "--train_file", tmp_path / "train.csv")


def test_malformed_file(refuse, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    match = "train.jsonl' cannot be read: .*check that the file can be parsed"
    refuse("clm", ValueError, match, "--do_train", "--train_file", tmp_path / "train.jsonl")


def test_no_train_split(refuse, tmp_path):
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "test.jsonl", [{"text": "a"}])
    match = r"has no 'train' split, which --do_train needs \(it has: test\)"
    refuse("clm", ValueError, match, "--do_train", "--dataset_name", tmp_path / "data")


def test_no_test_split(refuse, train):
    match = r"has no 'test' split, which --do_predict needs \(it has: train\); .* --test_file"
    refuse("classification", ValueError, match, *train, "--do_predict")


def test_too_few_rows_to_split(refuse, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"text": "a"}])
    match = "has no validation split, and 5.* of its 1 training rows cannot be split off; give --validation_file"
    refuse("clm", ValueError, match, "--do_train", "--do_eval", "--train_file", path)
    match = "and 0.* of its 48 training rows cannot be split off"
    path = write_rows(tmp_path / "more.jsonl", [{"text": text} for text in SENTENCES])
    argv = ["--do_train", "--do_eval", "--train_file", path, "--validation_split_percentage", 0]
    refuse("clm", ValueError, match, *argv)


@ANY
def test_no_text_column(name, refuse, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"body": "a", "label": i} for i in range(4)])
    match = "no text column was found: .*its columns are 'body', 'label'; name one with --text_column_name"
    refuse(name, ValueError, match, "--do_train", "--train_file", path)


@pytest.mark.parametrize(("name", "option"), [("clm", "--text_column_name"), ("classification", "--text_column_names")])
def test_named_text_column_is_missing(name, option, refuse, train):
    match = f"no column 'body'; its columns are 'text', 'label', 'score'; name one with {option}"
    refuse(name, ValueError, match, *train, option, "body")


def test_text_column_without_text(refuse, train):
    refuse("clm", ValueError, "column 'score' holds .*float.*, not text", *train, "--text_column_name", "score")


def test_rows_without_text(refuse, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"text": "a"}, {"text": None}])
    match = "1 of 2 rows have no value in column 'text'; remove"
    refuse("mlm", ValueError, match, "--do_train", "--train_file", path)


def test_block_larger_than_the_text(refuse, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"text": "the fox"}])
    match = r"no block of 32 tokens could be made: the text has \d+ tokens in 1 rows; lower --block_size"
    refuse("clm", ValueError, match, "--do_train", "--train_file", path, "--block_size", 32)
    match = "no block of 32 tokens could be made: .* lower --max_seq_length"
    refuse("mlm", ValueError, match, "--do_train", "--train_file", path)


def test_blank_lines_only(refuse, tmp_path):
    (tmp_path / "train.txt").write_text(" \n \n")
    argv = ["--do_train", "--train_file", tmp_path / "train.txt", "--line_by_line"]
    refuse("mlm", ValueError, "all 2 rows are blank", *argv)


@pytest.mark.parametrize(
    ("name", "option"), [("clm", "--block_size"), ("classification", "--max_seq_length"), ("mlm", "--max_seq_length")]
)
def test_longer_than_the_model_takes(name, option, refuse, train):
    refuse(name, ValueError, f"{option} is 64, and the model takes at most 32 tokens", *train, option, 64)
    refuse(name, ValueError, f"{option} is 1; give at least 2 tokens", *train, option, 1)


# Tokens


@pytest.fixture
def without(tokenizer, tmp_path):
    """A tokenizer that lacks special tokens."""

    def make(*names):
        folder = tmp_path / "tokenizer"
        tokenizer.save_pretrained(folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in names}))
        return ["--tokenizer_name", folder]

    return make


def test_no_mask_token(refuse, train, without):
    refuse("mlm", ValueError, "tokenizer' has no mask token", *train, *without("mask_token"))


def test_no_padding_token(refuse, train, without):
    match = "tokenizer' has no padding and no end-of-text token"
    refuse("classification", ValueError, match, *train, *without("pad_token", "eos_token"))


def test_no_end_of_text_token(refuse, train, without):
    refuse("clm", ValueError, "--append_eos: the tokenizer has no", *train, "--append_eos", *without("eos_token"))


# Labels


def test_no_label_column(refuse, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"text": "a", "kind": 1}] * 4)
    match = "no column 'label'; its columns are 'text', 'kind'; name one with --label_column_name"
    refuse("classification", ValueError, match, "--do_train", "--train_file", path)


def test_rows_without_label(refuse, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"text": "a", "label": i or None} for i in range(4)])
    match = "1 of 4 rows have no value in column 'label'"
    refuse("classification", ValueError, match, "--do_train", "--train_file", path)


def test_one_label(refuse, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"text": "a", "label": "x"}] * 4)
    match = "all labels in column 'label' are 'x'; give data with at least two"
    refuse("classification", ValueError, match, "--do_train", "--train_file", path)


def test_labels_of_a_strange_type(refuse, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"text": "a", "label": [1, 2]}] * 4)
    match = "column 'label' holds .*labels are classes, integers, text, or decimal"
    refuse("classification", ValueError, match, "--do_train", "--train_file", path)


def test_label_that_was_not_trained(refuse, train, tmp_path):
    path = write_rows(tmp_path / "validation.jsonl", [{"text": "a", "label": "ugly"}])
    match = "labels 'ugly' in column 'label' are not among those trained on, 'bad', 'good', 'neutral'"
    refuse("classification", ValueError, match, *train, "--do_eval", "--validation_file", path)


def test_label_that_the_checkpoint_does_not_know(refuse, data):
    match = "the data has the labels 'bad', 'good', 'neutral', and the checkpoint knows only '0', '1', '2'; train it"
    refuse("classification", ValueError, match, "--do_eval", "--validation_file", data / "validation.jsonl")
    match = "holds decimal numbers, and the checkpoint tells 3 labels apart"
    argv = ["--do_eval", "--validation_file", data / "validation.jsonl", "--label_column_name", "score"]
    refuse("classification", ValueError, match, *argv)


def test_head_of_another_size(refuse, train):
    match = r"classification' does not fit 1 label\(s\); pass --ignore_mismatched_sizes to train a new one"
    refuse("classification", ValueError, match, *train, "--label_column_name", "score")


def test_hidden_labels(refuse, tmp_path):
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [-1, 1]}, features=features)
    (tmp_path / "data").mkdir()
    rows.to_parquet(str(tmp_path / "data" / "train.parquet"))
    match = "1 of 2 rows of split 'train' have the label -1, which means that it is hidden"
    refuse("classification", ValueError, match, "--do_train", "--dataset_name", tmp_path / "data")


def test_three_text_columns(refuse, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"a": "a", "b": "b", "c": "c", "label": i} for i in range(4)])
    match = "'a', 'b', 'c' are 3 columns; give one or two"
    refuse("classification", ValueError, match, "--do_train", "--train_file", path, "--text_column_names", "a,b,c")


# The hub


@pytest.mark.parametrize("what", ["dataset", "model"])
def test_unknown_on_the_hub(what, checkpoints, data, tmp_path):
    known = {"dataset": ["--train_file", str(data / "train.txt")], "model": [str(checkpoints / "clm")]}
    dataset = ["--dataset_name", "someone/absent"] if what == "dataset" else known["dataset"]
    model = ["--model_name_or_path", *(["someone/absent"] if what == "model" else known["model"])]
    with Hub(tmp_path) as hub:
        argv = [*model, *dataset, "--do_train", "--use_cpu", "--output_dir", str(tmp_path / "o")]
        process = start_recipe("clm", argv, tmp_path / "home", hub)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode
    assert "finetune_clm.py: error: " in stderr
    assert "someone/absent" in stderr
    assert "Traceback" not in stderr


# From the command line


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--do_train", "--train_file", "absent.txt"], "--train_file: there is no file 'absent.txt'; give the path"),
        (["--do_train", "--patrickstar_config", "{}"], "patrickstar_config is given but patrickstar is not"),
        (None, "chunk_budget is too small for module 'transformer."),
    ],
    ids=["recipe", "arguments", "engine"],
)
def test_an_expected_error_ends_without_a_traceback(options, sentence, checkpoints, data, tmp_path):
    if options is None:
        options = ["--do_train", "--train_file", str(data / "train.txt"), "--patrickstar", "--block_size", "16"]
        options += ["--patrickstar_config", '{"chunk_budget": 1000}']
    argv = ["--model_name_or_path", str(checkpoints / "clm"), *COMMON, "--output_dir", str(tmp_path / "out"), *options]
    process = start_recipe("clm", argv, tmp_path / "home")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "finetune_clm.py: error: " in stderr
    assert sentence in stderr
    assert "Traceback" not in stderr


def test_a_mistake_of_a_program_keeps_its_traceback(monkeypatch):
    import common

    def main():
        return {}["absent"]

    with pytest.raises(KeyError):
        common.run(main)
