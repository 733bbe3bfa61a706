import pytest
from support import inside
from support.small import BUDGETS


def pytest_generate_tests(metafunc):
    """Runs tests with ``budget`` in the situations that their module names: see ``config_of``."""
    is_given = any("budget" in str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    if "budget" in metafunc.fixturenames and not is_given:
        metafunc.parametrize("budget", getattr(metafunc.module, "SITUATIONS", BUDGETS))


@pytest.fixture
def short_waits(monkeypatch):
    """A thread waits a moment for another one, and not a minute."""
    inside.shorten_waits(monkeypatch, 0.3)
