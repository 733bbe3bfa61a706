"""``hf-patrickstar export``: the optimizer's state of a checkpoint in torch's format."""

import argparse

from hf_patrickstar.checkpoint import torch_state
from hf_patrickstar.units import format_nbytes

HELP = "write the optimizer.pt of a checkpoint, which the stock Trainer reads"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command understands."""
    parser.add_argument("directory", metavar="DIR", help="a checkpoint that was saved with --patrickstar")
    parser.add_argument("--output", metavar="FILE", help="the file to write or replace (default: DIR/optimizer.pt)")


def run(options: argparse.Namespace) -> None:
    """Writes the files and prints their sizes.

    Raises:
        CheckpointError: If the training state cannot be read, or a file cannot be written.
    """
    for path in torch_state.export(options.directory, options.output):
        print(f"{path}: {format_nbytes(path.stat().st_size)}")
