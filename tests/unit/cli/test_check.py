"""``hf-patrickstar check`` finds what differs, and changes nothing of the user's."""

import contextlib
import os
import pathlib
import subprocess
import sys
import types

import pytest
import torch
from user_scripts import ARGUMENTS, WRONG_STEP, write_script

from hf_patrickstar.cli.main import main
from hf_patrickstar.integrations import short_training

NAME = "transformer.h.1.mlp.c_fc.weight"
TESTS = pathlib.Path(__file__).parents[2]


@pytest.fixture
def here(monkeypatch):
    """Trains in this process, which is quicker than in new ones; the commands that would have been started."""
    commands = []

    def run(command, **kwargs):
        commands.append((command, kwargs))
        with contextlib.redirect_stdout(sys.stderr):
            status = short_training.main(command[3:])
        return types.SimpleNamespace(returncode=status)

    monkeypatch.setattr(subprocess, "run", run)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield commands
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def check(script, *arguments, steps=2):
    return main(["check", "--steps", str(steps), script, *ARGUMENTS, *arguments])


@pytest.mark.parametrize("flag", [[], ["--patrickstar", "--patrickstar_config", '{"chunk_numel": 2048}']])
def test_the_same_bits(flag, here, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    saving = ["--output_dir", str(out), "--save_strategy", "steps", "--save_steps", "1", "--max_steps", "90"]
    script = write_script(tmp_path)
    assert check(script, *saving, "--gradient_accumulation_steps", "2", "--warmup_steps", "50", *flag) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("same bits: 2 steps, 4 losses, 2 gradient norms, and 40 parameters and buffers of ")
    assert len(here) == 2
    assert sorted(os.listdir(tmp_path)) == ["train.py"], "nothing is written beside the script"


def test_what_would_leave_the_machine_or_cannot_be_done_in_two_steps_is_off(here, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = "from transformers import EarlyStoppingCallback\ncallbacks.append(EarlyStoppingCallback())"
    off = ["--eval_strategy", "steps", "--eval_steps", "1", "--load_best_model_at_end", "true", "--save_steps", "1"]
    off += ["--push_to_hub", "true", "--resume_from_checkpoint", "nowhere", "--report_to", "all"]
    assert check(write_script(tmp_path, more), *off, steps=1) == 0
    assert capsys.readouterr().out.startswith("same bits: 1 steps, 1 losses")
    assert sorted(os.listdir(tmp_path)) == ["train.py"]


@pytest.mark.parametrize("step", [1, 2])
def test_a_wrong_step_is_found_and_named(step, here, tmp_path, capsys):
    script = write_script(tmp_path, WRONG_STEP.replace("{step}", str(step)))
    assert check(script) == 1
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith(f"different: '{NAME}' after step {step}, 1 of 4,096 elements, by 0.25")
    assert others[0] == f"  parameters and buffers that differ after step {step}: 1"
    assert any("the loss of step 2 is" in line for line in others) == (step == 1)
    assert others[-1] == "  a second training without --patrickstar has the same bits as the first one"
    assert len(here) == (5 if step == 1 else 3)


def test_a_script_may_choose_its_trainer_by_the_flag(here, tmp_path, capsys):
    more = "from transformers import Trainer as Stock\nTrainer = PatrickStarTrainer if args.patrickstar else Stock"
    assert check(write_script(tmp_path, more)) == 0


def test_what_differs_only_once_is_said_to(here, tmp_path, capsys):
    once = f"\nimport pathlib\nmark = pathlib.Path({str(tmp_path / 'mark')!r})\n" + WRONG_STEP.replace("{step}", "1")
    once = once.replace(
        "state.global_step == 1:", "state.global_step == 1 and not mark.exists():\n            mark.touch()"
    )
    assert check(write_script(tmp_path, once)) == 1
    assert f"different: '{NAME}' after step 1, but not when both trainings were repeated\n" in capsys.readouterr().out


def test_a_script_that_draws_anew_is_told_from_an_engine_that_is_wrong(here, tmp_path, capsys):
    more = "import os\ntorch.nn.init.constant_(model.lm_head.weight, int.from_bytes(os.urandom(2)) / 2**16)"
    assert check(write_script(tmp_path, more)) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("different: 'transformer.wte.weight' before the first step\n")
    assert "a second training without --patrickstar differs from the first one, too" in printed


def test_16_bit_runs_may_be_close(here, tmp_path, capsys):
    script = write_script(tmp_path, "model.to(torch.bfloat16)")
    assert check(script, "--bf16") == 0
    assert capsys.readouterr().out.startswith("close, not the same bits, which a 16-bit training need not have\n")
    wrong = write_script(tmp_path, "model.to(torch.bfloat16)\n" + WRONG_STEP.replace("{step}", "2"))
    assert check(wrong, "--bf16") == 1


def test_16_bit_runs_of_fp32_models_have_the_same_bits(here, tmp_path, capsys):
    assert check(write_script(tmp_path), "--bf16") == 0
    assert capsys.readouterr().out.startswith("same bits")


@pytest.mark.parametrize(
    ("more", "problem", "num_runs"),
    [
        ("raise SystemExit", "ended without building a Trainer", 1),
        (
            "from transformers import Trainer",
            "with Trainer and PatrickStarTrainingArguments, which cannot",
            2,
        ),
        (
            "from transformers import Trainer, TrainingArguments\nargs = TrainingArguments(use_cpu=True)",
            "with Trainer and TrainingArguments, which cannot",
            1,
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


STOPPING = """
class Stopping(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


callbacks.append(Stopping())
"""


def test_a_script_that_stops_earlier_gets_a_sentence(here, tmp_path, capsys):
    assert check(write_script(tmp_path, STOPPING)) == 2
    assert "ended its training after 1 of 2 steps" in capsys.readouterr().err
    assert check(write_script(tmp_path, STOPPING), steps=1) == 0


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


def test_an_error_of_the_script_is_passed_on_from_its_process(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]))
    script = write_script(tmp_path, "import atexit, os\nprint('said', flush=True)\natexit.register(os._exit, 7)\n1 / 0")
    assert check(script) == 7
    out, err = capfd.readouterr()
    assert out == "", "what the script prints goes to stderr"
    assert "\nsaid\n" in err
    assert "ZeroDivisionError: division by zero" in err
    assert err.endswith(f"'{script}' failed without --patrickstar, with exit status 7\n")
