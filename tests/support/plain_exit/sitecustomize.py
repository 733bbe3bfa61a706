"""Python imports this when it starts: processes of plain torch give the threads of gloo time to end.

They abort now and then otherwise; ``leave_at_exit`` in ``hf_patrickstar/dist/collectives.py`` says why.
"""

import atexit
import time


@atexit.register
def run_other_threads():
    """Lets go of Python's lock several times."""
    for _ in range(20):
        time.sleep(0.005)
