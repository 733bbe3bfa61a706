"""Plants mutants in copies of the package, one at a time, and says which test finds each.

Usage, from the project's root: python tests/mutants.py [--check] [NUMBER ...] [TESTS ...]

The mutants are the rows of the table in benchmarks/results/mutants-2026-11.md: a file of the package, a text that is in
it once, and what stands there instead. A line break in a text is written as the sign of RETURN.

The file is only a hint: a text that is not in it is looked for in the whole package. White space, comments and commas
before a closing bracket do not count. So code may be moved, indented and formatted anew.

Without numbers all are planted, which takes an hour with tests/engine, the default. Rows whose text is gone are named
at the end; with --check nothing is planted, and these are all that is printed.
"""

import ast
import functools
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_patrickstar"
TABLE = ROOT / "benchmarks/results/mutants-2026-11.md"
TESTS = ["tests/engine"]
_ROW = re.compile(r"\| (\d+) \| `([^`]+)` \| `([^`]*)` \| `([^`]*)` \|")


def mutants():
    """The number, the file, the text and what replaces it, of every row."""
    for number, file, old, new in _ROW.findall(TABLE.read_text(encoding="utf-8")):
        yield int(number), file, _text(old), _text(new)


def _text(cell):
    return cell.replace("⏎", "\n").replace("\\|", "|")


# Where a text stands


class Code(NamedTuple):
    """Code without what does not count.

    Attributes:
        letters: What counts.
        places: Where each of these stands in the code.
    """

    letters: str
    places: list[int]

    @classmethod
    def of(cls, text, comments):
        """Leaves out white space, commas before a closing bracket, and what stands between these places."""
        kept, place = [], 0
        for begin, end in [*comments, (len(text), len(text))]:
            kept += [at for at in range(place, begin) if not text[at].isspace()]
            place = end
        following = [*(text[at] for at in kept[1:]), ""]
        kept = [at for at, after in zip(kept, following, strict=True) if text[at] != "," or after not in (*")]}",)]
        return cls("".join(text[at] for at in kept), kept)


@functools.cache
def read(path):
    """A module of the package, with all that it has of ``Code``."""
    text = path.read_text(encoding="utf-8")
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    spans = [[starts[row - 1] + column for row, column in (token.start, token.end)] for token in comments]
    return text, Code.of(text, spans)


def find_place(file, old):
    """Where a text stands once: in its file, or else in the whole package; ``None`` if it is nowhere or several times.

    Returns:
        The path, and the first and the last place of what counts.
    """
    wanted = Code.of(old, [match.span() for match in re.finditer(r"(?m)(?:^\s*|  )#.*$", old)]).letters
    for paths in ([PACKAGE / file], sorted(PACKAGE.rglob("*.py"))):
        found = []
        for path in filter(pathlib.Path.exists, paths):
            _, code = read(path)
            begins = [match.start() for match in re.finditer(f"(?={re.escape(wanted)})", code.letters)]
            found += [(path, code.places[begin], code.places[begin + len(wanted) - 1]) for begin in begins]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def mutated(path, begin, end, old, new):
    """The code of a module in which ``new`` stands in place of what is there, indented as that is."""
    text, _ = read(path)
    end += 1
    if old[:1].isspace():
        begin = len(text[:begin].rstrip(" "))
    if old.endswith("\n"):
        end = re.compile(r",?[ \t]*(?:  #.*)?\n?").match(text, end).end()
    shift = _indent(text[begin:end], old[:1].isspace()) - _indent(old, old[:1].isspace())
    lines = new.split("\n")
    first = 0 if old[:1].isspace() else 1
    lines[first:] = [
        " " * shift + line if shift > 0 else line[min(-shift, len(line) - len(line.lstrip())) :] if shift else line
        for line in lines[first:]
    ]
    return text[:begin] + "\n".join(lines) + text[end:]


def _indent(text, has_first):
    """Spaces before the first line, or the second one where a text begins in the middle of a line."""
    lines = [line for line in text.split("\n")[0 if has_first else 1 :] if line.strip()]
    return len(lines[0]) - len(lines[0].lstrip()) if lines else 0


# Planting and finding


def plant(folder, file, old, new):
    """Copies the package into a folder, with one mutant in it; returns the file where it is, or ``None``."""
    place = find_place(file, old)
    if place is None:
        return None
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    path = place[0].relative_to(PACKAGE)
    (folder / PACKAGE.name / path).write_text(mutated(*place, old, new), encoding="utf-8")
    return path


def find(folder, tests):
    """The first of some tests that fails with the package in a folder, or an empty text."""
    # pytest as a program: as a module it would put the project's root first.
    command = [str(pathlib.Path(sys.executable).parent / "pytest"), "-x", "-q", "--tb=no", "--timeout=120"]
    # Nor may processes that tests start look into the directory where they start.
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run([*command, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) ([^\n]+?)(?: - .*)?$", found.stdout, re.M)
    return failed.group(1) if failed else "" if found.returncode == 0 else f"exit status {found.returncode}"


def check(file, old, new):
    """What is wrong with a row; an empty text if it can be planted."""
    place = find_place(file, old)
    if place is None:
        return "its text is not there, or several times"
    try:
        ast.parse(mutated(*place, old, new))
    except SyntaxError as error:
        return f"it is no code where it stands now: {error}"
    return ""


def main(numbers, tests, *, is_check):
    """Prints a line for each mutant, and at the end those that cannot be planted."""
    chosen = [row for row in mutants() if not numbers or row[0] in numbers]
    gone = {number: (file, wrong) for number, file, old, new in chosen if (wrong := check(file, old, new))}
    for number, file, old, new in chosen:
        if number in gone or is_check:
            continue
        with tempfile.TemporaryDirectory() as name:
            path = plant(pathlib.Path(name), file, old, new)
            print(number, path, find(pathlib.Path(name), tests) or "NOT FOUND", flush=True)
    print(f"{len(chosen) - len(gone)} of {len(chosen)} mutants can be planted")
    for number, (file, wrong) in gone.items():
        print(number, file, wrong)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--check"]
    main(
        {int(word) for word in words if word.isdigit()},
        [word for word in words if not word.isdigit()] or TESTS,
        is_check="--check" in sys.argv,
    )
