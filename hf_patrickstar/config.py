"""``PatrickStarConfig``: every setting with its default, its unit and its trade-off."""

import dataclasses
import difflib
import json
import os
from typing import Any, Literal

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import Machine, find_machine
from hf_patrickstar.units import ALIGNMENT_NUMEL, format_budget, parse_budget

_CHOICES: dict[str, tuple[str, ...]] = {
    "eviction": ("belady", "lru", "list_order"),
    "placement": ("auto", "host"),
    "dtype": ("auto", "fp32", "bf16", "fp16"),
    "reduce_dtype": ("auto", "fp32"),
    "optimizer_format": ("sharded", "torch", "both"),
}


_BUDGETS = ("device_budget", "host_budget", "chunk_budget")
_SYNONYMS = {"gpu": "device", "cuda": "device", "vram": "device", "cpu": "host", "ram": "host"}
"""Words in which people look for a key, and the word that it has."""


@dataclasses.dataclass(frozen=True, slots=True)
class PatrickStarConfig:
    """Settings of the engine. Each default is right for most people; none has to be set.

    Source: PatrickStar sections 6.1 (chunks), 8.1 (warm-up), 8.2 (placement) and 8.3 (eviction).

    Raises:
        ConfigError: If a value is not allowed.

    Attributes:
        device_budget: Bytes on the compute tier: a number, text such as ``"8GiB"``, or ``"auto"``. On an accelerator
            ``"auto"`` is the free memory of the device less a reserve of 5 %. The budget covers model and non-model
            data together. On a machine without an accelerator ``"auto"`` is 90 % of the available memory, less what the
            host tier takes of it, and only chunks are counted. A number there covers activations too, which slows
            first steps and evaluations. A smaller budget saves memory and moves more bytes.
        chunk_budget: Bytes that chunks may take on the compute tier at most: a number, text, or ``"auto"``: what
            non-model data leaves of ``device_budget``. A number leaves more of the device to other uses, and moves more
            bytes.
        host_budget: Bytes on the host tier for model data: a number, text, or ``"auto"``: 90 % of the memory that is
            available to this process (cgroup limits respected). Too small raises ``BudgetError`` before training.
        chunk_numel: Elements per chunk, or ``"auto"``: the size, within the budget, that wastes least. Larger chunks
            use the bus better; smaller chunks need a smaller budget.
        eviction: Which chunk leaves a full device: ``"belady"`` (the latest to be needed next, known from a trace,
            PatrickStar section 8.3), ``"lru"`` (the one unused longest) or ``"list_order"`` (the first of the chunk
            list, as in the warm-up of section 8.1; moves more).
        cpu_embedding: Whether input embeddings are looked up on the CPU, so that only activations cross the bus
            (PatrickStar section 8.2): ``True``, ``False``, or ``"auto"``: untied embeddings for which that takes less
            time, by the rows that a step looks up and the rates of ``machine``. A tied embedding that is
            looked up on the CPU still moves for the other modules that use it.
        placement: Where optimizer states live: ``"auto"`` gives the chunks of the first layers a home in the device
            margin, as many as steps leave room for (PatrickStar section 8.2), and the optimizer updates them there;
            ``"host"`` keeps all at home on the host, unless all fits on the device.
        machine: The machine by whose rates the engine decides what takes the least time: which embeddings are looked up
            on the CPU, how many chunks live in the device margin, how many are loaded ahead. A name that
            ``hf-patrickstar plan`` knows, a file of ``hf-patrickstar env --measure --json``, or ``"auto"``: the known
            machine with this device, or an accelerator on PCIe 4, with the cores that this process gets: each adds at
            most 12 GB/s and 30 GFLOP/s to the host. Wrong rates make training slower; results stay the same.
        prefetch_depth: How many chunks may be loaded to the compute tier ahead of their use; with 0, each is loaded
            when it is needed. More hides transfer time better where there is room, and never moves more bytes.
            ``"auto"`` takes as many as the bus brings in 20 ms, from 2 to 8.
        reshard_after_forward: With several processes, whether a communication group leaves the device as soon as
            forward does not need it any more, and is gathered again for backward: ``True`` takes the least memory and
            sends exactly what PatrickStar section 7 says; ``False`` keeps the group on the device as long as nothing
            else needs the room, which sends fewer bytes.
        reduce_dtype: With several processes, the type in which nccl adds gradients: ``"fp32"``, or ``"auto"``: their
            own. For 16-bit gradients ``"fp32"`` rounds once instead of at every addition, sends twice the bytes, and
            takes 4 bytes more on the device per element of the largest communication group. On gloo 16-bit gradients
            are always added in fp32, a piece at a time.
        dtype: Type of parameters and gradients on the compute device: ``"fp32"``, ``"bf16"``, ``"fp16"``, or
            ``"auto"``: what ``--bf16`` or ``--fp16`` says. Where 16-bit was asked for, the optimizer works on fp32
            masters. Where nothing was asked for, each parameter and its optimizer states keep the type that the model
            was loaded in, as in plain torch. float64 parameters stay float64 unless ``"fp32"`` was asked for.
        autocast: Whether forward runs under ``torch.autocast`` where 16-bit was asked for, as in the stock Trainer:
            matrix products in 16 bits, norms, softmax and losses in fp32. ``"auto"`` is ``True``. ``False`` computes
            everything in 16 bits: activations that autocast keeps in fp32 take half the bytes, and losses are 16-bit.
        keep_fp32: Which fp32 parameters stay fp32 where 16-bit was asked for; each element takes 2 bytes more on every
            tier. ``"auto"``: those that autocast does not round (embeddings, norms, scales, positions), so that losses
            are the stock Trainer's. A list of name patterns, such as ``["*norm*", "score.*"]``, replaces these, unless
            ``"auto"`` is in the list; with ``[]`` embeddings and norms are 16-bit too. Always fp32 are the modules that
            transformers lists in ``_keep_in_fp32_modules_strict`` (in fp16 also ``_keep_in_fp32_modules``), and fp32
            parameters of a model that was loaded mostly in 16-bit.
        frozen_master: Whether frozen parameters that were loaded in fp32 and are used in 16-bit have fp32 masters:
            ``True`` takes 4 bytes per such element. With ``False`` the engine reads the original values again from the
            safetensors file that they came from, whenever the parameters are saved, merged, copied or unfrozen.
            Parameters that came from no such file keep only their 16-bit values.
        pin_memory: Whether host chunks that move are page-locked: ``True``, ``False``, or ``"auto"``: yes with a CUDA
            device. Pinned memory copies faster and asynchronously. The engine takes no more of it than chunks need,
            where torch or the driver can do that, and says in the log how; what is taken is booked against
            ``host_budget``.
        host_threads: How many threads compute the optimizer's update on the host: a number, or ``"auto"``. ``torchrun``
            and ``accelerate launch`` set ``OMP_NUM_THREADS=1``, which leaves one core to it; there ``"auto"`` takes the
            cores of this process, divided by the processes that share them, for Adam and AdamW, whose bits do not
            depend on the number. Under ``mp.spawn``, ``srun`` or ``mpirun``, which do not set it, several processes on
            the same cores take no more than that share. Where ``OMP_NUM_THREADS`` was set by somebody else, it holds. A
            number is used for every optimizer that works chunk by chunk. More threads make updates faster until memory
            or other processes are the limit; an optimizer that reduces over tensors rounds differently with another
            number.
        overlap_optimizer: Whether the chunks of the host are updated while the next forward runs on an accelerator:
            ``step()`` settles what it does and returns, and what needs a chunk waits for its update. The results have
            the same bits. ``False`` updates all of them before ``step()`` returns, which is slower. On a machine
            without an accelerator both are the same. Other optimizers than torch's Adam and AdamW always update before
            ``step()`` returns.
        keep_gradients: Whether gradients stay after the optimizer's step until ``zero_grad``, as in torch: ``True``
            keeps them beside the values, 4 bytes per trainable parameter; ``False`` lets the step consume them, as if
            ``zero_grad`` followed; ``"auto"`` keeps them, where the host has room, until the first call of
            ``zero_grad``. After that call the step consumes gradients, and reading a consumed one is an error.
        reuse_plan: Whether the first steps follow what ``hf-patrickstar plan`` or an earlier run has traced of the same
            training: same model, batches, processes, types and versions, and a budget that gives the same chunks.
            ``False`` traces the model anew, and keeps nothing.
        background_save: Whether checkpoints (of the Trainer, ``save_state`` and ``save_checkpoint``) write the training
            state while training goes on. The checkpoint is consistent without a copy: the optimizer's step waits at a
            chunk that has not been written yet. The checkpoint appears a little later, and an error is raised at the
            next checkpoint, or when training ends.
        optimizer_format: The format of the optimizer's state in checkpoints: ``"sharded"`` (each process writes its
            part to a safetensors file, which is fastest and keeps every bit), ``"torch"`` (one process writes the
            ``optimizer.pt`` that the stock Trainer resumes from; it has no fp32 masters, so a model that was loaded in
            16-bit resumes from its rounded weights) or ``"both"`` (which takes the disk space of both). Loading accepts
            each format, whatever the setting is.
        process_wait_s: With several processes, how many seconds a process waits for the others at a call that all must
            make together (making the engine, reading parameters, evaluation, saving) before it raises
            ``CollectiveError``; it warns after ten. A lower value finds a mistake sooner. A higher value is right where
            one process takes long outside of the engine, for example on a slow file system. With 0 or ``None`` only
            the timeout of the process group ends such a wait. It ends all other waits too: for data, and for what
            follows such a call.
        debug_collectives: With several processes, whether they agree on every collective before they start it, so that
            a process that starts another one is named at once. Without it, the processes notice such a difference when
            forward or backward ends.
        debug_evict_all: Whether to evict every chunk that is not in use, at every access, and to fill its memory with
            NaN. Very slow; a use of released memory then always gives NaN. All chunks then have their home on the host,
            as far as the host has room, even if everything fits on the device; a warning says if no chunk moves.
    """

    device_budget: int | str = "auto"
    host_budget: int | str = "auto"
    chunk_budget: int | str = "auto"
    chunk_numel: int | str = "auto"
    eviction: Literal["belady", "lru", "list_order"] = "belady"
    cpu_embedding: bool | Literal["auto"] = "auto"
    placement: Literal["auto", "host"] = "auto"
    machine: str | Machine = "auto"
    prefetch_depth: int | str = "auto"
    reshard_after_forward: bool = False
    reduce_dtype: Literal["auto", "fp32"] = "auto"
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    autocast: bool | Literal["auto"] = "auto"
    keep_fp32: tuple[str, ...] | str = ("auto",)
    frozen_master: bool = False
    pin_memory: bool | Literal["auto"] = "auto"
    host_threads: int | str = "auto"
    overlap_optimizer: bool = True
    keep_gradients: bool | Literal["auto"] = "auto"
    reuse_plan: bool = True
    background_save: bool = False
    optimizer_format: Literal["sharded", "torch", "both"] = "sharded"
    process_wait_s: float | None = 60.0
    debug_collectives: bool = False
    debug_evict_all: bool = False

    def __post_init__(self) -> None:
        for name in _BUDGETS:
            value = getattr(self, name)
            if value != "auto":
                object.__setattr__(self, name, parse_budget(value, name))
        if self.chunk_numel != "auto":
            chunk_numel = self.chunk_numel
            if isinstance(chunk_numel, str) and chunk_numel.strip().isascii() and chunk_numel.strip().isdigit():
                chunk_numel = int(chunk_numel)
            if isinstance(chunk_numel, bool) or not isinstance(chunk_numel, int) or chunk_numel < 1:
                raise ConfigError(
                    f"chunk_numel: expected 'auto' or a positive number of elements, got {self.chunk_numel!r}"
                )
            if chunk_numel < ALIGNMENT_NUMEL:
                raise ConfigError(
                    f"chunk_numel: {chunk_numel} is smaller than the alignment of {ALIGNMENT_NUMEL} elements; use "
                    "'auto' or a larger number"
                )
            object.__setattr__(self, "chunk_numel", chunk_numel)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("autocast", "cpu_embedding", "pin_memory", "keep_gradients"):
            if not isinstance(getattr(self, name), bool) and getattr(self, name) != "auto":
                raise ConfigError(f"{name}: expected true, false or 'auto', got {getattr(self, name)!r}")
        if self.overlap_optimizer == "backward":
            raise ConfigError(
                "overlap_optimizer: 'backward' was removed; set true, with which chunks are updated beside forward"
            )
        patterns = self.keep_fp32
        is_list = isinstance(patterns, (list, tuple)) and all(isinstance(item, str) for item in patterns)
        if patterns != "auto" and not is_list:
            raise ConfigError(f"keep_fp32: expected 'auto' or a list of patterns of parameter names, got {patterns!r}")
        object.__setattr__(self, "keep_fp32", ("auto",) if patterns == "auto" else tuple(patterns))
        depth = self.prefetch_depth
        if depth != "auto" and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
            raise ConfigError(f"prefetch_depth: expected 'auto' or a number of chunks, 0 or more, got {depth!r}")
        self._find_machine()
        threads = self.host_threads
        if threads != "auto" and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ConfigError(f"host_threads: expected 'auto' or a number of threads, 1 or more, got {threads!r}")
        wait_s = self.process_wait_s
        is_number = isinstance(wait_s, (int, float)) and not isinstance(wait_s, bool)
        if wait_s is not None and not (is_number and 0 <= wait_s < float("inf")):
            raise ConfigError(f"process_wait_s: expected a number of seconds, 0 or more, or null, got {wait_s!r}")
        for name in (
            "background_save",
            "frozen_master",
            "overlap_optimizer",
            "reshard_after_forward",
            "reuse_plan",
            "debug_collectives",
            "debug_evict_all",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: expected true or false, got {getattr(self, name)!r}")

    def _find_machine(self) -> None:
        machine = self.machine
        if isinstance(machine, dict):  # of ``to_dict``
            object.__setattr__(self, "machine", Machine.from_dict(machine))
        elif isinstance(machine, str) and machine != "auto":
            object.__setattr__(self, "machine", find_machine(machine))
        elif not isinstance(machine, str | Machine):
            raise ConfigError(f"machine: expected 'auto', a known name or the path of a JSON file, got {machine!r}")

    @classmethod
    def from_any(cls, source: "ConfigSource") -> "PatrickStarConfig":
        """Makes a configuration from whatever a user has.

        Args:
            source: ``None`` (all defaults), a configuration, a dictionary, JSON text, or the path of a JSON file.

        Raises:
            ConfigError: If the file is missing, the text is no JSON object, a key is unknown (the nearest known one
                is named), or a value is not allowed.
        """
        if source is None:
            return cls()
        if isinstance(source, cls):
            return source
        if isinstance(source, dict):
            return cls._from_dict(source)
        if not isinstance(source, (str, os.PathLike)):
            raise ConfigError(f"patrickstar_config: expected a dict, JSON text or the path of a file, got {source!r}")
        text, origin = os.fspath(source), "the text given"
        if not text.lstrip().startswith("{"):
            origin = f"file '{text}'"
            try:
                with open(text, encoding="utf-8") as file:
                    text = file.read()
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
                raise ConfigError(
                    f"patrickstar_config: cannot read {origin}: {reason}; give JSON text or the path of a JSON file"
                ) from error
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f'patrickstar_config: {origin} is not JSON: {error}; give an object such as {{"device_budget": "8GiB"}}'
            ) from error
        if not isinstance(values, dict):
            raise ConfigError(f"patrickstar_config: {origin} holds {type(values).__name__}, expected a JSON object")
        return cls._from_dict(values)

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> "PatrickStarConfig":
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                words = [_SYNONYMS.get(word, word) for word in str(key).lower().split("_")]
                near = difflib.get_close_matches("_".join(words), known, n=1, cutoff=0.0)[0]
                raise ConfigError(
                    f"patrickstar_config: unknown key '{key}'; did you mean '{near}'? Known: {', '.join(known)}"
                )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The settings as a dictionary that ``from_any`` takes back."""
        values = dataclasses.asdict(self)
        budgets = {name: format_budget(values[name]) for name in _BUDGETS if values[name] != "auto"}
        return values | budgets


ConfigSource = PatrickStarConfig | dict[str, Any] | str | os.PathLike[str] | None
"""What users give as settings: a configuration, a dictionary, JSON text, the path of a JSON file, or nothing."""
