"""Kills training runs at random moments, also in the middle of saving, and fills the disk; nothing may be lost.

A tiny GPT-2 is trained by ``PatrickStarTrainer`` with one and with two processes, in fp32, in bf16 and as a model in
bf16, with training states saved at once and in the background, with updates on the host and over the bus, and with
optimizer states in memory and on the disk. SIGKILL comes:

- at a random moment after a save has begun,
- at a file operation in a save: before a file is opened, or a directory made, renamed or removed,
- at a random moment of training,
- at a random moment while a run starts and loads its checkpoint,

to all processes, or to one of two, and then the other has to end with an error. After each kill all checkpoints
must be whole and the newest one still there; the run is started again and must begin there; every loss, the final
weights and the final training state must be, bit for bit, those of a run that nobody disturbed. Then checkpoints are
saved to a disk with too little room: there must be a clear error, the earlier checkpoint must be intact, and when there
is room the run goes on from there.

The last line is ``50 kills, 50 resumes, 0 lost``; the exit status is 0 only if nothing was lost.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator

import torch
from crash_worker import CHUNK_BUDGET, Attempt, Orders, Variant, warm_up
from tqdm.auto import tqdm
from transformers.trainer_utils import get_last_checkpoint

from hf_patrickstar.checkpoint.safetensors_file import SafetensorsFile
from hf_patrickstar.checkpoint.storage import PARTIAL, REMOVED, REPLACED
from hf_patrickstar.checkpoint.torch_state import verify_files
from hf_patrickstar.checkpoint.training_state import SavedState, has_training_state
from hf_patrickstar.checkpoint.weight_files import open_weights
from hf_patrickstar.errors import CheckpointError

SAVE_STEPS, SAVE_LIMIT = 3, 2
PLACES = ("save", "operation", "anywhere", "operation", "loading")
"""Where kills come, in turn; as many of each as it is there."""
PRECISIONS = ("fp32", "bf16", "bf16 model")
VARIANTS = [
    Variant(
        1 + n % 2,
        PRECISIONS[n % 3],
        background=n // 2 % 2 == 1,
        over_bus=n in (0, 2, 4, 10),  # with two processes the norm may be rounded by where chunks of this size end
        on_disk=n in (1, 3, 6, 7, 8),
    )
    for n in range(12)
]
"""All there are, and a few of everything first."""
SHARES = (0.05, 0.3, 0.6, 0.85, 0.97)
"""Room on the full disk: one checkpoint and this part of another."""
DISK_NBYTES = 64 * 2**20
IN_NAMESPACE = "CRASH_TEST_IN_NAMESPACE"


class LostError(Exception):
    """Something that a kill or a full disk must not do has happened."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """When to kill.

    Attributes:
        place: One of ``PLACES``.
        moment: How far into it, from 0 to 1.
        ordinal: In which save since the start, from 1.
        victim: The only rank to be killed, or ``None`` for all.
    """

    place: str
    moment: float
    ordinal: int
    victim: int | None


@dataclasses.dataclass(frozen=True)
class Reference:
    """A run that nobody disturbed.

    Attributes:
        checkpoint: Its last one.
        losses: Of every rank and step, as texts of all their bits.
        logged: Losses in the Trainer's log.
        loading_s: Seconds from its start to its first step.
        training_s: Seconds from there to its end.
        saving_s: Seconds that saving took, at most.
        operations: File operations of a save.
    """

    checkpoint: pathlib.Path
    losses: dict[tuple[int, int], str]
    logged: list[float]
    loading_s: float
    training_s: float
    saving_s: float
    operations: int

    @classmethod
    def of(cls, attempt: Attempt) -> "Reference":
        """What a run has shown that has ended."""
        if any(attempt.statuses):
            raise LostError("a run that nobody disturbed failed")
        if not all(event.values[0] for event in attempt.told("done")):
            raise LostError(f"no chunk was ever evicted; {CHUNK_BUDGET} bytes are not tight")
        [begin], [done] = attempt.told("begin", 0), attempt.told("done", 0)
        starts, ends = attempt.told("saving", 0), attempt.told("saved", 0)
        checkpoint = pathlib.Path(str(get_last_checkpoint(str(attempt.orders.directory))))
        return cls(
            checkpoint,
            {(event.rank, event.values[0]): event.values[1] for event in attempt.told("step")},
            logged_losses(checkpoint),
            begin.time - attempt.start,
            done.time - begin.time,
            max(end.time - start.time for start, end in zip(starts, ends, strict=True)),
            ends[-1].values[1] // len(ends),
        )


# Looking at checkpoints


def logged_losses(checkpoint: pathlib.Path) -> list[float]:
    """The losses in the Trainer's log."""
    history = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def step_of(checkpoint: pathlib.Path) -> int:
    """The step that a checkpoint was saved after."""
    return int(checkpoint.name.rpartition("-")[2])


def check_whole(checkpoint: pathlib.Path, reference: Reference) -> None:
    """Opens everything in a checkpoint.

    Raises:
        LostError: If something is missing or damaged.
    """
    names, expected = (sorted(path.name for path in folder.iterdir()) for folder in (checkpoint, reference.checkpoint))
    if names != expected:
        raise LostError(f"{checkpoint.name} has the files {names}, not {expected}")
    try:
        open_weights(checkpoint)
        if has_training_state(checkpoint):  # else optimizer.pt has it
            state = SavedState(checkpoint)
            for name, shape in state.shapes.items():
                state.check_complete(name, 0, torch.Size(shape).numel())
        for _ in verify_files(checkpoint):
            pass
        for path in {*checkpoint.glob("*.pt*"), *checkpoint.glob("*.bin")} - {*checkpoint.glob("optimizer*")}:
            with zipfile.ZipFile(path) as file:
                if file.testzip() is not None:
                    raise LostError(f"{path} is damaged")
        step = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
    except (CheckpointError, OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise LostError(f"{checkpoint.name} is not whole: {error}") from error
    if step != step_of(checkpoint) or len(logged_losses(checkpoint)) != step:
        raise LostError(f"{checkpoint.name} is of step {step}")


def check_same(checkpoint: pathlib.Path, reference: Reference) -> None:
    """Compares weights, training state and log with those of the reference.

    Raises:
        LostError: If a bit is different.
    """
    if logged_losses(checkpoint) != reference.logged:
        raise LostError(f"{checkpoint.name} has other losses in its log")
    for path in sorted(reference.checkpoint.glob("*.safetensors")):
        left, right = SafetensorsFile(path), SafetensorsFile(checkpoint / path.name)
        if left.entries.keys() != right.entries.keys():
            raise LostError(f"{right.path} has other tensors")
        for name, entry in left.entries.items():
            numel = torch.Size(entry.shape).numel()
            if not torch.equal(left.read(name, 0, numel), right.read(name, 0, numel)):
                raise LostError(f"tensor '{name}' of {right.path.name} is different in the end")


class Run:
    """A training run from its first start to its end, however many starts that takes.

    Args:
        orders: What it does.
        reference: The same, undisturbed.
        log: Where what its processes print goes.

    Attributes:
        newest: The step of its newest whole checkpoint; 0 while there is none.
        is_done: Whether it has come to its end.
    """

    def __init__(self, orders: Orders, reference: Reference, log: pathlib.Path) -> None:
        self.orders, self.reference = orders, reference
        self.newest = 0
        self.is_done = False
        self._log = log
        self._seen: dict[tuple[int, int], str] = {}

    def start(self, **changes: int) -> Attempt:
        """Starts it, or starts it again."""
        return Attempt(dataclasses.replace(self.orders, **changes), self._log)

    def take_in(self, attempt: Attempt) -> None:
        """Checks what a start has told and left behind.

        Raises:
            LostError: If something was lost.
        """
        begun = attempt.told("begin")
        for event in begun:
            if event.values[0] != self.newest:
                raise LostError(f"rank {event.rank} began at step {event.values[0]}; checkpoint-{self.newest} is there")
        for event in attempt.told("step"):
            step, loss = event.values
            expected = self.reference.losses[event.rank, step]
            if loss != expected:
                raise LostError(f"loss of rank {event.rank} in step {step}: {loss}, undisturbed {expected}")
            self._seen[event.rank, step] = loss
        self._check_directory(attempt)
        self.is_done = not any(attempt.statuses)
        if self.is_done:
            self._check_end()

    def _check_directory(self, attempt: Attempt) -> None:
        saved = [event.values[0] for event in attempt.told("saved", 0)]
        if self.orders.variant.background:
            saved = saved[:-1]  # the last one may have been on its way
        directory = self.orders.directory
        found = sorted(directory.glob("checkpoint-*"), key=step_of) if directory.is_dir() else []
        for checkpoint in found:
            check_whole(checkpoint, self.reference)
        newest = step_of(found[-1]) if found else 0
        if newest < max([self.newest, *saved]):
            raise LostError(f"checkpoint-{max([self.newest, *saved])} was complete; the newest now is {newest}")
        self.newest = newest

    def _check_end(self) -> None:
        if self.newest != self.orders.steps:
            raise LostError(f"the run ended with checkpoint-{self.newest}")
        if self._seen != self.reference.losses:
            raise LostError(f"{len(self._seen)} losses were told, not {len(self.reference.losses)}")
        check_same(self.orders.directory / f"checkpoint-{self.newest}", self.reference)
        names = sorted(path.name for path in self.orders.directory.iterdir())
        if len(names) > SAVE_LIMIT or not all(name.startswith("checkpoint-") for name in names):
            raise LostError(f"the finished run leaves {names}")


# Killing


def strike(run: Run, attempt: Attempt, kill: Kill) -> None:
    """Kills at the moment that was chosen, unless the run ends before.

    Raises:
        LostError: If it hangs, or if the process that was spared says that all is well.
    """
    if kill.place == "operation":
        on_time = attempt.wait(lambda: any(status is not None for status in attempt.statuses))
    else:
        reference, steps = run.reference, run.orders.steps
        num_before, part = divmod(kill.moment * (steps - run.newest), 1)
        word, count, seconds = {
            "save": ("saving", kill.ordinal, kill.moment * reference.saving_s),
            "anywhere": ("step", num_before, part * reference.training_s / steps),
            "loading": ("", 0, kill.moment * reference.loading_s),
        }[kill.place]
        if word:
            attempt.wait(lambda: bool(attempt.told("begin", 0)))
        on_time = attempt.wait(lambda: len(attempt.told(word, 0)) >= count)
        attempt.wait(seconds=seconds)
    if not on_time:
        raise LostError("a run does not go on")
    attempt.kill(0 if kill.place == "operation" and kill.victim is not None else kill.victim)
    if not attempt.wait():
        raise LostError(f"rank {kill.victim} of two was killed; the other does not end")


class CrashTest:
    """Runs all of it.

    Args:
        folder: For everything that is written.
        options: The arguments of the command line.

    Attributes:
        kills: How often a process was killed, or several at once.
        resumes: How many kills were followed by a start that began at the newest whole checkpoint.
        lost: What went wrong.
        disk_kind: What was full: a tmpfs, or only a limit for the size of files.
    """

    def __init__(self, folder: pathlib.Path, options: argparse.Namespace) -> None:
        self.kills = self.resumes = 0
        self.lost: list[str] = []
        self.counts = {"inside a save": 0, "of one of two processes": 0, "before the first checkpoint": 0}
        self.disk_kind = ""
        self._pending = 0
        self._folder, self._options = folder, options
        self._random = random.Random(options.seed)
        self._references: dict[tuple[int, str], Reference] = {}
        self._number = 0

    def _orders(self, variant: Variant, parent: pathlib.Path | None = None) -> Orders:
        self._number += 1
        directory = (parent or self._folder) / f"run-{self._number}"
        return Orders(variant, directory, self._options.steps, SAVE_STEPS, SAVE_LIMIT)

    def _reference(self, variant: Variant) -> Reference:
        """The same training undisturbed, saved at once, updated on the host, states in memory: that must not matter."""
        key = (variant.world_size, variant.precision)
        if key not in self._references:
            orders = self._orders(dataclasses.replace(variant, background=False, over_bus=False, on_disk=False))
            with self._watched(orders) as log, Attempt(orders, log) as attempt:
                attempt.wait()
                self._references[key] = Reference.of(attempt)
            if key not in self._references:
                sys.exit("there is nothing to compare with")
        return self._references[key]

    @contextlib.contextmanager
    def _watched(self, orders: Orders) -> Iterator[pathlib.Path]:
        """Notes what is lost, with the end of what the processes printed."""
        log = self._folder / f"{orders.directory.name}.log"
        try:
            yield log
        except LostError as error:
            printed = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            self.lost.append(f"{orders.variant}: {error}")
            tqdm.write("\n".join([f"LOST {self.lost[-1]}", *printed.splitlines()[-20:]]))

    def kill_all(self, bar: "tqdm[None]") -> None:
        """Does the kills, a few for each variant."""
        total = self._options.kills
        chosen = VARIANTS[: max(1, min(total, len(VARIANTS)))]
        for number, variant in enumerate(chosen):
            ordinals = range(number, total, len(chosen))
            self._reference(variant)
            kills = [self._kill(ordinal, variant) for ordinal in ordinals]
            while kills and len(self.lost) < 5:
                self._one_run(variant, kills, bar)

    def _kill(self, ordinal: int, variant: Variant) -> Kill:
        place = PLACES[ordinal % len(PLACES)]
        # One that has not met the others yet would be waited for as long as torch waits for it, half an hour.
        spared = variant.world_size > 1 and place != "loading" and self._random.random() < 0.4
        victim = self._random.randrange(variant.world_size) if spared else None
        return Kill(place, self._random.random(), self._random.randint(1, 2), victim)

    def _one_run(self, variant: Variant, kills: list[Kill], bar: "tqdm[None]") -> None:
        """Kills a run again and again until no kill is left or it has come to its end."""
        reference, orders = self._reference(variant), self._orders(variant)
        with self._watched(orders) as log:
            run = Run(orders, reference, log)
            self._pending = 0
            while not run.is_done:
                kill = kills[0] if kills else None
                if self._attempt(run, kill):
                    kills.pop(0)
                    bar.update()
        shutil.rmtree(orders.directory, ignore_errors=True)

    def _attempt(self, run: Run, kill: Kill | None) -> bool:
        """One start; returns whether it was killed."""
        deadly = 0
        if kill is not None and kill.place == "operation":
            deadly = 1 + int((kill.ordinal - 1 + kill.moment) * run.reference.operations)
        with run.start(deadly_operation=deadly) as attempt:
            if kill is not None:
                strike(run, attempt, kill)
            elif not attempt.wait():
                raise LostError("a run does not end")
        was_killed = any(status is not None and status < 0 for status in attempt.statuses)
        if was_killed:
            self._count(run, attempt, kill)
        else:
            self._expect_success(attempt)
        resumed, self._pending = (self._pending, 0) if attempt.told("begin", 0) else (0, self._pending)
        run.take_in(attempt)
        self.resumes += resumed
        self._pending += was_killed
        return was_killed

    def _count(self, run: Run, attempt: Attempt, kill: Kill | None) -> None:
        self.kills += 1
        left = [run.orders.directory / name for name in (PARTIAL, REPLACED, REMOVED)]
        is_saving = len(attempt.told("saving", 0)) > len(attempt.told("saved", 0))
        self.counts["inside a save"] += is_saving or any(path.exists() for path in left)
        self.counts["of one of two processes"] += kill is not None and kill.victim is not None
        self.counts["before the first checkpoint"] += not run.newest and not attempt.told("saved", 0)

    def _expect_success(self, attempt: Attempt) -> None:
        if any(attempt.statuses):
            errors = [event.values for event in attempt.told("failed")]
            raise LostError(f"a run failed that nobody disturbed: {errors}")

    # The full disk

    def fill_disks(self, bar: "tqdm[None]") -> None:
        """Saves where there is too little room, with one process and with two."""
        for ordinal in range(2 * self._options.full_disks):
            variant = Variant(1 + ordinal % 2, "fp32", background=ordinal // 2 % 2 == 1)
            self._reference(variant)
            self._full_disk(variant, SHARES[ordinal // 2 % len(SHARES)])
            bar.update()

    def _full_disk(self, variant: Variant, share: float) -> None:
        reference = self._reference(variant)
        with small_disk(self._folder) as disk:
            orders = self._orders(variant, disk)
            filler = (disk or self._folder) / "filler"
            self.disk_kind = "tmpfs" if disk is not None else "file size limit"
            with self._watched(orders) as log:
                run = Run(orders, reference, log)
                sizes = [path.stat().st_size for path in reference.checkpoint.iterdir()]
                limit = 0
                if disk is None:
                    limit = int(share * max(sizes))
                else:
                    room = int((1 + share) * sum(-(-size // 4096) * 4096 for size in sizes))
                    filler.write_bytes(bytes(shutil.disk_usage(disk).free - room))
                with run.start(file_limit=limit) as attempt:
                    attempt.wait()
                self._check_refusal(run, attempt)
                filler.unlink(missing_ok=True)
                with run.start() as attempt:
                    attempt.wait()
                self._expect_success(attempt)
                run.take_in(attempt)
            shutil.rmtree(orders.directory, ignore_errors=True)

    def _check_refusal(self, run: Run, attempt: Attempt) -> None:
        """Every process must say what is wrong, and leave nothing."""
        reason = "File too large" if attempt.orders.file_limit else "No space left on device"
        needs = r"; the file needs (more|.*\d bytes\)), .*\d bytes\) are left"
        if attempt.orders.file_limit:
            needs = ""  # nobody can tell what is left of a limit
        pattern = re.compile(rf"'{re.escape(str(run.orders.directory))}[^']*' cannot be written: {reason}{needs}")
        if attempt.statuses != [1] * run.orders.variant.world_size:
            raise LostError(f"there was too little room, and processes ended with {attempt.statuses}")
        for event in attempt.told("failed"):
            kind, message = event.values
            if kind != "CheckpointError" or not pattern.search(message):
                raise LostError(f"there was too little room, and rank {event.rank} said {kind}: {message}")
        run.take_in(attempt)
        left = sorted(path.name for path in run.orders.directory.iterdir())
        if not run.newest or not all(name.startswith("checkpoint-") for name in left):
            raise LostError(f"there was too little room, and {left} is left")


# A small disk


@contextlib.contextmanager
def small_disk(folder: pathlib.Path) -> Iterator[pathlib.Path | None]:
    """A disk with little room, or ``None`` where none can be mounted."""
    place = folder / "disk"
    place.mkdir(exist_ok=True)
    if not can_mount(place):
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def can_mount(place: pathlib.Path) -> bool:
    """Mounts a tmpfs there, if this process may."""
    if shutil.which("mount") is None:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_NBYTES}", "none", str(place)]
    return subprocess.run(command, capture_output=True).returncode == 0


def enter_namespace() -> None:
    """Starts this script again where it may mount, if it may not here but there."""
    if os.geteuid() == 0 or IN_NAMESPACE in os.environ or shutil.which("unshare") is None:
        return
    command = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
        os.environ[IN_NAMESPACE] = "1"
        os.execvp(command[0], [*command, sys.executable, *sys.argv])


def parse_arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="how often to kill (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run, a multiple of 3 (default: 12)")
    parser.add_argument("--seed", type=int, default=0, help="chooses when kills come (default: %(default)s)")
    parser.add_argument(
        "--full_disks", type=int, default=5, help="how many full disks, with 1 and with 2 processes (default: 5)"
    )
    parser.add_argument("--folder", help="where to write; a temporary directory by default, removed at the end")
    options = parser.parse_args()
    if options.kills < 0 or options.full_disks < 0 or options.steps < 3 * SAVE_STEPS or options.steps % SAVE_STEPS:
        parser.error(f"--steps must be a multiple of {SAVE_STEPS}, at least {3 * SAVE_STEPS}; nothing may be negative")
    return options


def main() -> None:
    """Kills, fills disks, and says what came of it."""
    options = parse_arguments()
    enter_namespace()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without cleaning up
    tqdm.monitor_interval = 0  # a thread; there must be none where processes are forked
    warm_up()
    with tempfile.TemporaryDirectory(prefix="hf_patrickstar-crash-", dir=options.folder) as name:
        folder = pathlib.Path(name)
        test = CrashTest(folder, options)
        with tqdm(total=options.kills, desc="Kills", unit="kills", disable=None) as bar:
            test.kill_all(bar)
        with tqdm(total=2 * options.full_disks, desc="Full disks", unit="disks", disable=None) as bar:
            test.fill_disks(bar)
    print(f"Kills {', '.join(f'{what}: {count}' for what, count in test.counts.items())}")
    print(f"Full disks: {2 * options.full_disks}{f', by {test.disk_kind}' if test.disk_kind else ''}")
    print(f"{test.kills} kills, {test.resumes} resumes, {len(test.lost)} lost")
    sys.exit(bool(test.lost) or test.kills != options.kills or test.resumes != options.kills)


if __name__ == "__main__":
    main()
