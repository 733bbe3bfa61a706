"""Plants mutants in copies of the package, one at a time, and says which test finds each.

Usage, from the project's root: python tests/mutants.py [NUMBER ...] [TESTS ...]

The mutants are the rows of the table in benchmarks/results/mutants-2026-11.md: a file of the package, a text that is in
it once, and what stands there instead. A line break in a text is written as the sign of RETURN. Without numbers all are
planted, which takes an hour with tests/engine, the default. A row whose text is not there any more is left out, and a
line says so.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks/results/mutants-2026-11.md"
TESTS = ["tests/engine"]
_ROW = re.compile(r"\| (\d+) \| `([^`]+)` \| `([^`]*)` \| `([^`]*)` \|")


def mutants():
    """The number, the file, the text and what replaces it, of every row."""
    for number, file, old, new in _ROW.findall(TABLE.read_text(encoding="utf-8")):
        yield int(number), file, _text(old), _text(new)


def _text(cell):
    return cell.replace("⏎", "\n").replace("\\|", "|")


def plant(folder, file, old, new):
    """Copies the package into a folder, with one mutant in it; returns whether its text was there once."""
    shutil.copytree(ROOT / "hf_patrickstar", folder / "hf_patrickstar", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "hf_patrickstar" / file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace(old, new), encoding="utf-8")
    return text.count(old) == 1


def find(folder, tests):
    """The first of some tests that fails with the package in a folder, or an empty text."""
    # pytest as a program: as a module it would put the project's root first.
    command = [str(pathlib.Path(sys.executable).parent / "pytest"), "-x", "-q", "--tb=no", "--timeout=120"]
    # Nor may processes that tests start look into the directory where they start.
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run([*command, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) ([^\n]+?)(?: - .*)?$", found.stdout, re.M)
    return failed.group(1) if failed else "" if found.returncode == 0 else f"exit status {found.returncode}"


def main(numbers, tests):
    """Prints a line for each mutant."""
    for number, file, old, new in mutants():
        if numbers and number not in numbers:
            continue
        with tempfile.TemporaryDirectory() as name:
            is_there = plant(pathlib.Path(name), file, old, new)
            print(
                number,
                file,
                (find(pathlib.Path(name), tests) or "NOT FOUND") if is_there else "is not there",
                flush=True,
            )


if __name__ == "__main__":
    main(
        {int(word) for word in sys.argv[1:] if word.isdigit()},
        [word for word in sys.argv[1:] if not word.isdigit()] or TESTS,
    )
