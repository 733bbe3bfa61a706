"""What plans leave in the user's cache: what was printed, and traces for the runs that they were made for.

Files lie where libraries of Hugging Face keep such data (``HF_ASSETS_CACHE``; by default ``assets`` in ``HF_HOME``), in
``hf_patrickstar``. Any of them may be deleted at any time.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import io
import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hf_patrickstar.schedule.trace import Activation, KnownTraces, Trace, Visit
from hf_patrickstar.units import MIB
from hf_patrickstar.version import __version__

if TYPE_CHECKING:  # an answer that was kept is found without torch
    import torch

    from hf_patrickstar.setup.decisions import Decisions

logger = logging.getLogger(__name__)

_MOST_NBYTES = 256 * MIB
TRACES = "traces"
_IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")
"""Which code computes a part of the model: attributes of a configuration that its JSON text leaves out."""
_NOT_COMPUTED = {
    *("_name_or_path", "name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype"),
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "use_cache"),
}
"""Fields of a configuration that change no computation, or that the types and shapes of parameters tell already."""


def directory(kind: str) -> pathlib.Path:
    """The directory of one kind of files.

    Args:
        kind: What they are.

    Raises:
        OSError: If it cannot be made.
    """
    from huggingface_hub import cached_assets_path

    return cached_assets_path("hf_patrickstar", namespace=kind, subfolder="1")


def read(kind: str, key: str) -> bytes | None:
    """Reads a file.

    Args:
        kind: What it is.
        key: Its name.

    Returns:
        Its bytes, or ``None`` if there is none that can be read.
    """
    with contextlib.suppress(OSError):
        path = directory(kind) / key
        found = path.read_bytes()
        os.utime(path)  # the files that are used stay longest
        return found
    return None


def write(kind: str, key: str, values: bytes) -> None:
    """Writes a file as a whole or not at all; those not used for longest are deleted where all take too much.

    A directory that cannot be written is logged and no error: a cache saves time only.

    Args:
        kind: What it is.
        key: Its name.
        values: Its bytes.
    """
    try:
        place = directory(kind)
        with tempfile.NamedTemporaryFile(dir=place, prefix=".", delete=False) as file:
            try:
                file.write(values)
                file.close()
                os.replace(file.name, place / key)
            except BaseException:
                os.unlink(file.name)
                raise
        _delete_old(place)
    except OSError as error:
        logger.info("patrickstar: what was planned is not kept: %s", error)


def _delete_old(place: pathlib.Path) -> None:
    found = []
    for path in place.iterdir():
        with contextlib.suppress(OSError):  # deleted by another process
            stat = path.stat()
            found.append((stat.st_mtime, stat.st_size, path))
    excess = sum(nbytes for _, nbytes, _ in found) - _MOST_NBYTES
    for _, nbytes, path in sorted(found):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= nbytes


def digest(parts: Iterable[object]) -> str:
    """A name for parts that are written alike if they are alike; other versions and other code give another one."""
    return hashlib.sha256(repr([*parts, *_versions()]).encode()).hexdigest()


@functools.cache
def _versions() -> tuple[object, ...]:
    """The versions of what a plan is made with; of this package also its code, which people change in place."""
    root = pathlib.Path(__file__).parent
    stats = [(str(path.relative_to(root)), path.stat()) for path in sorted(root.rglob("*.py"))]
    code = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    others = []
    for name in ("torch", "transformers", "accelerate", "peft", "bitsandbytes"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            others.append((name, importlib.metadata.version(name)))
    return __version__, *others, tuple(code)


def find_traces(model: "torch.nn.Module", decisions: "Decisions") -> KnownTraces:
    """The traces that a plan has left for a training, or none; their key is that of the training in any case.

    Args:
        model: The model.
        decisions: What was decided about it.
    """
    key = key_of(computation_of(model), decisions)
    found = read(TRACES, key) if decisions.situation.config.reuse_plan else None
    if found is None:
        return KnownTraces(key)
    import torch

    try:
        with torch.serialization.safe_globals([KnownTraces, Trace, Visit, Activation]):  # a file runs no code
            known: KnownTraces = torch.load(io.BytesIO(found), weights_only=True)
    except Exception as error:  # what a damaged file raises may be anything
        logger.info("patrickstar: the traces of a plan cannot be read, and the first step is recorded: %s", error)
        return KnownTraces(key)
    kinds = dict.fromkeys(trace.kind for trace in known.traces.values())
    logger.info("patrickstar: reuse_plan: the first steps follow a plan made before (%s)", ", ".join(kinds))
    return known


def keep_traces(known: KnownTraces) -> None:
    """Keeps the traces of a plan for the run that it was made for.

    Args:
        known: The traces.
    """
    import torch

    buffer = io.BytesIO()
    torch.save(known, buffer)
    write(TRACES, known.key, buffer.getvalue())


def key_of(computation: list[object], decisions: "Decisions") -> str:
    """Names what the traces of a training depend on, as far as the engine can see it.

    Args:
        computation: What the model computes; see ``computation_of``.
        decisions: What was decided about it.
    """
    situation, precision = decisions.situation, decisions.precision
    config, resources = situation.config, situation.resources
    layout = decisions.tensors, decisions.choice.layout.chunks, decisions.embeddings, sorted(decisions.lists.items())
    types, asked = (precision.dtype, precision.autocast), (config.reduce_dtype, config.chunked_loss is True)
    kernels = [type(kernel).__name__ for kernel in situation.kernels]
    runs_on = resources.collectives.world_size, resources.has_lanes, resources.is_metered
    return digest([*layout, types, computation, kernels, situation.num_micro_batches, runs_on, asked])


def computation_of(model: "torch.nn.Module") -> list[object]:
    """What a model computes beside the shapes of its parameters, written alike by ``repr`` if it is alike.

    Parameters of the same shapes may make other activations: attention of more heads has more scores.

    Args:
        model: The model.
    """
    modules = [
        (type(module).__qualname__, getattr(module, "gradient_checkpointing", False), _dropped(module))
        for module in model.modules()
    ]
    config: Any = getattr(model, "config", None)
    if not _is_of_transformers(config):
        return [modules]
    fields = _computed(config.to_dict())
    return [modules, json.dumps(fields, sort_keys=True, default=str), list(implementations(config))]


def _dropped(module: "torch.nn.Module") -> float | None:
    """The probability by which a module drops values, if that is what it does."""
    import torch

    return float(module.p) if isinstance(module, torch.nn.modules.dropout._DropoutNd) else None


def _computed(value: Any) -> Any:
    """Fields of a configuration, and of those inside of it, that say what is computed."""
    if isinstance(value, dict):
        names = [name for name in value if name not in _NOT_COMPUTED and not str(name).endswith("_token_id")]
        return {str(name): _computed(value[name]) for name in names}
    return [_computed(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _is_of_transformers(config: Any) -> bool:
    """Whether it is a configuration of transformers, which this package imports elsewhere."""
    return hasattr(config, "to_dict") and hasattr(config, "sub_configs")


def implementations(config: Any) -> Iterator[object]:
    """Which code computes parts of a model: of a configuration, and of those inside of it.

    Args:
        config: The configuration, of transformers.
    """
    for name in _IMPLEMENTATIONS:
        yield getattr(config, name, None)
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if _is_of_transformers(inner):
            yield from implementations(inner)
