"""A recipe in two processes, started as a user does."""

import json
import os
import subprocess
import sys

import pytest
from support.running import COMMON, ROOT
from support.scripts import PLAIN_EXIT

pytestmark = pytest.mark.xdist_group("distributed")  # one worker of pytest-xdist, or each starts processes


def launch(checkpoints, data, output, *extra, folders=()):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]
    command += [ROOT / "recipes/accelerate/cpu_2_processes.yaml", ROOT / "recipes/finetune_clm.py"]
    command += ["--model_name_or_path", checkpoints / "clm", "--do_train", "--do_eval", "--block_size", "16", *COMMON]
    command += ["--train_file", data / "train.txt", "--validation_file", data / "validation.txt"]
    command += ["--output_dir", output, *extra]
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(output) + "-home"}
    env["PYTHONPATH"] = os.pathsep.join([*folders, str(ROOT)])
    env |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr[-6000:]
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry], result.stdout


@pytest.mark.long
def test_clm_in_two_processes(checkpoints, data, tmp_path):
    stock, _ = launch(checkpoints, data, tmp_path / "stock", folders=[str(PLAIN_EXIT)])
    ours, printed = launch(checkpoints, data, tmp_path / "ours", "--patrickstar")
    assert len(ours) == 3
    assert ours == stock
    assert "***** patrickstar *****" in printed
