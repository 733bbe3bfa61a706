"""The table of docs/gpu_status.md comes from committed records alone."""

import pytest


@pytest.fixture(scope="module")
def table(script):
    return script("write_gpu_table.py")


def test_the_page_is_what_the_script_writes(table):
    page = table.PAGE.read_text()
    assert table.written(page, table.table(table.read_records(table.RESULTS))) == page
    other = table.written(page, "| x |\n")
    assert "| x |" in other
    assert table.written(other, table.table(table.read_records(table.RESULTS))) == page
