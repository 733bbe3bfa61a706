"""``hf-patrickstar run``: scripts that know nothing of this package train in chunks, to the same weights."""

import json
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import make_model
from safetensors.torch import load_file
from texts import completions, make_tokenizer, preferences, prompts
from unchanged_scripts import FILES

TESTS = pathlib.Path(__file__).parents[1]
ARGUMENTS = ("--use_cpu", "--max_steps", "3", "--report_to", "none", "--disable_tqdm", "true")
ARGUMENTS += ("--per_device_train_batch_size", "4", "--learning_rate", "5e-3", "--save_strategy", "no")
OURS = ("--patrickstar", "--patrickstar_config", '{"chunk_budget": "64KiB"}')
TRL = {
    "sft": (completions, ("--max_length", "16")),
    "dpo": (preferences, ("--max_length", "16")),
    "grpo": (
        prompts,
        ("--reward_funcs", "texts.count_sevens", "--num_generations", "4", "--max_completion_length", "6"),
    ),
}


def environment():
    search = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def programs(folder, kind):
    """What runs, by name: words of a program that is given its own output directory."""
    rest = {"clm": ("--model_name_or_path", str(folder / "model"), "--max_train_samples", "16")}
    rest["glue"] = ("--task_name", "tiny", "--do_eval")
    rest["translation"] = ("--predict_with_generate",)
    found = {}
    for name in ("clm", "glue", "translation"):
        words = (str(folder / f"{name}.py"), "--output_dir", str(folder / kind / name), *rest[name], *ARGUMENTS)
        found[name] = {"plain": words, "run": (*words, *OURS)}
    words = (str(folder / "no_trainer.py"), "--output_dir", str(folder / kind / "no_trainer"))
    found["no_trainer"] = {"plain": words, "run": (*OURS, *words)}
    for name, (_, more) in TRL.items():
        words = ("-m", f"trl.scripts.{name}", "--model_name_or_path", str(folder / "model"), "--dtype", "float32")
        words += ("--dataset_name", str(folder / name), "--output_dir", str(folder / kind / name), *more, *ARGUMENTS)
        words += ("--bf16", "false", "--gradient_checkpointing", "false")
        found[name] = {"plain": words, "run": (*words, *OURS)}
    return found


def write_inputs(folder):
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    make_model("gpt2").save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    for name, (make, _) in TRL.items():
        (folder / name).mkdir()
        make().to_json(folder / name / "train.jsonl")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The folder of all that was written, and what both processes said."""
    folder = tmp_path_factory.mktemp("unchanged")
    write_inputs(folder)

    def start(kind):
        file = folder / f"{kind}.json"
        file.write_text(json.dumps(list(programs(folder, kind).values())), encoding="utf-8")
        command = [sys.executable, str(TESTS / "unchanged_scripts.py"), kind, str(file)]
        return subprocess.run(command, env=environment(), cwd=folder, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor() as pool:
        ended = dict(zip(("plain", "run"), pool.map(start, ("plain", "run")), strict=True))
    for kind, process in ended.items():
        assert process.returncode == 0, f"{kind}: {process.stdout[-2000:]}{process.stderr[-4000:]}"
    return folder, ended


def weights(folder, kind, name):
    return load_file(folder / kind / name / "model.safetensors")


@pytest.mark.parametrize("name", ["clm", "glue", "translation", "no_trainer", *TRL])
def test_a_script_trains_to_the_same_weights(outputs, name):
    folder, _ = outputs
    expected, found = weights(folder, "plain", name), weights(folder, "run", name)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert torch.equal(value, found[key]), key


def test_they_trained_in_chunks(outputs):
    _, ended = outputs
    assert ended["run"].stdout.count("has chunks: True") == 2
    assert ended["plain"].stdout.count("has chunks: False") == 2
    assert "hf-patrickstar run: Trainer and TrainingArguments of transformers" in ended["run"].stderr
    assert "hf-patrickstar run" not in ended["plain"].stderr


def test_processes_that_a_command_starts_inherit_it(outputs, tmp_path):
    """``trl sft`` starts ``accelerate launch``, which starts the script."""
    folder, _ = outputs
    words = list(programs(folder, "plain")["sft"]["plain"])[2:]
    place = words.index("--output_dir") + 1
    words[place] = str(tmp_path / "inherited")
    script = pathlib.Path(sys.executable).with_name("trl")
    command = [sys.executable, "-m", "hf_patrickstar", "run", "--inherit", str(script), "sft", *words, *OURS]
    there = {**environment(), "TMPDIR": str(tmp_path), "ACCELERATE_USE_CPU": "true"}
    process = subprocess.run(command, env=there, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    found, expected = load_file(tmp_path / "inherited" / "model.safetensors"), weights(folder, "plain", "sft")
    assert all(torch.equal(value, found[key]) for key, value in expected.items())
    assert "patrickstar: 3 steps took" in process.stdout
    assert not list(tmp_path.glob("hf-patrickstar-run-*"))


def test_without_the_flag_nothing_differs(outputs, tmp_path):
    folder, _ = outputs
    words = list(programs(folder, "plain")["clm"]["plain"])
    words[words.index("--output_dir") + 1] = str(tmp_path)
    command = [sys.executable, "-m", "hf_patrickstar", "run", *words]
    process = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    assert "has chunks: False" in process.stdout
    found, expected = load_file(tmp_path / "model.safetensors"), weights(folder, "plain", "clm")
    assert all(torch.equal(value, found[key]) for key, value in expected.items())
