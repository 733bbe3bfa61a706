"""Writes ``docs/configuration.md`` from the docstrings and fields of the settings and of the Trainer's arguments.

python scripts/site/configuration_page.py
"""

import ast
import dataclasses
import inspect
import json
import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "configuration.md"
SETTINGS = (ROOT / "hf_patrickstar" / "config.py", "PatrickStarConfig")
ARGUMENTS = (ROOT / "hf_patrickstar" / "integrations" / "training_args.py", "PatrickStarArgumentsMixin")

GROUPS = {
    "Memory": (
        *("device_budget", "chunk_budget", "host_budget", "disk_path", "disk_budget", "activation_offload"),
        *("chunked_loss", "chunk_numel", "pin_memory"),
    ),
    "Placement and movement": (
        "placement",
        "eviction",
        "prefetch_depth",
        "cpu_embedding",
        "machine",
        "reuse_plan",
    ),
    "Types": ("dtype", "autocast", "keep_fp32", "state_dtype", "frozen_master"),
    "Optimizer and gradients": ("updates", "overlap_optimizer", "host_threads", "keep_gradients"),
    "Several processes": ("reshard_after_forward", "reduce_dtype", "process_wait_s", "debug_collectives"),
    "Checkpoints": ("optimizer_format", "background_save"),
    "Finding mistakes": ("debug_evict_all",),
}
"""The settings in the order of the page."""

VALUES = {
    "bool": ("true", "false"),
    "bool | Literal['auto']": ('"auto"', "true", "false"),
    "int | str": ('"auto"', "a number of {unit}"),
    "str | Machine": ('"auto"', "text"),
    "tuple[str, ...] | str": ('"auto"', "a list of patterns"),
    "str | tuple[str, ...] | None": ("null", "a directory", "a list of directories"),
    "float | None": ("a number of {unit}", "null"),
    "dict[str, Any] | str | None": ("null", "JSON text", "the path of a JSON file"),
    "Logging": ('"brief"', '"all"', '"off"'),
}
"""Of every type of a setting the values that it takes: as in JSON, or in words."""
UNITS = {
    "device_budget": 'bytes, such as `"8GiB"`',
    "chunk_budget": "bytes",
    "host_budget": "bytes",
    "disk_budget": 'bytes, such as `"200GiB"`',
    "chunk_numel": "elements",
    "prefetch_depth": "chunks",
    "host_threads": "threads",
    "process_wait_s": "seconds",
}
"""Of every setting that may be a number, what is counted."""

_JSON = {"True": "true", "False": "false", "None": "null"}
_HEAD = """# Settings

Each default is right for most people. Settings are JSON text, the path of a JSON file, or in Python a dictionary or a
`PatrickStarConfig`:

```bash
python recipes/finetune_clm.py ... --patrickstar \\
    --patrickstar_config '{"device_budget": "8GiB", "prefetch_depth": 4}'
```

<!-- run -->
```python
from hf_patrickstar import PatrickStarConfig

config = PatrickStarConfig(device_budget="8GiB", prefetch_depth=4)
assert config.device_budget == 8 * 1024**3
```

With `--log_level info` the log explains what each `"auto"` decided. Sections are those of the paper (arXiv 2108.05818).
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
        lines += [f"## {title}", "", *(line for key in keys for line in _entry(settings[key], ""))]
    lines += ["## Arguments of the Trainer", "", *(line for each in arguments.values() for line in _entry(each, "--"))]
    return "\n".join(lines).rstrip() + "\n"


def _entry(setting: Setting, dashes: str) -> list[str]:
    text = re.sub(r"`(True|False|None)`", lambda found: f"`{_JSON[found.group(1)]}`", setting.text)
    return [f"### {dashes}{setting.name}", "", _values(setting), "", _wrapped(text), ""]


def _values(setting: Setting) -> str:
    """What a setting takes, its default first."""
    choices = re.fullmatch(r"Literal\[(.*)\]", setting.annotation)
    if choices:
        found = [f'"{choice}"' for choice in ast.literal_eval(f"[{choices.group(1)}]")]
    else:
        found = [*VALUES[setting.annotation]]
        if re.search(r"\b(int|float)\b", setting.annotation) and setting.name not in UNITS:
            raise ValueError(f"'{setting.name}' may be a number and has no unit")
    known = [f"`{value}`" if _is_json(value) else value.format(unit=UNITS.get(setting.name, "")) for value in found]
    default = f"`{setting.default}`"
    return ", ".join([f"{default} (default)", *(value for value in known if value != default)])


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


def _in_json(value: ast.expr | None) -> str:
    """A default as it is written in JSON; a field of ``dataclasses.field`` names it as an argument."""
    if isinstance(value, ast.Call):
        value = next(item.value for item in value.keywords if item.arg == "default")
    found = ast.literal_eval(value) if value is not None else None
    if isinstance(found, tuple):
        found = found[0] if len(found) == 1 else list(found)
    return json.dumps(found)


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
