"""``hf-patrickstar convert``: from a configuration of DeepSpeed or FSDP to ``--patrickstar_config``."""

import argparse
import json
import sys

from hf_patrickstar.cli.files import check_file, write_text
from hf_patrickstar.integrations.conversion.converted import Converted, convert
from hf_patrickstar.integrations.conversion.files import read_configuration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help="the JSON of --deepspeed or --fsdp_config, or a YAML file of Accelerate",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="where to write the JSON for --patrickstar_config, instead of to the console; an older file is replaced",
    )


def run(options: argparse.Namespace) -> None:
    """Prints the JSON to the standard output, and what each key becomes to the standard error.

    Args:
        options: What ``add_arguments`` added.

    Raises:
        ConfigError: If the file cannot be read, or the output cannot be written.
    """
    path = check_file(options.output, "--output") if options.output is not None else None
    converted = convert(read_configuration(options.file))
    text = json.dumps(converted.settings, indent=2)
    print(explain(converted), file=sys.stderr)
    if path is None:
        print(text)
    else:
        write_text(path, f"{text}\n", "--output")


def explain(converted: Converted) -> str:
    """The explanation as text: each key, the command line, what is not carried over, checkpoints."""
    parts = []
    for line in converted.lines:
        becomes = f"-> {line.becomes}" if line.becomes else "-> not carried over" if line.is_lost else "-> not needed"
        parts.append(f"{line.key} = {json.dumps(line.value, default=str)}\n    {becomes}\n    {line.why}")
    arguments = " ".join(("--patrickstar", *converted.arguments))
    parts.append(
        f"\nOn the command line, in place of --deepspeed, --fsdp and --fsdp_config:\n    {arguments}"
        + (" --patrickstar_config FILE" if converted.settings else "")
    )
    if converted.lost:
        lost = "\n".join(f"    {line.key}: {line.why}" for line in converted.lost)
        parts.append(f"\nNot carried over:\n{lost}")
    if converted.resume:
        parts.append("\nCheckpoints:\n" + "\n".join(f"    {text}" for text in converted.resume))
    return "\n".join(parts)
