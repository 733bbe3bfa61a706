"""Python imports this when it starts: processes of plain torch end after the threads of gloo have run.

They abort now and then otherwise; ``hf_patrickstar/runtime/departure.py`` says why.
"""

import atexit
import time


@atexit.register
def run_other_threads():
    """Lets go of Python's lock some times."""
    for _ in range(20):
        time.sleep(0.005)
