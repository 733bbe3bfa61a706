import pathlib

import pytest
from support.processes import Workers


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """One worker of pytest-xdist runs all tests of this folder, or each would start processes."""
    for item in items:
        if item.path.parent == pathlib.Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("distributed"))


def started(world_size):
    """A fixture of so many processes, which start once for all tests."""

    def workers():
        with Workers(world_size) as found:
            yield found

    return pytest.fixture(scope="session")(workers)


pair, three, four = started(2), started(3), started(4)
