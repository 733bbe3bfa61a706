"""What Python runs first in a process that inherits ``hf-patrickstar run``; then it runs the user's own sitecustomize.

Every Python process that a script starts runs this, compilers and launchers too. So it imports nothing of
hf_patrickstar before the process imports transformers or accelerate.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable, Sequence

_OWN = "hf_patrickstar.integrations"
_FIRST = ("transformers", "accelerate", f"{_OWN}.trainer", f"{_OWN}.training_args", f"{_OWN}.accelerator")


class Finder(importlib.abc.MetaPathFinder):
    """Has classes put in place after the first of ``_FIRST`` was executed; see [Note: unchanged scripts].

    Args:
        put: Puts them.
    """

    patches_classes = True

    def __init__(self, put: Callable[[], None]) -> None:
        self._put: Callable[[], None] | None = put

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See ``MetaPathFinder``."""
        if fullname not in _FIRST or self._put is None:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path) if finder is not self)
        spec = next((item for item in found if item is not None), None)
        if spec is None or spec.loader is None:
            return None  # the library is not installed, which a script may handle
        execute = spec.loader.exec_module

        def execute_and_put(module: types.ModuleType) -> None:
            # Only now: who looks for a module need not import it.
            put, self._put = self._put, None
            execute(module)
            if put is not None:
                put()

        vars(spec.loader)["exec_module"] = execute_and_put
        return spec


def _put_inherited() -> None:
    from hf_patrickstar.cli.patching import Defaults, patch_classes

    patch_classes(Defaults(**json.loads(os.environ["HF_PATRICKSTAR_RUN"])))


def _run_own_sitecustomize(here: str) -> None:
    """Runs the sitecustomize that Python would have found without this folder."""
    sys.path[:] = [folder for folder in sys.path if folder != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":  # else this package has imported the class
    if "HF_PATRICKSTAR_RUN" in os.environ:
        sys.meta_path.insert(0, Finder(_put_inherited))
    _run_own_sitecustomize(os.path.dirname(os.path.abspath(__file__)))
