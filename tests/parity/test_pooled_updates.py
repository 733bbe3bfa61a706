"""Updates beside the next forward that a pool of workers computes, as it does those of large chunks.

Everything begins late: the thread of the host with each update, and each worker with its tiles.
"""

import threading

import pytest
import torch
from simulated import streams_of
from test_overlapped_updates import CASES, OTHER_CASES, Run, assert_same, outcome, run_program

from hf_patrickstar.optim.adam_kernel import AdamKernel

pytestmark = pytest.mark.own_streams

WORKERS = "hf_patrickstar-update"
ELSEWHERE = (*OTHER_CASES, "margin")
"""Cases that workers compute nothing for: another kernel does, or the thread of the caller, for a device."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in ELSEWHERE])
def test_late_workers_change_no_bit(name):
    case, settings = CASES[name]
    expected = outcome("threads", case, settings, overlap_optimizer=False)
    torch.manual_seed(0)
    with streams_of("pooled") as threads:
        run = Run(**settings, host_threads=3)
        case(run)
        found = run.end()
        run.engine.detach()
    assert_same(expected, found)
    assert {thread.rpartition("_")[0] for thread in threads} == {WORKERS}
    assert len(set(threads)) > 1


def test_workers_compute_while_the_next_forward_runs(monkeypatch):
    """The tiles of the last chunk are computed when the first module has, and the forward waits for them later."""
    with streams_of("pooled"):
        run = Run(host_threads=3)
        for seed in range(3):
            run.step(seed)
        run.model.state_dict()  # waits for all updates
        first_module_ran, update, threads = threading.Event(), AdamKernel._update_share, []
        last = run.engine.manager.chunks[-1]

        def update_late(kernel, job, number, share):
            if share[0].chunk is last:
                assert first_module_ran.wait(30)
                threads.append(threading.current_thread().name)
            update(kernel, job, number, share)

        monkeypatch.setattr(AdamKernel, "_update_share", update_late)
        run.step(3)
        run.model.transformer.wpe.register_forward_hook(lambda *_: first_module_ran.set())
        run.step(4)
        run.end()
    assert len(threads) > 1
    assert all(thread.startswith(WORKERS) for thread in threads)


EXIT = """
    import atexit, sys, time
    import torch
    from simulated import streams_of
    import test_overlapped_updates as tests
    from hf_patrickstar.optim.adam_kernel import AdamKernel

    context = streams_of("pooled")
    threads = context.__enter__()
    run = tests.Run(host_threads=3, dtype="bf16")
    run.step(0)
    update = AdamKernel._update_share
    def update_late(*args, **settings):
        time.sleep(0.005)
        update(*args, **settings)
    AdamKernel._update_share = update_late
    run.step(1)
    assert run.num_under_way > 3
    num_begun = len(threads)

    def save():
        assert len(threads) > num_begun
        torch.save(run.model.state_dict(), sys.argv[1])
    atexit.register(save)
"""


def test_a_program_that_exits_loses_nothing_that_workers_were_at(tmp_path):
    """Workers finish what they have been given, and the thread of the host computes the rest alone."""
    path = tmp_path / "weights.pt"
    run_program(EXIT, str(path))
    torch.manual_seed(0)
    run = Run(overlap_optimizer=False, dtype="bf16")
    for seed in range(2):
        run.step(seed)
    saved = torch.load(path)
    assert saved.keys() == run.model.state_dict().keys()
    assert all(torch.equal(saved[key], value) for key, value in run.model.state_dict().items())
