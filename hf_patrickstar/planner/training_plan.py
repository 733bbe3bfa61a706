"""The plan of a training: what fits where, and how long a step takes. Pure data."""

import dataclasses
import json
from collections.abc import Mapping

from hf_patrickstar.memory.tiers import Tier


@dataclasses.dataclass(frozen=True, slots=True)
class TierUse:
    """What a step needs of the memory of one tier.

    Attributes:
        budget_nbytes: What there is.
        need_nbytes: The most bytes at once. Where the plan fits, chunks take what is there, and this is at most the
            budget; where it does not, it is the least that would do.
        owners: Bytes of each kind at the moment with the most bytes. Where the plan does not fit, those of a plan that
            has just the memory that would do.
        moment: That moment, as in ``"backward of lm_head"``; empty where all moments have as much.
    """

    budget_nbytes: int
    need_nbytes: int
    owners: Mapping[str, int]
    moment: str = ""

    @property
    def missing_nbytes(self) -> int:
        """By how much the tier is too small; 0 if it is not."""
        return max(self.need_nbytes - self.budget_nbytes, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Chunks:
    """What was decided about chunks.

    Attributes:
        num: How many there are.
        numel: Elements of a standard chunk; a tensor that is larger has a chunk of its own.
        utilisation: Part of their elements that parameters fill.
        num_on_device: Those that live on the device with their optimizer states.
        nbytes: Bytes of all of them on the device they are computed on, without optimizer states; of one process.
        largest_nbytes: Bytes of the largest.
        reasons: Why, a sentence for each decision of the engine before the first step. Later ones may move chunks.
    """

    num: int
    numel: int
    utilisation: float
    num_on_device: int
    nbytes: int
    largest_nbytes: int
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Speed:
    """What a step of the optimizer takes on the machine; simulated.

    Attributes:
        seconds: From one call of ``optimizer.step()`` to the next.
        tokens_per_s: Tokens of all processes, or what else is counted (``Plan.unit``).
        binding: The lane that has the most to do.
        least_seconds: What that lane alone takes.
        clipped_seconds: The bound where gradients are clipped by their norm, which needs all of them first; ``None`` if
            they are not.
        busy: The share of the step in which each lane has something to do.
        chain: Seconds of each lane in the work that had to wait for each other: together they are the step.
        to_device_nbytes: Bytes that cross to the device.
        to_host_nbytes: Bytes that cross to the host.
        sent_nbytes: Bytes of parameters and gradients that one process sends to others; 0 with one process.
        least_activation_nbytes: What activations take on the device at least: if all leave it between forward and
            backward that may.
        start: Seconds from the engine to the end of the first step, by what they are for.
        disk_written_nbytes: Bytes of masters and optimizer states that one process writes to the disk; it reads as
            many.
    """

    seconds: float
    tokens_per_s: float
    binding: str
    least_seconds: float
    clipped_seconds: float | None
    busy: Mapping[str, float]
    chain: Mapping[str, float]
    to_device_nbytes: int
    to_host_nbytes: int
    sent_nbytes: int
    least_activation_nbytes: int
    start: Mapping[str, float]
    disk_written_nbytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TriedChange:
    """A change of how the model is trained, which was planned, too.

    Attributes:
        text: What to do.
        tokens_per_s: As in ``Speed``, then.
        gain: That as a multiple of what it is without the change; ``None`` if the plan does not fit without it.
    """

    text: str
    tokens_per_s: float
    gain: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a training before it begins.

    Attributes:
        model: What was asked for.
        task: What the model is trained for.
        unit: What is counted in batches and in a second: tokens, or images or examples where there are no sequences.
        machine: Where it trains.
        num_parameters: Trainable and frozen.
        num_trainable: Trainable.
        batch_size: Sequences of a micro-batch on each process.
        length: Tokens of a sequence.
        num_micro_batches: Micro-batches of a step.
        world_size: Processes.
        settings: Settings of the engine that were given.
        checkpointing: Whether activations are computed again in backward.
        tiers: Memory by the name of the tier.
        chunks: What was decided; ``None`` if it does not fit.
        speed: How fast it is; ``None`` if it does not fit.
        shortage: Which setting is too small, in sentences, where no memory would do; else ``None``.
        remarks: What else one should know of the plan, in sentences.
        precision: The type of most parameters on the device, without ``torch.``.
        changes: What to change, the best first; ``None`` if nothing was tried.
        failed: Options that were tried and with which the training does not fit, either.
        largest: The largest ``batch_size`` and the largest ``length`` that fit, each with the other as it was asked
            for, where a plan does not fit and fewer tokens may help; ``None`` under a name if not even 1 fits.
            ``None`` in all if nothing was searched.
    """

    model: str
    task: str
    unit: str
    machine: str
    num_parameters: int
    num_trainable: int
    batch_size: int
    length: int
    num_micro_batches: int
    world_size: int
    settings: Mapping[str, object]
    checkpointing: bool
    tiers: Mapping[str, TierUse]
    chunks: Chunks | None
    speed: Speed | None
    shortage: str | None = None
    remarks: tuple[str, ...] = ()
    precision: str | None = None
    changes: tuple[TriedChange, ...] | None = None
    failed: tuple[str, ...] = ()
    largest: Mapping[str, int | None] | None = None

    @property
    def fits(self) -> bool:
        """Whether both tiers, and what the settings allow of them, are large enough."""
        return self.speed is not None

    @property
    def batch(self) -> str:
        """A micro-batch of one process, in words."""
        if self.unit == "tokens":
            return f"{self.batch_size} x {self.length} tokens"
        return f"{self.batch_size} {self.unit if self.batch_size > 1 else self.unit.removesuffix('s')}"

    def tier(self, tier: Tier) -> TierUse:
        """The memory of a tier."""
        return self.tiers[tier.value]

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps({**dataclasses.asdict(self), "fits": self.fits}, indent=2)
