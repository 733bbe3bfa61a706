"""A few steps of a script's training, recorded: ``hf-patrickstar run -m hf_patrickstar.cli.check_run``.

``hf-patrickstar check`` starts one such process for each training that it compares; by ``run`` it checks stock scripts,
too. Nothing of the user's is written to: the training has a directory of its own, and saving, evaluating, pushing and
reporting are switched off.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, set_seed

from hf_patrickstar.checkpoint.deferred import PIECE_NUMEL, Reader
from hf_patrickstar.checkpoint.safetensors_file import write_safetensors
from hf_patrickstar.cli.comparison import WEIGHTS, Record
from hf_patrickstar.integrations.training_script import ScriptError, StopScript, run_script, touch_nothing

_SEED = 0
_DIGEST_NBYTES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What one process does.

    Attributes:
        directory: Where it writes its ``Record`` and the last weights.
        is_chunked: Whether it trains with ``--patrickstar``.
        num_steps: Steps of the optimizer.
        path: The script.
        arguments: The script's own arguments.
    """

    directory: str
    is_chunked: bool
    num_steps: int
    path: str
    arguments: list[str]


class _StepRecorder(TrainerCallback):
    """Notes what a training does, and stops it.

    Args:
        task: What to do.
        trainer: The Trainer.
    """

    def __init__(self, task: Task, trainer: Trainer) -> None:
        own = trainer.accelerator
        self.record = Record(precision=getattr(own, "patrickstar_dtype", own.mixed_precision))
        self._task, self._trainer = task, trainer
        self._micro_batches: list[float] = []
        self._train_micro_batch = trainer.training_step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the Trainer's, and notes the loss."""
        loss = self._train_micro_batch(*args, **kwargs)
        self._micro_batches.append(float(loss))
        return loss

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """See ``TrainerCallback``."""
        self._note_weights(is_last=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See ``TrainerCallback``."""
        self.record.losses.append(self._micro_batches)
        self._micro_batches = []
        is_last = state.global_step >= self._task.num_steps
        self._note_weights(is_last=is_last)
        control.should_training_stop = control.should_training_stop or is_last

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """See ``TrainerCallback``."""
        for name, values in (("grad_norm", self.record.norms), ("learning_rate", self.record.rates)):
            if name in logs:
                values.append(float(logs[name]))

    def _note_weights(self, *, is_last: bool) -> None:
        assert self._trainer.model is not None
        with _weights_of(self._trainer.model) as weights:
            reader = Reader()
            self.record.digests.append({name: _digest(reader, value) for name, value in weights.items()})
            if is_last:
                write_safetensors(pathlib.Path(self._task.directory) / WEIGHTS, weights)


@contextlib.contextmanager
def _weights_of(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """All parameters and buffers, in the types that the model was loaded in; those in chunks are read in pieces."""
    engine = getattr(model, "patrickstar_engine", None)
    with contextlib.nullcontext() if engine is None else engine.weights.streamed(is_reader=True):
        state = model.state_dict()
        yield {name: state.get(name, tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def _digest(reader: Reader, tensor: torch.Tensor) -> str:
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=_DIGEST_NBYTES)
    with contextlib.closing(reader.pieces(tensor, PIECE_NUMEL)) as pieces:
        for piece in pieces:
            digest.update(piece.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _change_arguments(task: Task, arguments: Any) -> None:
    """Makes a training short, and one that touches nothing but its own directory."""
    values = {"max_steps": task.num_steps, "warmup_steps": 0, "logging_strategy": "steps", "logging_steps": 1}
    values |= {"patrickstar": task.is_chunked, "patrickstar_report": False}
    if not task.is_chunked:
        values["patrickstar_config"] = None
    touch_nothing(arguments, str(pathlib.Path(task.directory) / "output"), **values)


def _train(task: Task, trainer: Any, train: Any) -> None:
    if trainer.args.patrickstar is not task.is_chunked:
        raise ScriptError(f"'{task.path}' changes 'patrickstar' of its arguments; leave it as it was given")
    _change_arguments(task, trainer.args)  # again, for a script that has changed them after they were made
    trainer.remove_callback(EarlyStoppingCallback)  # it refuses to train without evaluation
    recorder = _StepRecorder(task, trainer)
    trainer.training_step = recorder.training_step
    trainer.add_callback(recorder)
    train(resume_from_checkpoint=False)
    num_done = len(recorder.record.losses)
    if num_done < task.num_steps:
        raise ScriptError(
            f"'{task.path}' ended its training after {num_done} of {task.num_steps} steps; give it more data, or "
            "check fewer steps (--steps)"
        )
    if task.is_chunked and getattr(trainer, "patrickstar_engine", None) is None:  # the same class twice is the same
        raise ScriptError(
            f"'{task.path}' trains with {type(trainer).__name__} and {type(trainer.args).__name__}, which do not train "
            "in chunks; import both from transformers, or derive them from PatrickStarTrainerMixin and "
            "PatrickStarArgumentsMixin"
        )
    recorder.record.write(task.directory)
    raise StopScript


def record_training(text: str) -> None:
    """Trains, and writes what it did, or why the script cannot be checked.

    Args:
        text: The fields of a ``Task`` as JSON.

    Raises:
        Exception: What the script raises.
    """
    task = Task(**json.loads(text))
    set_seed(_SEED)  # what a script draws before it sets its own seed is the same in each process
    torch.use_deterministic_algorithms(True, warn_only=True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  (a property of the module)
    try:
        on_train, on_arguments = functools.partial(_train, task), functools.partial(_change_arguments, task)
        run_script(task.path, task.arguments, on_train, on_arguments)
    except ScriptError as error:
        Record(problem=str(error)).write(task.directory)


if __name__ == "__main__":
    record_training(sys.argv[1])
