"""Where the seconds of a step went, by a trace that is made by hand, and by one of torch's profiler."""

import pytest

MS = 1000.0
BEGIN = 5_000_000.0


def span(kind, name, begin_ms, end_ms, thread=1, **told):
    moments = {"ts": BEGIN + begin_ms * MS, "dur": (end_ms - begin_ms) * MS}
    return {"ph": "X", "cat": kind, "name": name, "tid": thread, "args": told, **moments}


def launch(number, begin_ms, thread=1):
    return span("cuda_runtime", "cudaLaunchKernel", begin_ms, begin_ms + 0.01, thread, correlation=number)


def kernel(number, begin_ms, end_ms):
    return span("kernel", "gemm", begin_ms, end_ms, 7, correlation=number)


TRACE = [
    {"ph": "M", "name": "process_name", "pid": 1},
    {"ph": "i", "cat": "cuda_runtime", "name": "an instant", "ts": BEGIN},
    # The step before, which is not summarized, but whose updates run on.
    *(span("user_annotation", name, *times) for name, *times in (("step", -60, -10), ("backward", -50, -20))),
    span("user_annotation", "update", -20, -10),
    kernel(99, -49, -21),
    # The step.
    span("user_annotation", "step", 0, 100),
    span("user_annotation", "forward", 0, 30),
    span("user_annotation", "backward", 30, 60),
    span("user_annotation", "clip", 60, 82),
    span("user_annotation", "update", 82, 99),
    span("gpu_user_annotation", "forward", 10, 100, 7),
    # Forward waits for a chunk; a thread whose operators are not recorded starts a copy meanwhile.
    span("user_annotation", "patrickstar: wait for chunk 7", 1, 9),
    span("cuda_runtime", "cudaEventSynchronize", 2, 9),
    span("cuda_runtime", "cudaMemcpyAsync", 3, 8, 3),
    span("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 4, 12, 8, bytes=1000),
    launch(1, 9.5),
    kernel(1, 10, 40),
    # Backward is in autograd's thread. Its second kernel, and another stream's, run while the host clips.
    span("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 31, 59, 2),
    span("cpu_op", "aten::mm", 32, 58, 2),
    launch(2, 33, 2),
    launch(3, 34, 2),
    kernel(2, 50, 62),
    kernel(3, 61, 65),
    span("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 62, 70, 9, bytes=500),
    launch(4, 65.2),
    kernel(4, 65.5, 70),
    # Then the host is in Python.
    launch(5, 90),
    kernel(5, 90, 100),
]
UPDATES = [(BEGIN + begin * MS, BEGIN + end * MS) for begin, end in ((-15, -5), (-5, 3), (83, 101))]


@pytest.fixture
def summarize(load):
    return load("trace_summary").summarize


def test_kernels_gaps_and_short_gaps_are_the_step(summarize):
    found = summarize(TRACE, UPDATES)
    assert found["seconds"] == 0.1
    # A kernel is of the phase that launched it, and what runs twice at a time counts once.
    assert found["kernels"] == {"forward": 0.03, "backward": 0.015, "clip": 0.0045, "update": 0.01}
    assert found["copies"] == {"to_device": 0.008, "to_host": 0.008}
    assert found["copied_nbytes"] == {"to_device": 1000, "to_host": 500}
    assert [(row["at"], row["seconds"], row["copying"], row["host"]) for row in found["gaps"]] == [
        (0.0, 0.01, 0.006, "patrickstar: wait for chunk 7 > cudaEventSynchronize"),
        (0.04, 0.01, 0.0, "aten::mm"),
        (0.07, 0.02, 0.0, "Python in clip"),
    ]
    assert found["short_gap_seconds"] == 0.0005
    assert found["gap_seconds"] == 0.04
    assert sum(found["kernels"].values()) + found["gap_seconds"] + found["short_gap_seconds"] == pytest.approx(0.1)
    assert found["unexplained"] == {"Python in forward": 0.00199, "Python in clip": 0.012, "Python in update": 0.008}
    assert found["unexplained_share"] == 0.2199


def test_updates_stand_between_backward_and_the_next_forward(summarize):
    found = summarize(TRACE, UPDATES)
    assert found["updates"] == [[-0.015, -0.005], [-0.005, 0.003], [0.083, 0.101]]
    assert found["backward_to_update"] == pytest.approx(0.083 - 0.065)
    # The kernel that runs beside the copy of the chunk cannot need it.
    assert found["update_to_kernel"] == pytest.approx(0.050 - 0.003)
    assert "update_to_kernel" not in summarize(TRACE)
