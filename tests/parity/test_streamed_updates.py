"""Updates over the bus: chunks at home on the host are updated on the device, when they are loaded or looked at.

Each case of updates beside the next forward gives the same with ``updates=device``: over the thread of the CPU tier,
over simulated streams, whose races are errors, and over a thread that begins late.
"""

import dataclasses
import functools
import signal
import weakref
from unittest import mock

import pytest
import test_overlapped_8bit_updates as in_8_bits
import test_overlapped_updates as overlapped
import torch
from support import inside
from support.quantized_states import begin_apart
from support.runs import Run
from support.same import assert_same
from support.small import CHUNK_NUMEL, Tied, make
from support.streams import streams_of
from test_overlapped_updates import outcome

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import DeviceMemoryError
from hf_patrickstar.integrations.trainer_report import LaneWatch
from hf_patrickstar.machine import find_machine
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.adam_kernel import AdamKernel
from hf_patrickstar.optim.elementwise import ElementwiseKernel, Job
from hf_patrickstar.schedule.clock import Lane

TO_DEVICE, TO_HOST = Lane.TO_DEVICE, Lane.TO_HOST
pytestmark = pytest.mark.own_streams

SLOTS = 3 * 5 * 4 * 512
"""Bytes of three slots for a chunk of the cases in fp32: five lists, whose sizes are rounded up."""
OVER_BUS = {"updates": "device", "chunk_budget": f"{4 * 3 * CHUNK_NUMEL + SLOTS}B"}


def a_step_before_any_gradient(run):
    run.optimizer.step()
    overlapped.plain(run)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step(3)


CASES = {
    "a step before any gradient": (a_step_before_any_gradient, {}),
    **{name: found for name, found in overlapped.CASES.items() if name not in overlapped.OTHER_CASES},
    "on the CPU": (overlapped.plain, {"factory": functools.partial(Tied, depth=12), "cpu_embedding": True}),
    "bf16 states": (overlapped.plain, {"dtype": "bf16", "state_dtype": "bf16"}),
    "accumulation in 16-bit": (overlapped.micro_batches, {"accumulation": 2, "dtype": "bf16"}),
    "at once": (overlapped.plain, {"overlap_optimizer": False}),
    "kept gradients in 16-bit": (overlapped.consumed_gradients, {"keep_gradients": True, "dtype": "bf16"}),
    "a step that raises": (overlapped.a_step_that_raises_in_the_middle, {"dtype": "bf16", "autocast": False}),
    "loaded and kept": (overlapped.loaded_and_kept, {}),
}
MARGIN = {"device_budget": 25000 + SLOTS, "chunk_budget": "auto"}


@pytest.fixture
def tiles(monkeypatch):
    """How many elements each tile has that was updated on the device; a chunk has several."""
    monkeypatch.setattr("hf_patrickstar.optim.elementwise.SLOT_NUMEL", 128)
    found, update_share = [], ElementwiseKernel._update_share

    def update(kernel, job, share, here=None):
        if here is not None:
            found.append(sum(segment.numel for segment in share))
        update_share(kernel, job, share, here)

    monkeypatch.setattr(ElementwiseKernel, "_update_share", update)
    return found


@pytest.mark.parametrize(("number", "name"), enumerate(CASES), ids=list(CASES))
def test_everything_is_as_if_the_host_had_updated(tiles, number, name):
    case, settings = CASES[name]
    at_once = {"overlap_optimizer": False, "updates": "host"}
    expected = outcome("threads", case, {**settings, **at_once})
    assert not tiles
    for streams in ("threads", ("simulated", "simulated:1")[number % 2], "delayed"):
        tiles.clear()
        assert_same(expected, outcome(streams, case, {**settings, **OVER_BUS, **(MARGIN if name == "margin" else {})}))
        assert len(tiles) > 10
        assert max(tiles) <= 128


IN_8_BITS = {name: found for name, found in in_8_bits.CASES.items() if name != "margin"}


@pytest.mark.parametrize(("number", "name"), enumerate(IN_8_BITS), ids=list(IN_8_BITS))
def test_states_of_8_bits_cross_with_their_scales(tiles, monkeypatch, number, name):
    case, settings = IN_8_BITS[name]
    settings = {"make_optimizer": in_8_bits.OPTIMIZERS["adamw"], **settings}
    monkeypatch.setattr("hf_patrickstar.optim.elementwise.SLOT_NUMEL", 256)
    begin_apart()
    expected = outcome("threads", case, {**settings, "overlap_optimizer": False, "updates": "host"})
    for streams in ("threads", ("simulated", "simulated:1")[number % 2], "delayed"):
        begin_apart()
        tiles.clear()
        assert_same(expected, outcome(streams, case, {**settings, **OVER_BUS}))
        assert len(tiles) > 10


def started(run):
    """How many chunks are updated, and how many of these updates have begun."""
    updates = [chunk.update for chunk in inside.chunks(run.engine)]
    return len(updates), sum(update is None or update.is_done for update in updates)


def test_updates_begin_when_the_norm_is_known_and_chunks_are_needed():
    """The step only prepares them; the next forward has new values without another copy."""
    with streams_of("simulated"):
        run = Run(**OVER_BUS)
        run.step(0)
        run.model.state_dict()
        run.backward(1)
        norm = run.optimizer.clip_grad_norm_(None, 0.5)
        before = run.engine.stats()
        run.optimizer.step()
        assert started(run) == (len(inside.chunks(run.engine)), 0)
        assert run.engine.stats()["host_to_device_nbytes"] == before["host_to_device_nbytes"]
        run.optimizer.zero_grad()
        with torch.no_grad():
            overlapped.loss_of(run.model, 2)
        total, begun = started(run)
        assert begun == total
        after, chunks = run.engine.stats(), inside.chunks(run.engine)
        numel = sum(tensor.own_numel for chunk in chunks for tensor in chunk.owned)
        crossed = after["host_to_device_nbytes"] - before["host_to_device_nbytes"]
        assert crossed == 4 * 4 * numel
        assert after["device_to_host_nbytes"] - before["device_to_host_nbytes"] == 4 * 4 * numel
        assert norm > 0


def test_memory_that_runs_out_inside_an_update_loses_nothing(tiles, monkeypatch):
    """What is left of the chunk is updated when the micro-batch is repeated, once."""

    def train(fails):
        run = Run(**OVER_BUS)
        run.step(0)
        run.model.state_dict()
        run.step(1)
        left = [3] if fails else []
        update = AdamKernel._update

        def fail(*args):
            if left and not left[0]:
                left.clear()
                raise DeviceMemoryError("full")
            left[:] = [number - 1 for number in left]
            update(*args)

        with monkeypatch.context() as patch:
            patch.setattr(AdamKernel, "_update", fail)
            run.engine.attempt(lambda: run.backward(2))
        run.optimizer.step()
        run.keep_state(run.optimizer.state_dict())
        assert not left
        return run.end()

    for streams in ("simulated", "delayed"):
        with streams_of(streams):
            expected = train(False)
            found = train(True)
        assert_same(expected[-20:], found[-20:])


def test_an_update_that_cannot_be_done_names_its_parameters(monkeypatch):
    with streams_of("simulated"):
        run = Run(**OVER_BUS)
        run.step(0)
        run.model.state_dict()
        run.step(1)

        def fail(*args):
            raise ArithmeticError("no")

        with monkeypatch.context() as patch:
            patch.setattr(AdamKernel, "_update", fail)
            with pytest.raises(ArithmeticError) as caught:
                run.backward(2)
        assert "while the optimizer updated 'layers.0.weight' (chunk 0)" in str(caught.value.__notes__)
        run.optimizer.zero_grad()
        run.step(3)  # nothing was lost
        expected = Run(updates="host", overlap_optimizer=False)
        for seed in (0, 1, 3):
            expected.step(seed)
        assert_same(list(expected.model.state_dict().values()), list(run.model.state_dict().values()))


FEW_CORES = dataclasses.replace(find_machine("h100"), name="few cores", host_bandwidth=4e6, memory_bandwidth=1e12)


def streamed(run):
    return {chunk.spec.index for chunk in inside.chunks(run.engine) if chunk.is_streamed}


def test_where_chunks_are_updated_is_a_part_of_the_plan(caplog):
    """Each where it is done first; a run that knows the plan begins with the same choice, and has the same bits."""
    settings = {"machine": FEW_CORES, "chunk_budget": OVER_BUS["chunk_budget"], "cpu_embedding": False}
    settings["factory"] = functools.partial(Tied, depth=12)
    with streams_of("simulated"), caplog.at_level("INFO", "hf_patrickstar"):
        torch.manual_seed(0)
        first = Run(**settings)
        assert not streamed(first)
        overlapped.plain(first)
        chosen = streamed(first)
        assert chosen
        assert "updates: " in caplog.text
        assert "over the bus: a step takes 0." in caplog.text
        torch.manual_seed(0)
        second = Run(**settings)
        second.step(0)
        assert streamed(second) == chosen
        for seed in (1, 2):
            second.step(seed)
        assert streamed(second) == chosen
        assert_same(first.end(), second.end())
    many_cores = dataclasses.replace(FEW_CORES, host_bandwidth=1e12)
    with streams_of("simulated"):
        run = Run(**{**settings, "machine": many_cores})
        overlapped.plain(run)
        assert not streamed(run)


def test_a_step_is_measured_with_what_crosses():
    with streams_of("simulated"):
        run = Run(**OVER_BUS)
        run.step(0)
        run.step(1)  # the first one has kept its gradients until they were dropped, which waits for updates
        watch, timelines = LaneWatch(run.engine), []
        for seed in range(2, 6):
            timelines.append(watch.begin_step())
            run.step(seed)
        (timeline,) = filter(None, timelines)
        numel = sum(parameter.numel() for parameter in run.parameters)
        lists = {lane: [span for span in timeline.spans if span.lane is lane] for lane in (TO_DEVICE, TO_HOST)}
        for lane, spans in lists.items():
            nbytes = [int(span.what.split()[0]) for span in spans]
            assert sum(nbytes) >= 16 * numel, lane
            assert len(spans) < 20, "a span for each chunk, not for each tile"


# Memory


def test_what_an_update_reads_stays_until_it_has_ended():
    """On a device memory of the compute stream, as the factor is, could else be used again while slots read it."""
    with streams_of("simulated"):
        run = Run(**OVER_BUS)
        run.step(0)
        run.step(1)
        factors, make = [], Job.__init__

        def init(job, settings, factor, *others):
            make(job, settings, factor, *others)
            factors.append(weakref.ref(factor))

        with mock.patch.object(Job, "__init__", init):
            run.step(2)
        chunks = inside.chunks(run.engine)
        for chunk in chunks:
            chunk.update.begin()
        assert not all(chunk.update.is_done for chunk in chunks)
        assert [factor() is None for factor in factors] == [False]


@pytest.mark.parametrize("error", [DeviceMemoryError, KeyboardInterrupt])
def test_memory_of_an_update_that_failed_is_not_used_before_its_streams_are_done(tiles, monkeypatch, error):
    """Ctrl-C waits until all tiles are launched."""
    with streams_of("simulated"):
        run = Run(**OVER_BUS)
        run.step(0)
        run.step(1)
        update, calls = AdamKernel._update, []

        def fail(*args):
            calls.append(args)
            if len(calls) == 3 and error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            elif len(calls) == 3:
                raise error("full")
            update(*args)

        monkeypatch.setattr(AdamKernel, "_update", fail)
        chunk = inside.chunks(run.engine)[0]
        with pytest.raises(error):
            chunk.load(ahead=False)
        pool = chunk.device.pool
        buffer = pool.allocate(Tier.DEVICE, chunk.spec.capacity_numel, chunk.dtype, "another")
        buffer.fill_(1.0)  # no race
        pool.release(Tier.DEVICE, buffer, "another")
        run.step(2)
        expected = Run(updates="host", overlap_optimizer=False)
        for seed in range(3):
            expected.step(seed)
        assert_same(list(expected.model.state_dict().values()), list(run.model.state_dict().values()))


def test_slots_are_there_while_anything_is_updated_in_them(tiles, monkeypatch):
    monkeypatch.setattr("hf_patrickstar.optim.elementwise.SLOT_NUMEL", 512)
    monkeypatch.setattr("hf_patrickstar.optim.slots.TILE_NUMEL", 512)
    with streams_of("simulated"):
        run = Run(**OVER_BUS)
        run.step(0)
        run.step(1)
        ledger, mover = run.engine.ledger, run.engine.manager.evictor
        assert ledger.owners(Tier.DEVICE)["workspace"] == SLOTS
        chosen = streamed(run)
        mover._stream(frozenset(), 1)
        assert not ledger.owners(Tier.DEVICE).get("workspace")
        assert not streamed(run)
        run.step(2)
        mover._stream(chosen, 1)
        assert ledger.owners(Tier.DEVICE)["workspace"] == SLOTS
        run.step(3)
        assert max(tiles) > 128
        mover._stream(chosen, 4)
        assert ledger.owners(Tier.DEVICE)["workspace"] == SLOTS // 4
        tiles.clear()
        run.step(4)
        run.step(5)
        assert 0 < max(tiles) <= 128
        expected = Run(updates="host", overlap_optimizer=False)
        for seed in range(6):
            expected.step(seed)
        assert_same(list(expected.model.state_dict().values()), list(run.model.state_dict().values()))


@pytest.mark.parametrize("second", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_that_can_are_updated_over_the_bus_beside_one_that_cannot(second):
    def train(**settings):
        torch.manual_seed(0)
        model = make(functools.partial(Tied, depth=12)).train()
        layers = list(model.blocks.parameters())
        others = [parameter for parameter in model.parameters() if all(parameter is not layer for layer in layers)]
        config = {"chunk_numel": CHUNK_NUMEL, "placement": "host", "cpu_embedding": False, **settings}
        engine = PatrickStarEngine(model, config, [torch.optim.AdamW(layers, lr=1e-2), second(others, lr=1e-2)])
        for seed in range(3):
            overlapped.loss_of(model, seed).backward()
            for optimizer in engine.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        over_bus = {chunk.spec.optimizer_index for chunk in engine.manager.chunks if chunk.is_streamed}
        return over_bus, list(model.state_dict().values())

    _, expected = train(updates="host", overlap_optimizer=False)
    with streams_of("simulated"):
        over_bus, found = train(updates="device", chunk_budget="100000B", device_budget="120000B")
    assert over_bus == ({0, 1} if second is torch.optim.AdamW else {0})
    assert_same(expected, found)
