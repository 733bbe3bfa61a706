"""Finds every error that the package raises, with its remedy, for the search box of ``docs/errors.md``."""

import dataclasses
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from raised import Package, Raised

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "errors.md"
MARK = "<!-- The site has its search box here. -->"
DATA = "assets/errors.js"
_SEARCH = f"""<input id="error-text" type="search" placeholder="Words of the message, or all of it" autocomplete="off">

<ul id="error-list"></ul>

<script src="{DATA}"></script>
<script src="assets/error_search.js"></script>
"""

_VERBS = (
    "add assign begin call change choose compile convert copy derive detach drop end export free freeze give hold "
    "import initialise install keep leave let load look lower make move open pass pip plan prepare put raise "
    "read remove replace restart resume run save search set share start tie trace train try unfreeze use wait "
    "write"
)
_PHRASES = (
    r"name (?!is\b)|did you mean|known\b|known are|near are|the units are|its own error says|"
    r"optimizers whose|(?:this|they|all processes|every process|forward, backward[^;.]*) must\b"
)
"""Beginnings of a clause that say what is allowed, or where to look."""
_SETTING = r"(?:or |and |then |so |first |on a machine without accelerators |where [^,;.]*, |if [^,;.]*, )*"
_CLAUSE = re.compile(r"(?<=[;.:?]) |(?<=,) (?=so )")
_TABLE = re.compile(r"(?<=\.)(?:\s*<[^>]*>)+$")
"""Rows of numbers that follow the last sentence."""
_REMEDY = re.compile(rf"{_SETTING}(?:(?:{'|'.join(_VERBS.split())})\b(?!:)|{_PHRASES})", re.IGNORECASE)
_EXPECTED = re.compile(r"(?:expected|must be) (.+?)(?:, got .*)?$")
"""What a value must be, which says what to give."""
_PLACEHOLDER = re.compile(r"<[^<>]+>")


@dataclasses.dataclass(frozen=True)
class Message:
    """The text of an error, taken apart.

    Attributes:
        raised: The error.
        cause: What the text says before it says what to do.
        remedy: What to do; empty if the text does not say.
    """

    raised: Raised
    cause: str
    remedy: str


def take_apart(raised: Raised) -> Message:
    """Finds where a message begins to say what to do: at a clause that begins with an imperative."""
    text = raised.text
    for match in _CLAUSE.finditer(text):
        if _REMEDY.match(text, match.end()):
            return Message(raised, text[: match.start()].rstrip(";:, "), _TABLE.sub("", text[match.end() :]))
    expected = _EXPECTED.search(text)
    return Message(raised, text, f"give {expected.group(1)}" if expected else "")


def read_messages(package: Package) -> list[Message]:
    """The messages of all errors, without those that differ in their placeholders alone."""
    found: dict[tuple[str, str], Message] = {}
    for raised in package.find_raised():
        if re.search(r"[a-z]{3}", _PLACEHOLDER.sub("", raised.text)):  # else it is the text of another error
            found.setdefault((raised.kind, _PLACEHOLDER.sub("<>", raised.text)), take_apart(raised))
    return list(found.values())


def write_data(package: Package) -> str:
    """A script with all messages: for each its class, its cause and its remedy. A browser loads it from a file, too."""
    rows = [(message.raised.kind, message.cause, _sentence(message.remedy)) for message in read_messages(package)]
    return f"window.errorMessages = {json.dumps(sorted(rows), separators=(',', ':'))};\n"


def with_search(markdown: str) -> str:
    """The page as the site has it: it ends with a box that searches all messages."""
    before, mark, _ = markdown.partition(MARK)
    return before + _SEARCH if mark else markdown


def _sentence(remedy: str) -> str:
    """A remedy that stands alone: words that join a clause to the one before fall away, and a command is run."""
    text = re.sub(r"^(?:so|then|first)\b,? ?", "", remedy, flags=re.IGNORECASE)
    text = re.sub(r"^pip (?=install)", "run pip ", text)
    return text and text[0].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")
