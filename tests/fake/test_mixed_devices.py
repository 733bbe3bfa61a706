"""The whole engine on a fake device: no operator ever meets two devices.

The cases are in ``mixed_cases.py``, and how the device comes about in ``fake_device.py``. Whether torch has an
accelerator cannot be taken back, so all cases run in one process of their own.
"""

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent
CASES = FOLDER / "mixed_cases.py"
TIMEOUT_S = 600

pytestmark = pytest.mark.xdist_group("fake device")  # one process for all cases, not one per worker


def names_of_cases():
    """The names of all cases, as ``mixed_cases.case`` makes them; to import that file here would need the device."""
    names = []
    for node in ast.parse(CASES.read_text(encoding="utf-8")).body:
        for decorator in getattr(node, "decorator_list", ()):
            if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", None) == "case":
                words = [str(word.value) for word in decorator.args if isinstance(word, ast.Constant)]
                names.append("-".join([node.name, *words]))
    return names


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What became of each case: ``None``, or its error."""
    path = tmp_path_factory.mktemp("fake") / "results.json"
    paths = [FOLDER.parents[1], FOLDER.parent, FOLDER.parent / "parity"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-X", "faulthandler", str(CASES), str(path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        pytest.fail(
            f"the process of all cases exited with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
        )
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", names_of_cases())
def test_case(results, name):
    if results[name] is not None:
        pytest.fail(results[name], pytrace=False)


def test_all_cases_are_in_one_worker(request):
    """pytest-xdist groups tests by what it adds to their names, and says nothing where that has no effect."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("tests are not distributed by groups")
    assert request.node.nodeid.endswith("@fake device"), "versions of pytest and pytest-xdist that group no tests"


def test_every_case_is_here(results):
    assert sorted(results) == sorted(names_of_cases())
