"""``hf-patrickstar check``: whether a user's own training is the same with ``--patrickstar`` as without.

[Note: runs of a check]
Each training is a process of its own, one after the other, so that no more than one model is in memory. The first two
are compared after every step by what stands for the bits of each tensor; the weights themselves are kept for the last
step alone. If bits differ after an earlier step, two further trainings stop there, so that values can be told. Where
bits differ, a last one repeats the plain training: a script that is not the same twice proves nothing.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hf_patrickstar.errors import ConfigError

if TYPE_CHECKING:
    from hf_patrickstar.integrations.sameness import Comparison, Divergence, TensorDifference
    from hf_patrickstar.integrations.short_training import Record

_DEVICES = "CUDA_VISIBLE_DEVICES"
_SIGNALLED = 128
"""What a shell adds to the number of a signal that has ended a process."""


class _ScriptFailed(Exception):
    """The script failed, which it has told by itself.

    Args:
        status: Its exit status.
    """

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command understands."""
    parser.add_argument(
        "--steps", type=int, default=2, metavar="N", help="optimizer steps of each training; 2 by default"
    )
    parser.add_argument("script", metavar="SCRIPT", help="a training script that uses PatrickStarTrainer or the mixin")
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="the script's own arguments; --patrickstar may be among them",
    )


def run(options: argparse.Namespace) -> int:
    """Trains without and with ``--patrickstar`` and prints whether both are the same; see [Note: runs of a check].

    Returns:
        0 if the bits are the same, or a 16-bit training is close; 1 if not; the script's own status if it failed.

    Raises:
        ConfigError: If an argument makes no sense, or the script never trains, or cannot train in chunks.
    """
    if options.steps < 1:
        raise ConfigError(f"--steps: must be at least 1, got {options.steps}")
    if not os.path.isfile(options.script):
        raise ConfigError(f"there is no script '{options.script}'; give the path of a file")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("it compares trainings of one process; start it without accelerate launch or torchrun")
    with tempfile.TemporaryDirectory(prefix="hf-patrickstar-check-") as directory:
        try:
            text, status = _check(options, pathlib.Path(directory))
        except _ScriptFailed as failed:
            return failed.status
    print(text)
    return status


def _check(options: argparse.Namespace, directory: pathlib.Path) -> tuple[str, int]:
    """What to print, and the exit status."""
    # torch and transformers take seconds to import.
    from hf_patrickstar.integrations.sameness import Comparison, Divergence, find_divergence
    from hf_patrickstar.integrations.short_training import WEIGHTS, Record

    def compare(num_done: int) -> tuple[Record, Divergence | None, Comparison]:
        homes = [directory / f"{name}-{num_done}" for name in ("plain", "chunked")]
        plain, chunked = (_train(options, home, num_done, is_chunked=home is homes[1]) for home in homes)
        paths = [str(home / WEIGHTS) for home in homes]
        return plain, find_divergence(plain, chunked), Comparison(plain, chunked, *paths)

    plain, divergence, comparison = compare(options.steps)
    if divergence is None:
        return _same(plain, comparison), 0
    differences = comparison.differences() if divergence.are_numbers_close else {}
    if divergence.are_numbers_close and all(item.is_close for item in differences.values()):
        return _close(divergence, differences), 0
    if divergence.step is not None and 1 <= divergence.step < options.steps:
        *_, comparison = compare(divergence.step)
    again = _train(options, directory / "plain-again", options.steps, is_chunked=False)
    return _different(divergence, comparison, is_repeatable=find_divergence(plain, again) is None), 1


def _train(options: argparse.Namespace, home: pathlib.Path, num_done: int, *, is_chunked: bool) -> "Record":
    """Trains in a process of its own."""
    from hf_patrickstar.integrations.short_training import PROBLEM, Record, Task, command_of

    home.mkdir()
    task = Task(str(home), is_chunked, options.steps, num_done, options.script, tuple(options.arguments))
    which = "with --patrickstar" if is_chunked else "without --patrickstar"
    print(f"hf-patrickstar check: training {which}, {num_done} steps", file=sys.stderr, flush=True)
    device = os.environ.get(_DEVICES, "0").split(",")[0]  # plain training would use several GPUs at once
    environment = {**os.environ, _DEVICES: device, "PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    finished = subprocess.run(command_of(task), env=environment, check=False)
    if (home / PROBLEM).exists():
        raise ConfigError((home / PROBLEM).read_text(encoding="utf-8"))
    if finished.returncode:
        status = finished.returncode if finished.returncode > 0 else _SIGNALLED - finished.returncode
        print(
            f"hf-patrickstar check: '{options.script}' failed {which}, with exit status {status}",
            file=sys.stderr,
        )
        raise _ScriptFailed(status)
    return Record.read(str(home))


def _same(plain: "Record", comparison: "Comparison") -> str:
    num_losses = sum(map(len, plain.losses))
    return (
        f"same bits: {len(plain.losses)} steps, {num_losses} losses, {len(plain.norms)} gradient norms, and "
        f"{len(plain.digests[-1])} parameters and buffers of {comparison.numel:,} elements"
    )


def _close(divergence: "Divergence", differences: "Mapping[str, TensorDifference]") -> str:
    lines = ["close, not the same bits, which a 16-bit training need not have"]
    if differences:
        name, most = max(differences.items(), key=lambda item: item[1].largest)
        lines.append(
            f"{len(differences)} parameters and buffers differ at the end, by {most.largest:.3g} at most ('{name}'), "
            "as rounding and the learning rates allow"
        )
    return "\n  ".join([*lines, *divergence.numbers])


def _different(divergence: "Divergence", comparison: "Comparison", *, is_repeatable: bool) -> str:
    lines = ["different: all parameters and buffers have the same bits, losses or gradient norms have not"]
    if divergence.step is not None:
        name = divergence.names[0]
        when = f"after step {divergence.step}" if divergence.step else "before the first step"
        lines = [f"different: '{name}' {when}"]
        if divergence.step:
            lines[0] += f", {_in_words(comparison.difference_of(name))}"
        lines.append(f"parameters and buffers that differ {when}: {len(divergence.names)}")
    lines += divergence.numbers
    lines.append(
        "a second training without --patrickstar has the same bits as the first one"
        if is_repeatable
        else "a second training without --patrickstar differs from the first one, too: the script draws or orders "
        "something anew each time, which says nothing about --patrickstar; make it repeatable with set_seed"
    )
    return "\n  ".join(lines)


def _in_words(difference: "TensorDifference") -> str:
    if not difference.problem and not difference.num_different:
        return "but not when both trainings were repeated"
    return difference.problem or (
        f"{difference.num_different:,} of {difference.numel:,} elements, by {difference.largest:.6g} at most"
    )
