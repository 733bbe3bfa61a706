"""What docs/contributing.md and the templates of issues and pull requests name is there."""

import pathlib
import re

import pytest

import hf_patrickstar
from hf_patrickstar.cli.main import main

ROOT = pathlib.Path(hf_patrickstar.__file__).parent.parent
GUIDE = ROOT / "docs" / "contributing.md"
ISSUES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))
PULL_REQUEST = ROOT / ".github" / "pull_request_template.md"
PAGES = [GUIDE, PULL_REQUEST, *ISSUES]


def ids(path):
    return path.stem


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_path_that_is_named_exists(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w[\w.-]*/)+[\w.-]*|[\w-]+\.(?:txt|cfg|toml|in))`", text)
    assert [path for path in named if not ((ROOT / path).exists() or (ROOT / "hf_patrickstar" / path).exists())] == []
    links = re.findall(r"\]\(([^)#:]+)(?:#[\w-]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_command_that_is_named_exists(page, capsys):
    for command in set(re.findall(r"hf-patrickstar (\w+)", page.read_text(encoding="utf-8"))):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0, command


def test_the_guide_tells_of_every_folder_of_tests():
    text = GUIDE.read_text(encoding="utf-8")
    folders = {path.parent.relative_to(ROOT).parts[1] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    assert {folder for folder in folders if f"`tests/{folder}/`" not in text} == set()


def test_the_guide_names_what_it_tells_to_change():
    """Were one of these renamed, the guide would send people to what is not there."""
    text = GUIDE.read_text(encoding="utf-8")
    sources = "".join(
        (ROOT / path).read_text(encoding="utf-8")
        for path in (
            *(
                "tests/test_architecture.py",
                "tests/unit/test_config.py",
                "tests/support/models.py",
                "tests/conftest.py",
            ),
            *("hf_patrickstar/config.py", "hf_patrickstar/errors.py", "benchmarks/common.py", "pyproject.toml"),
        )
    )
    names = set(re.findall(r"`([A-Za-z]\w*)(?:\(\))?`", text)) - {"mypy", "ruff"}
    assert len(names) > 5
    assert {name for name in names if not re.search(rf"\b{name}\b", sources)} == set()


def test_every_long_test_is_in_a_part_of_the_script_that_runs_them():
    script = (ROOT / "scripts" / "test_long.sh").read_text(encoding="utf-8")
    parts = [ROOT / path for line in re.findall(r"pytest -m long (.*) ;;", script) for path in line.split()]
    assert [path for path in parts if not path.exists()] == []
    long = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.long" in path.read_text("utf-8")]
    long.remove(pathlib.Path(__file__))
    assert long
    assert [path for path in long if not any(path.is_relative_to(part) for part in parts)] == []
