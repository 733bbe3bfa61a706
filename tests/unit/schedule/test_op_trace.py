"""Notes of a micro-batch as they are kept for later plans."""

import pickle
import typing

from hf_patrickstar.schedule import op_trace as module
from hf_patrickstar.schedule.op_trace import OpTrace
from hf_patrickstar.schedule.script import Begin, BlockingCopy, HostWork, Kernel, Part

NOTES = (
    *(Begin(Part.FORWARD), module.EnterForward(((2, 8),), (5,)), module.Allocate(((7, 64), (8, 1)))),
    *(module.Acquire(1), Kernel("mm", 10, 20, "bfloat16"), Kernel("mm", 10, 20, "bfloat16", measured_ns=3)),
    *(HostWork("mm", 10, 20), BlockingCopy(4, True, False, "place"), module.LetGo(1)),
    *(module.Release(1, True), module.Free(7), module.LookedUp(2, 16)),
    *(module.LeaveForward(), Begin(Part.BACKWARD), module.Need(1)),
    *(module.Gradient(1, 8, 12), module.LeaveBackward()),
)


def test_every_kind_of_note_is_read_back_as_it_was_written():
    assert {type(note) for note in NOTES} == set(typing.get_args(module.Note))
    found = pickle.loads(pickle.dumps(OpTrace(NOTES)))
    assert found.notes == NOTES
    assert [type(note) for note in found.notes] == [type(note) for note in NOTES], "equal fields are not equal notes"
    assert type(found.notes[0].part) is Part
    assert pickle.loads(pickle.dumps(OpTrace(()))) == OpTrace(())
