"""Masters and optimizer states on the disk: everybody sees what an engine with room for them in memory would show.

Each case of updates beside the next forward gives the same with all states on the disk, and with a part of them there.
"""

import pytest
import test_overlapped_8bit_updates as in_8_bits
import test_overlapped_updates as overlapped
from support import inside
from support.disk import share_on_disk
from support.quantized_states import begin_apart
from support.same import assert_same
from test_overlapped_updates import outcome
from test_streamed_updates import MARGIN, OVER_BUS

pytestmark = pytest.mark.own_streams

CASES = {name: found for name, found in overlapped.CASES.items() if name not in overlapped.OTHER_CASES}
STREAMS = {"host": ("simulated", "threads", "simulated:1", "delayed"), "device": ("threads", "delayed", "delayed:1")}
"""The race detector does not know what another thread than that of the program puts into streams."""
AT_ONCE = {"overlap_optimizer": False, "updates": "host"}


@pytest.fixture
def engines(monkeypatch):
    """How many chunks each engine had on the disk after it was made."""
    found, init = [], overlapped.Run.__init__

    def make(run, *args, **kwargs):
        init(run, *args, **kwargs)
        found.append(sum(chunk.is_on_disk for chunk in inside.chunks(run.engine)))

    monkeypatch.setattr(overlapped.Run, "__init__", make)
    return found


@pytest.mark.parametrize(("number", "name"), enumerate(CASES), ids=list(CASES))
@pytest.mark.parametrize("updates", ["host", "device"])
def test_everything_is_as_in_memory(engines, tmp_path, number, name, updates):
    case, settings = CASES[name]
    expected = outcome("threads", case, {**settings, **AT_ONCE})
    engines.clear()
    there = OVER_BUS if updates == "device" else {}
    there = {**settings, **there, **(MARGIN if there and name == "margin" else {}), "disk_path": str(tmp_path)}
    for streams in STREAMS[updates][number % 2 :]:
        with share_on_disk((1.0, 0.3)[number % 2]):
            assert_same(expected, outcome(streams, case, there))
    assert min(engines) > 0
    assert not list(tmp_path.iterdir())


IN_8_BITS = {name: found for name, found in in_8_bits.CASES.items() if name != "margin"}


@pytest.mark.parametrize(("number", "name"), enumerate(IN_8_BITS), ids=list(IN_8_BITS))
@pytest.mark.parametrize("updates", ["host", "device"])
def test_states_of_8_bits_are_as_in_memory(engines, tmp_path, number, name, updates):
    case, settings = IN_8_BITS[name]
    settings = {"make_optimizer": in_8_bits.OPTIMIZERS["adamw"], **settings}
    begin_apart()
    expected = outcome("threads", case, {**settings, **AT_ONCE})
    engines.clear()
    for streams in STREAMS[updates][number % 2 :]:
        begin_apart()
        there = {**settings, **(OVER_BUS if updates == "device" else {}), "disk_path": str(tmp_path)}
        with share_on_disk((1.0, 0.3)[number % 2]):
            assert_same(expected, outcome(streams, case, there))
    assert min(engines) > 0
