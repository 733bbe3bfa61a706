"""Tides of long steps are short, and what is no survey is refused."""

import pytest

from hf_patrickstar.dist.order import Room
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.report.survey import MOST_MOMENTS, Survey, Tide
from hf_patrickstar.schedule.plan import Actions, Plan
from hf_patrickstar.schedule.trace import Trace, Visit


def test_moments_of_a_long_step_are_put_together():
    num = 2 * MOST_MOMENTS + 1
    visits = tuple(Visit(moment % 7, (), moment % 5, moment % 3) for moment in range(num))
    actions = tuple(Actions(evict=(1,), load=(2, 3)) for _ in range(num))
    plan = Plan(actions, {}, tuple(range(num)))
    tide = Tide.of(Trace("training/1", (1,) * 7, visits, forward_ends=(9,)), plan, Room(70, None, 2, ()), 100)
    assert (tide.stride, len(tide.copies), tide.fixed_nbytes) == (3, 667, 30)
    assert (tide.loads[0], tide.evictions[0]) == (6, 3)
    assert (sum(tide.loads), sum(tide.evictions)) == (2 * num, num)


def test_moments_that_are_put_together_have_the_bytes_of_the_fullest_one():
    """The most of each kind may be at different moments: their sum would be more than was ever there."""
    num = 2 * MOST_MOMENTS + 1
    kinds = [(0, 0, 50), (0, 40, 0), (20, 0, 5), *[(0, 0, 0)] * (num - 3)]
    visits = tuple(Visit(7 + moment % 3, (), others, gradients) for moment, (_, gradients, others) in enumerate(kinds))
    plan = Plan((Actions(),) * num, {}, tuple(copies for copies, _, _ in kinds))
    tide = Tide.of(Trace("training/1", (1,) * 10, visits), plan, Room(70, None, 2, ()), 100)
    row = (tide.chunks[0], tide.copies[0], tide.gradients[0], tide.others[0], tide.totals[0])
    assert row == (7, 0, 0, 50, 30 + 50)
    assert tide.totals[1] == 30 + 2, "no moment has less than is there all the time"


GOOD = {"budgets": {}, "owners": {}, "chunks": [], "tides": [], "reasons": []}
ROW = {"key": "k", "limit_nbytes": 1, "fixed_nbytes": 0, "stride": 1, "forward_ends": [], "chunks": [0], "copies": [0]}
TIDE = {**ROW, "gradients": [0], "others": [0], "loads": [0], "evictions": [0]}


@pytest.mark.parametrize(
    "change",
    [
        {"budgets": None},
        {"owners": {"device": 3}},
        {"chunks": [{"index": 0}]},
        {"tides": [{**TIDE, "copies": [0, 1]}]},
        {"tides": [{**TIDE, "unknown": 1}]},
        {"reasons": None},
    ],
)
def test_what_is_no_survey_is_refused(change):
    assert Survey.from_dict({**GOOD, "tides": [TIDE]}).tides[0].totals == (0,)
    with pytest.raises(ConfigError, match="this is not a survey of an engine"):
        Survey.from_dict({**GOOD, **change})
