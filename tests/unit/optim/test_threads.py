"""How many threads update optimizer states on the host, and that the bits do not depend on it."""

import math

import pytest
import torch

from hf_patrickstar.optim import threads as module
from hf_patrickstar.optim.adam_kernel import AdamKernel
from hf_patrickstar.optim.kernels import make_kernel
from hf_patrickstar.optim.threads import HostThreads, choose_threads

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
    monkeypatch.setattr(module, "usable_cores", lambda: frozenset(range(16)))
    monkeypatch.setattr(module, "cpu_quota", lambda: math.inf)


def choose(environment, setting="auto", sharers=2, launcher=None):
    return choose_threads(setting, sharers, environment, lambda: launcher)


@pytest.mark.parametrize("environment", [FROM_TORCHRUN, FROM_ACCELERATE])
@pytest.mark.parametrize(("sharers", "num"), [(1, 16), (2, 8), (3, 5), (16, 1), (32, 1)])
@pytest.mark.parametrize("launcher", [None, {}, {"PATH": "/bin"}])
def test_one_thread_by_the_launcher_becomes_the_cores_of_the_process(machine, environment, sharers, num, launcher):
    threads, said = choose(environment, sharers=sharers, launcher=launcher)
    assert threads.num == num
    assert said == (
        f"host_threads=auto: {num} for the optimizer's update on the host (16 cores, {sharers} processes on them), "
        "because OMP_NUM_THREADS=1 comes from the launcher; 1 for all else"
    )


def test_a_limit_of_the_cgroup_counts(machine, monkeypatch):
    monkeypatch.setattr(module, "cpu_quota", lambda: 6.5)
    assert choose(FROM_TORCHRUN)[0].num == 3


@pytest.mark.parametrize(
    ("environment", "launcher", "why"),
    [
        (FROM_TORCHRUN, {"OMP_NUM_THREADS": "1"}, "1, as OMP_NUM_THREADS said before the launcher began"),
        ({"OMP_NUM_THREADS": "4", "TORCHELASTIC_RUN_ID": "none"}, {}, "1, as OMP_NUM_THREADS or the program says"),
        ({"OMP_NUM_THREADS": "1"}, {}, "1, as OMP_NUM_THREADS or the program says"),
        ({"TORCHELASTIC_RUN_ID": "none"}, {}, "1, as torch has chosen"),
        ({}, None, "1, as torch has chosen"),
    ],
)
def test_what_somebody_has_set_holds(machine, environment, launcher, why):
    threads, said = choose(environment, launcher=launcher)
    assert threads.num is None
    assert said == f"host_threads=auto: {why}"


def test_a_program_that_has_set_its_threads_keeps_them(machine):
    torch.set_num_threads(2)
    assert choose(FROM_TORCHRUN)[0].num is None


def test_a_number_holds_whatever_the_environment_says(machine):
    threads, said = choose(FROM_TORCHRUN, setting=5)
    assert (threads.num, said) == (5, "host_threads=5: as asked")


@pytest.mark.parametrize(
    ("threads", "has_same_bits", "inside"),
    [
        (HostThreads(3), True, 3),
        (HostThreads(3), False, 1),
        (HostThreads(3, is_asked=True), False, 3),
        (HostThreads(), True, 1),
    ],
)
def test_threads_are_used_inside_of_a_block_alone(threads, has_same_bits, inside):
    with pytest.raises(KeyError), threads.inside(has_same_bits):  # noqa: PT012
        assert torch.get_num_threads() == inside
        raise KeyError
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("cls", "options", "prefers_fused", "has_same_bits"),
    [
        (torch.optim.AdamW, {}, True, True),
        (torch.optim.AdamW, {}, False, False),
        (torch.optim.Adam, {"fused": True}, False, True),
        (torch.optim.AdamW, {"foreach": True}, True, False),
        (torch.optim.AdamW, {"fused": False}, True, False),
        (torch.optim.SGD, {}, True, False),
        (torch.optim.Adafactor, {}, True, False),
    ],
)
def test_only_fused_adam_is_known_to_have_the_same_bits(cls, options, prefers_fused, has_same_bits):
    optimizer = cls([torch.nn.Parameter(torch.zeros(1))], lr=0.1, **options)
    kernel = make_kernel(optimizer, None, prefers_fused, HostThreads(3))
    assert kernel.has_same_bits == has_same_bits
    assert kernel.threads.num == 3
    assert isinstance(kernel, AdamKernel) == (cls in (torch.optim.Adam, torch.optim.AdamW))


@pytest.mark.parametrize("num", [2, 3, 5, 7])
@pytest.mark.parametrize("numel", [2**19, 2**19 - 64, 99_991, 64 * 3001])
def test_fused_adam_has_the_same_bits_with_any_number_of_threads(numel, num):
    """With the widening of the gradient, the product with the coefficient, and the rounding of the master."""

    def update():
        generator = torch.Generator().manual_seed(0)
        master, exp_avg = (torch.randn(numel, generator=generator) for _ in range(2))
        gradient = torch.randn(numel, generator=generator).bfloat16().float()
        exp_avg_sq = torch.rand(numel, generator=generator)
        torch._foreach_mul_([gradient], torch.tensor(0.37))
        options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
        lists = ([master], [gradient], [exp_avg], [exp_avg_sq], [], [torch.tensor(3.0)])
        torch._fused_adamw_(*lists, **options, amsgrad=False, maximize=False)
        return master, exp_avg, exp_avg_sq, master.bfloat16()

    expected = update()
    with HostThreads(num).inside(True):
        found = update()
    assert all(map(torch.equal, found, expected))
