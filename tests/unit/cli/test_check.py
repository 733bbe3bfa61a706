"""``hf-patrickstar check`` finds what differs, and changes nothing of the user's."""

import contextlib
import os
import pathlib
import subprocess
import tempfile
import types

import pytest
import torch
from support.scripts import ARGUMENTS, WRONG_STEP, write_script

from hf_patrickstar.cli import check_run
from hf_patrickstar.cli.main import main

NAME = "transformer.h.1.mlp.c_fc.weight"
TESTS = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def logs(tmp_path, monkeypatch):
    """Where the command may write."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def here(monkeypatch):
    """Trains in this process, which is quicker than in new ones; the commands that would have been started."""
    commands = []

    def run(command, stdout, **kwargs):
        commands.append(command)
        with contextlib.redirect_stdout(stdout):
            check_run.record_training(command[-1])
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield commands
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def check(script, *arguments, steps=2):
    return main(["check", "--steps", str(steps), script, *ARGUMENTS, *arguments])


def test_the_same_bits(here, logs, tmp_path, capsys):
    saving = ["--output_dir", str(tmp_path / "out"), "--save_strategy", "steps", "--save_steps", "1"]
    script = write_script(tmp_path, "print('said by the script')")
    more = ["--max_steps", "90", "--gradient_accumulation_steps", "2", "--warmup_steps", "50"]
    assert check(script, *saving, *more, "--patrickstar", "--patrickstar_config", '{"chunk_numel": 2048}') == 0
    verdict, detail = capsys.readouterr().out.splitlines()
    assert verdict == "same bits"
    assert detail.startswith("  2 steps, 4 losses, 2 gradient norms, 40 parameters and buffers with ")
    assert len(here) == 2
    assert sorted(os.listdir(tmp_path)) == ["tmp", "train.py"], "nothing is written beside the script"
    assert os.listdir(logs) == [], "logs are not kept where all is well"


def test_what_would_leave_the_machine_or_cannot_be_done_in_two_steps_is_off(here, tmp_path, capsys):
    more = "from transformers import EarlyStoppingCallback\ncallbacks.append(EarlyStoppingCallback())\n"
    more += "args.output_dir, args.save_strategy = 'changed', 'steps'"
    off = ["--eval_strategy", "steps", "--eval_steps", "1", "--load_best_model_at_end", "true", "--save_steps", "1"]
    off += ["--push_to_hub", "true", "--resume_from_checkpoint", "nowhere", "--report_to", "all"]
    assert check(write_script(tmp_path, more), *off, steps=1) == 0
    assert capsys.readouterr().out.startswith("same bits\n  1 steps, 1 losses")
    assert sorted(os.listdir(tmp_path)) == ["changed", "tmp", "train.py"]
    assert os.listdir(tmp_path / "changed") == [], "the Trainer makes the directory, and saves nothing there"


@pytest.mark.parametrize("step", [1, 2])
def test_a_wrong_step_is_found_and_named(step, here, logs, tmp_path, capsys):
    script = write_script(tmp_path, "print('said')\n" + WRONG_STEP.replace("{step}", str(step)))
    assert check(script) == 1
    verdict, first, *others = capsys.readouterr().out.splitlines()
    assert verdict == "different"
    assert f"after step {step}: '{NAME}' (1 in all)" in first
    assert any("the loss of step 2 is" in line for line in others) == (step == 1)
    numel = "1 of 4,096 elements, by 0.25 at most"
    assert any(f"'{NAME}' in {numel}" in line for line in others) == (step == 2)
    assert others[-2] == "  a second training without --patrickstar has the same bits as the first one"
    (folder,) = logs.iterdir()
    assert others[-1].endswith(f": {folder}")
    assert sorted(os.listdir(folder)) == ["patrickstar.log", "plain-again.log", "plain.log"]
    assert (folder / "plain.log").read_text().startswith("said\n")


def test_a_script_that_draws_anew_is_told_from_an_engine_that_is_wrong(here, tmp_path, capsys):
    more = "import os\ntorch.nn.init.constant_(model.lm_head.weight, int.from_bytes(os.urandom(2)) / 2**16)"
    assert check(write_script(tmp_path, more)) == 1
    printed = capsys.readouterr().out
    assert "before the first step: 'transformer.wte.weight'" in printed
    assert "a second training without --patrickstar differs from the first one, too" in printed


def test_16_bit_runs_may_be_close(here, tmp_path, capsys):
    script = write_script(tmp_path, "model.to(torch.bfloat16)")
    assert check(script, "--bf16") == 0
    assert capsys.readouterr().out.startswith("close\n")
    wrong = write_script(tmp_path, "model.to(torch.bfloat16)\n" + WRONG_STEP.replace("{step}", "2"))
    assert check(wrong, "--bf16") == 1


@pytest.mark.parametrize(
    ("more", "problem", "num_runs"),
    [
        ("raise SystemExit", "ended without building a Trainer", 1),
        ("args.patrickstar = False", "changes 'patrickstar' of its arguments", 2),
        (
            "class Stopping(TrainerCallback):\n    def on_step_end(self, args, state, control, **kwargs):\n"
            "        control.should_training_stop = True\ncallbacks.append(Stopping())",
            "ended its training after 1 of 2 steps",
            1,
        ),
        (
            "from transformers import Trainer, TrainingArguments\nargs = TrainingArguments(use_cpu=True)",
            "with Trainer and TrainingArguments, which do not train in chunks",
            2,
        ),
    ],
)
def test_a_script_that_cannot_be_checked_gets_a_sentence(more, problem, num_runs, here, tmp_path, capsys):
    assert check(write_script(tmp_path, more)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert problem in err
    assert "Traceback" not in err
    assert len(here) == num_runs


def test_wrong_arguments(tmp_path, capsys, monkeypatch):
    script = write_script(tmp_path)
    assert check(script, steps=0) == 2
    assert check(str(tmp_path / "none.py")) == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert check(script) == 2
    err = capsys.readouterr().err
    assert "--steps: must be at least 1, got 0" in err
    assert "there is no script" in err
    assert "start it without accelerate launch" in err


def test_an_error_of_the_script_ends_the_check_with_its_status_and_its_last_line(logs, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]))
    text = "import atexit, os\nprint('said', flush=True)\natexit.register(os._exit, 7)\n1 / 0"
    script = write_script(tmp_path, text=text)
    with pytest.raises(SystemExit) as end:
        check(script)
    assert end.value.code == 7
    out, err = capfd.readouterr()
    assert out == ""
    (folder,) = logs.iterdir()
    last = err.splitlines()[-1]
    assert "without --patrickstar, with exit status 7: ZeroDivisionError: division by zero" in last
    assert last.endswith(f"see {folder / 'plain.log'}")
    assert "Traceback" not in err
    assert "said\n" in (folder / "plain.log").read_text()
