"""The documentation as a site: every link leads somewhere, and a reader needs no network."""

import html.parser
import logging
import pathlib
import re
import shutil

import pytest

import hf_patrickstar

ROOT = pathlib.Path(hf_patrickstar.__file__).parent.parent
CONFIGURATION = ROOT / "scripts" / "site" / "mkdocs.yml"

pytest.importorskip("material", reason="mkdocs-material is not installed (pip install 'hf_patrickstar[docs]')")


def build_site(target, docs=ROOT / "docs"):
    from mkdocs import config
    from mkdocs.commands import build

    build.build(config.load_config(str(CONFIGURATION), site_dir=str(target), docs_dir=str(docs)))
    return target


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build_site(tmp_path_factory.mktemp("site"))


class Loaded(html.parser.HTMLParser):
    """What a browser loads with a page without being asked."""

    def __init__(self, text):
        super().__init__()
        self.urls = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        rel = given.get("rel", "")
        if tag in ("script", "img", "iframe", "source", "video") and given.get("src"):
            self.urls.append(given["src"])
        elif tag == "link" and rel not in ("next", "prev", "canonical"):
            self.urls.append(given["href"])


def test_every_page_loads_only_what_lies_beside_it(site):
    pages = sorted(site.glob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))  # and the page for an address that is not there
    for page in pages:
        loaded = Loaded(page.read_text()).urls
        assert loaded
        for url in loaded:
            assert page.name == "404.html" or (page.parent / url.split("?")[0]).resolve().is_file(), (page.name, url)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", sheet.read_text()), sheet
    index = (site / "search" / "search_index.js").read_text()
    assert index.startswith("var __index = {"), "search needs no server"
    assert "deferred_weights" in index
    assert "assets/iframe-worker.js" in (site / "configuration.html").read_text()


@pytest.mark.long
def test_a_broken_link_fails(tmp_path, caplog):
    from mkdocs.exceptions import Abort

    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    links = ("nowhere_1.md", "report.md#nowhere_2", "../nowhere_3.py")
    (docs / "broken.md").write_text("# Broken\n\n" + "".join(f"[gone]({link})\n" for link in links))
    with pytest.raises(Abort), caplog.at_level(logging.WARNING, "mkdocs"):
        build_site(tmp_path / "site", docs)
    assert [f"nowhere_{number}" in caplog.text for number in (1, 2, 3)] == [True] * 3
