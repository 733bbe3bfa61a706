"""Checkpoints of several processes: read by any number of them, whole or not at all."""

import errno
import json
import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import inside
from support.models import make_model
from support.processes import Workers
from support.together import (
    alone,
    differences,
    engaged,
    hf_loss,
    launched,
    make_optimizer,
    train_as_alone,
    train_together,
)

from hf_patrickstar import PatrickStarAccelerator, PatrickStarEngine, deferred_weights
from hf_patrickstar.checkpoint import safetensors_file, transaction
from hf_patrickstar.checkpoint.storage import NewFile
from hf_patrickstar.errors import CheckpointError, CollectiveError

CONFIGS = {1: {}, 2: {"chunk_numel": 4096}, 4: {"reshard_after_forward": True}}


def build(name, dtype, seed=None):
    """A model that is not the one that was saved."""
    model = make_model(name)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return model.to(dtype)


def whole_state(engine):
    """All that is trained, by name: weights, masters, averages, steps."""
    state = {f"weight/{key}": value.clone() for key, value in engine.model.state_dict().items()}
    names = [name for group in engine.optimizer.named_groups() for name in group]
    for number, found in engine.optimizer.state_dict()["state"].items():
        state |= {f"{key}/{names[number]}": value for key, value in found.items()}
    return state


def groups_of(engine):
    return [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]


def go_on(rank, folder, before, world_size, name, dtype):
    """Loads what other processes saved, compares, trains a step and saves."""
    model = build(name, dtype, seed=world_size)
    optimizer = make_optimizer(model)
    for group in optimizer.param_groups:
        group["lr"], group["betas"] = 0.5, (0.1, 0.2)
    with engaged(model, CONFIGS[world_size], optimizer) as engine:
        engine.load_checkpoint(f"{folder}/{before}")
        expected, groups = torch.load(f"{folder}/{before}.pt")
        assert differences(expected, whole_state(engine)) == {}
        assert groups_of(engine) == groups
        losses, _ = train_together(engine, hf_loss(name), steps=1, first=9)
        engine.save_checkpoint(f"{folder}/{world_size}")
        state, groups = whole_state(engine), groups_of(engine)
        if rank == 0:
            torch.save((state, groups), f"{folder}/{world_size}.pt")
        return losses


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", torch.bfloat16), ("mixtral", torch.float32)])
def test_any_number_of_processes_reads_the_same_state(pair, four, tmp_path, name, dtype):
    model = build(name, dtype)
    engine = PatrickStarEngine(model, CONFIGS[1], make_optimizer(model), device="cpu")
    for step in range(2):
        hf_loss(name)(model, step, 0, 0).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    engine.save_checkpoint(tmp_path / "1")
    torch.save((whole_state(engine), groups_of(engine)), tmp_path / "1.pt")
    engine.detach()
    pair.run(go_on, str(tmp_path), 1, 2, name, dtype)
    four.run(go_on, str(tmp_path), 2, 4, name, dtype)
    index = json.loads((tmp_path / "4" / "optimizer.index.json").read_text())
    assert len(index["files"]) == 4
    model = build(name, dtype, seed=3)
    engine = PatrickStarEngine(model, {"chunk_numel": 8192}, make_optimizer(model), device="cpu")
    engine.load_checkpoint(tmp_path / "4")
    expected, groups = torch.load(tmp_path / "4.pt")
    assert differences(expected, whole_state(engine)) == {}
    assert groups_of(engine) == groups
    engine.detach()
    loaded = type(model).from_pretrained(tmp_path / "4", dtype=dtype).state_dict()
    weights = {key.removeprefix("weight/"): v for key, v in expected.items() if key.startswith("weight/")}
    assert differences(weights, loaded) == {}


def read_own_part(rank, folder):
    model = build("gpt2", torch.float32)
    expected = alone(lambda: build("gpt2", torch.float32), hf_loss("gpt2"))
    if rank == 0:
        model.save_pretrained(folder, max_shard_size="40KB")
    dist.barrier()
    counted = []
    original = os.preadv

    def preadv(descriptor, buffers, offset):
        counted.append(sum(len(buffer) for buffer in buffers))
        return original(descriptor, buffers, offset)

    safetensors_file.os.preadv = preadv
    try:
        with deferred_weights():
            model = type(model).from_pretrained(folder)
        parameters = list(model.parameters())
        with engaged(model) as engine:
            own = sum(tensor.own_numel for tensor in inside.tensors(engine)) * 4
            num_read = sum(counted)
            train_as_alone(engine, expected, hf_loss("gpt2"))
    finally:
        safetensors_file.os.preadv = original
    assert all(left is right for left, right in zip(parameters, model.parameters(), strict=True))
    return own, num_read


def test_every_process_reads_only_its_part_of_deferred_weights(pair, tmp_path):
    found = pair.run(read_own_part, str(tmp_path))
    assert all(num_read == own for own, num_read in found)
    assert len({own for own, _ in found}) == 2 or found[0] == found[1]


def fail(rank, folder, who, suffix):
    """One rank cannot write one of its files; then there is room again."""
    original = NewFile.write

    def write_all(file, view):
        if dist.get_rank() == who and suffix in file.name and file.tell() > 20_000:  # between two pieces
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(file, view)

    with engaged(build("gpt2", torch.float32)) as engine:
        train_together(engine, hf_loss("gpt2"), steps=1)
        engine.save_checkpoint(f"{folder}/earlier")
        NewFile.write = write_all
        try:
            with pytest.raises(CheckpointError) as caught:
                engine.save_checkpoint(f"{folder}/c")
        finally:
            NewFile.write = original
        assert not Path(folder, "c").exists()
        train_together(engine, hf_loss("gpt2"), steps=1, first=1)
        engine.save_checkpoint(f"{folder}/c")
        state = whole_state(engine)
        engine.load_checkpoint(f"{folder}/earlier")
        engine.load_checkpoint(f"{folder}/c")
        assert differences(state, whole_state(engine)) == {}
        return str(caught.value)


@pytest.mark.parametrize(("who", "suffix"), [(0, "model.safetensors"), (1, "optimizer-00002")])
def test_a_rank_that_cannot_write_fails_the_checkpoint_of_all(pair, tmp_path, who, suffix):
    messages = pair.run(fail, str(tmp_path), who, suffix)
    for message in messages:
        assert "No space left on device" in message
        assert suffix in message
        assert f"on rank {who}" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "earlier"]


def fail_in_background(rank, folder, who):
    """One rank cannot write its training state while training goes on."""
    original = NewFile.write

    def write_all(file, view):
        if f"optimizer-0000{who + 1}" in file.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(file, view)

    with engaged(build("gpt2", torch.float32), {"background_save": True}) as engine:
        train_together(engine, hf_loss("gpt2"), steps=1)
        NewFile.write = write_all
        try:
            engine.save_checkpoint(f"{folder}/c")
            train_together(engine, hf_loss("gpt2"), steps=1, first=1)
            with pytest.raises(CheckpointError) as caught:
                engine.checkpoints.wait()
        finally:
            NewFile.write = original
        return str(caught.value)


def test_all_are_told_what_failed_in_the_background(pair, tmp_path):
    for message in pair.run(fail_in_background, str(tmp_path), 1):
        assert re.search(r"optimizer-00002.*No space left on device; the file needs .* are left", message)
    assert list(tmp_path.iterdir()) == []


def lose_in_background(rank, folder, is_waiting):
    """Rank 1 dies while it writes; rank 0 waits for the checkpoint, or fails elsewhere and closes it."""
    transaction.LAST_TIMEOUT_S = 0.5
    model = build("gpt2", torch.float32)
    engine = PatrickStarEngine(model, {"background_save": True}, make_optimizer(model), device="cpu")
    if rank == 1:
        NewFile.write = lambda *_: time.sleep(600)
    with engine.checkpoints.writing(f"{folder}/c") as checkpoint:
        engine.checkpoints.begin_state(checkpoint)
    Path(folder, f"rank{rank}-goes-on").touch()
    if rank == 1:
        checkpoint.write.join()
    if is_waiting:
        with pytest.raises(CollectiveError):
            engine.checkpoints.wait()
    else:
        engine.checkpoints.close()
    return not checkpoint.thread.is_alive()


@pytest.mark.parametrize("is_waiting", [False, True])
def test_nobody_waits_for_what_a_dead_process_would_write(tmp_path, is_waiting):
    with Workers(2) as workers:
        workers.start(lose_in_background, str(tmp_path), is_waiting, timeout=60)
        while len(list(tmp_path.glob("rank*"))) < 2:
            time.sleep(0.05)
        workers.kill(1)
        assert workers.collect(60) == [True, None]
    assert not (tmp_path / "c").exists()


def save_on_own_disks(rank, folder):
    """Each process has a disk of its own, as on two machines."""
    own = Path(folder, f"disk{rank}")
    own.mkdir()
    with engaged(build("gpt2", torch.float32)) as engine:
        train_together(engine, hf_loss("gpt2"), steps=1)
        engine.save_checkpoint(own / "c")
        state = whole_state(engine)
        train_together(engine, hf_loss("gpt2"), steps=1, first=1)
        loading, _ = engine.training_state.open(own / "c")
        loading()
        found = whole_state(engine)
        averages = {key: value for key, value in state.items() if not key.startswith("weight/")}
        assert differences(averages, {key: found[key] for key in averages}) == {}
    return sorted(path.name for path in (own / "c").iterdir())


def test_processes_with_disks_of_their_own_keep_their_parts_there(pair, tmp_path):
    first, second = pair.run(save_on_own_disks, str(tmp_path))
    assert "model.safetensors" in first
    assert "optimizer-00001-of-00002.safetensors" in first
    own = ["README.md", "optimizer-00002-of-00002.safetensors", "optimizer-others.safetensors", "optimizer.index.json"]
    assert second == own
    model = build("gpt2", torch.float32)
    engine = PatrickStarEngine(model, {}, make_optimizer(model), device="cpu")
    with pytest.raises(CheckpointError, match=r"optimizer-00002-of-00002.safetensors' is missing"):
        engine.load_checkpoint(tmp_path / "disk0" / "c")
    engine.detach()


def load_where_one_has_nothing(rank, folder):
    messages = []
    with engaged(build("gpt2", torch.float32)) as engine:
        engine.save_checkpoint(f"{folder}/c")
        place = f"{folder}/c" if rank == 0 else f"{folder}/nowhere"
        for load in (engine.load_checkpoint, engine.checkpoints.load_weights, engine.checkpoints.check_state):
            if load == engine.checkpoints.check_state and rank == 1:
                place = f"{folder}/damaged"
                os.makedirs(place)
                Path(place, "optimizer.index.json").write_text("{}")
            with pytest.raises(CheckpointError) as caught:
                load(place)
            messages.append(str(caught.value))
        train_together(engine, hf_loss("gpt2"), steps=1)
    return messages


def test_what_one_process_cannot_load_none_loads(pair, tmp_path):
    first, second = pair.run(load_where_one_has_nothing, str(tmp_path))
    for other, own in zip(first, second, strict=True):
        assert other == f"rank 1 cannot load the checkpoint: {own}"
    assert "nowhere' has no weights" in second[0]
    assert "is not the index of a training state" in second[2]


def accelerate_step(accelerator, model, optimizer, step, rank):
    loss = hf_loss("gpt2")(model, step, 0, rank)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def prepared_by_accelerate(config, seed=None, **kwargs):
    accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=config, **kwargs)
    assert accelerator.num_processes == 2
    model = build("gpt2", torch.float32, seed)
    return accelerator, *accelerator.prepare(model, make_optimizer(model))


def save_by_accelerate(rank, folder, safe):
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    with launched(rank):
        accelerator, model, optimizer = prepared_by_accelerate({}, project_config=project)
        for step in range(3):
            accelerate_step(accelerator, model, optimizer, step, rank)
            accelerator.save_state(safe_serialization=safe)
        state = whole_state(model.patrickstar_engine)
        losses = [accelerate_step(accelerator, model, optimizer, step, rank) for step in (3, 4)]
        model.patrickstar_engine.detach()
        accelerator.free_memory()
    with launched(rank):
        accelerator, model, optimizer = prepared_by_accelerate({"chunk_numel": 2048}, seed=4, project_config=project)
        accelerator.load_state()
        assert differences(state, whole_state(model.patrickstar_engine)) == {}
        assert [accelerate_step(accelerator, model, optimizer, step, rank) for step in (3, 4)] == losses
        model.patrickstar_engine.detach()
        accelerator.free_memory()


def test_accelerate_saves_and_loads(pair, tmp_path):
    pair.run(save_by_accelerate, str(tmp_path), False)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
