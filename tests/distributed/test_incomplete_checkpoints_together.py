"""Checkpoints of which files are gone, on one of two processes or on both: all raise the same, and none trains anew."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.models import make_model
from support.together import differences, engaged, hf_loss, launched, train_together
from support.trainers import train

from hf_patrickstar import CheckpointError, PatrickStarEngine

INDEX = "optimizer.index.json"


def copies(rank, saved, without=""):
    """A copy of a checkpoint for each rank, as on two machines; rank 1 lacks a file of its copy."""
    own = Path(f"{saved}-{rank}")
    shutil.copytree(saved, own)
    if rank == 1 and without:
        (own / without).unlink()
    return own


def states_of(engine):
    state = engine.optimizer.state_dict()["state"]
    return {f"{place}/{key}": value for place, found in state.items() for key, value in found.items()}


def load_without_an_index(rank, folder):
    messages = []
    with engaged(make_model("gpt2")) as engine:
        train_together(engine, hf_loss("gpt2"), steps=1)
        engine.save_checkpoint(f"{folder}/c")
        train_together(engine, hf_loss("gpt2"), steps=1, first=1)
        before = states_of(engine)
        own = copies(rank, f"{folder}/c", INDEX)
        for place in (own, f"{folder}/c"):
            if place != own and rank == 0:
                Path(folder, "c", INDEX).unlink()
            dist.barrier()
            with pytest.raises(CheckpointError) as caught:
                engine.load_checkpoint(place)
            messages.append(str(caught.value))
        assert differences(before, states_of(engine)) == {}
        train_together(engine, hf_loss("gpt2"), steps=1)
    return messages


def test_an_engine_finds_no_index(pair, tmp_path):
    first, second = pair.run(load_without_an_index, str(tmp_path))
    assert first[0] == f"rank 1 cannot load the checkpoint: {second[0]}"
    assert f"c-1/{INDEX}' is missing" in second[0]
    assert first[1] == second[1]
    assert f"c/{INDEX}' is missing" in first[1]


def resume(rank, folder, without):
    kwargs = {"save_strategy": "steps", "save_steps": 2, "ddp_backend": "gloo", "max_steps": 4}
    with launched(rank):
        trainer, recorder = train("gpt2", folder, {}, **kwargs)
        trainer.patrickstar_engine.detach()
        dist.barrier()
    own = copies(rank, f"{folder}/checkpoint-2", without)
    with launched(rank):
        try:
            _, resumed = train("gpt2", folder, {}, train_kwargs={"resume_from_checkpoint": str(own)}, **kwargs)
        except CheckpointError as error:
            return str(error)
        return resumed.losses == recorder.losses[2:]


@pytest.mark.parametrize("without", [INDEX, "scheduler.pt"])
def test_the_trainer_resumes_alike_on_all_processes(pair, tmp_path, without):
    first, second = pair.run(resume, str(tmp_path), without, timeout=120)
    if without == INDEX:
        assert first == f"rank 1 cannot load the checkpoint: {second}"
        assert f"checkpoint-2-1/{INDEX}' is missing" in second
    else:
        for text, rank in ((first, 0), (second, 1)):
            assert text.startswith(f"rank 1 finds no {without} in '{tmp_path}/checkpoint-2-{rank}', where other ranks")


def load_damaged(rank, folder):
    """Rank 0 has trained its parameters, and rank 1, whose file is damaged, has no state yet."""

    def make():
        model = torch.nn.ModuleList([torch.nn.Linear(64, 64, bias=False) for _ in range(2)])
        return model, PatrickStarEngine(model, {"chunk_numel": 4096}, torch.optim.AdamW(model.parameters()))

    def train_layers(model, engine, *numbers, scale=1.0):
        sum(model[number](torch.full((2, 64), scale)).sum() for number in numbers).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    torch.manual_seed(0)
    model, engine = make()
    train_layers(model, engine, 0, 1)
    engine.save_checkpoint(f"{folder}/c")
    path = Path(folder, "c", "optimizer-00002-of-00002.safetensors")
    if rank == 0:
        path.write_bytes(path.read_bytes()[:-4] + b"\xff" * 4)
    dist.barrier()
    engine.detach()
    model, engine = make()
    train_layers(model, engine, 0, scale=2.0)
    is_fresh, before = engine.checkpoints.state.is_fresh, states_of(engine)
    with pytest.raises(CheckpointError, match=path.name):
        engine.load_checkpoint(f"{folder}/c")
    return is_fresh, differences(before, states_of(engine))


def test_a_damaged_file_of_a_rank_without_states(pair, tmp_path):
    assert pair.run(load_damaged, str(tmp_path)) == [(False, {}), (True, {})]
