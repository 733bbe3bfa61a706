"""Modules of ``benchmarks/`` and ``scripts/``, for tests that call parts of them."""

import importlib
import pathlib
import sys

import pytest

import hf_patrickstar

ROOT = pathlib.Path(hf_patrickstar.__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="session")
def script():
    """Imports a script by its path in ``scripts/``."""

    def script(path):
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend((ROOT / "scripts" / path).parent)
            return importlib.import_module(pathlib.Path(path).stem)

    return script


@pytest.fixture
def load(monkeypatch):
    """Imports a module of the benchmarks by its name.

    Recipes, which other tests import into the same process, have a ``common`` of their own. So the modules of the
    benchmarks are imported anew for each test, and what was imported before is there again after it.
    """
    for path in BENCHMARKS.glob("*.py"):
        # What is set and then deleted is restored in either case, also where nothing was imported before.
        monkeypatch.setitem(sys.modules, path.stem, None)
        monkeypatch.delitem(sys.modules, path.stem)
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module
