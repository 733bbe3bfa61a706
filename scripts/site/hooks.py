"""What the site adds to the pages of ``docs``: files that they link to, flow charts, and the search for an error."""

import itertools
import logging
import pathlib
import re
import sys
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from errors_page import DATA, PAGE, with_search, write_data
from pictures import draw_flow
from raised import Package

ROOT = pathlib.Path(__file__).resolve().parents[2]
_OUTSIDE = re.compile(r"(\]\(|\]:\s*)\.\./([^)\s#]+)")
"""A link to a file of the repository that is outside of ``docs``."""

_FLOW = re.compile(r"^```mermaid\n(.*?)^```\n", re.DOTALL | re.MULTILINE)

log = logging.getLogger("mkdocs.hooks.hf_patrickstar")  # a warning there fails a strict build


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds pages that the navigation does not name, under "More", and files outside of ``docs`` that pages link to."""
    named = set(_pages_in(config.nav or []))
    rest = sorted(file.src_uri for file in files.documentation_pages() if file.src_uri not in named)
    if rest:
        config.nav = [*(config.nav or []), {"More": rest}]
    wanted = {target for file in files.documentation_pages() for _, target in _OUTSIDE.findall(file.content_string)}
    for target in sorted(wanted):
        path = ROOT / target
        if path.is_file() and files.get_file_from_path(target) is None:
            files.append(File.generated(config, target, abs_src_path=str(path)))
    for file in files.documentation_pages():
        for number, text in enumerate(_FLOW.findall(file.content_string)):
            files.append(File.generated(config, _chart_name(file, number), content=draw_flow(text)))
    files.append(File.generated(config, DATA, content=write_data(Package())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links out of ``docs`` lead to the copies that the site has, draws flow charts, and adds the search box."""
    if page.file.src_uri == PAGE.name:
        markdown = with_search(markdown)
    charts = (f"![flow chart]({_chart_name(page.file, number)})\n" for number in itertools.count())
    markdown = _FLOW.sub(lambda _: next(charts), markdown)

    def inside(match: re.Match[str]) -> str:
        before, target = match.groups()
        if not (ROOT / target).exists():
            log.warning("'%s' links to '../%s', which is not there", page.file.src_uri, target)
        return f"{before}{target}"

    return _OUTSIDE.sub(inside, markdown)


def _chart_name(file: File, number: int) -> str:
    return f"{pathlib.PurePosixPath(file.src_uri).stem}_flow_{number}.svg"


def _pages_in(nav: Any) -> list[str]:
    """The source paths in a navigation, which is made of lists, dictionaries and paths."""
    if isinstance(nav, str):
        return [nav]
    children = nav.values() if isinstance(nav, dict) else nav
    return [path for child in children for path in _pages_in(child)]
