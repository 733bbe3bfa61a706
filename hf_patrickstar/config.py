"""``PatrickStarConfig``: every setting with its default, its unit and its trade-off."""

import dataclasses
import difflib
import json
import os
from typing import Any, Literal, get_args, get_origin

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import Machine, find_machine
from hf_patrickstar.units import ALIGNMENT_NUMEL, format_budget, parse_budget

_SWITCH = bool | Literal["auto"]
_BUDGETS = ("device_budget", "host_budget", "chunk_budget", "disk_budget")
_NUMBERS = {
    "chunk_numel": (1, "a positive number of elements"),
    "prefetch_depth": (0, "a number of chunks, 0 or more"),
    "host_threads": (1, "a number of threads, 1 or more"),
}
_SYNONYMS = {"gpu": "device", "cuda": "device", "vram": "device", "cpu": "host", "ram": "host"}
"""Words in which people look for a key, and the word that it has."""


@dataclasses.dataclass(frozen=True, slots=True)
class PatrickStarConfig:
    """Settings of the engine. Each default is right for most people; none has to be set.

    Source: PatrickStar sections 6.1 (chunks), 8.1 (warm-up), 8.2 (placement) and 8.3 (eviction).

    Raises:
        ConfigError: If a value is not allowed.

    Attributes:
        device_budget: Memory that training may use on the device, activations included. ``"auto"``: the free memory
            less 5 %. Without an accelerator ``"auto"`` is 90 % of the available memory less the host tier and counts
            only chunks; a number counts activations, too. A smaller budget moves more bytes.
        host_budget: Memory on the host for model data. ``"auto"``: 90 % of what this process may use. Too little raises
            ``BudgetError`` before training.
        chunk_budget: The part of ``device_budget`` that chunks may use. ``"auto"``: what non-model data leaves.
        disk_path: A directory on a fast local drive (NVMe) for masters and optimizer states that neither the device nor
            the host has room for, or a list of directories on several drives. They are read and written in every step,
            which takes long and wears drives out: ``hf-patrickstar plan --disk-memory`` says how much. ``None``: none
            go to a drive, and too little memory is an error.
        disk_budget: What they may take there, in each process. ``"auto"``: the part of a process of 90 % of what is
            free.
        chunk_numel: Elements of a chunk. ``"auto"``: the size that wastes least. Large chunks use the bus better; small
            chunks need less memory on the device.
        eviction: Which chunk leaves a full device. ``"belady"``: the one that is needed again last, by the plan
            (PatrickStar section 8.3). ``"lru"``: the least recently used. ``"list_order"``: the first of the chunk
            list, which moves more bytes.
        cpu_embedding: Whether input embeddings are looked up on the CPU, so that only the rows of the batch cross the
            bus (PatrickStar section 8.2). ``"auto"``: untied ones for which this is faster.
        placement: Where optimizer states live. ``"auto"``: on the device for the chunks of the first layers, as far as
            steps leave room (PatrickStar section 8.2). ``"host"``: on the host, unless everything fits on the device.
        machine: Rates by which the engine decides: the name of a machine of ``hf-patrickstar plan``, or a file of
            ``hf-patrickstar env --measure --json``. ``"auto"``: the known machine with this device, else an accelerator
            on PCIe 4, with the cores of this process. Wrong rates cost time and change no result.
        prefetch_depth: Chunks that may be loaded ahead of their use. ``"auto"``: as many as the bus copies in 20 ms,
            from 2 to 8. A larger number never moves more bytes.
        activation_offload: Whether activations move to the host between forward and backward. ``True``: all that the
            host has room for. ``"auto"``: as few as a step needs to fit, or more if that is faster. Bits stay the same.
        reshard_after_forward: Whether gathered parameters leave the device after forward and are gathered again for
            backward. This takes the least memory and sends the most bytes.
        reduce_dtype: The type in which nccl adds gradients. ``"auto"``: their own. ``"fp32"`` rounds 16-bit gradients
            once, not at every addition, and sends twice the bytes. gloo always adds them in fp32.
        dtype: The type of parameters and gradients on the device. ``"auto"``: what ``--bf16`` or ``--fp16`` says;
            without them, the type in which each parameter was loaded. In 16-bit the optimizer updates fp32 masters.
            float64 stays float64 unless this is ``"fp32"``.
        autocast: Whether forward runs under ``torch.autocast`` in 16-bit training, as in the stock Trainer
            (``"auto"``). ``False``: activations take less memory, and losses are 16-bit.
        keep_fp32: Which fp32 parameters stay fp32 in 16-bit training, for 2 more bytes per element. ``"auto"``: those
            that autocast does not round (embeddings, norms, scales, positions), so that losses are the stock Trainer's.
            Name patterns, such as ``["*norm*", "score.*"]``, replace these unless ``"auto"`` is among them. Always
            fp32: modules that transformers keeps in fp32, and fp32 parameters of a model that was loaded mostly in
            16-bit.
        state_dtype: The type in which Adam and AdamW keep ``exp_avg`` and ``exp_avg_sq``. ``"auto"``: that of the
            masters. ``"bf16"`` takes 4 bytes less per trainable parameter; updates compute in fp32 and round the states
            to bf16, so that ``exp_avg_sq`` follows gradients that shrink slowly less well. For fewer bytes use
            ``--optim adamw_8bit``.
        frozen_master: Whether frozen fp32 parameters have fp32 masters in 16-bit training, for 4 bytes per element.
            Without them the engine reads the original values from their safetensors file again when they are saved,
            merged, copied or unfrozen; values that came from no such file stay on the host if it has room.
        pin_memory: Whether chunks on the host are page-locked, for faster, asynchronous copies. ``"auto"``: with a CUDA
            device. They count against ``host_budget``.
        host_threads: Threads that update chunks on the host. ``"auto"``: for Adam and AdamW the cores of this process,
            divided by the processes on them; an ``OMP_NUM_THREADS`` that you set is kept. Adam and AdamW have the same
            bits with any number; optimizers that reduce over tensors round differently.
        overlap_optimizer: Whether Adam, AdamW and 8-bit optimizers update chunks on the host while the next forward
            runs on an accelerator, with the same bits. Otherwise ``step()`` returns after the update, as with all other
            optimizers.
        updates: Where chunks at home on the host are updated. ``"host"``: there. ``"device"``: their gradients, masters
            and states cross the bus, a few million elements at a time, and are updated on the device; the copy that the
            next forward needs is there then. ``"auto"``: each where it is done first, if a step is faster for it, which
            takes some 0.2 GiB of the device, or 0.05 GiB where no more is left. As kernels of devices and hosts round
            differently, bits depend on it. For Adam, AdamW and 8-bit optimizers.
        chunked_loss: Whether the loss of a language model of transformers is computed in chunks of tokens, so that its
            logits are never whole. This saves some 10 bytes per token and word of the vocabulary, and computes the
            product with the output embedding once more. Losses are the same to 1e-6 in fp32, not to the last bit, so
            ``"auto"`` is ``False``; in 16-bit the gradient of the output embedding is rounded once per chunk. Code that
            reads the logits of training gets them, and saves nothing.
        keep_gradients: Whether gradients stay after the optimizer's step until ``zero_grad``, as in torch, for 4 bytes
            per trainable parameter. ``False``: the step consumes them; reading a consumed one is an error. ``"auto"``:
            they stay, if the host has room, until the first ``zero_grad``; later steps consume them.
        reuse_plan: Whether the first steps use what ``hf-patrickstar plan`` or an earlier run has traced of the same
            training, and whether their own traces are kept.
        background_save: Whether checkpoints are written while training goes on. They are consistent, but appear later;
            an error is raised at the next checkpoint, or when training ends.
        optimizer_format: The format of the optimizer's state in checkpoints. ``"torch"``: one process writes
            ``optimizer.pt``, from which the stock Trainer resumes. ``"sharded"``: each process writes its part.
            ``"auto"``: the first with one process, the second with several. This package resumes exactly from each.
        process_wait_s: How long a process waits for the others at a call that all must make (evaluation, saving,
            reading parameters), or in a step while all others wait in collectives of the user, before it raises
            ``CollectiveError``. A slow file system needs more. With 0 or ``None``
            only the timeout of the process group counts.
        debug_collectives: Whether processes agree on each collective before they start it, so that a wrong one is named
            at once and not at the end of a forward or backward.
        debug_evict_all: Whether chunks that are not in use are evicted at every access and filled with NaN, which shows
            uses of released memory. Very slow.
    """

    device_budget: int | str = "auto"
    host_budget: int | str = "auto"
    chunk_budget: int | str = "auto"
    disk_path: str | tuple[str, ...] | None = None
    disk_budget: int | str = "auto"
    chunk_numel: int | str = "auto"
    eviction: Literal["belady", "lru", "list_order"] = "belady"
    cpu_embedding: bool | Literal["auto"] = "auto"
    placement: Literal["auto", "host"] = "auto"
    machine: str | Machine = "auto"
    prefetch_depth: int | str = "auto"
    activation_offload: bool | Literal["auto"] = "auto"
    reshard_after_forward: bool = False
    reduce_dtype: Literal["auto", "fp32"] = "auto"
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    autocast: bool | Literal["auto"] = "auto"
    keep_fp32: tuple[str, ...] | str = ("auto",)
    state_dtype: Literal["auto", "bf16"] = "auto"
    frozen_master: bool = False
    pin_memory: bool | Literal["auto"] = "auto"
    host_threads: int | str = "auto"
    overlap_optimizer: bool = True
    updates: Literal["auto", "host", "device"] = "auto"
    chunked_loss: bool | Literal["auto"] = "auto"
    keep_gradients: bool | Literal["auto"] = "auto"
    reuse_plan: bool = True
    background_save: bool = False
    optimizer_format: Literal["auto", "sharded", "torch"] = "auto"
    process_wait_s: float | None = 60.0
    debug_collectives: bool = False
    debug_evict_all: bool = False

    def __post_init__(self) -> None:
        for name in _BUDGETS:
            value = getattr(self, name)
            if value != "auto":
                object.__setattr__(self, name, parse_budget(value, name))
        paths = (self.disk_path,) if isinstance(self.disk_path, str | os.PathLike) else self.disk_path or ()
        if not isinstance(paths, list | tuple) or not all(isinstance(path, str | os.PathLike) for path in paths):
            raise ConfigError(f"disk_path: expected a directory or a list of them, got {self.disk_path!r}")
        object.__setattr__(self, "disk_path", tuple(map(os.fspath, paths)) or None)
        if self.disk_path is None and self.disk_budget != "auto":
            raise ConfigError("disk_budget: give disk_path, too: the directory for what it allows")
        asked = {name: getattr(self, name) for name in _NUMBERS}
        text = str(self.chunk_numel).strip() if isinstance(self.chunk_numel, str) else ""
        if text.isascii() and text.isdigit():
            object.__setattr__(self, "chunk_numel", int(text))
        for name, (least, what) in _NUMBERS.items():
            value = getattr(self, name)
            if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"{name}: expected 'auto' or {what}, got {asked[name]!r}")
        if self.chunk_numel != "auto" and int(self.chunk_numel) < ALIGNMENT_NUMEL:
            raise ConfigError(
                f"chunk_numel: {self.chunk_numel} is smaller than the alignment of {ALIGNMENT_NUMEL} elements; use "
                "'auto' or a larger number"
            )
        if self.overlap_optimizer == "backward":
            raise ConfigError(
                "overlap_optimizer: 'backward' was removed; set true, with which chunks are updated beside forward"
            )
        patterns = self.keep_fp32
        is_list = isinstance(patterns, (list, tuple)) and all(isinstance(item, str) for item in patterns)
        if patterns != "auto" and not is_list:
            raise ConfigError(f"keep_fp32: expected 'auto' or a list of patterns of parameter names, got {patterns!r}")
        object.__setattr__(self, "keep_fp32", ("auto",) if patterns == "auto" else tuple(patterns))
        self._find_machine()
        wait_s = self.process_wait_s
        is_number = isinstance(wait_s, (int, float)) and not isinstance(wait_s, bool)
        if wait_s is not None and not (is_number and 0 <= wait_s < float("inf")):
            raise ConfigError(f"process_wait_s: expected a number of seconds, 0 or more, or null, got {wait_s!r}")
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), get_args(field.type)
            if get_origin(field.type) is Literal and value not in choices:
                raise ConfigError(f"{field.name}: expected one of {', '.join(choices)}, got {value!r}")
            if field.type == _SWITCH and not isinstance(value, bool) and value != "auto":
                raise ConfigError(f"{field.name}: expected true, false or 'auto', got {value!r}")
            if field.type is bool and not isinstance(value, bool):
                raise ConfigError(f"{field.name}: expected true or false, got {value!r}")

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
        return values | {name: format_budget(values[name]) for name in _BUDGETS if values[name] != "auto"}


ConfigSource = PatrickStarConfig | dict[str, Any] | str | os.PathLike[str] | None
"""What users give as settings: a configuration, a dictionary, JSON text, the path of a JSON file, or nothing."""
