"""Code in the documentation does what the text says: marked blocks run, and every other one names what exists."""

import ast
import dataclasses
import json
import pathlib
import re
import shlex
import sys

import pytest
from transformers import HfArgumentParser, TrainingArguments

import hf_patrickstar
from hf_patrickstar.cli import main as cli
from hf_patrickstar.cli.plan import split_script
from hf_patrickstar.cli.run import split_program
from hf_patrickstar.config import PatrickStarConfig

ROOT = pathlib.Path(hf_patrickstar.__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?P<mark><!-- run -->\n+)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
GONE_ON = re.compile(r"\\\n\s*")


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: The page that it is on.
        line: The line of the page where its code begins.
        kind: The language that the page gives it.
        text: The code.
        runs: Whether the page marks it as one that runs.
    """

    page: pathlib.Path
    line: int
    kind: str
    text: str
    runs: bool

    def __str__(self):
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self):
        """The command lines in it without their output: those after ``$``, or else every line of a bash block."""
        lines = GONE_ON.sub(" ", self.text).splitlines()
        shown = [line[2:] for line in lines if line.startswith("$ ")]
        lines = shown or (lines if self.kind == "bash" else [])
        return [re.split(r"\s#\s", line)[0] for line in lines if line and not line.startswith("#")]


def read_blocks(page):
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start("text")) + 1, found["kind"], found["text"], bool(found["mark"]))
        for found in BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in read_blocks(page)]
PYTHON = [block for block in BLOCKS if block.kind == "python"]
COMMANDS = [(block, command) for block in BLOCKS for command in block.commands]
PAGES_THAT_RUN = sorted({block.page for block in BLOCKS if block.runs})


# Blocks that run


@pytest.mark.parametrize("page", PAGES_THAT_RUN, ids=lambda page: page.name)
def test_marked_blocks_run_one_after_the_other(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "documented"}
    for block in (block for block in read_blocks(page) if block.runs):
        if block.kind == "python":  # empty lines before it, so that a traceback names the line of the page
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
        else:
            for command in block.commands:
                program, *arguments = shlex.split(command)
                assert program == "hf-patrickstar", f"{block}: only the package's own commands run here"
                assert cli.main(arguments) == 0, f"{block}: {capsys.readouterr()}"


# Blocks of Python


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_every_block_of_python_is_python_and_names_what_the_package_has(block):
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module == "hf_patrickstar":
            for alias in node.names:
                assert hasattr(hf_patrickstar, alias.name), alias.name
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "hf_patrickstar":
            assert hasattr(hf_patrickstar, node.attr), node.attr
        elif isinstance(node, ast.keyword) and node.arg == "patrickstar_config" and isinstance(node.value, ast.Dict):
            PatrickStarConfig.from_any(ast.literal_eval(node.value))


# Commands


def own_commands():
    found = []
    for block, command in COMMANDS:
        words = shlex.split(command) if command.startswith("hf-patrickstar ") else []
        if words:
            found.append(pytest.param([word for word in words[1:] if word != "..."], id=f"{block} {words[1]}"))
    return found


@pytest.mark.parametrize("words", own_commands())
def test_every_command_of_the_package_has_options_that_exist(words):
    if words[0] == "plan":
        words, _ = split_script(words)
    elif words[0] == "run":
        words, _ = split_program(words)
    _, unknown = cli._parser().parse_known_args(words)
    assert unknown == []


def recipe_commands():
    """The recipes that commands run, with their options; what starts them stands before them."""
    found = []
    for block, command in COMMANDS:
        match = re.search(r"(recipes/\w+\.py)(.*)", command)
        if match:
            found.append(pytest.param(match[1], shlex.split(match[2]), id=f"{block} {match[1]}"))
    return found


@pytest.fixture(scope="module")
def options_of():
    """The options that a recipe takes: fields of the dataclasses that it names, and arguments of parsers."""
    sys.path.insert(0, str(ROOT / "recipes"))
    known = {}

    def find(recipe):
        if recipe not in known:
            module = __import__(pathlib.Path(recipe).stem)
            modules = [module, *(vars(module)[name] for name in ("common", "loop_common") if name in vars(module))]
            own = {part.__name__ for part in modules}
            classes = {value for part in modules for value in vars(part).values() if dataclasses.is_dataclass(value)}
            taken = [value for value in classes if value.__module__ in own or issubclass(value, TrainingArguments)]
            actions = [action for value in taken for action in HfArgumentParser(value)._actions]
            known[recipe] = {option for action in actions for option in action.option_strings}
            for part in modules:
                known[recipe] |= set(re.findall(r'"(--\w+)"', pathlib.Path(part.__file__).read_text()))
        return known[recipe]

    yield find
    sys.path.remove(str(ROOT / "recipes"))


@pytest.mark.parametrize(("recipe", "words"), recipe_commands())
def test_every_recipe_in_a_command_takes_its_options(recipe, words, options_of):
    assert (ROOT / recipe).is_file()
    assert {word for word in words if word.startswith("--")} <= options_of(recipe)
    if "--patrickstar_config" in words:
        PatrickStarConfig.from_any(json.loads(words[words.index("--patrickstar_config") + 1]))


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "bash"], ids=str)
def test_every_file_of_the_repository_in_a_command_exists(block):
    for name in re.findall(r"\b((?:scripts|benchmarks|recipes)/[\w/]+\.\w+)", block.text):
        assert (ROOT / name).is_file(), name
