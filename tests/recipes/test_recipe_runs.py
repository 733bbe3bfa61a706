"""The recipes train, evaluate, predict, save and resume; with and without chunks alike."""

import csv
import json
import math
import re
import shutil

import pytest
from support.hub import Hub
from support.running import CHUNKS, COMMON, finish_recipe, start_recipe
from support.trainers import assert_same_weights
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

AUTO = {"clm": AutoModelForCausalLM, "classification": AutoModelForSequenceClassification, "mlm": AutoModelForMaskedLM}


def arguments(name, checkpoints, data, extension):
    """A training and evaluation run of a recipe on files."""
    words = ["--model_name_or_path", checkpoints / name, "--do_train", "--do_eval", *COMMON]
    words += ["--train_file", data / f"train.{extension}", "--validation_file", data / f"validation.{extension}"]
    words += {"clm": ["--block_size", "16"], "mlm": ["--max_seq_length", "16"]}.get(name, ["--max_seq_length", "24"])
    return [str(word) for word in words]


def losses(folder):
    """Every training loss that was logged."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    logged = [entry["loss"] for entry in history if "loss" in entry]
    assert logged, "no loss was logged"
    return logged


def results(folder, split):
    return json.loads((folder / f"{split}_results.json").read_text())


def assert_same_output(expected, actual, auto):
    """Two output directories hold the same losses, metrics and weights, bit for bit."""
    assert losses(actual) == losses(expected)
    assert results(actual, "train")["train_loss"] == results(expected, "train")["train_loss"]
    assert results(actual, "eval")["eval_loss"] == results(expected, "eval")["eval_loss"]
    assert_same_weights(auto.from_pretrained(expected), auto.from_pretrained(actual))


@pytest.mark.long
def test_clm_from_the_hub(checkpoints, data, tmp_path):
    shutil.copytree(checkpoints / "clm", tmp_path / "hub/models/someone/tiny-gpt2")
    texts = tmp_path / "hub/datasets/someone/tiny-text"
    texts.mkdir(parents=True)
    for name in ("train.jsonl", "validation.jsonl"):
        shutil.copy(data / name, texts)
    argv = (
        "--model_name_or_path someone/tiny-gpt2 --dataset_name someone/tiny-text --block_size 16 --do_train --do_eval"
    )
    stock, chunks = tmp_path / "stock", tmp_path / "chunks"
    with Hub(tmp_path / "hub") as hub:
        # Two homes: each run asks the hub for everything.
        processes = [
            start_recipe("clm", [*argv.split(), *COMMON, "--output_dir", str(output), *extra], home, hub)
            for output, home, extra in ((stock, tmp_path / "home1", []), (chunks, tmp_path / "home2", CHUNKS))
        ]
        printed = [finish_recipe(process) for process in processes]
    for path in ("/someone/tiny-gpt2/resolve/", "/datasets/someone/tiny-text/resolve/"):
        assert sum(asked.startswith(path) for asked in hub.served()) >= 2, hub.requests

    assert_same_output(stock, chunks, AutoModelForCausalLM)
    assert results(chunks, "eval")["perplexity"] == math.exp(results(chunks, "eval")["eval_loss"])
    assert "***** patrickstar *****" not in printed[0]
    assert "***** patrickstar *****" in printed[1]
    assert re.search(r"device peak .* = .* of .* \((device|chunk)_budget\)", printed[1])
    assert AutoTokenizer.from_pretrained(chunks)("the fox").input_ids


@pytest.mark.parametrize(("name", "extension"), [("classification", "jsonl"), ("mlm", "txt")])
def test_script_from_files(name, extension, checkpoints, data, recipe, tmp_path, capsys):
    stock, chunks = tmp_path / "stock", tmp_path / "chunks"
    argv = arguments(name, checkpoints, data, extension)
    recipe(name, *argv, "--output_dir", stock)
    assert "***** patrickstar *****" not in capsys.readouterr().out
    metrics = recipe(name, *argv, "--output_dir", chunks, *CHUNKS)
    assert "***** patrickstar *****" in capsys.readouterr().out
    assert_same_weights(recipe.trainers[0].model, AUTO[name].from_pretrained(stock))
    assert_same_output(stock, chunks, AUTO[name])
    assert metrics["eval_loss"] == results(chunks, "eval")["eval_loss"]


@pytest.mark.long
def test_options_from_a_json_file(checkpoints, data, recipe, tmp_path, capsys):
    options = {"model_name_or_path": str(checkpoints / "clm"), "train_file": str(data / "train.jsonl")}
    options |= {"validation_split_percentage": 25, "block_size": 16, "max_eval_samples": 2, "max_steps": 1}
    options |= {"output_dir": str(tmp_path / "out"), "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    options |= {"do_train": True, "do_eval": True, "patrickstar": True, "patrickstar_config": {"chunk_numel": 16384}}
    (tmp_path / "options.json").write_text(json.dumps(options))
    metrics = recipe("clm", tmp_path / "options.json")
    assert metrics["eval_samples"] == 2
    assert "model data" in capsys.readouterr().out


def test_resuming_gives_the_run_that_was_not_interrupted(checkpoints, data, recipe, tmp_path):
    argv = arguments("clm", checkpoints, data, "txt")
    argv[argv.index("--save_strategy") + 1] = "steps"
    argv += ["--save_steps", "2", *CHUNKS]
    recipe("clm", *argv, "--output_dir", tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "found" / "checkpoint-2")
    recipe("clm", *argv, "--output_dir", tmp_path / "found")
    named = ["--resume_from_checkpoint", tmp_path / "whole" / "checkpoint-2"]
    recipe("clm", *argv, "--output_dir", tmp_path / "named", *named)
    recipe("clm", *argv, "--output_dir", tmp_path / "found", "--resume_from_checkpoint", "false", "--max_steps", "1")
    whole, found, named, afresh = recipe.trainers
    for resumed in (found, named):
        assert resumed.state.global_step == 3
        assert_same_weights(whole.model, resumed.model)
    assert afresh.state.global_step == 1


@pytest.mark.long
def test_classification_of_pairs_with_integer_labels(checkpoints, data, recipe, tmp_path):
    model = ["--model_name_or_path", checkpoints / "classification", "--ignore_mismatched_sizes"]
    files = ["--train_file", data / "pairs.csv", "--test_file", data / "pairs.csv", "--max_predict_samples", 5]
    todo = ["--do_train", "--do_eval", "--do_predict", "--validation_split_percentage", 25]
    metrics = recipe("classification", *model, *files, *todo, *COMMON, "--output_dir", tmp_path / "out", *CHUNKS)
    assert metrics["eval_samples"] == 12
    assert 0 <= metrics["eval_accuracy"] <= 1
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert saved.config.id2label == {0: "4", 1: "5"}
    with open(tmp_path / "out" / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["index"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert {row["prediction"] for row in rows} <= {"4", "5"}

    # What was trained is evaluated with its own ids, though this file has one label only.
    lines = (data / "pairs.csv").read_text().splitlines()
    (tmp_path / "fives.csv").write_text("\n".join([lines[0], *(line for line in lines if line.endswith(",5"))]))
    model, files = ["--model_name_or_path", tmp_path / "out"], ["--validation_file", tmp_path / "fives.csv"]
    recipe("classification", *model, *files, "--do_eval", *COMMON, "--output_dir", tmp_path / "eval")
    dataset = recipe.trainers[-1].eval_dataset
    assert set(dataset["labels"]) == {1}
