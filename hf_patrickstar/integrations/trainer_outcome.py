"""What a Trainer's run says of its engine after the first planned step and at the end, in a line each."""

from typing import Any

from hf_patrickstar.integrations.trainer_report import Stopwatch
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.report.outcome import Outcome, describe_estimated, describe_outcome, describe_step

_SUMS = ("waiting_seconds", "loading_seconds", "computing_seconds", "settling_seconds", "updating_seconds", "retries")


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

    def begin_micro_batch(self) -> tuple[str, ...]:
        """Notes that a micro-batch begins.

        Returns:
            Once, when the first step has ended that was not recorded, what was estimated for it, unless that was said
            before the run began, and what it took; else nothing.
        """
        if self._is_told:
            return ()
        step = self._trainer.state.global_step
        if self._begun is not None and self._begun[0] == step:
            return ()
        now, stats, last = self.watch.elapsed, self._trainer.patrickstar_stats(), self._begun
        recorded = int(stats["recorded_steps"])
        self._begun = (step, recorded, now)
        if last is None or recorded != last[1] or step != last[0] + 1:
            return ()
        self._is_told = True
        engine = self._trainer.patrickstar_engine
        estimated = engine.manager.placement.estimated if engine.estimated is None else None
        before = () if estimated is None else (describe_estimated(estimated.seconds, engine.resources.machine.name),)
        return *before, describe_step(step, now - last[2], stats)

    def lines(self) -> tuple[str, ...]:
        """What the run has come to; nothing if it made no step."""
        num_steps = self._trainer.state.global_step - self._first_step
        if num_steps <= 0:
            return ()
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
        return (describe_outcome(found),)
