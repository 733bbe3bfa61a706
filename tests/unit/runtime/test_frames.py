"""Which forwards run on a thread, what this thread is doing, and what stands in for parameters meanwhile."""

import threading
import types

import pytest
import torch
from unit.runtime.data_parts import InBackward

from hf_patrickstar.runtime.frames import Frame, Frames, Lookup, current_stage
from hf_patrickstar.states import Stage


def in_backward(function):
    """What a function returns inside of a backward."""
    found = []
    InBackward.apply(torch.ones(1, requires_grad=True), lambda: found.append(function())).backward()
    return found[0]


def make(*stages):
    frames = Frames()
    frames.stack += [Frame(torch.nn.Identity(), stage) for stage in stages]
    return frames


@pytest.mark.parametrize(("is_graph", "stage"), [(True, Stage.FORWARD), (False, Stage.EVALUATION)])
def test_what_begins_depends_on_whether_autograd_records(is_graph, stage):
    with torch.set_grad_enabled(is_graph):
        assert current_stage() is stage
        assert Frames().stage is stage


def test_inside_of_a_backward_modules_are_computed_again():
    frames = Frames()
    seen = in_backward(lambda: (current_stage(), frames.stage, frames.is_inside))
    assert seen == (Stage.BACKWARD, Stage.BACKWARD, True)
    assert not frames.is_inside


def test_inside_of_a_forward_its_stage_counts():
    frames = make(Stage.EVALUATION, Stage.FORWARD)
    with torch.no_grad():
        assert (frames.stage, frames.is_inside) == (Stage.FORWARD, True)
    frames.stack.pop()
    assert frames.stage is Stage.EVALUATION
    assert in_backward(lambda: frames.stage) is Stage.EVALUATION
    frames.stack.pop()
    assert (frames.stage, frames.is_inside) == (Stage.FORWARD, False)


def test_every_thread_sees_its_own_forwards():
    frames, seen = make(Stage.FORWARD), []

    def look():
        seen.append((list(frames.stack), frames.is_inside))
        frames.stack.append("a forward of this thread")

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [([], False)]
    assert len(frames.stack) == 1


def test_the_innermost_forward_that_looks_a_parameter_up_has_its_leaf():
    frames = make(Stage.FORWARD, Stage.FORWARD, Stage.FORWARD)
    first, second, other = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    leaves = [torch.zeros(1) for _ in range(3)]
    frames.stack[0].lookups = {id(first): Lookup(None, leaves[0], 0), id(second): Lookup(None, leaves[1], 0)}
    frames.stack[1].lookups = {id(first): Lookup(None, leaves[2], 0)}
    assert frames.find_lookup(first) is leaves[2]
    assert frames.find_lookup(second) is leaves[1]
    assert frames.find_lookup(other) is None
    assert Frames().find_lookup(first) is None


def test_parameters_are_put_back_once():
    frames = make(Stage.FORWARD)
    (frame,) = frames.stack
    module = torch.nn.Linear(1, 1)
    weight, bias = module.weight, module.bias
    for name, parameter in (("weight", weight), ("bias", bias)):
        module._parameters[name] = torch.nn.Parameter(torch.zeros(1))
        frame.replaced.append((module._parameters, name, parameter))
    frames.end(frame)
    assert module.weight is weight
    assert module.bias is bias
    module._parameters["bias"] = None
    frames.end(frame)
    assert module.bias is None


def test_contexts_are_left_once_in_reverse_order():
    left = []

    def context(name):
        return types.SimpleNamespace(__exit__=lambda *error: left.append((name, error)))

    frame = Frame(torch.nn.Identity(), Stage.FORWARD, saved_tensors=context("hooks"), autocast=context("autocast"))
    frame.leave_contexts()
    frame.leave_contexts()
    assert left == [("autocast", (None,) * 3), ("hooks", (None,) * 3)]


def test_a_context_that_fails_is_not_left_twice():
    left = []

    def fail(*error):
        left.append("autocast")
        raise RuntimeError("stack out of order")

    frame = Frame(torch.nn.Identity(), Stage.FORWARD, autocast=types.SimpleNamespace(__exit__=fail))
    with pytest.raises(RuntimeError, match="stack out of order"):
        frame.leave_contexts()
    frame.leave_contexts()
    assert left == ["autocast"]


def test_frames_share_nothing():
    first, second = make(Stage.FORWARD, Stage.FORWARD).stack
    first.acquired.append("tensor")
    first.lookups[1] = "lookup"
    first.replaced.append("parameter")
    assert (second.acquired, second.lookups, second.replaced) == ([], {}, [])
