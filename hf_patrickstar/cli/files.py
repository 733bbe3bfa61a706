"""Files that a command will write."""

import os
import pathlib
from collections.abc import Mapping

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.report.timeline import VIRTUAL, write_trace
from hf_patrickstar.schedule.clock import Timeline


def check_file(name: str, option: str) -> pathlib.Path:
    """A path that can be written to as far as one can tell: the work before it takes longer than to say so.

    Args:
        name: The path that a user gave.
        option: The option that it was given with.

    Raises:
        ConfigError: If it cannot be written to.
    """
    if not name.strip():
        raise ConfigError(f"{option}: the name of the file is empty; name a file")
    path = pathlib.Path(name)
    if path.is_dir():
        raise ConfigError(f"{option}: '{path}' is a directory; name a file")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{option}: '{path}' cannot be written: there is no directory '{path.parent}'; make it, or name another "
            "file"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option}: '{path}' cannot be written: permission denied; name another file")
    return path


def check_files(files: Mapping[str, str]) -> None:
    """Makes sure that files can be written to, and that none of them would take the place of another.

    Args:
        files: The paths that a user gave, by the option that each was given with.

    Raises:
        ConfigError: If one cannot be written to, or two are the same.
    """
    seen: dict[str, str] = {}
    for option, name in files.items():
        path = os.path.realpath(check_file(name, option))
        if path in seen:
            raise ConfigError(f"{option}: '{name}' is written by {seen[path]}, too; name another file")
        seen[path] = option


def trace_beside(html_file: str | os.PathLike[str]) -> pathlib.Path:
    """The file for Perfetto that is written beside a page.

    Args:
        html_file: The page.
    """
    return pathlib.Path(html_file).with_suffix(".trace.json")


def write_trace_beside(timeline: Timeline, html_file: str | os.PathLike[str], process: str = VIRTUAL) -> None:
    """Writes the file for Perfetto beside a page; an older one is replaced.

    Args:
        timeline: What happened.
        html_file: The page.
        process: What the times are of.

    Raises:
        ConfigError: If the file cannot be written.
    """
    path = trace_beside(html_file)
    try:
        write_trace(timeline, path, process)
    except OSError as error:
        raise ConfigError(f"--html: '{path}' cannot be written: {error.strerror}; name another file") from error
