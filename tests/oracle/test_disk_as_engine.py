"""What the simulator says of states on the disk is what an engine does: which are there, the order, and the bytes.

The engine has no virtual time here: it reads and writes real files.
"""

import dataclasses

import pytest
from support import inside
from support.oracle import make_training

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.machine import CPU_TIER
from hf_patrickstar.memory.disk import Ring
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner.optimizers import keep_embeddings_wide
from hf_patrickstar.schedule.script import HostWork

pytestmark = pytest.mark.own_rest


def run(training, machine, known, folder, monkeypatch, num_steps):
    """The engine after some steps, the chunks of each step in the order in which the ring got them, and its counts.

    It knows the traces of the plan, as in a run after ``hf-patrickstar plan``.
    """
    order, submit, counts = [], Ring.submit, []

    def note(ring, tiles, ahead=()):
        tiles = list(tiles)
        order[-1] += [id(tile.key[0]) for tile, _ in tiles]
        return submit(ring, tiles, ahead)

    monkeypatch.setattr(Ring, "submit", note)
    monkeypatch.setattr("hf_patrickstar.engine.find_traces", lambda *_: dataclasses.replace(known, has_padding=True))
    model = training.make_model()
    budgets = {"device_budget": f"{machine.device_nbytes}B", "host_budget": f"{machine.host_nbytes}B"}
    disk = {"disk_path": str(folder), "disk_budget": machine.disk_nbytes}
    config = {**budgets, **disk, "pin_memory": False, "machine": CPU_TIER, "overlap_optimizer": False}
    made = training.make_optimizer(model.parameters())
    keep_embeddings_wide(made, model)
    num = training.num_micro_batches
    settings = {**config, **training.config, "reuse_plan": False}
    engine = PatrickStarEngine(model, settings, made, device="cpu", gradient_accumulation_steps=num)
    engine.optimizer.zero_grad()
    for _ in range(num_steps):
        order.append([])
        for _ in range(num):
            training.compute_loss(model, training.make_inputs()).backward()
        engine.optimizer.clip_grad_norm_(None, 1.0)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        counts.append((engine.counts.disk_read_nbytes, engine.counts.disk_written_nbytes))
    chunks = {id(region): c.spec.index for c in inside.chunks(engine) for region in c.home_lists.regions.values()}
    return engine, [[chunks.get(region) for region in step] for step in order], counts


def adamw_8bit(parameters):
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(parameters, lr=1e-3, min_8bit_size=256)


CASES = {
    "a part of them": {"share": 0.3},
    "most of them": {"share": 0.75},
    "two micro-batches": {"share": 0.5, "num_micro_batches": 2},
    "8-bit": {"share": 0.5, "make_optimizer": adamw_8bit},
}
STATES = ("master", "exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2")


@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_states_are_on_the_disk_as_planned(how, tmp_path, monkeypatch):
    how = dict(how)
    share = how.pop("share")
    training = make_training("gpt2", device_budget="auto", chunk_numel=2048, **how)
    config = {name: value for name, value in training.config.items() if name != "device_budget"}
    training = dataclasses.replace(training, config=config)
    roomy = dataclasses.replace(CPU_TIER, device_nbytes=350_000, host_nbytes=2**30, disk_nbytes=2**30)
    with_room = training.simulate(roomy)
    assert not any(with_room.disk_owners.values())
    states = sum(with_room.host_owners.get(name, 0) for name in STATES)
    machine = dataclasses.replace(roomy, host_nbytes=int(with_room.host_nbytes - share * states))
    told = training.simulate(machine)
    engine, order, counts = run(training, machine, told.known, tmp_path, monkeypatch, 5)
    on_disk = {chunk.spec.index for chunk in inside.chunks(engine) if chunk.is_on_disk}
    works = [entry for entry in told.script if isinstance(entry, HostWork) and entry.disk_nbytes]
    assert 0 < len(on_disk) == len(works)
    at_home = {index for index, load in enumerate(told.loads) if load.is_here}
    visited = [index for index in dict.fromkeys(told.traces[0].visited) if index not in at_home]
    assert set(visited[-len(on_disk) :]) == on_disk, "those that forward needs last"
    assert told.disk_owners == engine.ledger.owners(Tier.DISK)
    planned, found = ([chunk.disk_nbytes for chunk in survey.chunks] for survey in (told.survey, engine.survey()))
    assert planned == found
    assert sum(found) == sum(told.disk_owners.values())
    assert told.disk_written_nbytes == counts[-1][1] - counts[-2][1]
    assert told.host_owners == pytest.approx(engine.ledger.owners(Tier.HOST), rel=1e-3)
    assert order[-1] == order[-2]
    assert sorted(on_disk) == sorted(order[-1])
    assert engine.ledger.peak(Tier.HOST) <= machine.host_nbytes
    engine.detach()
