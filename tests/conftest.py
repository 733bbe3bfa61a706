import gc
import logging
import os
import shutil
import signal
import tempfile

# Before torch is imported: two shared cores, and spinning threads would steal each other's time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Plans leave files for runs there: each process of tests has a cache of its own.
CACHE = os.environ["HF_ASSETS_CACHE"] = tempfile.mkdtemp(prefix="hf_patrickstar_cache_")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts programs in the background so; tests interrupt themselves.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from support import inside
from support.processes import Workers
from support.streams import streams_of
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

from hf_patrickstar import units
from hf_patrickstar.runtime.rest import Rest
from hf_patrickstar.tracing.kept_traces import keep_traces

units.LEAST_BUDGET_NBYTES = 1  # models of tests take less than a MiB, and their budgets are numbers


def pytest_addoption(parser):
    parser.addoption(
        "--streams",
        default="threads",
        help="over which streams engines of the CPU tier run: 'threads' (the default), 'simulated' (every copy at the "
        "latest moment that the engine allows, races are errors), 'simulated:SEED' (at random moments), "
        "'delayed[:SEED]' (a real thread of the host begins its work late), or 'pooled[:SEED]' (so do the workers that "
        "it shares updates with, where there are several)",
    )

    parser.addoption(
        "--rest",
        default="auto",
        choices=("auto", "always", "partly", "never"),
        help="when engines rest: as they decide (the default), from their first step on where nothing moves, 'partly' "
        "(as if gradients had no room beside the chunks, so that only modules lose their hooks), or never",
    )


@pytest.fixture(autouse=True)
def _rest(request, monkeypatch):
    """Lets engines rest when the option says so; only a step that has been measured begins it otherwise.

    Tests whose result depends on when an engine rests are marked ``own_rest``.
    """
    choice = "auto" if "own_rest" in request.keywords else request.config.getoption("--rest")
    if choice in ("always", "partly"):
        monkeypatch.setattr(Rest, "waits_for_plans", False)
    if choice == "partly":
        monkeypatch.setattr(Rest, "_has_room", lambda self, peaks: False)
    elif choice == "never":
        monkeypatch.setattr(Rest, "_chunks_to_rest", lambda self, step: (frozenset(), False))


@pytest.fixture(autouse=True)
def _modes():
    """No mode watches operators of the next test; an engine that was dropped after an error has one on this thread."""
    yield
    for mode in _get_current_dispatch_mode_stack():
        if getattr(mode, "_mode_key", None) is None:
            _pop_mode()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _accelerate():
    """Accelerate forgets the precision and the device that a test chose, which later tests would be refused for."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _streams(request):
    """Runs the test over the streams that were asked for; tests that are about one kind are marked ``own_streams``."""
    with streams_of("threads" if "own_streams" in request.keywords else request.config.getoption("--streams")):
        yield


@pytest.fixture(autouse=True)
def _no_traces(monkeypatch):
    """Engines of a test keep no traces, which those of other tests would begin with; see ``keeping``."""
    monkeypatch.setattr("hf_patrickstar.tracing.estimator.keep_traces", lambda known: None)


@pytest.fixture
def keeping(monkeypatch):
    """Engines of the test keep the traces of steps that they estimate."""
    monkeypatch.setattr("hf_patrickstar.tracing.estimator.keep_traces", keep_traces)


@pytest.fixture
def recorded():
    """No engine estimates its first steps: they are recorded."""
    with inside.recorded():
        yield


@pytest.fixture(autouse=True)
def _log_levels():
    """Restores what a Trainer changes for its whole process: the levels of logs, which later tests would see."""
    package, level = logging.getLogger("hf_patrickstar"), transformers.logging.get_verbosity()
    try:
        yield
    finally:
        package.setLevel(logging.NOTSET)
        transformers.logging.set_verbosity(level)


def pytest_configure(config):
    """Processes that tests talk to run over the same streams."""
    try:
        streams_of(config.getoption("--streams"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    Workers.streams = config.getoption("--streams")


def pytest_unconfigure():
    shutil.rmtree(CACHE, ignore_errors=True)


def pytest_collection_finish():
    """What was imported need not be looked through whenever a test, or a Trainer, collects garbage."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available() and "GPU_TESTS_DEVICE" not in os.environ:
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
