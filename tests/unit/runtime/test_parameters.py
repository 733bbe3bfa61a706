"""Parameters that get their values for a while: what is asked of the parts around is written down."""

import contextlib
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from unit.runtime.parts import Fake, OneOfTwo, Parts

from hf_patrickstar.errors import BudgetError, DeviceMemoryError, EngineError
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime import parameters as module
from hf_patrickstar.runtime.gradient_place import GradientPlace
from hf_patrickstar.runtime.live_parameter import ReleasedMixin, raw_data, set_raw_data
from hf_patrickstar.runtime.parameters import Parameters
from hf_patrickstar.runtime.turns import Turns


class Device:
    """In place of the executor: the chunk's home is what is computed with, unless there is an error to raise.

    Attributes:
        errors: What is raised next.
        modes: Whether inference mode, gradients and a function transform were on, each time.
    """

    is_at_rest = False

    def __init__(self, told):
        self.told, self.errors, self.modes = told, [], []

    def ensure_on_device(self, chunk, who):
        self.told.append(("load", chunk.spec.index, who))
        in_transform = torch._C._functorch.peek_interpreter_stack() is not None
        self.modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), in_transform))
        if self.errors:
            raise self.errors.pop(0)
        if chunk.compute is None:
            chunk.set_compute(chunk.param)
        return chunk.compute


def make(*, is_alone=True, trainable=True):
    """Two chunks of two tensors of two elements, and what is told."""
    parts = Parts(None if is_alone else OneOfTwo())
    parts.add_chunk(2, 2, trainable=trainable)
    parts.add_chunk(2, 2)
    parts.told = told = []
    parts.device = Device(told)
    writes = Fake(told, "take_over", take_back=lambda tensor: tensor.dematerialize())
    writes.is_watching = False
    writes.handed_out = lambda: parts.handed_out.__contains__ if parts.handed_out else None
    parts.handed_out = []
    gradients = Fake(told, "move_to_list")
    gradients.lock = contextlib.nullcontext()
    steps = Fake(told, "give_up")
    steps.executor = parts.device
    turns = types.SimpleNamespace(others_may_read=lambda: False)
    parts.parameters = Parameters(parts.chunks, steps, gradients, writes, turns)
    return parts, parts.parameters, parts.tensors[0]


def told(parts):
    """What was told since the last call, in words."""
    found, parts.told[:] = list(parts.told), []
    return [(name, argument if name == "load" else argument.spec.name) for name, argument, *_ in found]


@pytest.fixture
def pauses(monkeypatch):
    """Other threads may let go of memory after two pauses; the pauses that were made."""
    made = []
    monkeypatch.setattr(module, "pauses_s", lambda: (0.25, 0.5, 0.0))
    monkeypatch.setattr(
        module, "time", types.SimpleNamespace(sleep=made.append)
    )  # other threads may sleep as they like
    return made


# Which there are


def test_parameters_are_in_model_order_and_found_by_number_and_object():
    parts = Parts()
    parts.add_chunk(2, 2)
    parts.add_chunk(2)
    parts.chunks.reverse()
    steps = types.SimpleNamespace(executor=None)
    parameters = Parameters(parts.chunks, steps, types.SimpleNamespace(lock=None), None, Turns())
    assert [tensor.spec.index for tensor in parameters.tensors] == [0, 1, 2]
    assert {index: tensor.spec.index for index, tensor in parameters.by_index.items()} == {0: 0, 1: 1, 2: 2}
    assert parameters.find(parts.tensors[2].parameter) is parts.tensors[2]
    assert parameters.find(torch.nn.Parameter(torch.ones(2))) is None


def test_what_is_indexed_anew_is_in_the_same_lists():
    parts, parameters, _ = make()
    tensors, by_index = parameters.tensors, parameters.by_index
    parameters.index(parts.tensors[2:])
    assert tensors == parts.tensors[2:]
    assert list(by_index) == [2, 3]
    assert parameters.find(parts.tensors[0].parameter) is None


def test_a_parameter_that_was_given_up_or_forgotten_is_not_found():
    parts, parameters, tensor = make()
    tensor.is_given_up = True
    parameters.forget(parts.tensors[1])
    parameters.forget(parts.tensors[1])
    assert [parameters.find(one.parameter) for one in parts.tensors] == [None, None, *parts.tensors[2:]]


# Their values


def test_a_parameter_has_its_value_until_it_is_released_as_often_as_it_was_acquired():
    parts, parameters, tensor = make()
    tensor.num_writes = 4
    parameters.acquire(tensor, "layer")
    assert parts.told == [("take_over", tensor), ("load", 0, "layer")]
    told(parts)
    assert raw_data(tensor.parameter).tolist() == [0, 1]
    assert (tensor.users, tensor.chunk.num_computing, tensor.read_at, tensor.is_materialized) == (1, 1, 4, True)
    parameters.acquire(tensor, "layer")
    assert (tensor.users, tensor.chunk.num_computing, told(parts)) == (2, 1, [("load", 0)])
    parameters.release(tensor)
    assert (tensor.users, tensor.is_materialized, told(parts)) == (1, True, [])
    parameters.release(tensor)
    assert (tensor.users, tensor.chunk.num_computing, told(parts)) == (0, 0, [("take_back", "t0")])
    assert raw_data(tensor.parameter).isnan().all()


def test_a_chunk_counts_its_parameters_that_are_computed_with():
    parts, parameters, _ = make()
    for tensor in parts.tensors:
        parameters.acquire(tensor, "layer")
    assert [chunk.num_computing for chunk in parts.chunks] == [2, 2]
    parameters.release(parts.tensors[0])
    assert [chunk.num_computing for chunk in parts.chunks] == [1, 2]


def test_an_alias_keeps_the_chunk_and_gives_the_parameter_nothing():
    parts, parameters, tensor = make()
    parameters.acquire(tensor, "layer", is_alias=True)
    assert (tensor.is_materialized, tensor.users, tensor.chunk.num_computing) == (False, 1, 1)
    parameters.release(tensor)
    assert told(parts) == [("take_over", "t0"), ("load", 0)]


def test_a_parameter_may_be_acquired_beside_an_alias():
    parts, parameters, tensor = make()
    parameters.acquire(tensor, "layer", is_alias=True)
    parameters.acquire(tensor, "layer")
    assert raw_data(tensor.parameter).tolist() == [0, 1]
    parameters.acquire(tensor, "layer", is_alias=True)
    parameters.release(tensor)
    parameters.release(tensor)
    assert tensor.is_materialized
    parameters.release(tensor)
    assert told(parts)[-1] == ("take_back", "t0")


# Those of a module together


def make_resident():
    """Parameters that answer, in chunks that are computed with where they are at home."""
    parts, parameters, tensor = make()
    for chunk in parts.chunks:
        chunk.home = Tier.DEVICE
        chunk.set_compute(chunk.param)
    for each in parts.tensors:
        each.bind(None)
    parts.device.is_at_rest = True
    return parts, parameters, tensor


def state_of(tensor):
    return tensor.users, tensor.chunk.num_computing, tensor.is_materialized, len(tensor.threads), tensor.read_at


@pytest.mark.parametrize("is_at_rest", [True, False])
def test_a_module_gets_its_parameters_and_gives_them_back_as_one_by_one(is_at_rest):
    parts, parameters, _ = make_resident()
    parts.device.is_at_rest = is_at_rest
    acquired = []
    for _ in range(2):
        parameters.acquire_all(parts.tensors[:3], "layer", acquired, is_recomputed=False)
        assert acquired == parts.tensors[:3]
        values = [raw_data(tensor.parameter).tolist() for tensor in parts.tensors]
        assert values[:3] == [[0, 1], [16, 17], [32, 33]]
        assert values[3] == [pytest.approx(float("nan"), nan_ok=True)] * 2
        assert [state_of(tensor) for tensor in acquired] == [(1, 2, True, 1, 0), (1, 2, True, 1, 0), (1, 1, True, 1, 0)]
        assert not any(isinstance(tensor.parameter, ReleasedMixin) for tensor in acquired)
        parameters.release_all(acquired)
        assert [state_of(tensor) for tensor in acquired] == [(0, 0, False, 0, 0)] * 3
        assert all(isinstance(tensor.parameter, ReleasedMixin) for tensor in acquired)
        assert all(raw_data(tensor.parameter).isnan().all() for tensor in acquired)
        acquired.clear()
    assert bool(told(parts)) is not is_at_rest
    assert not any(chunk.is_in_use for chunk in parts.chunks)


def hand_out(parts, tensor):
    parts.handed_out.append(tensor)


def put_gradient(parts, tensor):
    tensor.gradient = GradientPlace.PARAM


def assign(parts, tensor):
    set_raw_data(tensor.parameter, torch.ones(2))


def use(parts, tensor):
    parts.parameters.acquire(tensor, "another module")
    told(parts)


@pytest.mark.parametrize(
    ("change", "also"),
    [(hand_out, ["take_over"]), (put_gradient, ["take_over", "move_to_list"]), (assign, ["take_over"]), (use, [])],
)
def test_a_parameter_that_there_is_more_to_do_for_is_acquired_by_itself_with_those_after_it(change, also):
    parts, parameters, _ = make_resident()
    change(parts, parts.tensors[1])
    acquired = []
    parameters.acquire_all(parts.tensors[:3], "layer", acquired, is_recomputed=False)
    assert acquired == parts.tensors[:3]
    assert told(parts) == [*((name, "t1") for name in also), ("load", 0), ("take_over", "t2"), ("load", 1)]


def test_of_a_frozen_parameter_that_is_recomputed_only_the_chunk_stays():
    parts, parameters, tensor = make_resident()
    tensor.parameter.requires_grad_(False)
    acquired = []
    parameters.acquire_all(parts.tensors[:2], "layer", acquired, is_recomputed=True)
    assert [(each.is_materialized, each.users) for each in acquired] == [(False, 1), (True, 1)]
    parameters.release_all(acquired)
    assert not tensor.chunk.is_in_use


def write(tensor):
    with torch.no_grad():
        tensor.parameter.add_(1)


def reassign(tensor):
    torch._C.TensorBase.data.__set__(tensor.parameter, torch.ones(2, dtype=torch.bfloat16))


def narrow(tensor):
    torch._C.TensorBase.data.__set__(tensor.parameter, raw_data(tensor.parameter)[:1])


@pytest.mark.parametrize("change", [write, reassign, narrow])
def test_what_was_written_to_while_a_module_had_it_is_taken_back_by_itself_with_those_after_it(change):
    parts, parameters, _ = make_resident()
    acquired = []
    parameters.acquire_all(parts.tensors[:3], "layer", acquired, is_recomputed=False)
    change(parts.tensors[1])
    parameters.release_all(acquired)
    assert told(parts) == [("take_back", "t1"), ("take_back", "t2")]
    assert [tensor.users for tensor in acquired] == [0, 0, 0]


def test_nothing_is_released_together_while_something_is_watched():
    parts, parameters, _ = make_resident()
    acquired = []
    parameters.acquire_all(parts.tensors[:2], "layer", acquired, is_recomputed=False)
    parameters._writes.is_watching = True
    parameters.release_all(acquired)
    assert told(parts) == [("take_back", "t0"), ("take_back", "t1")]


def test_what_another_thread_holds_too_stays_until_that_releases_it():
    _, parameters, tensor = make_resident()
    acquired = []
    parameters.acquire_all([tensor], "layer", acquired, is_recomputed=False)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(parameters.acquire, tensor, "code that reads").result()
        parameters.release_all(acquired)
        assert (tensor.users, tensor.is_materialized) == (1, True)
        pool.submit(parameters.release, tensor).result()
    assert (tensor.users, tensor.is_materialized, tensor.threads) == (0, False, [])


def test_the_engine_knows_its_own_views_of_a_chunk_from_those_of_others():
    _, parameters, tensor = make_resident()
    acquired = []
    parameters.acquire_all([tensor], "layer", acquired, is_recomputed=False)
    kept = raw_data(tensor.parameter)
    parameters.release_all(acquired)
    assert tensor.chunk.is_aliased
    del kept
    assert not tensor.chunk.is_aliased
    payload, _ = tensor.chunk.clear_compute()
    assert torch._C._storage_Use_Count(payload.untyped_storage()._cdata) == tensor.chunk.base_use_count


def test_what_is_computed_with_is_found_without_a_visit_where_nothing_moves():
    parts, parameters, tensor = make_resident()
    assert parameters.find_at_rest(tensor) is tensor.chunk.compute
    tensor.gradient = GradientPlace.PARAM
    assert parameters.find_at_rest(tensor) is None
    tensor.gradient, parts.device.is_at_rest = GradientPlace.NONE, False
    assert parameters.find_at_rest(tensor) is None
    assert told(parts) == []


def test_a_parameter_that_moved_with_its_chunk_gets_its_value_from_there():
    _, parameters, tensor = make_resident()
    acquired = []
    parameters.acquire_all([tensor], "layer", acquired, is_recomputed=False)
    parameters.release_all(acquired)
    tensor.chunk.clear_compute()
    tensor.chunk.param = tensor.chunk.param + 5
    tensor.chunk.set_compute(tensor.chunk.param)
    parameters.acquire_all([tensor], "layer", acquired, is_recomputed=False)
    assert raw_data(tensor.parameter).tolist() == [5, 6]


@pytest.mark.parametrize(
    ("place", "is_alone", "moves"),
    [(GradientPlace.PARAM, True, True), (GradientPlace.PARAM, False, False), (GradientPlace.LIST, True, False)],
)
def test_a_gradient_in_the_place_of_the_value_makes_way(place, is_alone, moves):
    """With several processes the copies never hold gradients; a gather brings the values back."""
    parts, parameters, tensor = make(is_alone=is_alone)
    tensor.gradient = place
    parameters.acquire(tensor, "layer")
    assert told(parts) == [("take_over", "t0"), *[("move_to_list", "t0")] * moves, ("load", 0)]
    parameters.ensure_on_device(tensor, "backward")
    assert told(parts) == [*[("move_to_list", "t0")] * moves, ("load", 0)]


def test_what_was_acquired_with_no_forward_around_it_is_released_at_once():
    parts, parameters, tensor = make()
    for one in (tensor, parts.tensors[2], tensor):
        parameters.acquire(one, "code in backward")
        parameters.held_outside_forward.append(one)
    told(parts)
    parameters.release_held_outside_forward()
    assert told(parts) == [("take_back", "t2"), ("take_back", "t0")]
    assert parameters.held_outside_forward == []


def test_in_inference_mode_chunks_come_as_they_do_elsewhere():
    parts, parameters, tensor = make()
    with torch.inference_mode():
        parameters.acquire(tensor, "layer")
    assert parts.device.modes == [(False, False, False)]
    parameters.release(tensor)
    assert not raw_data(tensor.parameter).is_inference()


def test_inside_of_a_function_transform_chunks_come_and_go_as_they_do_elsewhere():
    parts, parameters, tensor = make()
    inside = []

    def function(x):
        parameters.acquire(tensor, "layer")
        inside.append(tensor.is_materialized)
        parameters.release(tensor)
        return (x * 2).sum()

    torch.func.grad(function)(torch.ones(2))
    assert parts.device.modes == [(False, True, False)]
    assert (inside, tensor.users, tensor.is_materialized) == ([True], 0, False)


# Without room


def in_thread(work, *arguments):
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    thread.join()


def test_memory_that_another_thread_may_let_go_of_is_waited_for(pauses):
    parts, parameters, tensor = make()
    in_thread(parameters.acquire, parts.tensors[2], "reader")
    parts.device.errors = [DeviceMemoryError("no room")] * 2
    parameters.acquire(tensor, "layer")
    assert pauses == [0.25, 0.5]
    assert (tensor.users, tensor.chunk.num_computing) == (1, 1)


def test_without_room_the_step_is_given_up_and_nothing_is_held(pauses):
    parts, parameters, tensor = make()
    in_thread(parameters.acquire, parts.tensors[2], "reader")
    parts.device.errors = [DeviceMemoryError(f"no room {number}") for number in range(3)]
    with pytest.raises(DeviceMemoryError, match="no room 2"):
        parameters.acquire(tensor, "layer")
    assert (pauses, parts.told[-1]) == ([0.25, 0.5], ("give_up",))
    assert (tensor.users, tensor.chunk.num_computing, tensor.is_materialized) == (0, 0, False)


def test_nothing_is_waited_for_where_no_other_thread_holds_a_parameter(pauses):
    """Threads of loggers and servers live beside every training."""
    parts, parameters, tensor = make()
    other = parts.tensors[2]
    with ThreadPoolExecutor(max_workers=1) as reader:  # one thread: it releases what it acquired
        reader.submit(parameters.acquire, other, "reader").result()
        parameters.acquire(other, "layer")
        reader.submit(parameters.release, other).result()
    assert other.threads == [threading.get_ident()]
    parts.device.errors = [DeviceMemoryError("no room")]
    with pytest.raises(DeviceMemoryError, match="no room"):
        parameters.acquire(tensor, "layer")
    assert (pauses, parts.told[-1]) == ([], ("give_up",))


def test_what_code_in_backward_holds_may_be_released_by_another_thread():
    _, parameters, tensor = make()
    parameters.acquire(tensor, "layer")
    in_thread(parameters.release, tensor)
    assert (tensor.users, tensor.threads) == (0, [])


def test_memory_that_the_system_refused_is_not_waited_for(pauses):
    parts, parameters, tensor = make()
    in_thread(parameters.acquire, parts.tensors[2], "reader")
    error = DeviceMemoryError("no room")
    error.__cause__ = BudgetError("no room")
    parts.device.errors = [error]
    with pytest.raises(DeviceMemoryError, match="no room"):
        parameters.acquire(tensor, "layer")
    assert (pauses, parts.told[-1]) == ([], ("give_up",))


def test_other_errors_are_neither_waited_for_nor_do_they_give_up_the_step(pauses):
    parts, parameters, tensor = make()
    parts.device.errors = [EngineError("no")]
    with pytest.raises(EngineError, match="no"):
        parameters.acquire(tensor, "layer")
    assert (pauses, told(parts)) == ([], [("take_over", "t0"), ("load", 0)])


def test_a_backward_that_finds_no_room_gives_up_at_once(pauses):
    parts, parameters, tensor = make()
    parts.device.errors = [DeviceMemoryError("no room")]
    with pytest.raises(DeviceMemoryError, match="no room"):
        parameters.ensure_on_device(tensor, "the backward of a use of 't0'")
    assert pauses == []
    assert parts.told == [("load", 0, "the backward of a use of 't0'"), ("give_up",)]


# Checks


def test_an_open_parameter_is_not_computed_with():
    parts, parameters, tensor = make()
    tensor.is_open = True
    with pytest.raises(EngineError, match=r"'t0' is open in full_parameters\(\); run the model after the block"):
        parameters.acquire(tensor, "layer")
    assert (tensor.users, told(parts)) == (0, [])
    tensor.is_open = False
    parameters.check_usable(tensor)


@pytest.mark.parametrize(("is_alone", "in_forward", "is_refused"), [(True, 1, 0), (False, 0, 0), (False, 1, 1)])
def test_a_frozen_parameter_that_was_unfrozen_inside_of_a_forward(is_alone, in_forward, is_refused):
    """Alone autograd keeps its gradient; in an evaluation there is none."""
    _, parameters, tensor = make(is_alone=is_alone, trainable=False)
    with torch.set_grad_enabled(bool(in_forward)):
        parameters.acquire(tensor, "layer")
        parameters.release(tensor)
        tensor.parameter.requires_grad_(True)
        if is_refused:
            with pytest.raises(EngineError, match="parameter 't0' was unfrozen inside of a forward"):
                parameters.acquire(tensor, "layer")
        else:
            parameters.acquire(tensor, "layer")


def test_where_nothing_is_trained_nothing_was_unfrozen():
    parts, parameters, tensor = make(is_alone=False, trainable=False)
    parts.chunks[1].lists.clear()
    parameters.index(parts.tensors)
    tensor.parameter.requires_grad_(True)
    parameters.acquire(tensor, "layer")
    assert tensor.is_materialized


@pytest.mark.parametrize(("read_at", "num_writes", "is_refused"), [(5, 5, 0), (4, 5, 0), (3, 5, 1), (-2, 0, 1)])
def test_a_gradient_of_what_was_not_read_lately_is_refused(read_at, num_writes, is_refused):
    _, parameters, tensor = make()
    tensor.read_at, tensor.num_writes = read_at, num_writes
    message = "a gradient arrived for parameter 't0', whose value was not read in this step nor in the one before"
    with pytest.raises(EngineError, match=message) if is_refused else contextlib.nullcontext():
        parameters.check_gradient(tensor)


def test_a_gradient_of_a_frozen_parameter_is_refused():
    _, parameters, tensor = make(trainable=False)
    with pytest.raises(EngineError, match="parameter 't0' was unfrozen inside of a forward"):
        parameters.check_gradient(tensor)
