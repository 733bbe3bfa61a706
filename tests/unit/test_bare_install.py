"""The package works where no extra is installed, nor what only the recipes need; and it declares what it imports."""

import ast
import configparser
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys

import pytest

import hf_patrickstar

ROOT = pathlib.Path(hf_patrickstar.__file__).parent.parent

EXTRAS = ("peft", "trl", "datasets", "matplotlib", "diffusers", "schedulefree", "rich", "hypothesis", "pytest")

BLOCKED = f"""
import importlib.metadata
import importlib.util
import sys

EXTRAS = {EXTRAS}


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {{name!r}}: it is an extra", name=name)


find_spec, distribution = importlib.util.find_spec, importlib.metadata.distribution


def find_spec_without_extras(name, package=None):
    return None if name.partition(".")[0] in EXTRAS else find_spec(name, package)


def distribution_without_extras(name):
    if name in EXTRAS:
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)


# transformers and accelerate ask whether there is a module, and which version of it.
importlib.util.find_spec = find_spec_without_extras
importlib.metadata.distribution = distribution_without_extras
sys.meta_path.insert(0, Blocker())
"""

USES = """
import torch
from support.models import make_model, make_rows

import hf_patrickstar
from hf_patrickstar.cli.main import main

layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
model, optimizer = hf_patrickstar.initialize_engine(lambda: layers, {"chunk_numel": 128})
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print("engine", model.patrickstar_engine.stats()["steps"])

arguments = hf_patrickstar.PatrickStarTrainingArguments(
    output_dir=sys.argv[1], patrickstar=True, max_steps=1, logging_steps=1, use_cpu=True, report_to="none"
)
trainer = hf_patrickstar.PatrickStarTrainer(
    model=make_model("gpt2"), args=arguments, train_dataset=make_rows("gpt2", 8)
)
trainer.train()
print("trainer", trainer.patrickstar_stats()["steps"])
print("report", main(["report", sys.argv[1]]))
plan = hf_patrickstar.plan("gpt2:n_layer=1,n_embd=8,n_head=1,vocab_size=64", "v100", dtype="fp32", length=8)
print("plan", plan.fits)
print("env", main(["env"]))
print("loaded", sorted(set(EXTRAS) & set(sys.modules)))
"""


@pytest.mark.long
def test_the_package_works_without_extras(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    process = subprocess.run(
        [sys.executable, "-c", BLOCKED + USES, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
    printed = dict(line.split(" ", 1) for line in process.stdout.splitlines() if " " in line)
    wanted = {"engine": "1", "trainer": "1", "report": "0", "plan": "True", "env": "0", "loaded": "[]"}
    assert wanted.items() <= printed.items(), process.stdout


def normal(name):
    """The name of a distribution as all its spellings are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required(text):
    """The names of the distributions that a list of requirements has."""
    return {normal(re.match(r"[\w.-]+", line)[0]) for line in text.split("\n") if re.match(r"\w", line)}


def is_for_checkers(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported(package):
    """The top-level modules that importing a package imports, and those that functions and type checkers import.

    A module that is named after a library and imports it is a plug-in: the library brings all that the plug-in needs.
    """
    outside, inside = set(), set()
    for path in package.rglob("*.py"):
        found = imports_of(ast.parse(path.read_text()))
        if path.stem not in set().union(*found):
            outside |= found[0]
            inside |= found[1]
    return outside, inside - outside


def imports_of(tree):
    outside, inside = set(), set()
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) or is_for_checkers(node)]
    late = {id(node) for block in blocks for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        else:
            continue
        (inside if id(node) in late else outside).update(name.partition(".")[0] for name in names)
    return outside, inside


def test_every_import_of_the_package_is_declared():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    always = required(parser["options"]["install_requires"])
    sometimes = set().union(
        *(required(text) for name, text in parser["options.extras_require"].items() if name != "dev")
    )
    owners = importlib.metadata.packages_distributions()
    own = {*sys.stdlib_module_names, "hf_patrickstar"}
    outside, inside = ({normal(owners[name][0]) for name in names - own} for names in imported(ROOT / "hf_patrickstar"))
    assert {"torch", "transformers", "accelerate"} <= outside <= always
    assert {"peft"} <= inside <= always | sometimes
