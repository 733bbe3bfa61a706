"""Settings of the engine as ``--set`` reads them."""

import pytest

from hf_patrickstar.cli.plan_run import settings_of
from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("process_wait_s=5.5", 5.5),
        ('keep_fp32=["norm", "lm_head"]', ["norm", "lm_head"]),
        ("chunk_numel=100", 100),
        ("chunk_budget=1GiB", "1GiB"),
        ("cpu_embedding=True", True),
        ("cpu_embedding=auto", "auto"),
    ],
)
def test_values_are_those_of_json_or_text(text, value):
    settings = settings_of([text])
    (found,) = settings.values()
    assert found == value
    assert type(found) is type(value)
    PatrickStarConfig.from_any(settings)


@pytest.mark.parametrize("text", ["process_wait_s=NaN", "keep_fp32=3"])
def test_a_value_that_makes_no_sense_gets_a_sentence(text):
    with pytest.raises(ConfigError, match=text.partition("=")[0]):
        PatrickStarConfig.from_any(settings_of([text]))
