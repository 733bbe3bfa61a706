"""Chunks that workers fill: the same bits and errors as in one thread, and the same model after a failure."""

import gc
import threading

import pytest
import torch
from sources import same_bits
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_patrickstar import CheckpointError, PatrickStarEngine
from hf_patrickstar.checkpoint import filling
from hf_patrickstar.checkpoint.deferred import DeferredTensor
from hf_patrickstar.checkpoint.filling import Filling
from hf_patrickstar.checkpoint.safetensors_file import write_safetensors
from hf_patrickstar.checkpoint.weight_files import open_weights
from hf_patrickstar.runtime.live_parameter import raw_data

WIDTH, DEPTH = 256, 6
THREADS = {"host_threads": 3}
MIXED = {"dtype": "bf16", "autocast": False, **THREADS}


@pytest.fixture(autouse=True)
def _several_parts(monkeypatch):
    """Every weight is filled in several parts."""
    monkeypatch.setattr(filling, "PART_NUMEL", 2**14)


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]).to(dtype)


def make_engine(model, config):
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return PatrickStarEngine(model, config, torch.optim.AdamW(trainable), device="cpu")


def values_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def payloads_of(engine):
    return [payload.clone() for chunk in engine.manager.chunks for payload in chunk.payloads.values()]


def assert_same(left, right):
    assert all(same_bits(one, other) for one, other in zip(left, right, strict=True))


def defer(model, folder, change=lambda value: value):
    """Writes a model's values to a file, and gives it deferred ones, to which ``change`` is applied."""
    path = folder / "model.safetensors"
    write_safetensors(path, model.state_dict())
    deferred = {name: change(value) for name, value in open_weights(path).items()}
    model.load_state_dict(deferred, assign=True)
    assert all(isinstance(parameter, DeferredTensor) for parameter in model.parameters())
    return path


def fail_at(monkeypatch, *names):
    """Parts of these parameters cannot be filled."""
    real = Filling.fill_part

    class Failing(Filling):
        def fill_part(self, begin, end, reader, piece_numel):
            def fill(*_):
                raise CheckpointError(f"cannot read {self.tensor.spec.name} from {begin}")

            broken = type("Broken", (), {"fill": staticmethod(fill)})()
            real(self, begin, end, broken if self.tensor.spec.name in names else reader, piece_numel)

    monkeypatch.setattr(filling, "Filling", Failing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [{}, {"dtype": "bf16", "autocast": False, "frozen_master": True}])
@pytest.mark.parametrize("is_deferred", [False, True])
def test_same_bits_with_any_number_of_workers(tmp_path, is_deferred, config, dtype):
    found = []
    for threads in (1, 3):
        model = make_model(dtype)
        model[1].requires_grad_(False)
        expected = values_of(model)
        if is_deferred:
            defer(model, tmp_path)
        engine = make_engine(model, {**config, "host_threads": threads})
        found.append(payloads_of(engine))
        for chunk in engine.manager.chunks:
            for tensor in chunk.tensors:
                for payload in (chunk.param, *(chunk.lists[name] for name in chunk.lists if name == "master")):
                    assert same_bits(tensor.view(payload), expected[tensor.spec.name].to(payload.dtype))
        engine.detach()
        assert_same(values_of(model).values(), expected.values())
    assert_same(*found)


def test_states_and_gaps_are_zeros():
    engine = make_engine(make_model(), MIXED)
    for chunk in engine.manager.chunks:
        assert not chunk.lists["exp_avg"].any()
        assert not chunk.lists["exp_avg_sq"].any()
        used = sum(tensor.own_numel for tensor in chunk.owned)
        assert torch.count_nonzero(chunk.param) <= used


def test_workers_fill_what_they_may_and_the_caller_the_rest(tmp_path, monkeypatch):
    threads = {}
    real = {name: getattr(Filling, name) for name in ("fill", "fill_part")}

    def note(name):
        def call(self, *args):
            threads.setdefault(self.tensor.spec.name, set()).add((name, threading.current_thread()))
            return real[name](self, *args)

        return call

    for name in real:
        monkeypatch.setattr(Filling, name, note(name))
    model = make_model()
    expected = values_of(model)
    with torch.no_grad():
        model[0].weight.copy_(expected["0.weight"].t())
    path = defer(model, tmp_path)
    model[0].weight = torch.nn.Parameter(open_weights(path)["0.weight"].t())  # computed as a whole
    model[1].weight = torch.nn.Parameter(expected["1.weight"].clone())
    model[2].weight = torch.nn.Parameter(expected["2.weight"].t().contiguous().t())  # not contiguous
    engine = make_engine(model, MIXED)
    here = ("fill", threading.current_thread())
    for name in ("0.weight", "2.weight", "0.bias"):
        assert threads[name] == {here}
    for name in ("1.weight", "3.weight"):
        assert {call for call, _ in threads[name]} == {"fill_part"}
        assert here[1] not in {thread for _, thread in threads[name]}
    engine.detach()
    assert_same(values_of(model).values(), expected.values())


@pytest.mark.parametrize("is_deferred", [False, True])
def test_the_error_is_that_of_the_first_parameter(tmp_path, monkeypatch, is_deferred):
    """Parameters before it were moved in, later ones were not, and the model is whole and can be managed again."""
    model = make_model()
    expected = values_of(model)
    if is_deferred:
        defer(model, tmp_path)
    parameters = list(model.parameters())
    moved = []
    with monkeypatch.context() as patches:
        fail_at(patches, "2.weight", "3.weight", "4.weight")
        real = filling.ManagedParameter.move_in
        patches.setattr(filling.ManagedParameter, "move_in", lambda self: (moved.append(self.spec.name), real(self)))
        with pytest.raises(CheckpointError, match=r"cannot read 2\.weight from 0$"):
            make_engine(model, MIXED)
    assert moved == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert all(left is right for left, right in zip(parameters, model.parameters(), strict=True))
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DeferredTensor) == (is_deferred and name not in moved)
    engine = make_engine(model, MIXED)
    engine.detach()
    assert_same(values_of(model).values(), expected.values())


def test_a_file_that_is_cut_is_named(tmp_path):
    model = make_model()
    path = defer(model, tmp_path)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors' ends at byte \d+, in the middle of tensor '\d\.\w+'"
    ):
        make_engine(model, MIXED)


def test_frozen_parameters_keep_their_memory_until_all_others_are_moved_in(monkeypatch):
    model = make_model()
    model[0].requires_grad_(False)
    before = model[0].weight.data_ptr()
    expected = values_of(model)
    fail_at(monkeypatch, f"{DEPTH - 1}.weight")
    with pytest.raises(CheckpointError, match="cannot read"):
        make_engine(model, MIXED)
    assert model[0].weight.data_ptr() == before
    assert_same(values_of(model).values(), expected.values())


def test_memory_is_freed_when_a_parameter_is_moved_in(monkeypatch):
    """Nobody else holds it, however far ahead workers are."""
    model = make_model()
    order, counts = [], []
    real = filling.ManagedParameter.move_in

    def move_in(self):
        storage = raw_data(self.parameter).untyped_storage()
        real(self)
        if self.spec.name.endswith("weight"):
            order.append(self.spec.name)
            counts.append(torch._C._storage_Use_Count(storage._cdata))

    monkeypatch.setattr(filling.ManagedParameter, "move_in", move_in)
    make_engine(model, MIXED)
    assert order == [f"{place}.weight" for place in range(DEPTH)]
    assert max(counts) == 1  # only the one here


def test_no_thread_is_left_after_construction(monkeypatch):
    def names():
        gc.collect()
        return {thread for thread in threading.enumerate() if thread.name.startswith("hf_patrickstar-update")}

    before = names()
    engine = make_engine(make_model(), MIXED)
    assert names() <= before
    engine.detach()
    fail_at(monkeypatch, "2.weight")
    with pytest.raises(CheckpointError):
        make_engine(make_model(), MIXED)
    assert names() <= before


def test_an_interruption_leaves_nobody_writing(monkeypatch):
    """The user interrupts while the caller waits for workers."""
    model = make_model()
    expected = values_of(model)
    active = []
    real = Filling.fill_part

    def fill_part(self, *args):
        active.append(1)
        real(self, *args)
        active.pop()

    monkeypatch.setattr(Filling, "fill_part", fill_part)

    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Filling, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_engine(model, MIXED)
    assert active == []
    assert_same(values_of(model).values(), expected.values())


def test_tensors_without_values_are_not_filled():
    """A plan makes engines of thousands of fake tensors; each operator on one takes a tenth of a millisecond."""

    class Copies(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.num += func.overloadpacket is torch.ops.aten.copy_
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Copies() as copies:
        model = torch.nn.Linear(16, 16)
        before = copies.num
        engine = make_engine(model, MIXED)
        assert copies.num == before
        assert all(tensor.is_filled for tensor in engine.manager.tensors)
        assert model.weight.shape == (16, 16)
