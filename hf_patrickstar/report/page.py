"""A page as one HTML file that needs nothing else: no network, no script, no font."""

import importlib.resources
import os
import pathlib

import jinja2

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.report.blocks import Page
from hf_patrickstar.report.charts import HEIGHT, WIDTH
from hf_patrickstar.version import __version__

_TEMPLATE = "page.html"


def render(page: Page) -> str:
    """The page as HTML; every text in it is escaped.

    Args:
        page: What it says.
    """
    sections = [section for section in page.sections if section.blocks]
    return _template().render(page=page, sections=sections, width=WIDTH, height=HEIGHT, version=__version__)


def write_page(page: Page, path: str | os.PathLike[str], option: str) -> None:
    """Writes the page; an older file is replaced.

    Args:
        page: What it says.
        path: The file.
        option: What a user has named the file with, for errors.

    Raises:
        ConfigError: If the file cannot be written.
    """
    try:
        pathlib.Path(path).write_text(render(page), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: '{path}' cannot be written: {error.strerror}; name another file") from error


def _template() -> jinja2.Template:
    text = importlib.resources.files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text)
