"""Measures this machine as each of several processes has it."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import Any

from hf_patrickstar.common.cores import own_cores
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import Machine, find_machine
from hf_patrickstar.memory.compute_device import num_accelerators

_LIMIT_S = 600
_MOST_LINES = 5


def measure_launched(num_processes: int) -> Machine:
    """Measures this machine with several processes, which are started for it: ``hf-patrickstar env --measure`` in each.

    Args:
        num_processes: How many; each has a device of its own, or else an equal part of the cores.

    Raises:
        ConfigError: If there are not so many devices, or a process fails.
    """
    if 0 < num_accelerators() < num_processes:
        raise ConfigError(
            f"--machine this: {num_processes} processes need as many devices, {num_accelerators()} are here; use "
            "fewer, or name a machine that has them"
        )
    command = [sys.executable, *f"-m torch.distributed.run --standalone --nproc_per_node {num_processes}".split()]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads_of_each(num_processes))}
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "machine.json"
        command += ["-m", "hf_patrickstar", "env", "--measure", "--json", str(file)]
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        try:
            done = subprocess.run(command, env=environment, timeout=_LIMIT_S, check=False, **streams)
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(command, -signal.SIGKILL, "", f"killed after {_LIMIT_S:g} s")
        if done.returncode:
            said = "\n".join(done.stderr.strip().splitlines()[-_MOST_LINES:])
            raise ConfigError(
                f"--machine this: {num_processes} processes cannot measure this machine together (exit status "
                f"{done.returncode}): {said}; run 'torchrun --nproc_per_node {num_processes} -m hf_patrickstar env "
                "--measure' to see all that they say"
            )
        return find_machine(str(file))


def threads_of_each(num_processes: int) -> int:
    """Threads of torch in each of several processes that share the cores of this one; ``OMP_NUM_THREADS`` says else."""
    return int(os.environ.get("OMP_NUM_THREADS") or own_cores(num_processes))
