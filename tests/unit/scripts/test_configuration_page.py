"""``docs/configuration.md`` says what the settings are."""

import dataclasses
import json
import pathlib
import re
import sys

import pytest

import hf_patrickstar
from hf_patrickstar.config import PatrickStarConfig

FOLDER = pathlib.Path(hf_patrickstar.__file__).parent.parent / "scripts" / "site"


@pytest.fixture(scope="module")
def page():
    sys.path.insert(0, str(FOLDER))
    try:
        import configuration_page
    finally:
        sys.path.remove(str(FOLDER))
    return configuration_page


def test_the_committed_page_is_the_generated_one(page):
    assert page.TARGET.read_text() == page.write_page(), "run python scripts/site/configuration_page.py"


def test_the_defaults_on_the_page_are_those_of_the_class(page):
    text = page.TARGET.read_text()
    defaults = dict(re.findall(r"^### (\w+)\n\n`(.*?)` \(default\)", text, re.MULTILINE))
    assert set(defaults) == {field.name for field in dataclasses.fields(PatrickStarConfig)}
    given = {key: json.loads(value) for key, value in defaults.items()}
    assert PatrickStarConfig.from_any(given) == PatrickStarConfig()


def test_a_new_setting_needs_a_description_a_group_and_a_unit(page, tmp_path, monkeypatch):
    def settings(field, said):
        text = f'class Config:\n    """A class.\n\n    Attributes:\n        {said}\n    """\n\n    {field}\n'
        (tmp_path / "config.py").write_text(text)
        return tmp_path / "config.py", "Config"

    with pytest.raises(ValueError, match="'fresh'"):
        page.read_settings(*settings("fresh: int = 1", "stale: Bytes."))
    monkeypatch.setattr(page, "SETTINGS", settings("fresh: float | None = 1.0", "fresh: Bytes."))
    with pytest.raises(ValueError, match="'fresh'"):
        page.write_page()
    monkeypatch.setattr(page, "GROUPS", {"All": ("fresh",)})
    with pytest.raises(ValueError, match="'fresh' may be a number and has no unit"):
        page.write_page()
    monkeypatch.setattr(page, "UNITS", {"fresh": "bytes"})
    assert "### fresh\n\n`1.0` (default), a number of bytes, `null`\n\nBytes.\n" in page.write_page()
