"""The training run that ``crash_test.py`` kills, and the processes that it is made of.

They are forked from a process that has imported everything, so that one starts in a moment. Each tells what it does
through a pipe: ``begin``, ``step``, ``saving``, ``saved``, ``done`` or ``failed``; what it told before a kill arrives.
"""

import contextlib
import dataclasses
import gc
import json
import math
import os
import pathlib
import random
import resource
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

# Before torch is imported: forked processes must not find threads that are not there, nor fight for the cores.
os.environ.update({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""})
os.environ.update({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments

VOCAB, LENGTH, ROWS = 96, 16, 16
CHUNK_BUDGET = "64000B"
"""Bytes: less than the parameters have in any precision, so that chunks come and go."""
OVER_BUS = {"updates": "device", "placement": "host", "chunk_numel": 4096, "chunk_budget": "400000B"}
"""Settings with which chunks are updated over the bus; most of the budget is for the slots."""
HOST_NBYTES = {"fp32": 600_000, "bf16": 540_000, "bf16 model": 300_000}
"""Memory of the host for all processes, so that a good part of the states has to be on the disk."""
SILENCE_S = 120.0
"""A run that tells nothing for so long hangs, however busy the machine is."""
PORTS = range(10_000, 30_000)
"""Below those that the system gives to connections, so that nobody else is given one between its choice and its use."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        world_size: How many processes.
        precision: "fp32", "bf16" (of a model in fp32) or "bf16 model".
        background: Whether training goes on while its state is saved.
        over_bus: Whether chunks are updated over the bus.
        on_disk: Whether masters and optimizer states are on the disk.
    """

    world_size: int
    precision: str
    background: bool
    over_bus: bool = False
    on_disk: bool = False

    def __str__(self) -> str:
        where = "in the background" if self.background else "at once"
        how = f"saved {where}{', updated over the bus' * self.over_bus}{', states on the disk' * self.on_disk}"
        return f"{self.world_size} process{'es' * (self.world_size > 1)}, {self.precision}, {how}"


@dataclasses.dataclass(frozen=True)
class Orders:
    """What to train, and how to end.

    Attributes:
        variant: How.
        directory: The output directory; training goes on from the newest checkpoint there.
        steps: How many in all.
        save_steps: A checkpoint after so many.
        save_limit: Checkpoints to keep.
        deadly_operation: While it saves, rank 0 kills itself at this file operation, counted from 1; 0 is never.
        file_limit: Bytes that a file may have when the first checkpoint is there; 0 is no limit.
    """

    variant: Variant
    directory: pathlib.Path
    steps: int
    save_steps: int
    save_limit: int
    deadly_operation: int = 0
    file_limit: int = 0


# In the forked process


class _Reporter:
    """Says what happens, and counts file operations while a checkpoint is saved."""

    def __init__(self, orders: Orders, rank: int, descriptor: int) -> None:
        self._descriptor = descriptor
        self._prefix = str(orders.directory) + os.sep
        self._deadly = orders.deadly_operation if rank == 0 else 0
        self._operations = 0
        self._is_counting = False
        sys.addaudithook(self._count)

    def tell(self, word: str, *values: Any) -> None:
        os.write(self._descriptor, (json.dumps([time.monotonic(), word, *values]) + "\n").encode())

    def start_counting(self) -> None:
        self._is_counting = True

    @property
    def operations(self) -> int:
        return self._operations

    def _count(self, event: str, args: tuple[Any, ...]) -> None:
        """Python calls this before files are opened, made, renamed or removed, whichever thread does it."""
        if not self._is_counting or not (event == "open" or event.startswith("os.")):
            return
        if not (args and isinstance(args[0], (str, os.PathLike)) and os.fspath(args[0]).startswith(self._prefix)):
            return
        self._operations += 1
        if self._operations == self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)


class _ReportingCallback(TrainerCallback):
    def __init__(self, reporter: _Reporter) -> None:
        self._reporter = reporter

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._reporter.tell("begin", state.global_step)


class _ReportingTrainer(PatrickStarTrainer):
    """Tells every loss to the last bit, and when it saves."""

    reporter: _Reporter
    orders: Orders

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.reporter.tell("step", self.state.global_step + 1, float(loss).hex())
        return loss

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.reporter.tell("saving", self.state.global_step)
        self.reporter.start_counting()
        super()._save_checkpoint(*args, **kwargs)
        self.reporter.tell("saved", self.state.global_step, self.reporter.operations)
        if self.orders.file_limit:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.orders.file_limit, hard))


def make_model(precision: str, seed: int) -> GPT2LMHeadModel:
    """A tiny model with dropout, whose losses depend on the state of the random number generator too."""
    torch.manual_seed(seed)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=3, n_head=2, **ends)
    model = GPT2LMHeadModel(config)
    return model.to(torch.bfloat16) if precision == "bf16 model" else model


def make_rows() -> list[dict[str, torch.Tensor]]:
    """What it learns."""
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def train(orders: Orders, rank: int, reporter: _Reporter) -> None:
    """Trains to the end, from the newest checkpoint if there is one."""
    variant, directory = orders.variant, orders.directory
    newest = get_last_checkpoint(str(directory)) if directory.is_dir() else None
    host_nbytes = HOST_NBYTES[variant.precision] // variant.world_size
    on_disk = {"disk_path": tempfile.gettempdir(), "host_budget": f"{host_nbytes}B"}
    args = PatrickStarTrainingArguments(
        output_dir=str(directory),
        patrickstar=True,
        patrickstar_report=False,
        patrickstar_config={
            "chunk_budget": CHUNK_BUDGET,
            "background_save": variant.background,
            **(OVER_BUS if variant.over_bus else on_disk if variant.on_disk else {}),
        },
        bf16=variant.precision == "bf16",
        use_cpu=True,
        max_steps=orders.steps,
        save_steps=orders.save_steps,
        save_total_limit=orders.save_limit,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=5e-3,
        weight_decay=0.1,
        max_grad_norm=0.5,
        lr_scheduler_type="cosine",
        disable_tqdm=True,
        report_to=[],
        seed=7,
    )
    if args.world_size != variant.world_size:
        raise RuntimeError(f"{args.world_size} processes train together, not {variant.world_size}")
    # Other weights than at the start: what a checkpoint does not restore shows in the losses.
    model = make_model(variant.precision, seed=0 if newest is None else 1)
    callbacks = [_ReportingCallback(reporter)]
    trainer = _ReportingTrainer(model=model, args=args, train_dataset=make_rows(), callbacks=callbacks)
    trainer.reporter, trainer.orders = reporter, orders
    trainer.train(resume_from_checkpoint=newest)
    if (trainer.patrickstar_engine.counts.disk_written_nbytes > 0) is not variant.on_disk:
        raise RuntimeError(f"states are{' not' * variant.on_disk} on the disk")
    reporter.tell("done", trainer.patrickstar_stats()["chunk_evictions"])


def _serve(orders: Orders, rank: int, port: int, pipe: int, log: pathlib.Path) -> NoReturn:
    """What a forked process does; it never returns to the code that forked it."""
    status = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, sys.stdout.fileno())
        os.dup2(output, sys.stderr.fileno())
        world_size = orders.variant.world_size
        if world_size > 1:
            os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)})
            os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        reporter = _Reporter(orders, rank, pipe)
        try:
            train(orders, rank, reporter)
            status = 0
        except BaseException as error:
            traceback.print_exc()
            reporter.tell("failed", type(error).__name__, str(error))
        sys.stderr.flush()
    finally:
        os._exit(status)  # not through the parent's cleaning up, which it has inherited


# In the process that forks


def warm_up() -> None:
    """Does once what every process that is forked later would do again, and keeps the collector off what is there."""
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        make_model("fp32", seed=0).save_pretrained(folder)  # compiles a thousand patterns of names
    gc.collect()
    gc.freeze()


@dataclasses.dataclass(frozen=True)
class Event:
    """What a process told: when, which rank, and what."""

    time: float
    rank: int
    word: str
    values: tuple[Any, ...]


@dataclasses.dataclass
class _Process:
    pid: int
    pipe: int
    rest: bytes = b""
    status: int | None = None


class Attempt:
    """One start of a training run; it lasts until all its processes have ended.

    Args:
        orders: What they do.
        log: Where what they print goes.

    Attributes:
        events: What they told so far, in the order of its arrival.
    """

    def __init__(self, orders: Orders, log: pathlib.Path) -> None:
        self.orders = orders
        self.events: list[Event] = []
        self._processes: list[_Process] = []
        port = _free_port() if orders.variant.world_size > 1 else 0
        for rank in range(orders.variant.world_size):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                _serve(orders, rank, port, write, log)
            os.close(write)  # now the pipe ends when the process does
            self._processes.append(_Process(pid, read))
        self.start = time.monotonic()

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *_: Any) -> None:
        """Nothing that was started here outlives it."""
        self.kill()
        self.wait()

    @property
    def statuses(self) -> list[int | None]:
        """How each process ended, as ``subprocess`` has it; ``None`` while it runs."""
        return [process.status for process in self._processes]

    def told(self, word: str, rank: int | None = None) -> list[Event]:
        """What was told in that word, by one rank or by any."""
        return [event for event in self.events if event.word == word and rank in (None, event.rank)]

    def kill(self, rank: int | None = None) -> None:
        """Kills one process or all that run."""
        for process in self._processes if rank is None else [self._processes[rank]]:
            if process.status is None:
                os.kill(process.pid, signal.SIGKILL)

    def wait(self, is_enough: Callable[[], bool] = lambda: False, seconds: float = math.inf) -> bool:
        """Listens until enough was told, all processes have ended, time is up, or nothing is told any more.

        Args:
            is_enough: Whether enough was told.
            seconds: How long to listen at most.

        Returns:
            Whether the processes went on as long as it listened.
        """
        end = time.monotonic() + seconds
        while not is_enough():
            waiting = {process.pipe: process for process in self._processes if process.status is None}
            left = end - time.monotonic()
            if not waiting or left <= 0:
                return True
            ready, _, _ = select.select(list(waiting), [], [], min(left, SILENCE_S))
            if not ready and left > SILENCE_S:
                return False
            for pipe in ready:
                self._read(waiting[pipe])
        return True

    def _read(self, process: _Process) -> None:
        found = os.read(process.pipe, 65536)
        if not found:
            os.close(process.pipe)
            process.status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
            return
        *lines, process.rest = (process.rest + found).split(b"\n")
        self.events.extend(self._parse(self._processes.index(process), lines))

    def _parse(self, rank: int, lines: list[bytes]) -> Iterator[Event]:
        for line in lines:
            when, word, *values = json.loads(line)
            yield Event(when, rank, word, tuple(values))


def _free_port() -> int:
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
