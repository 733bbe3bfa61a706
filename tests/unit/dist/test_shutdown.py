"""What a process does when Python ends."""

import subprocess
import sys

SCRIPT = """
import atexit, os, time
from hf_patrickstar.dist import collectives

def destroy():
    print("destroyed")
    raise RuntimeError("a group is broken")

def pause(seconds):
    global num_pauses
    num_pauses += 1

num_pauses = 0
collectives.dist.is_initialized, collectives.dist.destroy_process_group = lambda: True, destroy
atexit.register(lambda: print(num_pauses, "pauses"))
atexit.register(print, "registered before")
collectives.leave_at_exit(destroys=True)
atexit.register(print, "registered between")
collectives.leave_at_exit(destroys=True)
atexit.register(print, "registered after")
collectives.time = type("", (), {"sleep": staticmethod(pause)})
child = os.fork()
if child:
    os.waitpid(child, 0)
    print("the child has ended", flush=True)
"""


def test_groups_are_destroyed_once_after_all_that_was_registered_since_and_not_by_a_child():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=True)
    lines = done.stdout.splitlines()
    child, own = lines[:4], lines[5:]
    assert child == ["registered after", "registered between", "registered before", "0 pauses"]
    assert lines[4] == "the child has ended"
    assert own[:3] == ["registered after", "registered between", "destroyed"]
    assert own[3:] == ["registered before", "20 pauses"], "also where a group cannot be destroyed"
    assert "a group is broken" in done.stderr
