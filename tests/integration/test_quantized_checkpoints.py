"""Adapters over packed weights: runs that are resumed, by whichever Trainer or after a kill, end with the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
from support.models import make_rows
from support.quantized import load, saved, with_adapter
from support.same import assert_same
from support.trainers import arguments, logged, smallest_budget
from transformers import Trainer, TrainingArguments

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments, units

pytest.importorskip("bitsandbytes")

TESTS = Path(__file__).parents[1]
ADAPTER = "adapter_model.safetensors"


def make_trainer(folder, *, is_ours, kind="nf4", adapter_seed=1, **kwargs):
    model = with_adapter(load(kind, saved(2).name), seed=adapter_seed)
    cls, args_cls = Trainer, TrainingArguments
    if is_ours:
        cls, args_cls = PatrickStarTrainer, PatrickStarTrainingArguments
        settings = {"chunk_budget": smallest_budget(model), "optimizer_format": "torch"}
        kwargs |= {"patrickstar": True, "patrickstar_config": settings}
    kwargs = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **kwargs}
    return cls(model=model, args=arguments(args_cls, folder, **kwargs), train_dataset=make_rows("llama", 32))


def adapter_of(checkpoint):
    return safetensors.torch.load_file(checkpoint / ADAPTER)


@pytest.mark.parametrize("kind", ["nf4", "fp4, double", "int8"])
@pytest.mark.parametrize(("saves_ours", "loads_ours"), [(True, True), (False, True), (True, False)])
def test_resuming(kind, saves_ours, loads_ours, tmp_path):
    stock = make_trainer(tmp_path / "stock", is_ours=False, kind=kind)
    stock.train()
    first = make_trainer(tmp_path / "first", is_ours=saves_ours, kind=kind)
    first.train()
    assert logged(first, "loss") == logged(stock, "loss")
    resumed = make_trainer(tmp_path / "resumed", is_ours=loads_ours, kind=kind, adapter_seed=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "first/checkpoint-2"))
    assert logged(resumed, "loss") == logged(stock, "loss")
    assert_same(adapter_of(tmp_path / "stock/checkpoint-4"), adapter_of(tmp_path / "resumed/checkpoint-4"))


def main(folder):
    """Trains until it ends, from the last checkpoint if there is one."""
    units.LEAST_BUDGET_NBYTES = 1  # as in all tests
    kwargs = {"max_steps": 100, "save_steps": 10, "save_total_limit": 2, "warmup_steps": 5}
    trainer = make_trainer(folder, is_ours=folder.endswith("ours"), kind="nf4, double", **kwargs)
    trainer.train(resume_from_checkpoint=os.path.isdir(folder) and any(Path(folder).glob("checkpoint-*")))
    print(json.dumps(logged(trainer, "loss")))


def start(folder):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, __file__, str(folder)]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def losses_of(process):
    out, err = process.communicate(timeout=170)
    assert process.returncode == 0, err[-4000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.long
def test_a_hundred_steps_with_a_kill(tmp_path):
    whole, killed = start(tmp_path / "stock"), start(tmp_path / "ours")
    try:
        deadline = time.monotonic() + 170
        while not (tmp_path / "ours/checkpoint-40").is_dir():
            assert killed.poll() is None, killed.communicate()[1][-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        losses = losses_of(whole)
        assert len(losses) == 100
        assert losses_of(start(tmp_path / "ours")) == losses
    finally:
        for process in (whole, killed):
            process.kill()
    found = (adapter_of(tmp_path / name / "checkpoint-100") for name in ("stock", "ours"))
    assert_same(*found)


if __name__ == "__main__":
    main(sys.argv[1])
