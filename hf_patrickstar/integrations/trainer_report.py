"""What a Trainer's run shows and records of its engine.

Training logs get figures, the console at most three lines (what was decided, the first planned step, what the run came
to), and the cache a record for ``hf-patrickstar report``.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from transformers import PrinterCallback, ProgressCallback
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.memory.accelerator import device_name, is_accelerator
from hf_patrickstar.memory.lanes import LaneTimes
from hf_patrickstar.memory.streams import DeviceStreams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.report.figures import PREFIX, brief, few
from hf_patrickstar.report.measure import cpu_name
from hf_patrickstar.report.measured_step import measured_lanes, measured_timeline
from hf_patrickstar.report.outcome import Outcome, describe_outcome, describe_step
from hf_patrickstar.report.run_record import RunRecorder
from hf_patrickstar.schedule.clock import Timeline
from hf_patrickstar.version import __version__

logger = logging.getLogger(__name__)

_LOGGED = ("loss", "grad_norm", "learning_rate", "epoch")
_SUMS = ("waiting_seconds", "loading_seconds", "computing_seconds", "settling_seconds", "updating_seconds", "retries")
_MOST_TRIES = 8
"""If so many steps were recorded one after the other, no step is measured: inputs differ from step to step."""
_NOTEBOOK = "NotebookProgressCallback"
"""The console of a notebook, whose module can be imported in notebooks alone."""


def tell_console(handler: Any, line: str) -> None:
    """Prints a line where the Trainer prints its logs, beside a progress bar if there is one.

    Args:
        handler: The Trainer's ``CallbackHandler``.
        line: The line.
    """
    consoles = [callback for callback in handler.callbacks if _is_console(callback) or _is_notebook(callback)]
    if not consoles:
        return
    bars = (getattr(console, "training_bar", None) for console in consoles)
    write: Callable[[str], Any] = next((bar.write for bar in bars if bar is not None), print)
    write(f"patrickstar: {line}")


@contextlib.contextmanager
def bars_as_asked(args: Any) -> Iterator[None]:
    """Inside the block the package shows no progress if ``disable_tqdm`` says so, and neither does transformers.

    Args:
        args: The arguments of a Trainer.
    """
    if not args.disable_tqdm or not is_progress_bar_enabled():
        yield
        return
    are_those_of_the_hub_disabled = are_progress_bars_disabled()
    disable_progress_bar()
    try:
        yield
    finally:
        enable_progress_bar()
        if are_those_of_the_hub_disabled:
            disable_progress_bars()


def _is_console(callback: Any) -> bool:
    return isinstance(callback, (PrinterCallback, ProgressCallback))


def _is_notebook(callback: Any) -> bool:
    return any(base.__name__ == _NOTEBOOK for base in type(callback).__mro__)


@contextlib.contextmanager
def figures_told(handler: Any, figures: Mapping[str, float], shown: dict[str, str] | None) -> Iterator[None]:
    """Inside the block the logs that the Trainer passes to callbacks have figures of the engine, too.

    ``log_history``, and so ``trainer_state.json``, does not get them: seconds, and bytes of a step that is recorded
    again, would differ between a resumed run and an uninterrupted one.

    Args:
        handler: The Trainer's ``CallbackHandler``.
        figures: All figures.
        shown: What a console has shown last, which changes with what it shows now: it gets figures in words when they
            have changed, and other callbacks get few. ``None`` if all callbacks get all figures.
    """
    numbers = figures if shown is None else few(figures)
    words = brief(figures)
    added = {} if words == shown else words
    if shown is not None:
        shown.update(words)

    def with_numbers(tell: Callable[..., Any]) -> Callable[..., Any]:
        def on_log(args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> Any:
            logs.update(numbers)  # log_history has a copy without the figures
            return tell(args, state, control, logs, **kwargs)

        return on_log

    def with_words(tell: Callable[..., Any]) -> Callable[..., Any]:
        def on_log(args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> Any:
            others = {key: value for key, value in logs.items() if key not in numbers}
            return tell(args, state, control, logs=others | added, **kwargs)

        return on_log

    consoles = [callback for callback in handler.callbacks if _is_console(callback)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_on_log(handler, with_numbers))
        for console in consoles if shown is not None else ():
            stack.enter_context(_on_log(console, with_words))
        yield


@contextlib.contextmanager
def _on_log(owner: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces the ``on_log`` of one object inside the block; the list of callbacks does not change."""
    before = dict(vars(owner))
    owner.on_log = change(owner.on_log)
    try:
        yield
    finally:
        if "on_log" in before:
            owner.on_log = before["on_log"]
        else:
            del owner.on_log


class Stopwatch:
    """Measures seconds, without those of pauses."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last call, or since the stopwatch was made."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return seconds

    @property
    def elapsed(self) -> float:
        """Seconds since then; the lap goes on."""
        return time.perf_counter() - self._since

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block no time passes."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - begin


class LaneWatch:
    """Watches the first step that is not recorded.

    Args:
        engine: The engine.

    Attributes:
        is_over: Whether nothing is measured any more.
    """

    def __init__(self, engine: PatrickStarEngine) -> None:
        self.is_over = False
        self._engine = engine
        self._streams = engine.resources.streams
        self._durations = engine.manager.steps.durations
        self._times: LaneTimes | None = None
        self._num_tries = 0
        self._recorded: int | None = None  # steps that were recorded before the one that is watched

    def begin_step(self) -> Timeline | None:
        """Notes that a step of the optimizer begins, and so that the one before has ended.

        Returns:
            Once, the timeline of the step that has ended.
        """
        if self.is_over:
            return None
        recorded = int(self._engine.stats()["recorded_steps"])
        if self._recorded is not None:
            is_usual = recorded == self._recorded
            found = self._end()
            if is_usual or self._num_tries == _MOST_TRIES:
                self.is_over = True
                return found if is_usual else None
        self._recorded = recorded
        self._num_tries += 1
        self._begin()
        return None

    def stop(self) -> None:
        """Measures no more."""
        self.is_over = True
        self._streams.end_timing()
        self._durations.mark = None

    def _begin(self) -> None:
        try:
            self._times = self._streams.begin_timing()
        except RuntimeError as error:  # not every accelerator has moments with times
            logger.info("patrickstar: the lanes of a step cannot be measured on %s: %s", self._streams.device, error)
            self.stop()
            return
        if isinstance(self._streams, DeviceStreams):
            self._durations.mark = self._times.mark

    def _end(self) -> Timeline | None:
        times, self._times, self._durations.mark = self._times, None, None
        self._streams.end_timing()
        if times is None:
            return None
        measure = measured_lanes if isinstance(self._streams, DeviceStreams) else measured_timeline
        return measure(self._durations.last, times)


class RunReport:
    """The record of one call of ``Trainer.train``; see [Note: the record of a run].

    Args:
        trainer: The Trainer, which has an engine.

    Attributes:
        watch: Runs while the Trainer trains.
    """

    def __init__(self, trainer: Any) -> None:
        step = trainer.state.global_step
        self.watch = Stopwatch()
        self._trainer = trainer
        self._recorder = RunRecorder(trainer.args.output_dir, _about(trainer), is_resumed=step > 0)
        self._last_step = step
        self._last_tokens = trainer.state.num_input_tokens_seen
        self._fingerprint: tuple[Any, ...] = ()
        self._lanes = LaneWatch(trainer.patrickstar_engine)
        self._begun = -1
        self._length = 0

    def begin_micro_batch(self, inputs: Any) -> None:
        """Notes that a micro-batch begins: with the first one of a step, that step.

        Args:
            inputs: The micro-batch.
        """
        length = _length_of(inputs)
        if length > self._length:
            self._length = length
            self._recorder.note_length(length)
            self._fingerprint = ()  # it is written with the next log
        step = self._trainer.state.global_step
        if step == self._begun or self._lanes.is_over:
            return
        self._begun = step
        timeline = self._lanes.begin_step()
        if timeline is not None:
            self._recorder.note_timeline(timeline)
            self._fingerprint = ()  # it is written with the next log

    def close(self) -> None:
        """Measures no more."""
        self._lanes.stop()

    def note_loss(self, logs: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """Records what was logged with a training loss.

        Args:
            logs: What the Trainer logs.
            figures: The engine's figures since the last log.
        """
        state, seconds = self._trainer.state, self.watch.lap()
        num = state.global_step - self._last_step
        num = num if num > 0 else max(state.global_step, 1)  # the Trainer has started over, with smaller batches
        tokens = state.num_input_tokens_seen - self._last_tokens
        self._last_step, self._last_tokens = state.global_step, state.num_input_tokens_seen
        row: dict[str, Any] = {"step": state.global_step, "num_steps": num}
        row |= {name: float(logs[name]) for name in _LOGGED if logs.get(name) is not None}
        row["seconds"] = seconds / num
        row["samples_per_s"] = samples_of(self._trainer) * num / seconds if seconds else None
        if tokens > 0:
            row["tokens_per_s"] = tokens / seconds if seconds else None
        row |= {name.removeprefix(PREFIX): value for name, value in figures.items()}
        self._survey(self._trainer.patrickstar_engine)
        self._recorder.note_step(row)

    def note_evaluation(self, loss: float) -> None:
        """Records the loss of an evaluation.

        Args:
            loss: Its mean.
        """
        self._recorder.note_step({"step": self._trainer.state.global_step, "eval_loss": loss})

    def _survey(self, engine: PatrickStarEngine) -> None:
        manager, ledger = engine.manager, engine.ledger
        peaks = [tuple(sorted(ledger.owner_peaks(tier).items())) for tier in Tier]
        homes = tuple(chunk.home for chunk in manager.chunks)
        plans = tuple((trace.key, room) for trace, _, room in manager.steps.followed)
        fingerprint = (manager.tracer.version, homes, plans, *peaks)  # to compare it is less work than to survey
        if fingerprint != self._fingerprint:
            self._fingerprint = fingerprint
            self._recorder.note_survey(engine.survey())


def samples_of(trainer: Any) -> int:
    """Sequences, or images, of a step of the optimizer on all processes, if no batch is cut short.

    Args:
        trainer: The Trainer.
    """
    args = trainer.args
    return int(trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _length_of(inputs: Any) -> int:
    """Tokens of a sequence of a micro-batch; 0 if it has none."""
    values = inputs.values() if isinstance(inputs, Mapping) else ()
    tokens = [value for value in values if isinstance(value, torch.Tensor) and value.dim() == 2]
    whole = [value for value in tokens if not value.is_floating_point()]
    return max(whole, key=torch.Tensor.numel).shape[1] if whole else 0


def _about(trainer: Any) -> dict[str, Any]:
    engine, args = trainer.patrickstar_engine, trainer.args
    model = trainer.model
    name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    return {
        "model": str(name),
        "model_class": type(model).__name__,
        "device": device_name(engine.device) if is_accelerator(engine.device) else cpu_name(),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_trainable": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "batch_size": int(trainer._train_batch_size),
        "num_micro_batches": int(args.gradient_accumulation_steps),
        "world_size": int(args.world_size),
        "precision": str(engine.dtype).removeprefix("torch."),
        "checkpointing": any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()),
        "settings": engine.config.to_dict(),
        "version": __version__,
    }


class RunOutcome:
    """Measures one call of ``Trainer.train``.

    Args:
        trainer: The Trainer, which has an engine and begins its first step.

    Attributes:
        watch: Runs while the Trainer trains.
    """

    def __init__(self, trainer: Any) -> None:
        self.watch = Stopwatch()
        self._trainer = trainer
        self._before = trainer.patrickstar_stats()
        self._first_step = trainer.state.global_step
        self._begun: tuple[int, int, float] | None = None  # a step, steps recorded before it, and when it began
        self._is_told = False

    def begin_micro_batch(self) -> str | None:
        """Notes that a micro-batch begins.

        Returns:
            Once, when the first step has ended that was not recorded, what it took; else ``None``.
        """
        if self._is_told:
            return None
        step = self._trainer.state.global_step
        if self._begun is not None and self._begun[0] == step:
            return None
        now, stats, last = self.watch.elapsed, self._trainer.patrickstar_stats(), self._begun
        recorded = int(stats["recorded_steps"])
        self._begun = (step, recorded, now)
        if last is None or recorded != last[1] or step != last[0] + 1:
            return None
        self._is_told = True
        engine = self._trainer.patrickstar_engine
        estimated = engine.manager.placement.estimated
        return describe_step(step, now - last[2], stats, None if estimated is None else estimated.seconds)

    def describe(self) -> str | None:
        """What the run has come to, in one line; ``None`` if it made no step."""
        num_steps = self._trainer.state.global_step - self._first_step
        if num_steps <= 0:
            return None
        trainer, engine, seconds = self._trainer, self._trainer.patrickstar_engine, self.watch.elapsed
        stats = trainer.patrickstar_stats()
        added = {name: stats[name] - self._before[name] for name in _SUMS}
        estimated, machine = engine.manager.placement.estimated, engine.resources.machine.name
        whole = max(estimated.duration_ns, 1) if estimated is not None else 1
        chunks = [chunk for chunk in engine.manager.chunks if not chunk.is_retired]
        found = Outcome(
            seconds=seconds,
            num_steps=num_steps,
            stats=stats | added,
            has_lanes=engine.resources.has_lanes,
            is_metered=engine.resources.is_metered,
            num_chunks=len(chunks),
            num_on_device=sum(chunk.home is Tier.DEVICE for chunk in chunks),
            batch_size=int(trainer._train_batch_size),
            num_micro_batches=int(trainer.args.gradient_accumulation_steps),
            settings=engine.config.to_dict(),
            machine=machine if estimated is not None else "",
            copying=estimated.copying_ns / whole if estimated is not None else 0.0,
            updating=estimated.updating_ns / whole if estimated is not None else 0.0,
        )
        return describe_outcome(found)
