"""A user's module is checked by mypy against the types of the package: ``py.typed``, and every public name."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import hf_patrickstar

ROOT = pathlib.Path(hf_patrickstar.__file__).parent.parent

USER = '''
"""Uses of the public names. A line that is wrong ends with the code of the error that mypy reports for it."""

import dataclasses
import pathlib
from contextlib import AbstractContextManager
from typing import Any, assert_type

from torch.nn import Module
from transformers import Trainer, TrainingArguments

from hf_patrickstar import (
    BudgetError,
    PatrickStarAccelerator,
    PatrickStarArgumentsMixin,
    PatrickStarConfig,
    PatrickStarEngine,
    PatrickStarError,
    PatrickStarTrainer,
    PatrickStarTrainerMixin,
    PatrickStarTrainingArguments,
    __version__,
    deferred_weights,
    get_engine,
    initialize_engine,
    plan,
)
from hf_patrickstar import no_such_name  # attr-defined
from hf_patrickstar.optim.optimizer import ChunkedOptimizer


class Net:
    hidden = 4


def make_net() -> Net:
    return Net()


class SpecialTrainer(Trainer):
    seed = 3


class MySpecialTrainer(PatrickStarTrainerMixin, SpecialTrainer):
    pass


@dataclasses.dataclass
class MyArguments(PatrickStarArgumentsMixin, TrainingArguments):
    corpus: str = "corpus.txt"


def mixes() -> None:
    trainer = MySpecialTrainer(model=make_net(), args=MyArguments(patrickstar=True, corpus="other.txt"))
    assert_type(trainer.seed, int)
    MyArguments(corpus=4)  # arg-type


def trains() -> None:
    args = PatrickStarTrainingArguments(
        output_dir="out", patrickstar=True, patrickstar_config={"device_budget": "8GiB"}, patrickstar_logging="all"
    )
    assert_type(args, PatrickStarTrainingArguments)
    trainer = PatrickStarTrainer(model=make_net(), args=args)
    assert_type(trainer, PatrickStarTrainer)
    assert_type(trainer.patrickstar_engine, PatrickStarEngine | None)
    assert_type(trainer.patrickstar_stats(), dict[str, Any])
    assert_type(trainer.train().training_loss, float)
    PatrickStarTrainingArguments(max_steps="many")  # arg-type
    PatrickStarTrainingArguments(patrickstar_config=8)  # arg-type
    trainer.patrickstar_engine.full_parameters()  # union-attr


def loops() -> None:
    config = PatrickStarConfig(device_budget="8GiB")
    for source in (None, config, {"device_budget": 2**30}, "settings.json", pathlib.Path("settings.json")):
        initialize_engine(make_net, source)
    model, optimizer = initialize_engine(make_net, config, device="cpu", gradient_accumulation_steps=2)
    assert_type(model, Net)
    assert_type(optimizer, ChunkedOptimizer)
    model.depth  # attr-defined
    initialize_engine(make_net())  # arg-type
    PatrickStarEngine(model, 8)  # arg-type
    PatrickStarConfig(device_bugdet="8GiB")  # call-arg


def looks(model: Module) -> None:
    assert_type(get_engine(model), PatrickStarEngine)
    assert_type(get_engine(model).stats(), dict[str, Any])


def accelerates() -> None:
    accelerator = PatrickStarAccelerator(cpu=True, mixed_precision="bf16", patrickstar_config={"host_budget": "8GiB"})
    assert_type(accelerator, PatrickStarAccelerator)
    assert_type(accelerator.patrickstar_config, PatrickStarConfig)
    PatrickStarAccelerator(patrickstar_config=8)  # arg-type


def plans() -> None:
    answer = plan("gpt2:n_layer=2", "rtx4090", batch_size=4, settings={"host_budget": "8GiB"})
    assert_type(answer.fits, bool)
    if answer.speed is not None:
        assert_type(answer.speed.seconds, float)
    answer.speed.seconds  # union-attr
    plan("gpt2:n_layer=2", "rtx4090", batch_size="four")  # arg-type


def defers() -> None:
    block: AbstractContextManager[None] = deferred_weights(enabled=True)
    with block as nothing:
        assert_type(nothing, None)
    deferred_weights("yes")  # arg-type


def fails() -> None:
    try:
        assert_type(__version__, str)
    except BudgetError as error:
        wider: PatrickStarError = error
        raise wider from None
'''

OPTIONS = """[mypy]
strict = True
follow_imports = silent
python_executable = {python}
mypy_path = stubs
# mypy does not look into these libraries, which takes half a minute: all that they have is of type Any.
[mypy-torch.*,accelerate.*,peft.*,matplotlib.*,transformers.*]
follow_imports = skip
[mypy-psutil.*,pynvml.*,tqdm.*]
ignore_missing_imports = True
"""

ANYTHING = """
from typing import Any
def __getattr__(name: str) -> Any: ...
"""

STUBS = {
    "__init__.pyi": ANYTHING
    + """
import dataclasses
from .trainer_utils import TrainOutput

@dataclasses.dataclass
class TrainingArguments:
    output_dir: str | None = ...
    max_steps: int = ...

class Trainer:
    args: TrainingArguments
    def __init__(self, model: Any = ..., args: TrainingArguments | None = ...) -> None: ...
    def train(self, resume_from_checkpoint: str | None = ...) -> TrainOutput: ...
""",
    "trainer_utils.pyi": ANYTHING
    + """
from typing import NamedTuple

class TrainOutput(NamedTuple):
    global_step: int
    training_loss: float
""",
}
"""Of transformers what a user's Trainer is made of; a mixin must not hide the types of the Trainer behind it."""


@pytest.mark.long
def test_mypy_sees_the_types_of_every_public_name(tmp_path):
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text(OPTIONS.format(python=sys.executable))
    stubs = tmp_path / "stubs" / "transformers"
    stubs.mkdir(parents=True)
    for name, text in STUBS.items():
        (stubs / name).write_text(text)
    expected = {
        (number, line.rpartition("  # ")[2]) for number, line in enumerate(USER.splitlines(), 1) if "  # " in line
    }
    # What PYTHONPATH names counts as installed: mypy uses its types only if there is a py.typed.
    environment = {name: value for name, value in os.environ.items() if name != "MYPYPATH"} | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-m", "mypy", "user.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    found = {
        (int(match[1]), match[2])
        for match in re.finditer(r"^user\.py:(\d+): error: .*\[([\w-]+)\]$", process.stdout, re.M)
    }
    assert found == expected, process.stdout + process.stderr
    assert process.stdout.splitlines()[-1].startswith(f"Found {len(expected)} errors in 1 file")
