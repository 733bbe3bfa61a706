"""The command ``hf-patrickstar``: what it prints, and its exit status."""

import os
import re
import subprocess
import sys

import pytest
import torch
from support.checkpoint_files import write_training_state

from hf_patrickstar.cli import plan_run
from hf_patrickstar.cli.main import main

STATES = {"w": {"exp_avg": torch.ones(3), "step": torch.tensor(1.0)}}


@pytest.mark.parametrize("output", [None, "other.pt"])
def test_export(output, tmp_path, capsys):
    write_training_state(tmp_path, STATES)
    path = tmp_path / (output or "optimizer.pt")
    assert main(["export", str(tmp_path), *([] if output is None else ["--output", str(path)])]) == 0
    assert torch.equal(torch.load(path, weights_only=True)["state"][0]["exp_avg"], torch.ones(3))
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"{re.escape(str(path))}: [0-9.]+ (B|KiB)\n", out)
    assert err == ""


def test_a_command_that_fails(tmp_path, capsys):
    assert main(["export", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    missing = f"'{tmp_path}/optimizer.index.json' is missing; copy it there, or use another checkpoint"
    assert err.startswith(f"hf-patrickstar export: {missing}; or delete ")


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["export"], ["export", "a", "b"]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: hf-patrickstar" in capsys.readouterr().err


def test_help_shows_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    numbers = ("--batch-size", "--accumulation", "--processes")
    assert all(re.search(rf" {option} N [^()]*\(default: 1\)", text) for option in numbers)
    for default in ("rtx4090", "bf16", "adamw", "1.0", "95% of", "90% of", "the model's positions, at most 4096"):
        assert f"(default: {default}" in text


def test_a_plan_imports_what_it_needs_and_its_repetition_no_torch(tmp_path):
    """Nor does the first one say anything of libraries that it does not need."""
    names = {"torch", "peft", "bitsandbytes", "transformers.trainer_utils", "torch._inductor.compile_fx"}
    code = (
        "import sys; from hf_patrickstar.cli.main import main; status = main(sys.argv[1:]); "
        f"print(status, sorted({names} & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "plan", "gpt2:n_layer=1,n_embd=8,n_head=2,vocab_size=20", "--no-advice"]
    environment = {**os.environ, "HF_ASSETS_CACHE": str(tmp_path)}
    first, again = (
        subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True)
        for _ in range(2)
    )
    assert (first.stderr, again.stderr) == ("0 ['torch']\n", "0 []\n")
    assert first.stdout == again.stdout
    assert "fits" in first.stdout


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_of_a_plan_are_for_terminals(is_terminal, capsys, monkeypatch):
    monkeypatch.setattr(plan_run, "PROGRESS_AFTER_S", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    layers = 2 + is_terminal  # an answer that was kept is given without plans
    main(["plan", f"gpt2:n_layer={layers},n_embd=64,n_head=2", "--machine", "rtx4090"])
    assert ("trying changes" in capsys.readouterr().err) == is_terminal


def test_who_reads_may_close_the_pipe():
    command = [sys.executable, "-m", "hf_patrickstar", "env"]
    read, write = os.pipe()
    os.close(read)
    try:
        finished = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    finally:
        os.close(write)
    assert finished.returncode == 141, "as of a program that SIGPIPE ends"
    assert "BrokenPipeError" not in finished.stderr
