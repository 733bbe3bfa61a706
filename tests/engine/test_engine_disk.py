"""Masters and optimizer states of which neither the device nor the host has room are in files, as few as will do."""

import gc
import os
import pathlib
import re

import pytest
import torch
from support import inside
from support.models import make_batch, make_model
from support.same import assert_same

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import BudgetError, ConfigError, EngineError
from hf_patrickstar.memory.tiers import Tier

pytestmark = pytest.mark.own_rest
TILE_NUMEL = 1024


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """A chunk has several tiles."""
    monkeypatch.setattr("hf_patrickstar.optim.elementwise.SLOT_NUMEL", TILE_NUMEL)


def train(num_steps=5, accumulation=1, make_optimizer=torch.optim.AdamW, **config):
    """Losses, values and states of a small model, and its engine, if there are settings."""
    model = make_model("gpt2").train()
    optimizer, engine = make_optimizer(model.parameters(), lr=1e-2), None
    if config:
        settings = {"chunk_numel": 4096, "reuse_plan": False, **config}
        engine = PatrickStarEngine(model, settings, optimizer, gradient_accumulation_steps=accumulation)
        optimizer = engine.optimizer
    losses = steps(model, optimizer, range(num_steps), accumulation)
    states = [value.clone() for p in model.parameters() for value in optimizer.state[p].values()]
    return losses, [value.clone() for value in model.state_dict().values()], states, engine


def steps(model, optimizer, seeds, accumulation=1):
    losses = []
    for seed in seeds:
        for micro in range(accumulation):
            torch.manual_seed(seed)
            loss = model(**make_batch("gpt2", seed=10 * seed + micro)).loss / accumulation
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def on_disk(engine):
    return [chunk for chunk in inside.chunks(engine) if chunk.is_on_disk]


@pytest.fixture
def least_host(tmp_path):
    """The bytes of the host, with room for all lists and with room for none, of a tight device."""
    *_, engine = train(num_steps=1, device_budget="300000B", disk_path=str(tmp_path))
    host = engine.ledger.owners(Tier.HOST)
    whole, states = sum(host.values()), sum(host[name] for name in ("master", "exp_avg", "exp_avg_sq"))
    engine.detach()
    return whole, states


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_is_the_same_bit_for_bit_with_any_share_of_them_there(tmp_path, least_host, accumulation):
    """And memory is as planned: no tier has more than its budget, and the disk no more than the host lacks."""
    expected = train(accumulation=accumulation)
    whole, states = least_host
    shares = []
    for share in (0.0, 0.3, 0.6, 0.9):
        host = whole - int(share * states) + (accumulation > 1) * states // 3 + 40_000
        settings = {"device_budget": "300000B", "host_budget": f"{host}B", "disk_path": str(tmp_path)}
        *found, engine = train(accumulation=accumulation, **settings)
        assert_same(expected[:3], found)
        ledger = engine.ledger
        there = ledger.owners(Tier.DISK)
        assert set(there) <= {"master", "exp_avg", "exp_avg_sq"}
        assert ledger.peak(Tier.HOST) <= host
        assert ledger.total_peak <= 300_000
        largest = max(chunk.state_nbytes + chunk.param_nbytes for chunk in inside.chunks(engine))
        assert not there or host - ledger.used(Tier.HOST) < largest, "the host is full"
        shares.append(sum(there.values()) / states)
        engine.detach()
    assert shares[0] == 0.0
    assert shares == sorted(shares)
    assert shares[-1] > 0.6
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_the_same_and_training_goes_on_from_it(tmp_path, least_host):
    whole, states = least_host
    drive = tmp_path / "drive"
    drive.mkdir()
    tight = {"device_budget": "300000B", "host_budget": f"{whole - int(0.6 * states)}B", "disk_path": [str(drive)]}
    *_, with_room = train(device_budget="300000B", chunk_numel=4096)
    with_room.save_checkpoint(tmp_path / "with room")
    *_, engine = train(**tight)
    assert on_disk(engine)
    engine.save_checkpoint(tmp_path / "on the disk")
    for file in sorted((tmp_path / "with room").rglob("*")):
        other = tmp_path / "on the disk" / file.relative_to(tmp_path / "with room")
        assert file.is_dir() or file.suffix == ".json" or file.read_bytes() == other.read_bytes(), file.name
    expected = steps(with_room.model, with_room.optimizer, range(5, 8))
    assert_same(expected, steps(engine.model, engine.optimizer, range(5, 8)))
    *_, resumed = train(num_steps=1, **tight)  # with lists on the disk that are full of something else
    resumed.load_checkpoint(tmp_path / "on the disk")
    assert_same(expected, steps(resumed.model, resumed.optimizer, range(5, 8)))
    for each in (with_room, engine, resumed):
        each.detach()


def test_too_little_memory_names_the_disk_with_what_it_would_cost(tmp_path, least_host):
    whole, states = least_host
    tight = {"device_budget": "300000B", "host_budget": f"{whole - int(0.6 * states)}B"}
    with pytest.raises(BudgetError) as caught:
        train(**tight)
    said = str(caught.value)
    assert re.search(r"With disk_path, a directory on a local drive, it fits with \S+ KiB of masters and states", said)
    assert "a step" in said
    *_, engine = train(**tight, disk_path=str(tmp_path))  # the remedy
    assert on_disk(engine)
    engine.detach()


def test_a_disk_that_is_too_small_is_refused_before_anything_is_allocated(tmp_path, least_host, monkeypatch):
    whole, states = least_host
    tight = {"device_budget": "300000B", "host_budget": f"{whole - int(0.6 * states)}B", "disk_path": str(tmp_path)}
    with pytest.raises(BudgetError, match=r"and the disk 48\.83 KiB"):
        train(**tight, disk_budget="50000B")
    tight["host_budget"] = "400000B"  # too little for chunks alone, which is known before the first step

    def refuse(*args):
        raise OSError(28, "No space left on device")

    allocated = []
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(
        "hf_patrickstar.setup.payloads.Payloads.make_chunk", lambda *args, **kwargs: allocated.append(args)
    )
    with pytest.raises(BudgetError, match=rf"{re.escape(str(tmp_path))}.*No space left on device"):
        train(**tight)
    assert not allocated


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"disk_path": "/nowhere at all"}, "/nowhere at all"),
        ({"disk_path": 3}, "disk_path: expected a directory"),
        ({"disk_budget": "1GiB"}, "disk_budget: give disk_path"),
        ({"disk_path": [""]}, "disk_path"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        train(num_steps=0, **settings)


def test_an_error_of_the_drive_names_the_list_and_training_cannot_go_on_with_wrong_bits(
    tmp_path, least_host, monkeypatch
):
    whole, states = least_host
    drive = tmp_path / "drive"
    drive.mkdir()
    tight = {"device_budget": "300000B", "host_budget": f"{whole - int(0.6 * states)}B", "disk_path": str(drive)}
    *_, engine = train(**tight)
    engine.save_checkpoint(tmp_path / "checkpoint")
    expected = steps(engine.model, engine.optimizer, range(5, 7))
    engine.load_checkpoint(tmp_path / "checkpoint")
    assert_same(expected, steps(engine.model, engine.optimizer, range(5, 7)))
    read = os.preadv

    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(EngineError, match=r"of chunk \d+ cannot be read .*drive.*Input/output error"):
        steps(engine.model, engine.optimizer, range(7, 9))
    monkeypatch.setattr(os, "preadv", read)
    files = {file: file.read_bytes() for file in pathlib.Path(tmp_path / "checkpoint").rglob("*") if file.is_file()}
    *_, other = train(num_steps=1, **tight)
    other.load_checkpoint(tmp_path / "checkpoint")
    assert_same(expected, steps(other.model, other.optimizer, range(5, 7)))
    assert files == {file: file.read_bytes() for file in files}
    other.detach()


def test_values_whose_masters_cannot_be_read_are_no_numbers(tmp_path, least_host, monkeypatch):
    """After an error of the drive gradients may be in their places; nobody trains with these unnoticed."""
    whole, states = least_host
    tight = {"device_budget": "300000B", "host_budget": f"{whole - int(0.6 * states)}B", "disk_path": str(tmp_path)}
    *_, engine = train(**tight)
    steps(engine.model, engine.optimizer, [50])  # since then nobody has looked at states or values
    steps_before = {index: int(step) for index, step in engine.optimizer.kernel._steps.items()}
    read = os.preadv

    def fail(*args):
        raise OSError(5, "Input/output error")

    engine.model(**make_batch("gpt2", seed=90)).loss.backward()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(EngineError):
            engine.optimizer.step()
    assert os.preadv is read
    steps_now = {index: int(step) for index, step in engine.optimizer.kernel._steps.items()}
    added = {index: steps_now[index] - steps_before[index] for index in steps_now}
    for chunk in inside.chunks(engine):  # a few have been read ahead, and are updated
        assert len({added[tensor.spec.index] for tensor in chunk.owned}) == 1
    assert 0 in {added[chunk.owned[0].spec.index] for chunk in on_disk(engine)}
    assert not any(tensor.has_gradient for tensor in inside.tensors(engine))
    engine.optimizer.zero_grad()
    assert not torch.isfinite(engine.model(**make_batch("gpt2", seed=91)).loss)


def test_the_space_is_free_when_the_engine_is_detached(tmp_path, least_host):
    whole, states = least_host
    tight = {"device_budget": "300000B", "host_budget": f"{whole - int(0.6 * states)}B", "disk_path": str(tmp_path)}
    *_, engine = train(**tight)

    def num_open():
        links = [path.readlink() for path in pathlib.Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum(str(link).startswith(str(tmp_path)) for link in links)

    assert num_open() > 0
    optimizer = engine.optimizer
    engine.detach()
    gc.collect()
    assert num_open() == 0
    assert optimizer is engine.optimizer
