import contextlib
import gc
import os

# Before torch is imported: two shared cores, and spinning threads would steal each other's time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from simulated import simulated_streams


def pytest_addoption(parser):
    parser.addoption(
        "--streams",
        default="threads",
        help="over which streams engines of the CPU tier run: 'threads' (the default), 'simulated' (every copy at the "
        "latest moment that the engine allows, races are errors), or 'simulated:SEED' (at random moments)",
    )


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _streams(request):
    """Runs the test over the streams that were asked for; tests that are about one kind are marked ``own_streams``."""
    kind, _, seed = request.config.getoption("--streams").partition(":")
    if kind not in ("threads", "simulated"):
        raise pytest.UsageError(f"--streams: '{kind}' is neither 'threads' nor 'simulated'")
    is_simulated = kind == "simulated" and "own_streams" not in request.keywords
    with simulated_streams(int(seed) if seed else None) if is_simulated else contextlib.nullcontext():
        yield


def pytest_collection_finish():
    """What was imported need not be looked through whenever a test, or a Trainer, collects garbage."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
