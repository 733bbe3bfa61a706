"""The whole engine on a fake device: no operator ever meets two devices.

The cases are in ``mixed_cases.py``, and how the device comes about in ``fake_device.py``. Whether torch has an
accelerator cannot be taken back, so all cases run in one process of their own. Most take long; see ``test_long.sh``.
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
SHORT = {"fp32-bert", "an_operator_of_two_devices_in_a_model"}

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
def results(request, tmp_path_factory):
    """What became of each case that was asked for: ``None``, or its error."""
    names = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    path = tmp_path_factory.mktemp("fake") / "results.json"
    paths = [FOLDER.parents[1], FOLDER.parent]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-X", "faulthandler", str(CASES), str(path), *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        pytest.fail(
            f"the process of the cases exited with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
        )
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in names_of_cases()]
)
def test_case(results, name):
    if results[name] is not None:
        pytest.fail(results[name], pytrace=False)
