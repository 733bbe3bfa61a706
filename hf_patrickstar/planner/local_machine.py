"""Measures this machine: as each of several processes has it, and what the engine's own work costs its host."""

import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import torch

from hf_patrickstar.common.cores import own_cores
from hf_patrickstar.counts import Counts
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import Machine, find_machine
from hf_patrickstar.memory.compute_device import find_device, num_accelerators
from hf_patrickstar.report.measure import Sweeps

_LIMIT_S = 600
_MOST_LINES = 5
_NUM_LAYERS = 32
_WIDTH = 8
_CHUNK_NUMEL = 8 * _WIDTH * (_WIDTH + 1)
_NUM_STEPS = 9
_NUM_WARMUP = 3
"""A step is recorded, one follows its first plan, and one finds memory warm."""
_LEAST_S = 1e-9


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


def _alone(device: torch.device, counts: Counts, reduce_dtype: str) -> Collectives:
    """One process, whatever others there are."""
    return Collectives(0, 1, device, counts=counts, reduce_dtype=reduce_dtype)


def seconds_of_a_visit() -> float:
    """Measures how much longer a deep model of tiny layers takes with the engine, per visit to a chunk.

    Each chunk is loaded once in a step, by the plan. The model trains with the engine and without it in turns, two
    seconds in all; see [Note: cold caches] in ``report/measure.py``.

    Returns:
        Seconds of the host; the median of some steps.
    """
    device = find_device(None)
    sweeps = Sweeps(device)
    plain, ours = _make_model(sweeps).to(device), _make_model(sweeps)
    inputs = torch.ones(1, _WIDTH, device=device)
    # There is room for copies of all chunks and not for the optimizer's states beside them, so chunks do move.
    param_nbytes = sum(parameter.nbytes for parameter in ours.parameters())
    settings = {"placement": "host", "chunk_numel": _CHUNK_NUMEL, "chunk_budget": f"{2 * param_nbytes}B"}
    made = torch.optim.AdamW(ours.parameters(), lr=0.0)
    engine = PatrickStarEngine(ours, settings, made, device=device, process_group=_alone)
    try:
        differences = []
        for number in range(_NUM_WARMUP + _NUM_STEPS):
            own = sweeps.host_seconds(lambda: plain(inputs).sum().backward())
            plain.zero_grad(set_to_none=True)
            before = engine.counts.chunk_visits
            over = sweeps.host_seconds(lambda: ours(inputs).sum().backward())
            num_visits = engine.counts.chunk_visits - before
            for optimizer in engine.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if number >= _NUM_WARMUP:
                differences.append((over - own) / max(num_visits, 1))
    finally:
        engine.detach()
    return max(statistics.median(differences), _LEAST_S)


def _make_model(sweeps: Sweeps) -> torch.nn.Module:
    return sweeps.between(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_NUM_LAYERS))
