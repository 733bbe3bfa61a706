"""How many threads update optimizer states on the host, and which optimizers use them."""

import math

import pytest
import torch

from hf_patrickstar import cores
from hf_patrickstar.optim import threads as module
from hf_patrickstar.optim.threads import choose_threads

FROM_TORCHRUN = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
FROM_ACCELERATE = {"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "no"}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def machine(monkeypatch):
    """A machine with 16 cores and no limit."""
    for user in (cores, module):
        monkeypatch.setattr(user, "usable_cores", lambda: frozenset(range(16)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: math.inf)


@pytest.fixture
def torch_threads(monkeypatch):
    """Lets torch say that it computes with so many threads."""
    return lambda num: monkeypatch.setattr(module.torch, "get_num_threads", lambda: num)


def choose(environment, setting="auto", sharers=2, launcher=None):
    return choose_threads(setting, sharers, environment, lambda: launcher)


@pytest.mark.parametrize("environment", [FROM_TORCHRUN, FROM_ACCELERATE])
@pytest.mark.parametrize(("sharers", "num"), [(1, 16), (2, 8), (3, 5), (16, 1), (32, 1)])
@pytest.mark.parametrize("launcher", [None, {}, {"PATH": "/bin"}])
def test_one_thread_by_the_launcher_becomes_the_cores_of_the_process(machine, environment, sharers, num, launcher):
    threads, said = choose(environment, sharers=sharers, launcher=launcher)
    assert threads == num
    assert said == (
        f"host_threads=auto: {num} for the optimizer's update on the host (16 cores, {sharers} processes on them), "
        "because OMP_NUM_THREADS=1 comes from the launcher; 1 for all else"
    )


def test_a_limit_of_the_cgroup_counts(machine, monkeypatch):
    monkeypatch.setattr(cores, "cpu_quota", lambda: 6.5)
    assert choose(FROM_TORCHRUN)[0] == 3


@pytest.mark.parametrize(
    ("environment", "launcher", "why"),
    [
        (FROM_TORCHRUN, {"OMP_NUM_THREADS": "1"}, "1, as OMP_NUM_THREADS said before the launcher began"),
        ({"OMP_NUM_THREADS": "4", "TORCHELASTIC_RUN_ID": "none"}, {}, "1, as OMP_NUM_THREADS or the program says"),
        ({"OMP_NUM_THREADS": "1"}, {}, "1, as OMP_NUM_THREADS or the program says"),
    ],
)
def test_what_somebody_has_set_holds(machine, environment, launcher, why):
    threads, said = choose(environment, launcher=launcher)
    assert threads is None
    assert said == f"host_threads=auto: {why}"


@pytest.mark.parametrize("environment", [{}, {"TORCHELASTIC_RUN_ID": "none"}])
@pytest.mark.parametrize(("sharers", "num"), [(2, 8), (3, 5), (16, 1), (32, 1)])
def test_processes_for_which_nobody_has_set_a_number_share_the_cores(machine, torch_threads, environment, sharers, num):
    torch_threads(16)
    threads, said = choose(environment, sharers=sharers)
    assert threads == num
    assert said == (
        f"host_threads=auto: {num} for the optimizer's update on the host (16 cores, {sharers} processes on them), "
        "because OMP_NUM_THREADS is not set; 16 for all else"
    )


@pytest.mark.parametrize(("sharers", "now"), [(1, 16), (2, 8), (2, 4), (32, 1)])
def test_threads_of_torch_that_are_no_more_than_the_share_of_the_process_stay(machine, torch_threads, sharers, now):
    torch_threads(now)
    threads, said = choose({}, sharers=sharers)
    assert threads is None
    assert said == f"host_threads=auto: {now}, as torch has chosen"


def test_a_limit_of_the_cgroup_is_shared_where_nobody_has_set_a_number(machine, torch_threads, monkeypatch):
    torch_threads(16)
    monkeypatch.setattr(cores, "cpu_quota", lambda: 6.5)
    assert choose({})[0] == 3


def test_a_program_that_has_set_its_threads_keeps_them(machine):
    torch.set_num_threads(2)
    assert choose(FROM_TORCHRUN)[0] is None


def test_a_number_holds_whatever_the_environment_says(machine):
    threads, said = choose(FROM_TORCHRUN, setting=5)
    assert (threads, said) == (5, "host_threads=5: as asked")
