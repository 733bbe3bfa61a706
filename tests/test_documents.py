"""What docs/architecture.md says of files and names is there, and docs/migrating.md knows all keys."""

import ast
import dataclasses
import fnmatch
import pathlib
import re

import pytest
from accelerate.utils import FullyShardedDataParallelPlugin

import hf_patrickstar

ROOT = pathlib.Path(hf_patrickstar.__file__).parent
TEXT = (ROOT.parent / "docs" / "architecture.md").read_text()
PRIVATE_NAMES = (ROOT.parent / "docs" / "private_names.md").read_text()
MARKED = re.compile(r"`([^`\n]+)`")


def section(title):
    """The text of a section, without its title."""
    return re.split(r"^## ", TEXT.split(f"\n## {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def names_of(definition):
    """The methods and attributes of a class."""
    names = {node.name for node in definition.body if isinstance(node, ast.FunctionDef)}
    for node in definition.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            names.add(node.attr)
    return names


def read_classes():
    """Of every class and top-level function its file and the names in it."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                members = names_of(node) if isinstance(node, ast.ClassDef) else set()
                found.setdefault(node.name, []).append((path.relative_to(ROOT).as_posix(), members))
    return found


CLASSES = read_classes()
STEP = section("A step")
WALKED = re.findall(r"`([\w/]+\.py)`\s+`([\w.]+)`", STEP)


def is_there(file, name):
    owner, _, member = name.partition(".")
    places = [(path, members) for path, members in CLASSES.get(owner, []) if file in (None, path)]
    return any(not member or member in members for _, members in places)


@pytest.mark.parametrize(("file", "name"), WALKED)
def test_the_walk_through_a_step_names_what_is_in_a_file(file, name):
    assert is_there(file, name)


def test_every_name_in_the_walk_exists():
    names = [name for name in MARKED.findall(STEP) if re.fullmatch(r"[A-Z]\w*(\.\w+)?", name)]
    assert len(names) > 30
    assert [name for name in names if not is_there(None, name)] == []


def test_every_file_in_the_walk_and_its_picture_exists():
    files = re.findall(r"[\w/]+\.py\b", STEP)
    assert len(set(files)) > 15
    assert [file for file in files if not ((ROOT / file).is_file() or (ROOT / "runtime" / file).is_file())] == []


def test_every_phase_is_in_the_walk():
    """A phase that the walk does not name would be found by nobody."""
    text = (ROOT / "runtime" / "manager.py").read_text()
    phases = re.findall(r"    @phase\n    def (\w+)", text)
    assert len(phases) > 10
    assert [name for name in phases if f"ChunkManager.{name}`" not in STEP] == []


def rows_of_private_names():
    """Of each row the names that it lists, and the files that use them."""
    for line in PRIVATE_NAMES.splitlines():
        if line.startswith("| ") and not line.endswith("| where |"):
            names, files = line.strip("|").split(" | ")
            folder, paths = "", []
            for file in MARKED.findall(files):
                folder = file.rpartition("/")[0] if "/" in file else folder
                paths.append(ROOT / folder / file.rpartition("/")[2])
            yield pytest.param(
                [name.rpartition(".")[2] for name in MARKED.findall(names)], paths, id=MARKED.findall(names)[0]
            )


@pytest.mark.parametrize(("names", "paths"), rows_of_private_names())
def test_private_names_are_used_where_the_table_says(names, paths):
    texts = [path.read_text() for path in paths]
    assert [name for name in names if not any(name in text for text in texts)] == []
    assert [path for path, text in zip(paths, texts, strict=True) if not any(name in text for name in names)] == []


def test_every_key_of_accelerates_fsdp_is_in_the_table():
    table = (ROOT.parent / "docs" / "migrating.md").read_text().split("## Keys", 1)[1]
    keys = {field.name.removeprefix("fsdp_") for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
    assert {key for key in keys if not any(fnmatch.fnmatch(key, known) for known in MARKED.findall(table))} == set()
