import pytest
from support.processes import Workers


def started(world_size):
    """A fixture of so many processes, which start once for all tests."""

    def workers():
        with Workers(world_size) as found:
            yield found

    return pytest.fixture(scope="session")(workers)


pair, three, four = started(2), started(3), started(4)
