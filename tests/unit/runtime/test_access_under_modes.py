"""What answers for a parameter under modes of users: nothing that it does is seen, and failures end the access."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_patrickstar.memory.operators import has_modes_of_users
from hf_patrickstar.runtime.access import Access, unseen_by_modes


class Told(Access):
    def __init__(self, value, told, error=None):
        super().__init__(value)
        self.told, self.error = told, error

    def needs_copy(self, results):
        self.told.append(("needs_copy", len(results), has_modes_of_users()))
        if self.error is not None:
            raise self.error
        return False

    def end(self):
        self.told.append(("end", has_modes_of_users()))


class Answers:
    def __init__(self, error=None):
        self.told, self.error = [], error

    def access(self, func, *, is_graph, writes=False):
        self.told.append(("access", has_modes_of_users()))
        return Told(torch.ones(2), self.told, self.error)


def test_without_a_mode_it_answers_itself():
    live = Answers()
    assert unseen_by_modes(live) is live


@pytest.mark.parametrize("mode", [TorchDispatchMode, TorchFunctionMode])
def test_it_works_without_modes_and_they_are_back_afterwards(mode):
    live = Answers()
    with mode():
        access = unseen_by_modes(live).access(torch.Tensor.norm, is_graph=False)
        assert has_modes_of_users()
        assert type(access.value) is torch.Tensor
        access.end()
    assert live.told == [("access", False), ("end", False)]


def test_a_function_that_makes_views_gets_memory_of_its_own_before_it_is_called():
    live = Answers()
    with TorchFunctionMode():
        unseen_by_modes(live).access(torch.Tensor.view, is_graph=False)
    assert live.told == [("access", False), ("needs_copy", 1, False)]


def test_an_access_ends_where_there_is_no_memory_for_that():
    live = Answers(MemoryError())
    with TorchFunctionMode(), pytest.raises(MemoryError):
        unseen_by_modes(live).access(torch.Tensor.view, is_graph=False)
    assert live.told[-1] == ("end", False)
