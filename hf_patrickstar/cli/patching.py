"""Puts the Trainer, the arguments and the Accelerator of this package where scripts find the stock ones.

[Note: unchanged scripts]
A script says ``from transformers import Trainer``. ``install`` makes that import return a class that is derived from
``PatrickStarTrainerMixin`` and the stock ``Trainer``. It puts a finder into ``sys.meta_path`` of this process. As soon
as the script has imported transformers, accelerate, or a module of this package that needs them, the finder has the
classes put, before the importer goes on. So ``Seq2SeqTrainer``, TRL's trainers and all argument classes, which are
derived from the names in ``PLACES``, inherit the mixins. No file and no other process is changed, and what a script
sets in ``os.environ`` before it imports transformers is heeded.

The classes that are put have the names and modules of the stock ones, so that what a script pickles with them
(``training_args.bin``) can be read without this package. Without ``patrickstar`` they do what the stock ones do.

Scripts that have the mixins already run, too: the mixins that this package exports are empty from then on, since a
class cannot have the same mixin both before and behind another one of its bases.

``accelerate.Accelerator`` is replaced only if all of a script shall train in chunks, since an Accelerate loop has no
parser that knows ``--patrickstar``. The Trainer keeps the stock one, and turns it into a ``PatrickStarAccelerator``
where its arguments say so.
"""

import dataclasses
import functools
import sys
import types
from typing import Any

from hf_patrickstar.cli.inherited.sitecustomize import Finder
from hf_patrickstar.errors import ConfigError

PLACES = (
    ("transformers.training_args", "PatrickStarArgumentsMixin"),
    ("transformers.trainer", "PatrickStarTrainerMixin"),
    ("accelerate", "PatrickStarAccelerator"),
)
"""Whose classes are replaced, and what the new class is derived from; the last one only if everything is in chunks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Defaults:
    """What holds for every training of a script.

    Attributes:
        patrickstar: Whether each ``TrainingArguments`` has ``patrickstar`` unless it is told otherwise, and each
            ``Accelerator`` trains in chunks.
        config: Their settings, as JSON text or the path of a JSON file.
    """

    patrickstar: bool = False
    config: str | None = None


def install(defaults: Defaults) -> None:
    """Lets this process put classes at their places; see [Note: unchanged scripts].

    Args:
        defaults: What holds for every training of the script.

    Raises:
        ConfigError: If a module was imported before.
    """
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    # What this process has inherited makes way for its own options.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not hasattr(finder, "patches_classes")]
    for module, base in PLACES if defaults.patrickstar else PLACES[:2]:
        if module in sys.modules:
            raise ConfigError(
                f"'{module}' was imported before {base} could be put there; start the script in a new "
                "process, by 'hf-patrickstar run' alone"
            )
    if "transformers" in sys.modules:
        patch_classes(defaults)
    else:
        sys.meta_path.insert(0, Finder(functools.partial(patch_classes, defaults)))


def patch_classes(defaults: Defaults) -> None:
    """Puts the classes at their places, once in a process.

    Args:
        defaults: What holds for every training of the script.
    """
    import transformers.training_args

    from hf_patrickstar.integrations import training_args

    values = {"patrickstar": defaults.patrickstar, "patrickstar_config": defaults.config}
    fields = [
        (field.name, field.type, dataclasses.field(default=values[field.name], metadata=field.metadata))
        for field in dataclasses.fields(training_args.PatrickStarArgumentsMixin)
        if defaults.patrickstar and field.name in values
    ]
    stock: Any = transformers.TrainingArguments
    bases = training_args.PatrickStarArgumentsMixin, stock
    shown = {"__repr__": stock.__repr__, "__str__": stock.__str__}
    arguments = dataclasses.make_dataclass(stock.__name__, fields, bases=bases, namespace=shown, repr=False)
    _put(arguments, stock, transformers, transformers.training_args)
    empty = dataclasses.make_dataclass("PatrickStarArgumentsMixin", [])
    vars(training_args).update(PatrickStarArgumentsMixin=empty, PatrickStarTrainingArguments=arguments)

    import transformers.trainer

    from hf_patrickstar.integrations import trainer

    _put(arguments, stock, transformers.trainer)
    stock = transformers.trainer.Trainer
    made = type(stock)(stock.__name__, (trainer.PatrickStarTrainerMixin, stock), {})
    _put(made, stock, transformers, transformers.trainer)
    vars(trainer).update(PatrickStarTrainerMixin=type("PatrickStarTrainerMixin", (), {}), PatrickStarTrainer=made)
    if not defaults.patrickstar:
        return

    import accelerate.accelerator

    from hf_patrickstar.integrations.accelerator import PatrickStarAccelerator

    class Accelerator(PatrickStarAccelerator):
        def __init__(self, *args: Any, patrickstar_config: Any = defaults.config, **kwargs: Any) -> None:
            super().__init__(*args, patrickstar_config=patrickstar_config, **kwargs)

    _put(Accelerator, accelerate.Accelerator, accelerate, accelerate.accelerator)


def _put(made: Any, stock: type, *modules: types.ModuleType) -> None:
    """Puts a class into modules, in place of the stock one, whose names it takes."""
    made.__module__, made.__qualname__, made.__doc__ = stock.__module__, stock.__qualname__, stock.__doc__
    for module in modules:
        setattr(module, stock.__name__, made)
