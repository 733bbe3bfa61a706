"""Data for the recipes, and how to run one as users do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TEXT = "the quick slow red fox dog bird jumps runs sleeps over under lazy tree"
WORDS = TEXT.split()
SENTENCES = [" ".join(WORDS[(i * k + k) % len(WORDS)] for k in range(1, 9)) for i in range(48)]
LABELS = ["bad", "good", "neutral"]
COMMON = ["--seed", "7", "--max_steps", "3", "--learning_rate", "5e-3", "--per_device_train_batch_size", "2"]
COMMON += ["--per_device_eval_batch_size", "4", "--logging_steps", "1", "--save_strategy", "no"]
COMMON += ["--report_to", "none", "--disable_tqdm", "true", "--use_cpu"]
CHUNKS = ["--patrickstar", "--patrickstar_config", '{"chunk_numel": 16384, "host_budget": "64MiB"}']


def write_rows(path, rows):
    """Writes a jsonl file; returns its path as text."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def recipe_path(name):
    """The script of a recipe."""
    return str(ROOT / "recipes" / f"finetune_{name}.py")


def start_recipe(name, argv, home, hub=None):
    """Starts a recipe as a user does. Nothing of it can leave this machine or use what another test left."""
    return start([recipe_path(name), *argv], home, hub)


def start(words, home, hub=None):
    """Starts Python with these words; see ``start_recipe``."""
    # The hub's and the data sets' own variables would lead elsewhere.
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),
    }
    env |= {"HF_HUB_OFFLINE": "1"} if hub is None else {"HF_ENDPOINT": hub.url}
    return subprocess.Popen(
        [sys.executable, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish_recipe(process, timeout=120):
    """Waits for a recipe and returns what it printed; if it failed, the test fails with what it said."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        pytest.fail(f"{process.args} took more than {timeout} s\n{stdout[-4000:]}\n{stderr[-8000:]}")
    if process.returncode:
        pytest.fail(f"{process.args} exited with {process.returncode}\n{stdout[-4000:]}\n{stderr[-8000:]}")
    return stdout
