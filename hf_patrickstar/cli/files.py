"""Files that a command will write."""

import json
import os
import pathlib
from collections.abc import Mapping

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.report.page import Page, render
from hf_patrickstar.report.timeline import to_trace
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


def write_text(path: str | os.PathLike[str], text: str, option: str) -> None:
    """Writes a file; an older one is replaced.

    Args:
        path: The file.
        text: What is written.
        option: The option that the file was given with, for errors.

    Raises:
        ConfigError: If the file cannot be written.
    """
    try:
        pathlib.Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: '{path}' cannot be written: {error.strerror}; name another file") from error


def write_html(page: Page, timeline: Timeline | None, html_file: str | os.PathLike[str], process: str) -> None:
    """Writes a page, and beside it the file of its timeline for Perfetto; older files are replaced.

    Args:
        page: What it says.
        timeline: What happened in a step, or ``None``.
        html_file: The page.
        process: What the times are of.

    Raises:
        ConfigError: If a file cannot be written.
    """
    write_text(html_file, render(page), "--html")
    if timeline is not None:
        write_text(trace_beside(html_file), json.dumps(to_trace(timeline, process)), "--html")
