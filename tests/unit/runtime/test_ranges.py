"""Names in a profile."""

import pytest
import torch

from hf_patrickstar.runtime.ranges import named, phase


class Phases:
    @phase
    def before_module(self, number, *, is_last):
        """Doc."""
        torch.ones(1).add(number)
        if is_last:
            raise KeyError
        return number


def children(profile, text):
    return [[child.name for child in event.cpu_children] for event in profile.function_events if event.name == text]


@pytest.mark.parametrize(
    ("indices", "text"),
    [((), "patrickstar: plan"), ((7,), "patrickstar: plan chunk 7"), ((7, 0), "patrickstar: plan chunks 7, 0")],
)
def test_what_is_done_has_a_name_in_a_profile(indices, text):
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        with named("plan", *indices):
            torch.ones(1).add(1)
        assert Phases().before_module(3, is_last=False) == 3
        with pytest.raises(KeyError):
            Phases().before_module(3, is_last=True)
    (found,) = children(profile, text)
    assert "aten::add" in found
    assert ["aten::add" in found for found in children(profile, "patrickstar: before_module")] == [True, True]


def test_without_a_profiler_nothing_is_made():
    assert named("load", 1) is named("evict", 2)
    with pytest.raises(KeyError), named("load", 1), named("load", 1):
        raise KeyError
    assert Phases().before_module(3, is_last=False) == 3
    assert (Phases.before_module.__name__, Phases.before_module.__doc__) == ("before_module", "Doc.")
