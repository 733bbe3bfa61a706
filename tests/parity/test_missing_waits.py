"""Every wait of the package is needed: without it one of these runs meets a race, or computes something else."""

import contextlib
import functools
import pathlib
import tempfile
import threading
import types
from unittest import mock

import pytest
import safetensors.torch
import torch
from support import inside, mutations, runs
from support.streams import simulated_streams
from torch import nn

import hf_patrickstar
from hf_patrickstar.checkpoint import state_files
from hf_patrickstar.checkpoint.weight_files import FoundWeights
from hf_patrickstar.errors import DeviceMemoryError, PatrickStarError
from hf_patrickstar.memory import streams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim import elementwise, slots
from hf_patrickstar.schedule.trace import Activation, Trace, Visit

pytestmark = pytest.mark.own_streams

ROWS, WIDTH = 20, 16
CHUNK = 320  # elements: the embedding, or a layer and a bit


class Layers(nn.Module):
    """An embedding, layers, and a head that may be tied to it."""

    def __init__(self, *, tied=False, depth=3):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x).tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def batch(seed):
    return torch.randint(0, ROWS, (2, 6), generator=torch.Generator().manual_seed(seed))


class Woven(nn.Module):
    """A model whose chunks are needed in turns.

    The first chunk has the embedding, which is the head too, and ``first``. Backward needs it for the head, then not
    for ``up`` and ``down``, which take all of the device, and then again for ``first``. The embedding is used as such,
    too: so its gradient is complete while the chunk is on its way to the device again.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.start = nn.Embedding(ROWS, WIDTH)

    def forward(self, ids):
        x = self.second(self.first(self.start(ids)).tanh())
        x = self.third(x + self.embedding(ids))
        x = self.down(self.up(x).tanh())
        return nn.functional.cross_entropy((x @ self.embedding.weight.t()).flatten(0, 1), ids.flatten())


class Run(runs.Run):
    """See there; over simulated streams."""

    def __init__(self, model=None, optimizer=None, **others):
        super().__init__(optimizer, model=model or Layers(), loss_of=lambda model, seed: model(batch(seed)), **others)

    def keep_in_flight(self):
        """How many gradients hold memory on the device until they are at home."""
        self.keep(torch.tensor(len(self.engine.resources.streams._in_flight)))

    def evaluate(self):
        with torch.no_grad():
            self.keep(self.model(batch(99)))

    def update(self, *, to_none=True):
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=to_none)

    def train(self, steps=2):
        for number in range(steps):
            self.backward(number)
            self.update()

    def fail_in_backward(self):
        """A backward that fails after its first gradients are on their way home."""
        with pytest.raises(ZeroDivisionError), failing(self.model.layers[0].register_full_backward_pre_hook):
            self.backward()


@contextlib.contextmanager
def failing(register, error=ZeroDivisionError):
    """Inside the block a hook raises."""

    def fail(*_):
        raise error("in a hook")

    handle = register(fail)
    try:
        yield
    finally:
        handle.remove()


class LateWriter:
    """The thread of a checkpoint begins to write when somebody waits for it: by then all that does not wait is done.

    Args:
        run: The engine.
        folder: Where the checkpoint is written.

    Attributes:
        is_right: Whether the file has what was there when the block began.
    """

    def __init__(self, run, folder):
        self.is_right = False
        self._folder = folder
        self._may_begin = threading.Event()
        self._run = run

    def __enter__(self):
        may_begin = self._may_begin
        begin = state_files.StateFile._run

        class Event(threading.Event):
            def wait(self, timeout=None):
                may_begin.set()
                return super().wait(timeout)

        def run(*args):
            may_begin.wait()
            begin(*args)

        names = types.SimpleNamespace(Event=Event, Thread=threading.Thread)
        with (
            mock.patch.object(state_files, "threading", names),
            mock.patch.object(state_files.StateFile, "_run", run),
        ):
            file = self._run.engine.training_state.begin_save(self._folder, with_index=True)
            self._file, self._expected = file, {key: tensor.clone() for key, tensor in file.tensors.items()}
            file.start(self._run.engine.weights.piece_numel)
        return self

    def __exit__(self, kind, *_):
        self._may_begin.set()
        error = self._file.join()
        if kind is None:
            assert error is None
            saved = safetensors.torch.load_file(self._file.path)
            self._run.keep(*(saved[key] for key in sorted(saved)))
            self.is_right = all(torch.equal(saved[key], value) for key, value in self._expected.items())


# Runs: the quick ones first


def trained(model=Layers, steps=2, **config):
    """A run of ordinary steps."""

    def train(folder):
        run = Run(model(), **config)
        run.train(steps)
        return run.end()

    return train


def clipped(steps, accumulation=1, *, evaluates=True, **config):
    """A norm that was asked for once is computed beside backward from then on, if gradients are summed."""

    def train(folder):
        run = Run(accumulation=accumulation, **config)
        for number in range(steps):
            for micro in range(accumulation):
                run.backward(accumulation * number + micro)
            if evaluates:
                run.evaluate()
            run.keep(run.optimizer.clip_grad_norm_(None, 0.1))
            run.update()
        return run.end()

    return train


def looking_at_states(folder):
    """Whoever has the states sees those of the last step."""
    run = Run(num_chunks=16, device_budget=10**6)
    states = [run.optimizer.state[parameter] for parameter in run.parameters]
    for number in range(3):
        run.backward(number)
        run.update()
        run.keep(*(state["exp_avg"] for state in states if "exp_avg" in state))
        run.keep(*(state["exp_avg"] for state in run.optimizer.state_dict()["state"].values()))
    return run.end()


def updated_by_the_caller(folder):
    """A step returns when chunks are updated, whose last gradients are on their way home when it begins."""
    run = Run(dtype="bf16", overlap_optimizer=False)
    run.train(3)
    return run.end()


def holding_a_state(folder):
    """Somebody looks into the state of the last chunk, and the host's thread is still at those before it."""
    run = Run(dtype="bf16", num_chunks=16, device_budget=10**6)
    run.train(1)
    held = run.optimizer.state[inside.chunks(run.engine)[-1].owned[-1].parameter]["exp_avg"]
    for number in range(2):
        run.backward(number)
        run.update()
        run.keep(held)
    return run.end()


def accumulation(folder, **settings):
    run = Run(accumulation=2, **settings)
    for number in range(2):
        run.backward(2 * number)
        run.backward(2 * number + 1)
        run.keep(*(p.grad for p in run.parameters)) if number else None
        run.update()
    return run.end()


def several_backwards(folder):
    run = Run()
    for number in range(2):
        run.backward(2 * number)
        run.backward(2 * number + 1)
        run.keep_in_flight()
        run.update()
    return run.end()


def margin(folder):
    run = Run(placement="auto", num_chunks=16, device_budget=10**6)
    run.train(4)
    assert run.engine.stats()["chunks_in_margin"] > 0
    inside.leave_margin(run.engine)
    run.train(1)
    return run.end()


def lookups(folder):
    """The gradient of a tied embedding is added up on the host, and written over what the head's copy reads."""
    run = Run(Layers(tied=True), cpu_embedding=True)
    driver = run.engine.resources.streams._driver
    place = inside.gradients(run.engine).place_deferred

    def place_deferred(tensor):
        driver.take(tensor.deferred_gradient, Tier.HOST, "a gradient")
        place(tensor)

    with mock.patch.object(inside.gradients(run.engine), "place_deferred", place_deferred):
        run.train(3)
    run.evaluate()
    return run.end()


def lookups_that_write(folder):
    model = Layers(tied=True)
    model.embedding.max_norm = 1.0
    run = Run(model, cpu_embedding=True)
    run.evaluate()
    run.evaluate()
    return run.end()


def dropped_gradients(folder):
    run = Run()
    run.train(1)
    run.backward()
    run.optimizer.zero_grad()
    run.evaluate()
    run.backward()
    run.optimizer.zero_grad(set_to_none=False)
    run.update(to_none=False)
    return run.end()


def assigning(folder):
    run = Run()
    run.train(1)
    run.backward()
    given = [torch.ones(parameter.shape) for parameter in run.parameters]
    for parameter, gradient in zip(run.parameters, given, strict=True):
        parameter.grad = gradient
        gradient.mul_(0.5)
    run.update()
    return run.end()


def saving(folder):
    run = Run()
    for number in range(2):
        run.backward(number)
        run.keep(*run.model.state_dict().values())
        run.engine.checkpoints.save(folder / f"before-{number}")
        run.update()
        run.evaluate()
        run.engine.checkpoints.save(folder / f"after-{number}")
    run.backward()
    run.engine.checkpoints.load(folder / "before-1")
    return run.end()


class Momentum(torch.optim.Optimizer):
    """An optimizer that nobody knows, so it sees all parameters at once."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            state.setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)
            parameter.data.sub_(state["sum"], alpha=0.1)

    @torch.no_grad()
    def shrink(self):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["sum"].mul_(0.5)
            parameter.mul_(0.5)


def all_at_once(folder):
    run = Run(optimizer=Momentum)
    run.train()
    run.evaluate()
    run.optimizer.shrink()
    return run.end()


def changes_of_the_model(folder, **settings):
    run = Run(**settings)
    run.train(1)
    run.backward()
    run.model.layers[1] = nn.Linear(WIDTH, WIDTH)
    run.evaluate()
    run.update()
    run.evaluate()
    del run.model.layers[2]
    run.evaluate()
    return run.end()


def little_in_flight(folder):
    with mock.patch.object(streams, "_IN_FLIGHT_NBYTES", 3000):
        run = Run()
    run.train()
    return run.end()


def none_in_flight(folder):
    run = Run()

    def hold_none(*_):
        run.keep_in_flight()
        run.engine.resources.streams.hold_at_most(0)
        run.keep_in_flight()

    run.model.layers[0].register_full_backward_pre_hook(hold_none)
    run.train()
    return run.end()


def short_of_room(folder):
    run = Run()

    def make_room(*_):
        inside.make_room(run.engine, 10**9)
        run.keep_in_flight()

    run.model.layers[0].register_full_backward_pre_hook(make_room)
    run.train()
    return run.end()


def out_of_memory(folder):
    run = Run()
    attempts = []

    def attempt():
        run.keep_in_flight()
        attempts.append(len(attempts))
        if len(attempts) % 2:
            with failing(run.model.layers[0].register_full_backward_pre_hook, DeviceMemoryError):
                run.backward()
        run.backward()

    for _ in range(2):
        run.engine.attempt(attempt)
        run.update()
    return run.end()


def detaching(folder):
    run = Run()
    run.train(2)
    run.fail_in_backward()
    run.engine.detach()
    run.keep_in_flight()
    return run.end()


def interrupting(folder):
    run = Run()
    run.train(3)
    with pytest.raises(ZeroDivisionError), failing(run.model.layers[0].register_forward_hook):
        run.backward()
    run.engine.detach()
    return run.end()


def saved_while(change, prepare=lambda run, folder: None, model=Layers, **kwargs):
    """A run in which a checkpoint is being written while something changes what is in it."""

    def saving(folder):
        run = Run(model(), **kwargs)
        run.train(2)
        run.backward()
        found = prepare(run, folder)
        with LateWriter(run, folder) as writer:
            change(run) if found is None else change(run, found)
        assert writer.is_right or mutations.is_active(), "the checkpoint has what came later"
        return run.end()

    return saving


def replace_states(run):
    for parameter in run.parameters:
        run.optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.ones(parameter.shape),
            "exp_avg_sq": torch.ones(parameter.shape),
        }


def write_to_states(run):
    for parameter in run.parameters:
        run.optimizer.state[parameter]["exp_avg"].mul_(0.5)


def write_values(run):
    with torch.no_grad():
        for parameter in run.parameters:
            parameter.mul_(0.5)


def open_other_state(run, folder):
    (folder / "other").mkdir()
    file = run.engine.training_state.begin_save(folder / "other", with_index=True)
    file.write()
    run.update()
    return folder / "other"


def load_other_state(run, directory):
    run.engine.checkpoints.load_parts(FoundWeights(), directory)


class Skipping(Layers):
    """Backward needs an early activation between later ones, and the first one with no parameter."""

    def __init__(self):
        super().__init__(depth=6)

    def forward(self, ids):
        x = first = self.layers[0](self.embedding(ids).sin()).tanh()
        for number, layer in enumerate(self.layers[1:]):
            x = layer(x).tanh() * (first if number == 3 else 1)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Inside(Layers):
    """Computes a gradient inside of forward, of what has only just left."""

    def forward(self, ids):
        x = self.embedding(ids)
        first = self.layers[0](x).tanh()
        first = first + torch.autograd.grad(first.sum(), x, retain_graph=True)[0]
        return nn.functional.cross_entropy(self.head(first).flatten(0, 1), ids.flatten())


def leaving(folder):
    """Activations leave while the next ones are computed, and come back while those after them are used."""
    run = Run(Skipping(), activation_offload=True)
    for number in range(3):
        loss = run.model(batch(number))
        run.keep_in_flight()
        run.keep(torch.tensor(inside.activations(run.engine)._leaving is None))
        loss.backward()
        run.keep(loss)
        run.update()
    run.model(batch(3))  # has no backward
    run.engine.detach()
    return run.end()


def leaving_in_vain(folder):
    """Backward fails, or needs only the last ones; no chunk comes in between."""
    run = Run(Skipping(), num_chunks=16, activation_offload=True)
    run.train(1)
    for number in range(2):
        loss = run.model(batch(number))
        run.keep(*torch.autograd.grad(loss, run.model.layers[4].weight))
        del loss
        run.keep(torch.tensor(run.engine.stats()["offloaded_nbytes"]))
    with pytest.raises(ZeroDivisionError), failing(run.model.embedding.register_full_backward_pre_hook):
        run.backward()
    run.model(batch(0).repeat(1, 2))  # what is known of such a step has other buffers
    return run.end()


def leaving_out_of_order(folder):
    """Another one begins to come back before the one that comes is used."""
    run = Run(Skipping(), num_chunks=16, activation_offload=True)
    activations = [Activation(place, 4 * 32 * 32, 0, 0, 9) for place in range(4)]
    moving = inside.activations(run.engine)
    moving.begin(Trace("training", (), (Visit(0),), activations=tuple(activations), num_offloaded=3))
    kept = [moving.keep(torch.full((32, 32), float(place))) for place in range(4)]
    moving.end_forward()
    run.keep(*(moving.bring(kept[place]) + 1 for place in (1, 3, 0, 2)))
    moving.end_backward()
    return run.end()


def leaving_inside(folder):
    """Nothing is known of such a step."""
    with (
        mock.patch.object(*inside.EAGER_NBYTES, 1),
        inside.recorded(),
    ):
        run = Run(Inside(), activation_offload=True)
        run.train(1)
    assert run.engine.stats()["offloaded_nbytes"] > 0
    return run.end()


def over_bus(train=None, **config):
    """A run whose chunks are updated on the device, each in several tiles; by default, one of clipped steps."""
    settings = {"updates": "device", "chunk_budget": f"{4 * 3 * CHUNK + 3 * 5 * 256}B", **config}

    def train_in_tiles(folder):
        with mock.patch.object(elementwise, "SLOT_NUMEL", 64), mock.patch.object(slots, "TILE_NUMEL", 64):
            return (train or clipped(3, **settings))(folder, **({} if train is None else settings))

    return train_in_tiles


def updated_twice(folder, **settings):
    """A step follows another one, whose updates have not begun."""
    run = Run(keep_gradients=False, **settings)
    run.train(1)
    run.backward(1)
    run.optimizer.step()
    run.update()
    return run.end()


def failed_backward(folder, **settings):
    """A step by the gradients that a backward has left on their way."""
    run = Run(**settings)
    run.train(2)
    run.fail_in_backward()
    run.update()
    return run.end()


RUNS = {
    "on demand": trained(prefetch_depth=0),
    "ahead": clipped(3, prefetch_depth=2),
    "over the bus": over_bus(prefetch_depth=2, dtype="bf16"),
    "over the bus, on demand": over_bus(prefetch_depth=0),
    "over the bus, at once": over_bus(overlap_optimizer=False),
    "over the bus, accumulation": over_bus(accumulation),
    "over the bus, twice": over_bus(updated_twice),
    "over the bus, a backward that fails": over_bus(failed_backward),
    "over the bus, changes of the model": over_bus(changes_of_the_model),
    "looking at states": looking_at_states,
    "updated by the caller": updated_by_the_caller,
    "holding a state": holding_a_state,
    "saved while it steps": saved_while(Run.update),
    "accumulation": accumulation,
    "accumulation and norms": clipped(3, 2, evaluates=False),
    "several backwards": several_backwards,
    "16-bit": clipped(2, dtype="bf16"),
    "woven": trained(Woven, 3, chunk_numel=640, chunk_budget=1280 * 4, cpu_embedding=False),
    "lookups": lookups,
    "lookups that write": lookups_that_write,
    "dropped gradients": dropped_gradients,
    "assigning": assigning,
    "all at once": all_at_once,
    "changes of the model": changes_of_the_model,
    "little in flight": little_in_flight,
    "none in flight": none_in_flight,
    "short of room": short_of_room,
    "out of memory": out_of_memory,
    "detaching": detaching,
    "interrupting": interrupting,
    "leaving": leaving,
    "leaving in vain": leaving_in_vain,
    "leaving inside": leaving_inside,
    "leaving out of order": leaving_out_of_order,
    "margin": margin,
    "saved while states are replaced": saved_while(replace_states),
    "saved while states are written to": saved_while(write_to_states),
    "saved while values are written": saved_while(write_values, model=lambda: Layers().bfloat16(), dtype="bf16"),
    "saved while all is updated at once": saved_while(Run.update, optimizer=Momentum),
    "saved while the optimizer's method runs": saved_while(lambda run: run.optimizer.shrink(), optimizer=Momentum),
    "saved while another is loaded": saved_while(load_other_state, open_other_state),
    "saving": saving,
}


# Sites

WATCHED = (
    ("memory/streams.py", "Streams", "DeviceStreams", "Copy", "StreamCopy", "Later"),
    *((f"runtime/{name}.py",) for name in ("activations", "chunk", "executor", "gradients", "manager", "evictor")),
    *((f"runtime/{name}.py",) for name in ("parameter", "parameters")),
    *((f"optim/{name}.py",) for name in ("elementwise", "kernel", "optimizer", "slots", "state", "total_norm")),
)
"""Modules that order copies and kernels of one process, some with the classes that do."""

ELSEWHERE = {
    "for threads": ["checkpoint/checkpoints.py", "checkpoint/transaction.py", "memory/driver.py"],
    "for threads, and a compute stream that simulated tensors do not have": ["checkpoint/state_files.py"],
    "for threads that use the model": ["model/lock.py"],
    "for slots that are about to go: tests/parity/test_streamed_updates.py": ["runtime/home_mover.py"],
    "for workers: tests/unit/checkpoint/test_first_values.py": ["checkpoint/first_values.py"],
    "for complete checkpoints": ["integrations/accelerator_checkpoints.py", "integrations/trainer_checkpoints.py"],
    "for errors of work that has ended: tests/parity/test_overlapped_updates.py": ["engine.py"],
    "for workspace that is about to go (tests/parity/test_overlapped_updates.py), and for zeros": ["setup/payloads.py"],
    "for room in the ring: tests/unit/runtime/test_gradient_ring.py": ["runtime/gradient_ring.py"],
    "for less in flight: tests/unit/memory/test_streams.py": ["setup/resources.py", "planner/simulated_machine.py"],
    "for processes: tests/distributed/test_races_together.py": [
        *("runtime/groups.py", "dist/collectives.py", "dist/tickets.py", "dist/watchdog.py"),
    ],
    "to measure, with nobody beside it": ["memory/lanes.py", "report/measure.py", "memory/compute_device.py"],
    "in virtual time": ["schedule/replay.py"],
    "not: it joins words": ["cli/run.py", "schedule/repeats.py", "integrations/training_script.py"],
    "not: it notes a loss": ["integrations/accelerator.py"],
}
"""Modules that wait for something else, by what they wait for."""

_STREAMED = "noticed by tests/parity/test_streamed_updates.py alone"
_GROUP = "only a group of several processes comes here"
_HELD = "the thread holds the tensors that it writes, so its file is right; the memory would be free in the books alone"
_RING = "in threads of the ring, which simulated streams do not know; test_states_on_disk.py runs real ones"
_TILE = "optim/elementwise.py ElementwiseKernel._update_tile:"

UNNOTICED = {
    "memory/streams.py DeviceStreams.beside: lane.wait_stream(...)": _GROUP,
    "memory/streams.py Copy.event: self.after.synchronize()": "asks for the error of work that has ended",
    "memory/streams.py Streams.on_host: other.wait()": "copies of the CPU tier are complete when they return",
    "runtime/chunk.py Chunk.param: self.wait_for_update()": "who reads values waits for gradients on their way as well",
    "runtime/chunk.py Chunk.gathered: self.note(...)": _GROUP,
    "runtime/chunk.py Chunk.gathered: self.under_way": _GROUP,
    "runtime/chunk.py Chunk.move_home: self.wait_for_reader()": _HELD,
    "runtime/chunk.py Chunk.retire: self.wait_for_reader()": _HELD,
    "runtime/manager.py ChunkManager.update: ticket.wait()": "results are the same if they end later",
    "optim/slots.py Slots.release: ticket.join()": _STREAMED,
    "optim/elementwise.py ElementwiseKernel._stream: ticket.join()": _STREAMED,
    "runtime/chunk.py Chunk.load: update.join()": _STREAMED,
    "optim/elementwise.py ElementwiseKernel._stream: ticket.wait()": _RING,
    f"{_TILE} ticket.wait()": _RING,
    f"{_TILE} self._workers.submit(update, shares, first=True).wait()": _RING,
    "runtime/manager.py ChunkManager.update: chunk.wait_for_update()": "what comes next comes after it, too",
    "runtime/gradients.py Gradients._add_to_list: chunk.wait()": "all gradients of a parameter leave the same way",
    "runtime/gradients.py Gradients._write_over_value: chunk.under_way": _GROUP,
    "runtime/gradients.py Gradients._write_over_value: copy.join()": _GROUP,
    "runtime/manager.py ChunkManager.close: chunk.wait_for_reader()": _HELD,
    "runtime/manager.py ChunkManager.settle_failures: update.wait()": "asks for the error of work that has ended",
    "runtime/manager.py ChunkManager.update: found.wait()": "there are no workers beside modes of operators",
    "runtime/evictor.py Evictor._await_gathers: chunk.wait_for_copy()": _GROUP,
    "runtime/parameter.py ManagedParameter.own_part: chunk.wait()": "a value is written in place on the CPU tier only",
}
"""Sites that no run of one process can miss, and why."""

SITES = {site.key: site for module, *classes in WATCHED for site in mutations.find_sites(module, *classes)}


def outcome(name):
    """What comes out of a run: the bits, or the error of the package that ended it."""
    torch.manual_seed(0)
    try:
        with tempfile.TemporaryDirectory() as folder, simulated_streams():
            found = RUNS[name](pathlib.Path(folder))
    except (PatrickStarError, RuntimeError) as error:  # inside of a script of torch any error is a RuntimeError
        return f"{type(error).__name__}: {error}"
    return [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in found]


@functools.cache
def expected():
    """The outcome of every run with all sites, and the sites that it reaches."""
    found = {}
    with mutations.noting(tuple(SITES.values())) as reached:
        for name in RUNS:
            reached.clear()
            found[name] = (outcome(name), frozenset(reached))
    return found


@pytest.mark.parametrize("name", RUNS)
def test_with_all_waits_nothing_is_noticed(name):
    bits, reached = expected()[name]
    assert isinstance(bits, list), bits
    assert len(reached) > 10
    assert outcome(name) == bits, "it does not come out the same twice"


@pytest.mark.parametrize("key", [key for key in SITES if key not in UNNOTICED])
def test_a_missing_wait_is_noticed(key):
    """Some run that comes to the site meets a race, or has another outcome, when it is gone."""
    runs = [name for name, (_, reached) in expected().items() if key in reached]
    assert runs, "no run comes here"
    with mutations.without(SITES[key]):
        assert any(outcome(name) != expected()[name][0] for name in runs), f"unnoticed by {runs}"


@pytest.mark.parametrize("key", UNNOTICED)
def test_what_is_said_to_be_unnoticed_is(key):
    assert key in SITES, "there is no such site any more"
    runs = [name for name, (_, reached) in expected().items() if key in reached]
    with mutations.without(SITES[key]):
        assert all(outcome(name) == expected()[name][0] for name in runs[:1])


def test_every_module_that_waits_is_known():
    root = pathlib.Path(hf_patrickstar.__file__).parent
    paths = sorted(str(path.relative_to(root)) for path in root.rglob("*.py"))
    waiting = {path for path in paths if mutations.find_sites(path)}
    assert waiting == {module for module, *_ in WATCHED}.union(*ELSEWHERE.values())
