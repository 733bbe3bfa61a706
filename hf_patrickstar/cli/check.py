"""``hf-patrickstar check``: whether a user's own training is the same with ``--patrickstar`` as without.

[Note: runs of a check]
Each training is a process of its own, one after the other, so that no more than one model is in memory. They are
compared after every step by a hash of each tensor; the weights themselves are kept for the last step alone. Where bits
differ, a third training repeats the plain one: a script that is not the same twice proves nothing.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from hf_patrickstar.checkpoint.torch_state import verify_files
from hf_patrickstar.cli.comparison import RECORD, Record, compare
from hf_patrickstar.errors import ConfigError

HELP = (
    "compare a few steps of a script's training without and with --patrickstar, bit by bit. It compares losses, "
    "gradient norms, parameters and buffers. Nothing is saved, evaluated or reported. Of a checkpoint, it verifies the "
    "checksums of the optimizer's files."
)

_TRAINING = "hf_patrickstar.cli.check_run"
_DEVICES = "CUDA_VISIBLE_DEVICES"
_SIGNALLED = 128
"""What a shell adds to the number of a signal that has ended a process."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command understands."""
    add = parser.add_argument
    add("--steps", type=int, default=2, metavar="N", help="optimizer steps of each training (default: %(default)s)")
    add("script", metavar="SCRIPT", help="a training script that trains with the Trainer, or a checkpoint")
    text = "the script's own arguments; --patrickstar may be among them"
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help=text)


def run(options: argparse.Namespace) -> int:
    """Trains without and with ``--patrickstar`` and prints whether both are the same; see [Note: runs of a check].

    Returns:
        0 if the bits are the same, or a 16-bit training is close; 1 if not.

    Raises:
        CheckpointError: If a file of a checkpoint is damaged.
        ConfigError: If an argument makes no sense, or the script never trains, or cannot train in chunks.
        SystemExit: If the script failed, with its status.
    """
    if os.path.isdir(options.script):
        print("\n".join(verify_files(options.script)) or f"{options.script}: no file of an optimizer")
        return 0
    if options.steps < 1:
        raise ConfigError(f"--steps: must be at least 1, got {options.steps}")
    if not os.path.isfile(options.script):
        raise ConfigError(f"there is no script or checkpoint '{options.script}'; give the path of one")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("it compares trainings of one process; start it without accelerate launch or torchrun")
    logs = pathlib.Path(tempfile.mkdtemp(prefix="hf-patrickstar-check-"))
    with tempfile.TemporaryDirectory(prefix="hf-patrickstar-weights-") as directory:
        plain, chunked = (_train(options, directory, logs, name) for name in ("plain", "patrickstar"))
        verdict, details = compare(plain, chunked)
        if verdict == "different":
            again = _train(options, directory, logs, "plain-again")
            details.append(
                "a second training without --patrickstar has the same bits as the first one"
                if (plain / RECORD).read_bytes() == (again / RECORD).read_bytes()
                else "a second training without --patrickstar differs from the first one, too, so the script is not "
                "repeatable, and nothing is known about --patrickstar; call set_seed in the script"
            )
            details.append(f"what the script printed: {logs}")
    print("\n  ".join([verdict, *details]))
    if verdict != "different":
        shutil.rmtree(logs)
    return int(verdict == "different")


def _train(options: argparse.Namespace, directory: str, logs: pathlib.Path, name: str) -> pathlib.Path:
    """Trains in a process of its own, which prints to a log file; returns where its record is."""
    home, log = pathlib.Path(directory) / name, logs / f"{name}.log"
    home.mkdir()
    task = {"directory": str(home), "is_chunked": name == "patrickstar", "num_steps": options.steps}
    task |= {"path": options.script, "arguments": options.arguments}
    command = [sys.executable, "-m", "hf_patrickstar", "run", "-m", _TRAINING, json.dumps(task)]
    which = "with --patrickstar" if task["is_chunked"] else "without --patrickstar"
    print(f"hf-patrickstar check: training {which}, {options.steps} steps", file=sys.stderr, flush=True)
    device = os.environ.get(_DEVICES, "0").split(",")[0]  # plain training would use several GPUs at once
    environment = {**os.environ, _DEVICES: device, "PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with open(log, "w", encoding="utf-8") as file:
        finished = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    if finished.returncode or not (home / RECORD).exists():
        status = finished.returncode if finished.returncode >= 0 else _SIGNALLED - finished.returncode
        last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        print(
            f"hf-patrickstar check: '{options.script}' failed {which}, with exit status {status}: {last}; see {log}",
            file=sys.stderr,
        )
        raise SystemExit(status or 1)
    if Record.read(home).problem:
        raise ConfigError(f"{Record.read(home).problem}; what it printed is in {log}")
    return home
