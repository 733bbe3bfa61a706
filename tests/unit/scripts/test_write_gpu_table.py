"""The table of docs/gpu_status.md comes from committed records alone."""

import pytest


@pytest.fixture(scope="module")
def table(script):
    return script("write_gpu_table.py")


COMMIT = "0123456789" * 4


def record(parts, **others):
    return {
        **{"device": "NVIDIA X", "date": "2026-11-26T10:00:00+00:00", "commit": COMMIT},
        **{"is_rehearsal": False, "parts": parts},
        **others,
    }


def test_records_of_a_device_and_commit_are_one_row(table):
    one = {"smoke": {"outcome": "passed", "result": []}, "tests": {"outcome": "failed"}}
    two = {
        "3b_auto": {"outcome": "passed", "result": {"fits": True, "tokens_per_second": 12345.6}},
        "3b_plain": {"outcome": "passed", "result": {"fits": False}},
        "3b_fsdp2": {"outcome": "timed out"},
        "8b_auto": {"outcome": "left"},
    }
    rows = table.table([record(two), record(one)]).splitlines()
    assert len(rows) == 3
    assert rows[2] == (
        "| NVIDIA X | 2026-11-26 | 0123456 | 3 of 6 | not run | not run | 12,346 | does not fit | timed out | not run "
        "| not run |"
    )
    rows = table.table([record(one), record(one, commit=f"{COMMIT}-dirty", date="2026-11-27")]).splitlines()
    assert [row.split(" | ")[2] for row in rows[2:]] == ["0123456", "0123456-dirty"]


def test_a_rehearsal_is_no_row(table, tmp_path):
    for number, found in enumerate([record({}, is_rehearsal=True), record({"tests": {}})]):
        (tmp_path / f"gpu_check_{number}.json").write_text(table.json.dumps(found))
    assert [found["parts"] for found in table.read_records(tmp_path)] == [{"tests": {}}]


def test_the_page_is_what_the_script_writes(table):
    page = table.PAGE.read_text()
    assert table.written(page, table.table(table.read_records(table.RESULTS))) == page
    other = table.written(page, "| x |\n")
    assert "| x |" in other
    assert table.written(other, table.table(table.read_records(table.RESULTS))) == page
