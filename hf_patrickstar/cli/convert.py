"""``hf-patrickstar convert``: from a configuration of DeepSpeed or FSDP to ``--patrickstar_config``."""

import argparse
import json
import pathlib
import sys

import yaml

from hf_patrickstar.cli.files import check_file, write_text
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.integrations.conversion import LOST, convert

HELP = (
    "make --patrickstar_config from a configuration of DeepSpeed, FSDP or Accelerate. It prints the JSON, and on the "
    "standard error what each key becomes."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes."""
    parser.add_argument(
        "file", metavar="FILE", help="the JSON of --deepspeed or --fsdp_config, or a YAML file of Accelerate"
    )
    parser.add_argument("--output", metavar="FILE", help="the file for the JSON; the default is the standard output")


def run(options: argparse.Namespace) -> None:
    """Prints the JSON to the standard output, and what each key becomes to the standard error.

    Args:
        options: What ``add_arguments`` added.

    Raises:
        ConfigError: If the file cannot be read, or the output cannot be written.
    """
    path = None if options.output is None else check_file(options.output, "--output")
    try:
        text = pathlib.Path(options.file).read_text(encoding="utf-8")
        values = json.loads(text) if options.file.endswith(".json") else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read '{options.file}': {' '.join(str(error).split())}; name another file") from error
    if not isinstance(values, dict):
        raise ConfigError(f"'{options.file}' has no keys; name a configuration of DeepSpeed, FSDP or Accelerate")
    settings, arguments, rows = convert(values)
    for row in rows:
        print(f"{row.key} = {json.dumps(row.value, default=str)}\n    {row.becomes}: {row.why}", file=sys.stderr)
    words = " ".join(["--patrickstar", *(f"{name} {value}".strip() for name, value in arguments.items())])
    words += " --patrickstar_config FILE" if settings else ""
    print(f"\nReplace --deepspeed, --fsdp and --fsdp_config by:\n    {words}", file=sys.stderr)
    lost = ", ".join(row.key for row in rows if row.becomes in (LOST, "unknown"))
    print(f"\nNot carried over: {lost}" if lost else "\nEverything is carried over.", file=sys.stderr)
    if path is None:
        print(json.dumps(settings, indent=2))
    else:
        write_text(path, json.dumps(settings, indent=2) + "\n", "--output")
