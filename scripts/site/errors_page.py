"""Writes ``docs/errors.md``: every error that the package raises, with its cause and its remedy.

python scripts/site/errors_page.py
"""

import dataclasses
import html
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from raised import Package, Raised

TARGET = pathlib.Path(__file__).resolve().parents[2] / "docs" / "errors.md"

FIRST = (
    "patrickstar_config is given but patrickstar is not",
    "patrickstar_config: unknown key",
    "both manage parameters",
    "which torch_compile traces away",
    "for the model data:",
    "its chunks need <need> on the compute device at once beside",
    ": out of memory. The micro-batch",
    "zero_grad was not called since",
    "processes were launched, but Accelerate lets each of them train alone",
    "This must be called by all processes together",
    "Make room, save to another disk",
)
"""Parts of the messages of settings, memory, processes and disks, which a first training may well meet."""

ORDER = (
    "ConfigError",
    "BudgetError",
    "DeviceMemoryError",
    "EngineError",
    "CollectiveError",
    "CheckpointError",
    "ScriptError",
    "TraceError",
)
PARTS = {
    "config": "Settings",
    "units": "Settings",
    "cli": "Commands",
    "planner": "Plans",
    "schedule": "Plans of a step",
    "tracing": "Plans of a step",
    "report": "Pages, records and pictures",
    "machine": "Machines",
    "integrations": "Trainer and Accelerate",
    "layout": "Chunks and memory",
    "memory": "Chunks and memory",
    "decisions": "Making an engine",
    "precision": "Making an engine",
    "membership": "Changes of the model",
    "engine": "Engine",
    "runtime": "Running model",
    "dist": "Several processes",
    "optim": "Optimizer",
    "checkpoint": "Checkpoints",
}

_VERBS = (
    "add assign begin call change choose convert copy derive detach drop end export freeze give hold import initialise "
    "install keep leave let load look lower make move open pass pip plan prepare put raise read remove replace restart "
    "resume run save "
    "search set share start tie trace train try unfreeze use wait write"
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
    found = {}
    for raised in package.find_raised():
        if re.search(r"[a-z]{3}", _PLACEHOLDER.sub("", raised.text)):  # else it is the text of another error
            found.setdefault((raised.kind, _part(raised), _PLACEHOLDER.sub("<>", raised.text)), take_apart(raised))
    return list(found.values())


def write_page(package: Package) -> str:
    """The page, in Markdown.

    Args:
        package: The source of the errors.

    Raises:
        ValueError: If a part of a message that stands first on the page is in no message.
    """
    messages = read_messages(package)
    known = [kind for kind in package.classes if kind not in ("PatrickStarError", *ORDER)]
    lines = [_HEAD]
    lines += ["## Look here first", ""]
    for part in FIRST:
        found = [message for message in messages if part in message.raised.text]
        found.sort(key=lambda message: message.raised.kind not in package.classes)
        if not found:
            raise ValueError(f"no message has '{part}' in it")
        lines += _entry(found[0], with_kind=True)
    for kind in [*ORDER, *known]:
        lines += ["", f"## {kind}", "", _plain(package.classes[kind]), ""]
        lines += _by_part([message for message in messages if message.raised.kind == kind])
    lines += ["", "## Errors of Python's own classes", "", _BUILT_IN, ""]
    lines += _by_part([message for message in messages if message.raised.kind not in package.classes], with_kind=True)
    return "\n".join(lines).rstrip() + "\n"


_HEAD = """# Error messages

Every error that the package raises on purpose, by class: what each class means, and for each message its remedy. What
is only known when the error is raised is in angle brackets. `python scripts/site/errors_page.py` writes this page from
the source; a test compares them.

Every class is a subclass of `hf_patrickstar.PatrickStarError`. The commands of `hf-patrickstar` print such an error as
one sentence, without a traceback, and end with the exit status 2. [Troubleshooting](troubleshooting.md) begins with
what you see instead of with a message.
"""
_BUILT_IN = """Where torch or Python raise a class of their own for the same mistake, so does the package. Those about
bookkeeping ("cannot book", "columns of the tide") are checks of the package upon itself: please report one that you
see."""


def _by_part(messages: list[Message], with_kind: bool = False) -> list[str]:
    titles = list(dict.fromkeys(PARTS.values())) + ["Package"]
    lines = []
    for title in titles:
        entries = [message for message in messages if _part(message.raised) == title]
        if entries:
            lines += [*([""] if lines else []), f"**{title}**", ""]
        for message in entries:
            lines += _entry(message, with_kind)
    return lines


def _part(raised: Raised) -> str:
    return PARTS.get(raised.module.partition("/")[0].removesuffix(".py"), "Package")


def _entry(message: Message, with_kind: bool = False) -> list[str]:
    kind = f"`{message.raised.kind}` " if with_kind else ""
    lines = [f"- {kind}`{message.cause}` ({message.raised.module})"]
    if message.remedy:
        remedy = re.sub(r"^(so|then|first|pip(?= install))\b,? ?", _sentence_start, message.remedy, flags=re.IGNORECASE)
        remedy = remedy[0].upper() + remedy[1:]
        lines[0] += "<br>"
        lines.append(f"  **Remedy:** {_escaped(remedy)}{'' if remedy.endswith(('.', '?')) else '.'}")
    return lines


def _sentence_start(match: re.Match[str]) -> str:
    """Words that join a clause to the one before fall away where it stands alone; a command is run."""
    return "run pip " if match[1].lower() == "pip" else ""


def _escaped(text: str) -> str:
    """Text that neither Markdown nor HTML reads as anything else."""
    return re.sub(r"([\\`*_{}\[\]])", r"\\\1", html.escape(text, quote=False))


def _plain(docstring: str) -> str:
    """A docstring in Markdown."""
    return docstring.replace("``", "`")


if __name__ == "__main__":
    TARGET.write_text(write_page(Package()))
    print(f"wrote {TARGET}")
