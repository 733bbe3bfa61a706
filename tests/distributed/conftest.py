import pytest
from processes import Workers


@pytest.fixture(scope="session")
def pair():
    with Workers(2) as workers:
        yield workers


@pytest.fixture(scope="session")
def four():
    with Workers(4) as workers:
        yield workers


@pytest.fixture(scope="session")
def single():
    with Workers(1) as workers:
        yield workers


@pytest.fixture(scope="session")
def three():
    with Workers(3) as workers:
        yield workers
