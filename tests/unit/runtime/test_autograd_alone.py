"""What autograd tells the phases of a step, which only write it down: operands kept and needed, a backward's ends."""

import threading
import types

import pytest
import torch
from unit.runtime.data_parts import InBackward
from unit.runtime.parts import Fake, Parts

from hf_patrickstar.runtime import autograd as module
from hf_patrickstar.runtime.autograd import Autograd
from hf_patrickstar.runtime.chunk import Epoch
from hf_patrickstar.runtime.live_parameter import LiveMixin
from hf_patrickstar.runtime.operands import SavedView


class Address(SavedView):
    """An address in whose place backward gets a value."""

    def __init__(self, value):
        super().__init__(types.SimpleNamespace(epoch=Epoch(), num_writes=0, num_saved=0), (), (), 0, 0)
        self.value = value


def make(*, is_in_chunk=lambda key: False, backward_begin=None):
    """What listens to autograd, and what phases are told; backward gets ten times what was kept."""
    told = []
    phases = Fake(
        *(told, "backward_end"),
        backward_begin=backward_begin,
        operand_saved=lambda operand: Address(operand.detach()),
        operand_needed=lambda saved: saved.value * 10 if isinstance(saved, Address) else saved,
    )
    return Autograd(phases, is_in_chunk), told


def words(told):
    """What was told, with numbers in place of operands."""
    return [name if not args else (name, float(getattr(args[0], "value", args[0]))) for name, *args in told]


def leaf(value=1.0):
    return torch.tensor(value, requires_grad=True)


# Operands


def test_phases_keep_operands_and_bring_them_back():
    autograd, told = make()
    x = leaf()
    with autograd.kept_as_numbers():
        result = x * torch.tensor(3.0)
    assert words(told) == [("operand_saved", 3)]
    told.clear()
    result.backward()
    assert words(told) == ["backward_begin", ("operand_needed", 3), "backward_end"]
    assert x.grad == 30, "what phases bring is computed with"


def test_operands_before_and_after_the_block_are_torchs():
    autograd, told = make()
    x = leaf()
    before = x * torch.tensor(2.0)
    with autograd.kept_as_numbers():
        pass
    (before * torch.tensor(3.0)).backward()
    assert (told, x.grad) == ([], 6)


def test_a_block_that_raises_ends_too():
    autograd, told = make()
    with pytest.raises(ValueError, match="inside"), autograd.kept_as_numbers():
        raise ValueError("inside")
    (leaf() * torch.tensor(3.0)).backward()
    assert told == []


def test_blocks_may_be_inside_of_each_other():
    """The operand of the inner one is kept once."""
    autograd, told = make()
    x = leaf()
    with autograd.kept_as_numbers(), autograd.kept_as_numbers():
        result = x * torch.tensor(3.0)
    assert [name for name, *_ in told].count("operand_saved") == 1
    result.backward()
    assert x.grad == 30


def test_nothing_is_kept_as_numbers_under_a_function_transform():
    autograd, told = make()

    def function(x):
        with autograd.kept_as_numbers():
            return x * x

    assert torch.func.grad(function)(torch.tensor(3.0)) == 6
    assert told == []


# The beginning and the end of a backward


def test_a_backward_begins_and_ends_once():
    autograd, told = make()
    with autograd.kept_as_numbers():
        result = leaf() * torch.tensor(2.0) * torch.tensor(3.0) * torch.tensor(4.0)
    told.clear()
    result.backward()
    names = [name for name, *_ in told]
    assert names == ["backward_begin", "operand_needed", "operand_needed", "operand_needed", "backward_end"]


def test_every_backward_begins_and_ends():
    autograd, told = make()
    with autograd.kept_as_numbers():
        first, second = leaf() * torch.tensor(2.0), leaf() * torch.tensor(3.0)
    told.clear()
    first.backward()
    second.backward()
    assert [name for name, *_ in told] == ["backward_begin", "operand_needed", "backward_end"] * 2


def test_outside_of_a_backward_there_is_nothing_to_notice():
    autograd, told = make()
    autograd.notice_backward()
    assert told == []


def test_a_backward_that_needs_no_operand_is_noticed_by_who_calls():
    autograd, told = make()
    x = leaf()
    result = InBackward.apply(x, lambda: (autograd.notice_backward(), autograd.notice_backward()))
    x.register_post_accumulate_grad_hook(lambda x: told.append(("gradient",)))
    result.backward()
    assert told == [("backward_begin",), ("gradient",), ("backward_end",)]


def test_a_backward_inside_of_a_backward_has_its_own_beginning_and_end():
    autograd, told = make()

    def inside():
        autograd.notice_backward()
        with torch.enable_grad():
            InBackward.apply(leaf(), autograd.notice_backward).backward()
        told.append(("goes on",))

    InBackward.apply(leaf(), inside).backward()
    names = [name for name, *_ in told]
    assert names == ["backward_begin", "backward_begin", "backward_end", "goes on", "backward_end"]


def test_a_backward_that_fails_has_no_end_and_the_next_one_begins():
    autograd, told = make()

    def fail():
        autograd.notice_backward()
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        InBackward.apply(leaf(), fail).backward()
    assert told == [("backward_begin",)]
    InBackward.apply(leaf(), autograd.notice_backward).backward()
    assert told == [("backward_begin",), ("backward_begin",), ("backward_end",)]


def test_no_thread_goes_on_before_another_has_begun_the_backward(monkeypatch):
    """Autograd runs CPU embeddings beside a device, each in a thread of its own."""
    task = []
    monkeypatch.setattr(module, "_current_graph_task_id", lambda: task[0])  # in the other thread, too
    other = threading.Thread(target=lambda: (autograd.notice_backward(), told.append(("goes on",))), daemon=True)

    def begin():
        other.start()
        other.join(0.1)
        told.append(("begun",))

    def inside():
        task.append(torch._C._current_graph_task_id())
        autograd.notice_backward()
        other.join()

    autograd, told = make(backward_begin=begin)
    InBackward.apply(leaf(), inside).backward()
    assert [name for name, *_ in told] == ["backward_begin", "begun", "goes on", "backward_end"]


def test_a_backward_begins_while_another_waits_for_its_turn():
    """It may be inside of the one that has the turn, which would never end."""
    this = threading.current_thread()
    other = threading.Thread(target=lambda: InBackward.apply(leaf(), autograd.notice_backward).backward(), daemon=True)

    def begin():
        if threading.current_thread() is this:
            other.start()
            other.join(10)

    autograd, told = make(backward_begin=begin)
    InBackward.apply(leaf(), lambda: (autograd.notice_backward(), told.append(("goes on",)))).backward()
    names = [name for name, *_ in told]
    assert names == ["backward_begin", "backward_begin", "backward_end", "goes on", "backward_end"]


def test_a_backward_that_could_not_begin_is_begun_by_who_comes_next():
    failures = iter([ValueError("inside")])

    def begin():
        for failure in failures:
            raise failure

    def inside():
        with pytest.raises(ValueError, match="inside"):
            autograd.notice_backward()
        autograd.notice_backward()

    autograd, told = make(backward_begin=begin)
    InBackward.apply(leaf(), inside).backward()
    assert told == [("backward_begin",), ("backward_begin",), ("backward_end",)]


# With hooks of the user's own


class Theirs:
    """The user's saved-tensors hooks, which write down what they get.

    Args:
        pack: What they keep of an operand.
        unpack: What they give back for it.
    """

    def __init__(self, pack, unpack=lambda kept: kept):
        self.shown, self.given_back = [], []
        self.pack, self.unpack = pack, unpack

    def hooks(self):
        def pack(operand):
            self.shown.append(operand)
            return self.pack(operand)

        def unpack(kept):
            self.given_back.append(kept)
            return self.unpack(kept)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def test_what_their_hooks_keep_elsewhere_is_theirs():
    autograd, told = make()
    theirs = Theirs(lambda operand: float(operand) + 1, torch.tensor)
    x = leaf()
    with theirs.hooks(), autograd.kept_as_numbers():
        result = x * torch.tensor(3.0)
    assert (theirs.shown, told) == ([3], [])
    result.backward()
    assert (theirs.given_back, x.grad) == ([4.0], 4)
    assert told == [("backward_begin",), ("backward_end",)]


def test_an_operand_that_they_keep_as_it_is_becomes_an_address():
    autograd, told = make()
    theirs = Theirs(lambda operand: operand)
    x = leaf()
    with theirs.hooks(), autograd.kept_as_numbers():
        result = x * torch.tensor(3.0)
    assert words(told) == [("operand_saved", 3)]
    result.backward()
    assert (theirs.given_back, x.grad) == ([30], 30), "they get what phases bring"


def test_tensors_in_chunks_among_what_they_keep_become_addresses():
    in_chunk = torch.tensor(5.0)
    key = in_chunk.untyped_storage()._cdata
    autograd, told = make(is_in_chunk=lambda found: found == key)
    theirs = Theirs(lambda operand: ("note", in_chunk), lambda kept: kept[1])
    x = leaf()
    with theirs.hooks(), autograd.kept_as_numbers():
        result = x * torch.tensor(3.0)
    assert words(told) == [("operand_saved", 5)]
    result.backward()
    assert (theirs.given_back, x.grad) == ([("note", 50)], 50)


def test_their_hooks_are_in_force_again_after_the_block():
    autograd, told = make()
    theirs = Theirs(lambda operand: operand)
    with theirs.hooks():
        with autograd.kept_as_numbers():
            pass
        kept = leaf() * torch.tensor(3.0)
    assert (theirs.shown, told, kept.item()) == ([3], [], 3)


def test_they_see_the_value_of_a_parameter_and_not_the_parameter():
    """A parameter may be a placeholder by the time that they look."""
    parts = Parts()
    (tensor,) = parts.add_chunk(1)
    parts.load(tensor.chunk)
    tensor.bind(Fake([], value_for=None))
    tensor.materialize(tensor.chunk.compute)
    autograd, told = make()
    theirs = Theirs(lambda operand: operand)
    with theirs.hooks(), autograd.kept_as_numbers():
        leaf(torch.ones(1, dtype=torch.bfloat16).item()) * tensor.parameter
    (shown,) = [operand for operand in theirs.shown if operand.shape == (1,)]
    assert (type(shown), shown.requires_grad) == (torch.Tensor, False)
    assert [isinstance(args[0], LiveMixin) for _, *args in told if args[0].shape == (1,)] == [True]
