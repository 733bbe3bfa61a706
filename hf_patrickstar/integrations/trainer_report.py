"""Records a Trainer's run for ``hf-patrickstar report``: what it is, and figures with each training loss."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.integrations.trainer_lanes import LaneWatch
from hf_patrickstar.memory.accelerator import device_name, is_accelerator
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.report.figures import PREFIX
from hf_patrickstar.report.measure import cpu_name
from hf_patrickstar.report.run_record import RunRecorder
from hf_patrickstar.version import __version__

_LOGGED = ("loss", "grad_norm", "learning_rate", "epoch")


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
