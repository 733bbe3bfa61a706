"""Names in a profile."""

import pytest
import torch

from hf_patrickstar.runtime.ranges import named


@pytest.mark.parametrize(
    ("indices", "text"),
    [((), "patrickstar: plan"), ((7,), "patrickstar: plan chunk 7"), ((7, 0), "patrickstar: plan chunks 7, 0")],
)
def test_what_is_done_has_a_name_in_a_profile(indices, text):
    with torch.autograd.profiler.profile(use_kineto=False) as profile, named("plan", *indices):
        torch.ones(1).add(1)
    names = [event.name for event in profile.function_events]
    assert names.count(text) == 1
    (event,) = [event for event in profile.function_events if event.name == text]
    assert "aten::add" in [child.name for child in event.cpu_children]


def test_without_a_profiler_nothing_is_made():
    assert named("load", 1) is named("evict", 2)
    with named("load", 1), named("load", 1):
        pass


def test_an_error_inside_goes_through():
    with pytest.raises(KeyError), named("load", 1):
        raise KeyError
