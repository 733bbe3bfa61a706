"""Puts the Trainer, the arguments and the Accelerator of this package where scripts find the stock ones.

[Note: unchanged scripts]
A script says ``from transformers import Trainer``. ``install`` makes that import return a class that is derived from
``PatrickStarTrainerMixin`` and the stock ``Trainer``. It puts a finder into ``sys.meta_path`` of this process. The
finder lets the other finders load a module, and changes the module after it was executed, before its importer goes on.
So ``Seq2SeqTrainer``, TRL's trainers and all argument classes, which are derived from the names in ``PLACES``, inherit
the mixins. No file and no other process is changed.

The classes that are put have the names and modules of the stock ones, so that what a script pickles with them
(``training_args.bin``) can be read without this package. Without ``patrickstar`` they do what the stock ones do.

Scripts that have the mixins already run, too: the mixins that this package exports are empty from then on, since a
class cannot have the same mixin both before and behind another one of its bases.

``accelerate.Accelerator`` is replaced only if all of a script shall train in chunks, since an Accelerate loop has no
parser that knows ``--patrickstar``. The Trainer keeps the stock one, and turns it into a ``PatrickStarAccelerator``
where its arguments say so.
"""

import dataclasses
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

from hf_patrickstar.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A name in another library that gets a class of this package.

    Attributes:
        module: The module after whose import the class is put.
        name: The name there.
        gets: What the class that is put there is derived from.
        library: The library's name for ``importlib.metadata``.
        tried: The version of the library that this was tried with.
    """

    module: str
    name: str
    gets: str
    library: str
    tried: str


ARGUMENTS = Place(
    "transformers.training_args", "TrainingArguments", "PatrickStarArgumentsMixin", "transformers", "5.23"
)
TRAINER = Place("transformers.trainer", "Trainer", "PatrickStarTrainerMixin", "transformers", "5.23")
ACCELERATOR = Place("accelerate", "Accelerator", "PatrickStarAccelerator", "accelerate", "1.15")
PLACES = (ARGUMENTS, TRAINER, ACCELERATOR)
"""The complete list of what is replaced; see [Note: unchanged scripts]."""

_OWN = {
    "hf_patrickstar.integrations.training_args": ARGUMENTS,
    "hf_patrickstar.integrations.trainer": TRAINER,
}
"""Modules of this package that are loaded by the import of another library's module, which has to come first."""


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


def places_of(defaults: Defaults) -> tuple[Place, ...]:
    """The places that get a class of this package.

    Args:
        defaults: What holds for every training.
    """
    return PLACES if defaults.patrickstar else (ARGUMENTS, TRAINER)


def install(defaults: Defaults) -> None:
    """Lets this process put classes at their places when it imports the modules; see [Note: unchanged scripts].

    Args:
        defaults: What holds for every training of the script.

    Raises:
        ConfigError: If a module was imported before, or a library has no such module. The import of a module raises it,
            too, if the module does not have the name.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    places = places_of(defaults)
    for place in places:
        if place.module in sys.modules:
            raise ConfigError(
                f"'{place.module}' was imported before {place.gets} could be put there; start the script in a new "
                "process, by 'hf-patrickstar run' alone"
            )
    sys.meta_path.insert(0, _Finder(places, defaults))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of places as other finders do, and has them changed after they were executed."""

    def __init__(self, places: Sequence[Place], defaults: Defaults) -> None:
        self._places = {place.module: place for place in places}
        self._defaults = defaults

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in _OWN and _OWN[fullname].module not in sys.modules:
            _load_host(fullname)
            module = sys.modules[fullname]
            # Python takes a module's own spec where the module was loaded while it was looked for.
            module.__spec__ = importlib.util.spec_from_loader(fullname, _Loaded(module))
            return module.__spec__
        place = self._places.get(fullname)
        if place is None:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((item for item in found if item is not None), None)
        if spec is None or spec.loader is None:
            if fullname == place.library:
                return None  # the library is not installed, which a script may handle
            raise _moved(place, f"has no module '{fullname}'")
        spec.loader = _Loader(spec.loader, place, self._defaults)
        return spec


def _load_host(name: str) -> None:
    """Imports the other library's module, whose import loads the module of this package."""
    if name == "hf_patrickstar.integrations.trainer":
        import transformers.trainer
    else:
        import transformers.training_args  # noqa: F401


class _Loader(importlib.abc.Loader):
    """Loads a module as its own loader does, and changes the module afterwards."""

    def __init__(self, inner: Any, place: Place, defaults: Defaults) -> None:
        self._inner, self._place, self._defaults = inner, place, defaults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # sources and resources of the module

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        module: types.ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        stock = vars(module).get(self._place.name)
        if not isinstance(stock, type):
            raise _moved(self._place, f"has no class '{self._place.name}' in '{self._place.module}'")
        if self._place is ARGUMENTS:
            _put_arguments(module, stock, self._defaults)
        elif self._place is TRAINER:
            _put_trainer(module, stock)
        else:
            _put_accelerator(module, self._defaults)


class _Loaded(importlib.abc.Loader):
    """Stands for a module that was loaded while it was looked for."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec


def _moved(place: Place, problem: str) -> ConfigError:
    try:
        version = importlib.metadata.version(place.library)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return ConfigError(
        f"{place.library} {version} {problem}, where {place.gets} is put ({place.library} {place.tried} has it); "
        f"install {place.library} {place.tried}, or derive from {place.gets} in the script and run it by python"
    )


def _in_place_of(stock: type, made: Any) -> None:
    made.__module__, made.__qualname__, made.__doc__ = stock.__module__, stock.__qualname__, stock.__doc__


def _put(module: types.ModuleType, name: str, made: Any) -> None:
    setattr(module, name, made)
    package = sys.modules[module.__name__.partition(".")[0]]
    if name in vars(package):  # transformers remembers what was once imported from it
        setattr(package, name, made)


def _put_arguments(module: types.ModuleType, stock: Any, defaults: Defaults) -> None:
    from hf_patrickstar.integrations import training_args as own

    fields = []
    for field in dataclasses.fields(own.PatrickStarArgumentsMixin):
        values = {"patrickstar": defaults.patrickstar, "patrickstar_config": defaults.config}
        if defaults.patrickstar and field.name in values:
            changed = dataclasses.field(default=values[field.name], metadata=field.metadata)
            fields.append((field.name, field.type, changed))
    made = dataclasses.make_dataclass(
        stock.__name__,
        fields,
        bases=(own.PatrickStarArgumentsMixin, stock),
        namespace={"__repr__": stock.__repr__, "__str__": stock.__str__},
        repr=False,
    )
    _in_place_of(stock, made)
    _put(module, stock.__name__, made)
    empty = dataclasses.make_dataclass("PatrickStarArgumentsMixin", [])
    for name, value in (("PatrickStarArgumentsMixin", empty), ("PatrickStarTrainingArguments", made)):
        setattr(own, name, value)


def _put_trainer(module: types.ModuleType, stock: type) -> None:
    from hf_patrickstar.integrations import accelerator
    from hf_patrickstar.integrations import trainer as own

    made = type(stock)(stock.__name__, (own.PatrickStarTrainerMixin, stock), {})
    _in_place_of(stock, made)
    _put(module, stock.__name__, made)
    if "Accelerator" in vars(module):
        vars(module)["Accelerator"] = vars(accelerator)["Accelerator"]  # the stock one; its arguments decide
    for name, value in (
        ("PatrickStarTrainerMixin", type("PatrickStarTrainerMixin", (), {})),
        ("PatrickStarTrainer", made),
    ):
        setattr(own, name, value)


def _put_accelerator(module: types.ModuleType, defaults: Defaults) -> None:
    from accelerate import accelerator as home

    from hf_patrickstar.integrations.accelerator import PatrickStarAccelerator

    stock = home.Accelerator

    class Accelerator(PatrickStarAccelerator):
        def __init__(self, *args: Any, patrickstar_config: Any = defaults.config, **kwargs: Any) -> None:
            super().__init__(*args, patrickstar_config=patrickstar_config, **kwargs)

    _in_place_of(stock, Accelerator)
    _put(module, stock.__name__, Accelerator)
    setattr(home, stock.__name__, Accelerator)
