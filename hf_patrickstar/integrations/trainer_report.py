"""What a Trainer's run shows and records of its engine.

Training logs get figures, the console at most three lines (what was decided, the first planned step, what the run came
to), and the cache a record for ``hf-patrickstar report``.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.memory.compute_device import device_name, is_accelerator
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.admission import is_checkpointing
from hf_patrickstar.report.measure import cpu_name
from hf_patrickstar.report.measured_step import measured_timeline
from hf_patrickstar.report.outcome import PREFIX, Outcome, brief, describe_outcome, describe_step, few
from hf_patrickstar.report.run_record import RunRecorder
from hf_patrickstar.schedule.clock import Timeline
from hf_patrickstar.version import __version__

logger = logging.getLogger(__name__)

_LOGGED = ("loss", "grad_norm", "learning_rate", "epoch")
_SUMS = ("waiting_seconds", "loading_seconds", "computing_seconds", "settling_seconds", "updating_seconds", "retries")
_MOST_TRIES = 8
"""If so many steps were recorded one after the other, no step is measured: inputs differ from step to step."""
_CONSOLES = {"PrinterCallback", "ProgressCallback", "NotebookProgressCallback"}
"""By name, since the last one can be imported in notebooks alone."""


def _consoles(handler: Any) -> list[Any]:
    return [item for item in handler.callbacks if _CONSOLES & {base.__name__ for base in type(item).__mro__}]


def tell_console(handler: Any, line: str) -> None:
    """Prints a line where the Trainer prints its logs, above a progress bar if there is one.

    Args:
        handler: The Trainer's ``CallbackHandler``.
        line: The line.
    """
    consoles = _consoles(handler)
    bars = (getattr(console, "training_bar", None) for console in consoles)
    write: Callable[[str], Any] = next((bar.write for bar in bars if bar is not None), print)
    if consoles:
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


def tell_figures(
    stack: contextlib.ExitStack, handler: Any, figures: Mapping[str, float], shown: dict[str, str] | None
) -> None:
    """Until the stack is closed, the logs that the Trainer passes to callbacks have figures of the engine, too.

    ``log_history``, and so ``trainer_state.json``, does not get them: seconds, and bytes of a step that is recorded
    again, would differ between a resumed run and an uninterrupted one.

    Args:
        stack: What takes the figures away again.
        handler: The Trainer's ``CallbackHandler``.
        figures: All figures.
        shown: What a console has shown last, which changes with what it shows now: it gets figures in words when they
            have changed, and other callbacks get few. ``None`` if all callbacks get all figures.
    """
    numbers = figures if shown is None else few(figures)
    stack.enter_context(_logs_changed(handler, lambda logs: {**logs, **numbers}))
    if shown is not None:
        words = brief(figures)
        added = {} if words == shown else words
        shown.update(words)
        for console in _consoles(handler):
            stack.enter_context(
                _logs_changed(console, lambda logs: {key: logs[key] for key in logs if key not in numbers} | added)
            )


def _logs_changed(owner: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Replaces the ``on_log`` of one object inside a block; the list of callbacks does not change."""
    tell = owner.on_log

    def on_log(args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> Any:
        return tell(args, state, control, logs=change(logs), **kwargs)

    return mock.patch.object(owner, "on_log", on_log)


class LaneWatch:
    """Measures the lanes of the first step that is not recorded.

    Args:
        engine: The engine.

    Attributes:
        is_over: Whether nothing is measured any more.
    """

    def __init__(self, engine: PatrickStarEngine) -> None:
        self.is_over = False
        self._streams = engine.resources.streams
        self._durations = engine.manager.steps.durations
        self._counts = engine.counts
        self._recorded = 0  # steps that were recorded before the one that is measured
        self._num_tries = 0

    def begin_step(self) -> Timeline | None:
        """Notes that a step of the optimizer begins, and so that the one before has ended.

        Returns:
            Once, the timeline of the step that has ended.
        """
        times, recorded = self._durations.times, self._counts.recorded_steps
        is_usual = recorded == self._recorded
        if self.is_over:
            return None
        if times is not None and (is_usual or self._num_tries == _MOST_TRIES):
            self.stop()
            return measured_timeline(times) if is_usual else None
        self._recorded = recorded
        self._num_tries += 1
        try:
            self._durations.times = self._streams.begin_timing()
        except RuntimeError as error:  # not every accelerator has moments with times
            logger.info("patrickstar: the lanes of a step cannot be measured on %s: %s", self._streams.device, error)
            self.stop()
        return None

    def stop(self) -> None:
        """Measures no more."""
        self.is_over = True
        self._streams.end_timing()
        self._durations.times = None


class TrainingRun:
    """Measures one call of ``Trainer.train``, and records it; see [Note: the record of a run].

    Args:
        trainer: The Trainer, which has an engine and begins its first step.
        is_recorded: Whether it is recorded.
    """

    def __init__(self, trainer: Any, *, is_recorded: bool) -> None:
        state = trainer.state
        self._since = time.perf_counter()
        self._trainer = trainer
        self._before = trainer.patrickstar_stats()
        self._first_step = state.global_step
        self._begun: tuple[int, int, float] | None = None  # a step, steps recorded before it, and when it began
        self._is_told = False
        self._logged = (state.global_step, state.num_input_tokens_seen, 0.0)  # step, tokens, seconds at the last log
        self._fingerprint: tuple[Any, ...] = ()
        self._lanes = LaneWatch(trainer.patrickstar_engine)
        self._recorder: RunRecorder | None = None
        if is_recorded:
            self._recorder = RunRecorder(trainer.args.output_dir, _about(trainer), is_resumed=state.global_step > 0)

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self._since

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block no time passes."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - begin

    def begin_micro_batch(self, inputs: Any) -> str | None:
        """Notes that a micro-batch begins: with the first one of a step, that step.

        Args:
            inputs: The micro-batch.

        Returns:
            Once, when the first step has ended that was not recorded, what it took; else ``None``.
        """
        step, last = self._trainer.state.global_step, self._begun
        if self._recorder is not None:
            self._recorder.length = max(self._recorder.length, _length_of(inputs))
        if last is not None and last[0] == step:
            return None
        if self._recorder is not None:
            self._recorder.timeline = self._lanes.begin_step() or self._recorder.timeline
        now, engine = self._elapsed, self._trainer.patrickstar_engine
        self._begun = (step, engine.counts.recorded_steps, now)
        if self._is_told or last is None or last[1] != self._begun[1]:
            return None
        self._is_told = True
        estimated = engine.manager.evictor.estimated
        return describe_step(step, now - last[2], engine.stats(), None if estimated is None else estimated.seconds)

    def close(self) -> None:
        """Measures no more."""
        self._lanes.stop()

    def note_loss(self, logs: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """Records what was logged with a training loss.

        Args:
            logs: What the Trainer logs.
            figures: The engine's figures since the last log.
        """
        if self._recorder is None:
            return
        trainer, state, engine = self._trainer, self._trainer.state, self._trainer.patrickstar_engine
        last_step, last_tokens, before = self._logged
        self._logged = (state.global_step, state.num_input_tokens_seen, self._elapsed)
        num, tokens = state.global_step - last_step, state.num_input_tokens_seen - last_tokens
        num = num if num > 0 else max(state.global_step, 1)  # a second log, or the Trainer has started over
        seconds = max(self._logged[2] - before, 1e-9)
        row: dict[str, Any] = {"step": state.global_step, "num_steps": num}
        row |= {name: float(logs[name]) for name in _LOGGED if logs.get(name) is not None}
        num_samples = trainer._train_batch_size * trainer.args.gradient_accumulation_steps * trainer.args.world_size
        row |= {"seconds": seconds / num, "samples_per_s": num_samples * num / seconds}
        if tokens > 0:
            row["tokens_per_s"] = tokens / seconds
        row |= {name.removeprefix(PREFIX): value for name, value in figures.items()}
        manager, ledger = engine.manager, engine.ledger
        peaks = [tuple(sorted(ledger.owner_peaks(tier).items())) for tier in Tier]
        homes = tuple(chunk.home for chunk in manager.chunks)
        plans = tuple((trace.key, room) for trace, _, room in manager.steps.followed)
        # To compare it is less work than to survey.
        fingerprint = (self._recorder.length, self._lanes.is_over, manager.steps.version, homes, plans, *peaks)
        if fingerprint != self._fingerprint:
            self._fingerprint = fingerprint
            self._recorder.note_survey(engine.survey())
        self._recorder.note_step(row)

    def note_evaluation(self, loss: float) -> None:
        """Records the loss of an evaluation.

        Args:
            loss: Its mean.
        """
        if self._recorder is not None:
            self._recorder.note_step({"step": self._trainer.state.global_step, "eval_loss": loss})

    def describe(self) -> str | None:
        """What the run has come to, in one line; ``None`` if it made no step."""
        trainer, engine, stats = self._trainer, self._trainer.patrickstar_engine, self._trainer.patrickstar_stats()
        if (num_steps := trainer.state.global_step - self._first_step) <= 0:
            return None
        estimated = engine.manager.evictor.estimated
        known: dict[str, Any] = {}
        if estimated is not None:
            whole = max(estimated.duration_ns, 1)
            known = {"copying": estimated.copying_ns / whole, "updating": estimated.updating_ns / whole}
            known["machine"] = engine.resources.machine.name
        chunks = [chunk for chunk in engine.manager.chunks if not chunk.is_retired]
        found = Outcome(
            seconds=self._elapsed,
            num_steps=num_steps,
            stats=stats | {name: stats[name] - self._before[name] for name in _SUMS},
            has_lanes=engine.resources.has_lanes,
            is_metered=engine.resources.is_metered,
            num_chunks=len(chunks),
            num_on_device=sum(chunk.home is Tier.DEVICE for chunk in chunks),
            batch_size=int(trainer._train_batch_size),
            num_micro_batches=int(trainer.args.gradient_accumulation_steps),
            settings=engine.config.to_dict(),
            **known,
        )
        return describe_outcome(found)


def _length_of(inputs: Any) -> int:
    """Tokens of a sequence of a micro-batch; 0 if it has none."""
    values = inputs.values() if isinstance(inputs, Mapping) else ()
    tokens = [value for value in values if isinstance(value, torch.Tensor) and value.dim() == 2]
    whole = [value for value in tokens if not value.is_floating_point()]
    return max(whole, key=torch.Tensor.numel).shape[1] if whole else 0


def _about(trainer: Any) -> dict[str, Any]:
    engine, args = trainer.patrickstar_engine, trainer.args
    model = trainer.model
    return {
        "model": str(getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__),
        "model_class": type(model).__name__,
        "device": device_name(engine.device) if is_accelerator(engine.device) else cpu_name(),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_trainable": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "batch_size": int(trainer._train_batch_size),
        "num_micro_batches": int(args.gradient_accumulation_steps),
        "world_size": int(args.world_size),
        "precision": str(engine.dtype).removeprefix("torch."),
        "checkpointing": is_checkpointing(model),
        "settings": engine.config.to_dict(),
        "version": __version__,
    }
