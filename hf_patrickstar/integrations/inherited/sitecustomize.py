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
from collections.abc import Sequence

_OWN = "hf_patrickstar.integrations"
_FIRST = ("transformers", "accelerate", f"{_OWN}.trainer", f"{_OWN}.training_args", f"{_OWN}.accelerator")


class _Trigger(importlib.abc.MetaPathFinder):
    """Lets classes be put in place as soon as a library that has a place for them is imported, and then leaves."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _FIRST:
            return None
        sys.meta_path.remove(self)
        from hf_patrickstar.integrations.unchanged import Defaults, install

        install(Defaults(**json.loads(os.environ["HF_PATRICKSTAR_RUN"])))
        return importlib.util.find_spec(fullname)


def _run_own_sitecustomize(here: str) -> None:
    """Runs the sitecustomize that Python would have found without this folder."""
    sys.path[:] = [folder for folder in sys.path if folder != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "HF_PATRICKSTAR_RUN" in os.environ:
    sys.meta_path.insert(0, _Trigger())
_run_own_sitecustomize(os.path.dirname(os.path.abspath(__file__)))
