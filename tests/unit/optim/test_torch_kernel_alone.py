"""The kernel for any torch optimizer, chunk by chunk and all at once: what the optimizer sees, and what stays."""

import pytest
import torch
from unit.optim.updates import end_update, firsts, give, group_of, make_parts, masters, randomize, twins, values
from unit.spec_builders import BF16, FP32

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.kernel import WORKSPACE
from hf_patrickstar.optim.torch_kernel import OWN_STATE, TorchKernel
from hf_patrickstar.runtime.chunk import MASTER


class Counting(torch.optim.Optimizer):
    """Subtracts gradients times a rate of the group; writes down what it sees. A group has a counter of its own.

    Attributes:
        seen: Of every step, the first elements of the values and of the gradients of each group.
        fails: Whether the next step raises an error in its middle.
    """

    def __init__(self, params, rate=1.0):
        super().__init__(params, {"rate": rate, "count": 0})
        self.seen, self.fails = [], False

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.seen.append(
            [
                [(p.flatten()[0].item(), None if p.grad is None else p.grad.flatten()[0].item()) for p in g["params"]]
                for g in self.param_groups
            ]
        )
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["at"] = group["count"]
                    parameter.sub_(group["rate"] * parameter.grad)
        if self.fails:
            raise RuntimeError("in the middle")
        return loss

    @torch.no_grad()
    def double(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(2)


def make(*chunks, groups=None, cls=Counting, at_once=False, **settings):
    """Parts, and a kernel of an optimizer over their parameters; the first group has all that are in no other one."""
    options = {key: settings.pop(key) for key in [key for key in settings if key in ("lr", "momentum", "rate")]}
    parts = make_parts(*(chunks or [(2, 2)]), **settings)
    parts.groups = {tensor.spec.index: 0 for tensor in parts.tensors} | (groups or {})
    members = [[] for _ in range(1 + max(parts.groups.values()))]
    for tensor in parts.tensors:
        members[parts.groups[tensor.spec.index]].append(tensor.parameter)
    parts.optimizer = cls([{"params": params} for params in members], **options)
    parts.kernel = TorchKernel(parts.optimizer, parts.pool, updates_at_once=at_once)
    parts.kernel.reserve(parts.chunks)
    return parts


def update(parts, coefficient=None, groups=None):
    """One step, chunk by chunk."""
    parts.kernel.begin_step()
    for chunk in parts.chunks:
        parts.kernel.update([chunk], parts.groups if groups is None else groups, coefficient)
    parts.kernel.end_step()
    end_update(parts)


def members(parts):
    """The names of what is in the groups of the optimizer."""
    names = {id(tensor.parameter): tensor.spec.name for tensor in parts.tensors}
    return [[names.get(id(p), "another") for p in group["params"]] for group in parts.optimizer.param_groups]


# Chunk by chunk


@pytest.mark.parametrize("types", [BF16, FP32])
@pytest.mark.parametrize(
    ("cls", "options"), [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adagrad, {"lr": 0.1})]
)
def test_three_steps_end_in_the_same_bits_as_with_torch(cls, options, types):
    parts = make((5, (3, 4)), (7,), (6,), groups={1: 1, 2: 1}, cls=cls, types=types, **options)
    parts.optimizer.param_groups[1]["lr"] = 0.01
    randomize(parts)
    ordinary = twins(parts)
    reference = cls(
        [{"params": [ordinary[0], ordinary[3]]}, {"params": [ordinary[1], ordinary[2]], "lr": 0.01}], **options
    )
    if cls is torch.optim.Adagrad:  # it makes its states before the first step
        for tensor, twin in zip(parts.tensors, ordinary, strict=True):
            parts.kernel.load_tensor_state(tensor, reference.state[twin])
    for _ in range(3):
        for tensor, twin in zip(parts.tensors, ordinary, strict=True):
            gradient = torch.randn(tensor.spec.shape).to(tensor.chunk.param.dtype)
            parts.gradients.add(tensor, gradient)
            twin.grad = gradient.float() * 0.3
        update(parts, torch.tensor(0.3))
        reference.step()
    for tensor, master, value, twin in zip(parts.tensors, masters(parts), values(parts), ordinary, strict=True):
        assert torch.equal(master, twin)
        assert torch.equal(value, twin.to(value.dtype)), "the rounded master"
        state = parts.kernel.tensor_state(tensor)
        assert state.keys() == reference.state[twin].keys()
        for key, found in reference.state[twin].items():
            assert torch.equal(state[key], found)


def test_the_optimizer_sees_the_masters_of_one_chunk_with_their_gradients():
    parts = make((2, 2), (2,), groups={1: 1})
    give(parts, t0=3, t1=4, t2=5)
    update(parts, torch.tensor(0.5))
    assert parts.optimizer.seen == [[[(0.0, 1.5)], [(16.0, 2.0)]], [[(32.0, 2.5)], []]]
    assert firsts(masters(parts)) == firsts(values(parts)) == [-1.5, 14.0, 29.5]


def test_between_steps_it_has_the_models_own_parameters_without_gradients():
    parts = make((2, 2), (2,), groups={1: 1})
    lists = [group["params"] for group in parts.optimizer.param_groups]
    give(parts, t0=3, t1=4, t2=5)
    update(parts)
    assert members(parts) == [["t0", "t2"], ["t1"]]
    assert [group["params"] is before for group, before in zip(parts.optimizer.param_groups, lists, strict=True)] == [
        True,
        True,
    ]
    assert {id(key) for key in parts.optimizer.state} == {id(tensor.parameter) for tensor in parts.tensors}
    with parts.kernel.lent(parts.tensors):
        assert [p.grad for group in parts.optimizer.param_groups for p in group["params"]] == [None] * 3


def test_a_counter_of_a_group_advances_once_in_a_step():
    parts = make((2,), (2,))
    for expected in (1, 2):
        give(parts, t0=1, t1=1)
        update(parts)
        assert parts.optimizer.param_groups[0]["count"] == expected
        assert [parts.kernel.own_state(tensor) for tensor in parts.tensors] == [{"at": expected}] * 2


def test_what_is_set_in_a_group_between_steps_is_used_in_the_next():
    parts = make((2,))
    parts.optimizer.param_groups[0]["rate"] = 0.5
    give(parts, t0=4)
    update(parts)
    assert firsts(masters(parts)) == [-2.0]
    assert parts.optimizer.param_groups[0]["rate"] == 0.5


def test_what_has_no_gradient_is_not_seen():
    parts = make((2, 2), (2,))
    give(parts, t1=4)
    update(parts)
    assert parts.optimizer.seen == [[[(16.0, 4.0)]]], "and of a chunk without any there is no step"
    assert firsts(masters(parts)) == firsts(values(parts)) == [0.0, 12.0, 32.0]
    assert parts.kernel.own_state(parts.tensors[0]) == {}


def test_what_is_in_no_group_keeps_its_gradient():
    parts = make((2, 2))
    give(parts, t0=4, t1=4)
    parts.kernel.begin_step()
    parts.kernel.update(parts.chunks, {0: 0}, None)
    assert parts.optimizer.seen == [[[(0.0, 4.0)]]]
    assert firsts(values(parts)) == [-4.0, 4.0]


def test_gradients_of_the_accumulation_list_are_used_there():
    parts = make((2,))
    give(parts, t0=4)
    parts.gradients.move_to_list(parts.tensors[0])
    update(parts, torch.tensor(0.5))
    assert firsts(masters(parts)) == [-2.0]
    assert firsts([parts.gradients.of(parts.tensors[0])]) == [2.0], "what stays is clipped"


def test_a_step_that_fails_leaves_the_groups_as_they_were():
    parts = make((2,), (2,), groups={1: 1})
    give(parts, t0=1, t1=1)
    parts.optimizer.fails = True
    parts.kernel.begin_step()
    with pytest.raises(RuntimeError, match="in the middle"):
        parts.kernel.update(parts.chunks, parts.groups, None)
    assert members(parts) == [["t0"], ["t1"]]


def test_hooks_are_not_called_for_each_chunk():
    parts = make((2,), (2,))
    parts.optimizer.register_step_pre_hook(lambda *_: pytest.fail("called"))
    give(parts, t0=1, t1=1)
    update(parts)
    assert firsts(masters(parts)) == [-1.0, 15.0]


def test_scratch_space_is_for_a_whole_chunk():
    parts = make((2, 2), (3,))
    assert parts.kernel.workspace_numel(2**30) == 2**30
    assert parts.kernel.workspace_numel(2**30, widens=False) == 0
    assert parts.ledger.owners(Tier.HOST)[WORKSPACE] == 4 * 4
    assert (parts.kernel.batch_numel, parts.kernel.follows_homes, parts.kernel.splits_tensors) == (0, False, False)


# Parameters in no chunk


def test_others_are_updated_alone():
    parts = make((2,))
    others = [torch.nn.Parameter(torch.full((2,), value)) for value in (100.0, 200.0)]
    parts.optimizer.param_groups[0]["params"] += others
    for parameter in others:
        parameter.grad = torch.ones(2)
    parts.kernel.update_others(others[:1])
    assert parts.optimizer.seen == [[[(100.0, 1.0)]]]
    assert firsts(others) == [99.0, 200.0]
    assert members(parts) == [["t0", "another", "another"]]


def test_without_a_gradient_there_is_no_step():
    parts = make((2,))
    parts.kernel.update_others([torch.nn.Parameter(torch.zeros(2))])
    parts.kernel.update_others([])
    assert parts.optimizer.seen == []


def test_the_groups_are_whole_again_if_the_step_of_others_fails():
    parts = make((2,))
    other = torch.nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    parts.optimizer.add_param_group({"params": [other]})
    parts.optimizer.fails = True
    with pytest.raises(RuntimeError, match="in the middle"):
        parts.kernel.update_others([other])
    assert members(parts) == [["t0"], ["another"]]


# All at once


def present(parts, told=None, factor=None):
    """What makes gradients ready: they go to the accumulation list, in fp32."""

    def make_ready(is_all):
        if told is not None:
            told.append(is_all)
        for tensor in parts.tensors:
            parts.gradients.move_to_list(tensor)
        return factor

    return make_ready


def nothing(tensor):
    raise AssertionError("nobody looks at the model meanwhile")


def update_at_once(parts, factor=None, told=None, follow=nothing, closure=None):
    result = parts.kernel.update_at_once(parts.tensors, present(parts, told, factor), follow, closure)
    update(parts)
    return result


def test_an_optimizer_that_needs_all_sees_all_in_one_step():
    parts = make((2, 2), (2,), groups={1: 1}, at_once=True)
    give(parts, t0=3, t1=4)
    told = []
    assert update_at_once(parts, torch.tensor(0.5), told) is None
    assert parts.optimizer.seen == [[[(0.0, 1.5), (32.0, None)], [(16.0, 2.0)]]]
    assert told == [True]
    assert firsts(masters(parts)) == firsts(values(parts)) == [-1.5, 14.0, 32.0]
    assert members(parts) == [["t0", "t2"], ["t1"]]


def test_what_the_optimizer_changes_without_a_gradient_becomes_the_value_too():
    parts = make((2, 2), at_once=True)
    give(parts, t0=3)
    masters(parts)[1].fill_(7)
    update_at_once(parts)
    assert firsts(values(parts)) == [-3.0, 7.0]


def test_there_is_no_scratch_space_for_all_at_once():
    parts = make((2, 2), at_once=True)
    assert WORKSPACE not in parts.ledger.owners(Tier.HOST)
    assert parts.kernel.workspace_numel(2**30) == 0


def test_a_closure_sees_the_model_and_the_step_sees_what_it_computed():
    parts = make((2, 2), at_once=True)
    told, followed, grads = [], [], []

    def closure():
        grads.append((members(parts), torch.is_grad_enabled()))
        for tensor in parts.tensors:
            parts.gradients.drop(tensor)
        give(parts, t0=5)
        return "loss"

    assert update_at_once(parts, None, told, lambda tensor: followed.append(tensor.spec.name), closure) == "loss"
    assert grads == [([["t0", "t1"]], True)], "with the model's own parameters in the groups"
    assert followed == ["t0", "t1"], "each has changed, for all that is known"
    assert told == [False, True], "what is there before is not all that is used"
    assert parts.optimizer.seen == [[[(0.0, 5.0), (16.0, None)]]]
    assert firsts(masters(parts)) == [-5.0, 16.0]


def test_a_factor_is_applied_once_to_what_a_closure_computes():
    parts = make((2,), at_once=True)
    factors = [None, torch.tensor(0.5)]

    def make_ready(is_all):
        present(parts)(is_all)
        return factors.pop(0)

    parts.kernel.update_at_once(parts.tensors, make_ready, lambda tensor: None, lambda: give(parts, t0=6))
    assert parts.optimizer.seen == [[[(0.0, 3.0)]]]


def test_a_closure_that_fails_leaves_the_groups_as_they_were():
    parts = make((2, 2), at_once=True)

    def closure():
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        update_at_once(parts, follow=lambda tensor: None, closure=closure)
    assert members(parts) == [["t0", "t1"]]
    with parts.kernel.lent(parts.tensors):
        assert [p.grad for p in parts.optimizer.param_groups[0]["params"]] == [None, None]


def test_lbfgs_ends_in_the_same_bits_as_with_torch():
    parts = make((4, 3), cls=torch.optim.LBFGS, lr=0.5, at_once=True, types=FP32)
    randomize(parts)
    ordinary = twins(parts)
    before = ordinary[0].tolist()
    reference = torch.optim.LBFGS(ordinary, lr=0.5)

    def closure():
        for tensor, master in zip(parts.tensors, masters(parts), strict=True):
            parts.gradients.drop(tensor)
            parts.gradients.add(tensor, (master - 1) ** 3)

    def loss_of(tensors):
        return sum(((tensor - 1) ** 4).sum() for tensor in tensors)

    def ours():
        closure()
        return loss_of(masters(parts))

    def theirs():
        for twin in ordinary:
            twin.grad = (twin.detach() - 1) ** 3
        return loss_of(ordinary)

    update_at_once(parts, follow=lambda tensor: None, closure=ours)
    reference.step(theirs)
    assert all(torch.equal(master, twin) for master, twin in zip(masters(parts), ordinary, strict=True))
    assert ordinary[0].tolist() != before


# Methods of the optimizer beside its step


def test_lent_masters_are_in_the_groups_for_a_while():
    parts = make((2, 2))
    with parts.kernel.lent(parts.tensors) as changed:
        parts.optimizer.double()
        assert changed == []
    assert firsts(masters(parts)) == [0.0, 32.0]
    assert changed == parts.tensors
    assert members(parts) == [["t0", "t1"]]


def test_only_what_was_changed_is_said_to_be():
    parts = make((2, 2))
    with parts.kernel.lent(parts.tensors) as changed, torch.no_grad():
        parts.optimizer.param_groups[0]["params"][1].add_(1)
    assert [tensor.spec.name for tensor in changed] == ["t1"]


def test_lent_states_are_under_the_masters():
    parts = make((2,))
    give(parts, t0=1)
    update(parts)
    with parts.kernel.lent(parts.tensors):
        (master,) = parts.optimizer.param_groups[0]["params"]
        assert parts.optimizer.state[master] == {"at": 1}
        assert len(parts.optimizer.state) == 1
    assert parts.kernel.own_state(parts.tensors[0]) == {"at": 1}


# State


def moved(*chunks, host_nbytes=None, **settings):
    """Parts after one step of SGD with momentum, whose buffers have 4 bytes per element."""
    parts = make(*chunks, cls=torch.optim.SGD, lr=1.0, momentum=0.5, **settings)
    if host_nbytes is not None:
        parts.ledger.lower_limit(Tier.HOST, parts.ledger.used(Tier.HOST) + host_nbytes)
    return parts


def test_state_that_the_optimizer_makes_is_booked():
    parts = moved((2, 2), (3,))
    give(parts, t0=1, t2=1)
    update(parts)
    assert parts.ledger.owners(Tier.HOST)[OWN_STATE] == 20
    give(parts, t0=1, t1=1)
    update(parts)
    assert parts.ledger.owners(Tier.HOST)[OWN_STATE] == 28, "once each"
    parts.kernel.load_tensor_state(parts.tensors[2], {})
    assert parts.ledger.owners(Tier.HOST)[OWN_STATE] == 16


def test_state_that_has_no_room_is_an_error_after_the_step_is_whole():
    parts = moved((2,), (2,), host_nbytes=12)
    give(parts, t0=3, t1=3)
    parts.kernel.begin_step()
    parts.kernel.update(parts.chunks, parts.groups, None)
    assert firsts(values(parts)) == [-3.0, 13.0]
    with pytest.raises(BudgetError, match=r"8 bytes\) more needed for 'optimizer_state'"):
        parts.kernel.end_step()
    assert parts.ledger.owners(Tier.HOST)[OWN_STATE] == 8
    parts.kernel.end_step()  # it is told once


def test_all_that_has_no_room_is_told_together():
    parts = moved((2,), (2,), host_nbytes=4)
    give(parts, t0=3, t1=3)
    with pytest.raises(BudgetError, match=r"16 bytes\) more needed"):
        update(parts)


def test_a_state_is_that_of_the_optimizer():
    parts = moved((2,))
    tensor = parts.tensors[0]
    assert parts.kernel.own_state(tensor) == parts.kernel.tensor_state(tensor) == {}
    assert parts.kernel.state_places(tensor) == {}
    give(parts, t0=3)
    update(parts)
    assert parts.kernel.own_state(tensor)["momentum_buffer"].tolist() == [3.0, 3.0]
    parts.kernel.own_state(tensor)["momentum_buffer"].fill_(4)
    parts.kernel.tensor_state(tensor)["momentum_buffer"].fill_(100)
    give(parts, t0=1)
    update(parts)
    assert parts.kernel.own_state(tensor)["momentum_buffer"].tolist() == [3.0, 3.0], "half of 4, and 1"


def test_a_state_is_taken_over_and_gone_on_with():
    parts = moved((2,))
    given = torch.tensor([8.0, 8.0])
    parts.kernel.load_tensor_state(parts.tensors[0], {"momentum_buffer": given})
    assert parts.ledger.owners(Tier.HOST)[OWN_STATE] == 8
    give(parts, t0=1)
    update(parts)
    assert masters(parts)[0].tolist() == [-5.0, -4.0]
    assert given.tolist() == [8.0, 8.0], "what was given is not the place"


def test_an_empty_state_begins_anew():
    parts = moved((2,))
    give(parts, t0=8)
    update(parts)
    parts.kernel.load_tensor_state(parts.tensors[0], {})
    assert parts.kernel.own_state(parts.tensors[0]) == {}
    assert OWN_STATE not in parts.ledger.owners(Tier.HOST)
    give(parts, t0=1)
    update(parts)
    assert parts.kernel.own_state(parts.tensors[0])["momentum_buffer"].tolist() == [1.0, 1.0]


def test_a_parameter_that_is_in_no_group_of_this_step_keeps_its_state():
    parts = moved((2, 2))
    give(parts, t0=8, t1=8)
    update(parts)
    give(parts, t0=1)
    update(parts, groups=group_of([0]))
    assert parts.kernel.own_state(parts.tensors[1])["momentum_buffer"].tolist() == [8.0, 8.0]


def test_every_parameter_of_a_chunk_has_a_master_of_its_own():
    parts = make((2, 2))
    with parts.kernel.lent(parts.tensors):
        one, other = parts.optimizer.param_groups[0]["params"]
    assert one.data_ptr() == parts.chunks[0].lists[MASTER].data_ptr()
    assert other.data_ptr() == one.data_ptr() + 8
    assert (one.dtype, one.shape, one.is_leaf) == (torch.float32, (2,), True)


def test_a_parameter_that_begins_anew_has_its_master_where_that_is_then():
    parts = make((2,))
    give(parts, t0=1)
    update(parts)
    parts.kernel.load_tensor_state(parts.tensors[0], {})
    parts.chunks[0].lists[MASTER] = torch.tensor([50.0, 60.0])
    give(parts, t0=1)
    update(parts)
    assert masters(parts)[0].tolist() == values(parts)[0].tolist() == [49.0, 59.0]
