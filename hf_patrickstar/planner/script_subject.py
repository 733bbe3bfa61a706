"""A subject that a user's own script makes: its model, its batches, its loss and its optimizer.

[Note: planning a script]
The script runs up to ``Trainer.train``, with weights that are not read (``deferred_weights``); where its code needs
their values, it runs once more and reads them. What it has made by then is planned: the Trainer's model is copied, with
a tensor that has no bytes in place of each parameter and buffer, so that adapters, heads and frozen parts are where
the script has put them. The loss is ``compute_loss`` of the script's Trainer, the optimizer is the one that the Trainer
makes, and a micro-batch has the shapes of the largest of the first batches of the Trainer's data loader. With
``--use_liger_kernel`` the loss is that of ``chunked_loss``, which takes as many rows at once as Liger's fused loss, and
as much memory; what its other kernels save is not counted.

What the Trainer holds beside its model (a teacher, say) takes its bytes of the device and is computed with, too.
"""

import contextlib
import copy
import dataclasses
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import Trainer

from hf_patrickstar.checkpoint.weight_files import deferred_weights
from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import ConfigError, EngineError, PatrickStarError
from hf_patrickstar.integrations.training_script import StopScript, run_script, touch_nothing
from hf_patrickstar.machine import Machine
from hf_patrickstar.model.admission import is_checkpointing
from hf_patrickstar.model.chunked_loss import chunk_losses, find_heads
from hf_patrickstar.planner.from_python import OF_THE_MACHINE, asks_for_checkpointing, disk_memory_of, settings_of
from hf_patrickstar.planner.planning import THIS, TrainingSetup, arrange_machine, time_operators
from hf_patrickstar.planner.subject import MakeOptimizer, Subject
from hf_patrickstar.tracing.fake import as_fake, copying

_CONVERSION = "issues during automatic conversion of the weights"
"""What transformers raises where it cannot convert weights, say pack them; the cause is in its log alone."""
NUM_BATCHES = 8
"""How many batches are looked at for the largest."""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptSubject(Subject):
    """What a script trains; see [Note: planning a script] and ``Subject``.

    Attributes:
        trainer: The script's Trainer.
        model: Its model.
        inputs: The shapes of a batch, as tensors on the meta device, with ``seen`` sequences.
        seen: Sequences, and tokens of one, of that batch.
        optimizer: An optimizer over the model's parameters.
        num_items: What the Trainer passes to ``compute_loss`` as ``num_items_in_batch``.
        others: What the Trainer holds beside its model, by attribute.
    """

    trainer: Any
    model: torch.nn.Module
    inputs: Mapping[str, Any]
    seen: tuple[int, int]
    optimizer: torch.optim.Optimizer
    num_items: torch.Tensor | int | None
    others: Mapping[str, torch.nn.Module]

    def make_model(self) -> torch.nn.Module:
        """Copies the model, without bytes."""
        model: Any = as_fake(self.model)
        model.train()
        if self.checkpointing:
            _enable_checkpointing(model, self.trainer.args)
        elif is_checkpointing(model):
            model.gradient_checkpointing_disable()
        if getattr(self.trainer.args, "use_liger_kernel", False):
            with contextlib.suppress(ConfigError):  # Liger has no fused loss for other models, either
                chunk_losses(find_heads(model))
        for name, module in self.others.items():
            setattr(self.trainer, name, as_fake(module))
        self.trainer.model = self.trainer.model_wrapped = model
        return model  # type: ignore[no-any-return]

    def make_inputs(self) -> dict[str, Any]:
        """Makes a micro-batch of the script's shapes, with ``batch_size`` sequences of ``length`` tokens."""
        return tree_map_only(torch.Tensor, self._resized, dict(self.inputs))  # type: ignore[no-any-return]

    def _resized(self, tensor: torch.Tensor) -> torch.Tensor:
        (size, length), shape = self.seen, list(tensor.shape)
        if shape and shape[0] == size:
            shape[0] = self.batch_size
        if length > 1:
            shape[1:] = [self.length if numel == length else numel for numel in shape[1:]]
        return torch.zeros(shape, dtype=tensor.dtype, device="cpu")

    def compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Computes the loss as the script's Trainer does."""
        num_items = self.num_items
        if isinstance(num_items, torch.Tensor):
            num_items = torch.ones(num_items.shape, dtype=num_items.dtype, device="cpu")
        with self.trainer.compute_loss_context_manager():
            loss: torch.Tensor = self.trainer.compute_loss(model, dict(inputs), num_items_in_batch=num_items)
        return loss

    def find_optimizer(self, name: str) -> MakeOptimizer | None:
        """What copies the script's optimizer; ``name`` is not used."""

        def make(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
            memo: dict[int, Any] = dict(zip(map(id, self.model.parameters()), parameters, strict=True))
            with copying():
                made = copy.deepcopy(self.optimizer, memo)
                # Copies of torch's optimizers are without what a class has added, as those of bitsandbytes have.
                added = {name: value for name, value in vars(self.optimizer).items() if not hasattr(made, name)}
                vars(made).update(tree_map_only(torch.Tensor, lambda value: copy.deepcopy(value, memo), added))
            return made

        return make

    @property
    def num_layers(self) -> int:
        """Layers of the model; 0, since it cannot have others."""
        return 0

    @property
    def unit(self) -> str:
        """What a batch is counted in."""
        return "tokens" if self.length > 1 else "examples"


def arrange_script(
    path: str,
    arguments: Sequence[str],
    machine: str | Machine,
    *,
    world_size: int = 1,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    host_cores: int | None = None,
    disk_memory: int | str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[ScriptSubject, TrainingSetup]:
    """Runs a script up to its training, and finds what it trains and how; see [Note: planning a script].

    Args:
        path: The script.
        arguments: Its own arguments.
        machine: As for ``plan``.
        world_size: Processes, each on a device of the machine.
        device_memory: Bytes of the device that training may take; by default ``device_budget`` of the script, or 95 %
            of what the machine has.
        host_memory: Bytes of the host that each process may take; by default ``host_budget`` of the script, or 90 % of
            what the machine has for it.
        host_cores: Cores of the host for each process, where they are fewer than the machine has.
        disk_memory: Bytes of a drive that each process may take; by default what the settings of the script allow.
        settings: Settings of the engine that take the place of the script's.

    Raises:
        ConfigError: If an argument makes no sense, or the script ends or fails before it trains.
    """
    if world_size < 1:
        raise ConfigError(f"processes ({world_size}) must be at least 1")
    PatrickStarConfig.from_any(dict(settings or {}))  # checks keys and values before anything takes time
    arrange_machine(machine if machine != THIS else "h100", world_size, device_memory, host_memory, host_cores)
    with tempfile.TemporaryDirectory(prefix="hf-patrickstar-plan-") as directory:
        subject, given = _find(path, arguments, directory)
    given |= settings or {}
    if device_memory is None and given.get("device_budget") != "auto":
        device_memory = given.get("device_budget")
    if host_memory is None and given.get("host_budget") != "auto":
        host_memory = given.get("host_budget")
    disk_memory = disk_memory_of(given, world_size) if disk_memory is None else disk_memory
    found = arrange_machine(machine, world_size, device_memory, host_memory, host_cores, disk_memory)
    args, optimizer = subject.trainer.args, type(subject.optimizer).__name__
    max_norm = args.max_grad_norm or float("inf")  # the Trainer computes the norm all the same
    others = {key: value for key, value in given.items() if key not in OF_THE_MACHINE}
    times = time_operators(world_size) if machine == THIS else None
    beside = sum(tensor.nbytes for module in subject.others.values() for tensor in module.parameters())
    trained = args.gradient_accumulation_steps, world_size, optimizer, max_norm
    return subject, TrainingSetup(found, *trained, others, times, beside)


def _find(path: str, arguments: Sequence[str], directory: str) -> tuple[ScriptSubject, dict[str, Any]]:
    """The subject, and the settings of the engine that differ from their defaults."""

    def change(args: Any) -> None:
        touch_nothing(args, directory, use_cpu=True, tf32=None)  # the device need not be here
        if hasattr(args, "patrickstar"):
            args.patrickstar = True

    def take(trainer: Trainer, _: Callable[..., Any]) -> None:
        raise StopScript((_subject_of(trainer, os.path.basename(path)), settings_of(trainer.args)))

    def run() -> Any:
        with contextlib.redirect_stdout(sys.stderr):  # what the script prints is no part of the plan
            return run_script(path, arguments, take, change)

    try:
        try:
            with deferred_weights():
                return run()  # type: ignore[no-any-return]
        except (Exception, SystemExit) as error:
            if not _is_about_deferred(error):
                raise
        print(f"'{path}' needs the values of weights; it runs again and reads them", file=sys.stderr, flush=True)
        return run()  # type: ignore[no-any-return]
    except PatrickStarError:
        raise
    except (Exception, SystemExit) as error:  # what a script raises may be anything
        raise ConfigError(_failure(path, error)) from error


def _failure(path: str, error: Exception | SystemExit) -> str:
    """What a script raised before it trained, and where in its own code, in a sentence."""
    if isinstance(error, SystemExit):
        said = f"with the status {error.code}" if isinstance(error.code, int) else f"with '{error.code}'"
        return f"'{path}' ended itself {said} before it trained; change its arguments, or what it needs to train"
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    folder = os.path.dirname(os.path.abspath(path)).rstrip(os.sep) + os.sep
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [place for place in places if os.path.abspath(place[0]).startswith(folder) and not _is_of_library(place[0])]
    if isinstance(error, SyntaxError) and error.filename is not None:
        own, said = [(error.filename, error.lineno)], f"{type(error).__name__}: {error.msg}"
    place = "{}, line {}: ".format(*own[-1]) if own else ""
    return (
        f"'{path}' failed before it trained ({place}{said}); use arguments with which it trains, and run it with "
        "python to see the whole traceback"
    )


def _is_of_library(path: str) -> bool:
    """Whether a file is of something that is installed, or of this package, wherever it lies."""
    return "site-packages" in path or os.path.abspath(path).startswith(_PACKAGE)


def _is_about_deferred(error: BaseException | None) -> bool:
    """Whether it is, or was raised from, an error of ``deferred_weights``."""
    while error is not None:
        if (isinstance(error, EngineError) and "deferred_weights" in str(error)) or _CONVERSION in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _subject_of(trainer: Any, name: str) -> ScriptSubject:
    try:
        batches = list(islice(trainer.get_train_dataloader(), NUM_BATCHES))
    except ValueError as error:  # there is no data set
        raise ConfigError(
            f"'{name}' calls train(), but its Trainer has no batches: {error}; give the script its data"
        ) from error
    if not batches:
        raise ConfigError(
            f"'{name}' calls train(), but the data loader of its Trainer is empty; give the script more data"
        )
    batch = max(batches, key=_numel)
    num_items = trainer._get_num_items_in_batch(batches[: trainer.args.gradient_accumulation_steps], "cpu")
    inputs = tree_map_only(torch.Tensor, lambda value: value.to("meta"), dict(trainer._prepare_inputs(batch)))
    size, length = _extents(inputs)
    masks = [value for key, value in dict(batch).items() if key.endswith("attention_mask")]
    model: Any = trainer.model
    args, base = trainer.args, getattr(model, "get_base_model", lambda: model)()
    return ScriptSubject(
        name=name,
        task=type(base).__name__,
        config=getattr(model, "config", None),  # type: ignore[arg-type]
        batch_size=size,
        length=length,
        checkpointing=asks_for_checkpointing(args) or is_checkpointing(model),
        trainer=trainer,
        model=model,
        inputs=inputs,
        seen=(size, length),
        optimizer=trainer.optimizer or trainer.create_optimizer(),
        num_items=num_items,
        others=_other_modules(trainer),
        has_padding=not all(bool(torch.as_tensor(mask).all()) for mask in masks),
        is_packed="position_ids" in batch,
    )


def _numel(batch: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(dict(batch)) if isinstance(leaf, torch.Tensor))


def _extents(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Sequences of a batch, and tokens of one; 1 token if the batch has no sequences of whole numbers."""
    tensors = [leaf for leaf in tree_leaves(dict(inputs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    tokens = [tensor for tensor in tensors if tensor.dim() == 2 and not tensor.is_floating_point()]
    if tokens:
        longest = max(tokens, key=lambda tensor: tensor.numel())
        return longest.shape[0], longest.shape[1]
    return (tensors[0].shape[0] if tensors else 1), 1


def _other_modules(trainer: Any) -> dict[str, torch.nn.Module]:
    """What a Trainer computes with beside its model."""
    known = {id(module) for model in (trainer.model, trainer.model_wrapped) for module in model.modules()}
    found = vars(trainer).items()
    return {name: value for name, value in found if isinstance(value, torch.nn.Module) and id(value) not in known}


def _enable_checkpointing(model: Any, args: Any) -> None:
    """Computes activations again in backward, as the Trainer makes a model do."""
    names = "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"
    kwargs = {"use_reentrant": False, **next(filter(None, (getattr(args, name, None) for name in names)), {})}
    kwargs.pop("offload", None)  # the engine does that itself
    others = {name: kwargs.pop(name) for name in ("every_n_layers",) if name in kwargs}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs, **others)
