import os
import zlib

import pytest
from live.both import CONFIGS, Both

SAMPLE = 8
"""Of the patterns, one in so many runs at budgets other than the tight one; LIVE_ALL=1 runs all, on a deeper model."""


@pytest.fixture(params=["plain"] if os.environ.get("LIVE_PLAIN") else list(CONFIGS))
def both(request):
    """Runs a pattern on a plain model and on one in chunks: at a part of its bytes, when all fits, and poisoned."""
    return Both(CONFIGS.get(request.param))


def pytest_collection_modifyitems(config, items):
    """Leaves out most of what the tight budget has shown already; which, depends on the name alone."""
    if os.environ.get("LIVE_ALL"):
        return
    left_out = [item for item in items if _is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not _is_left_out(item)]


def _is_left_out(item):
    if "live" not in item.path.parts or not hasattr(item, "callspec"):
        return False
    budgets = {"roomy", "poisoned"} & set(item.callspec.id.split("-"))
    return bool(budgets) and zlib.crc32(f"{item.name}".encode()) % SAMPLE != 0
