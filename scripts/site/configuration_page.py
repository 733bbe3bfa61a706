"""Writes ``docs/configuration.md`` from the docstrings and fields of the settings and of the Trainer's arguments.

python scripts/site/configuration_page.py
"""

import ast
import dataclasses
import inspect
import pathlib
import re
import textwrap
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "configuration.md"
SETTINGS = (ROOT / "hf_patrickstar" / "config.py", "PatrickStarConfig")
ARGUMENTS = (ROOT / "hf_patrickstar" / "integrations" / "training_args.py", "PatrickStarArgumentsMixin")

GROUPS = {
    "Memory": ("device_budget", "chunk_budget", "host_budget", "chunk_numel", "pin_memory"),
    "What lives where, and what moves": (
        "placement",
        "eviction",
        "prefetch_depth",
        "cpu_embedding",
        "machine",
        "reuse_plan",
    ),
    "Types": ("dtype", "autocast", "keep_fp32", "frozen_master"),
    "Optimizer and gradients": ("overlap_optimizer", "host_threads", "keep_gradients"),
    "Several processes": ("reshard_after_forward", "reduce_dtype", "process_wait_s", "debug_collectives"),
    "Checkpoints": ("optimizer_format", "background_save"),
    "Finding mistakes": ("debug_evict_all",),
}
"""The settings in the order of the page."""

TYPES = {
    "bool": "`true` or `false`",
    "bool | Literal['auto']": '`true`, `false` or `"auto"`',
    "int | str": 'a whole number, or `"auto"`',
    "str | Machine": "text",
    "tuple[str, ...] | str": 'a list of texts, or `"auto"`',
    "float": "a number",
    "float | None": "a number, or `null`",
    "dict[str, Any] | str | None": "JSON text, the path of a JSON file, or in Python a dictionary",
    "Logging": '`"off"`, `"brief"` or `"all"`',
}
UNITS = {
    "device_budget": 'bytes, also as text: `"8GiB"`',
    "chunk_budget": 'bytes, also as text: `"8GiB"`',
    "host_budget": 'bytes, also as text: `"8GiB"`',
    "chunk_numel": "elements",
    "prefetch_depth": "chunks",
    "host_threads": "threads",
    "process_wait_s": "seconds",
}
"""Of every setting that may be a number, what is counted."""

_HEAD = """# Settings

Every setting with its type, its default, its unit, and what it costs. Each default is right for most people, and none
has to be set. `python scripts/site/configuration_page.py` writes this page from the source; a test compares them.

Settings are given as JSON text, as the path of a JSON file, or in Python as a dictionary or a `PatrickStarConfig`:

```bash
python recipes/finetune_clm.py ... --patrickstar --patrickstar_config '{"device_budget": "8GiB", "prefetch_depth": 4}'
```

<!-- run -->
```python
from hf_patrickstar import PatrickStarConfig

config = PatrickStarConfig(device_budget="8GiB", prefetch_depth=4)
assert config.device_budget == 8 * 1024**3
```

A key that does not exist is an error that names the nearest one. Every `auto` explains its decision in one line of the
log with `--log_level info`. The sections that are named are those of the paper (arXiv 2108.05818);
[Concepts](concepts.md) explains their words.
"""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A field of a class.

    Attributes:
        name: Its key.
        annotation: Its type, as the source has it.
        default: Its default, as in JSON.
        text: What the docstring of the class says of it.
    """

    name: str
    annotation: str
    default: str
    text: str


def read_settings(path: pathlib.Path, name: str) -> dict[str, Setting]:
    """The fields of a class, by their names.

    Args:
        path: The file.
        name: The class.

    Raises:
        ValueError: If the docstring says nothing of a field.
    """
    (node,) = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == name]
    assert isinstance(node, ast.ClassDef)
    texts = _described(ast.get_docstring(node) or "")
    found = {}
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            key = field.target.id
            if key not in texts:
                raise ValueError(f"the docstring of {name} says nothing of '{key}'")
            found[key] = Setting(key, ast.unparse(field.annotation), _in_json(field.value), texts[key])
    return found


def write_page() -> str:
    """The page, in Markdown.

    Raises:
        ValueError: If a setting is in no group, or one that may be a number has no unit.
    """
    settings, arguments = read_settings(*SETTINGS), read_settings(*ARGUMENTS)
    grouped = [key for keys in GROUPS.values() for key in keys]
    if sorted(grouped) != sorted(settings):
        raise ValueError(f"in one of GROUPS and the settings only: {sorted(set(grouped) ^ set(settings))}")
    lines = [_HEAD]
    for title, keys in GROUPS.items():
        lines += [f"## {title}", "", *_table((settings[key] for key in keys), "")]
        for key in keys:
            lines += [f"### {key}", "", _wrapped(settings[key].text), ""]
    lines += ["## Arguments of the Trainer", "", *_table(arguments.values(), "--")]
    for key, argument in arguments.items():
        lines += [f"### --{key}", "", _wrapped(argument.text), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(settings: Iterable[Setting], dashes: str) -> list[str]:
    rows = [
        f"| [`{dashes}{each.name}`](#{dashes}{each.name}) | {_type(each)} | `{each.default}` | {_unit(each)} |"
        for each in settings
    ]
    return ["| key | type | default | unit |", "|---|---|---|---|", *rows, ""]


def _type(setting: Setting) -> str:
    choices = re.fullmatch(r"Literal\[(.*)\]", setting.annotation)
    if choices:
        *first, last = [f'`"{choice}"`' for choice in ast.literal_eval(f"[{choices.group(1)}]")]
        return f"{', '.join(first)} or {last}"
    return TYPES[setting.annotation]


def _unit(setting: Setting) -> str:
    if re.search(r"\b(int|float)\b", setting.annotation) and setting.name not in UNITS:
        raise ValueError(f"'{setting.name}' may be a number and has no unit")
    return UNITS.get(setting.name, "")


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


def _in_json(value: ast.expr | None) -> str:
    """A default as it is written in JSON; a field of ``dataclasses.field`` names it as an argument."""
    if isinstance(value, ast.Call):
        value = next(item.value for item in value.keywords if item.arg == "default")
    found = ast.literal_eval(value) if value is not None else None
    if isinstance(found, tuple):
        found = found[0] if len(found) == 1 else list(found)
    names = {True: "true", False: "false", None: "null"}
    return (
        names[found]
        if found is None or isinstance(found, bool)
        else f'"{found}"'
        if isinstance(found, str)
        else str(found)
    )


def _described(docstring: str) -> dict[str, str]:
    """Of each name in the section of attributes or arguments its text, in Markdown."""
    body = re.search(r"^(?:Attributes|Args):\n(.*?)(?=^\S|\Z)", docstring, re.DOTALL | re.MULTILINE)
    entries = re.findall(
        r"^(\w+): (.*?)(?=^\w|\Z)", inspect.cleandoc(body.group(1)) if body else "", re.DOTALL | re.MULTILINE
    )
    return {name: " ".join(text.split()).replace("``", "`") for name, text in entries}


if __name__ == "__main__":
    TARGET.write_text(write_page())
    print(f"wrote {TARGET}")
