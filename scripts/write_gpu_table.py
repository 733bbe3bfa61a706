"""Writes the table of docs/gpu_status.md from the records of ``scripts/gpu_check.py`` in benchmarks/results."""

import json
import pathlib
from collections.abc import Iterable, Mapping

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gpu_status.md"
RESULTS = ROOT / "benchmarks" / "results"
MARKS = "<!-- From here: python scripts/write_gpu_table.py -->\n", "<!-- to here -->"
RATES = {
    "3 B here, 24 GiB": "3b_24GiB",
    "3 B Trainer here, 24 GiB": "3b_trainer",
    "3 B here": "3b_auto",
    "3 B plain": "3b_plain",
    "3 B FSDP2": "3b_fsdp2",
    "8 B here": "8b_auto",
    "8 B here, 16 K tokens, 80 GB": "8b_16k",
}
"""Titles of columns with tokens per second, and the parts that measure them."""
NONE = "No record has been committed yet.\n"


def read_records(folder: pathlib.Path) -> list[dict]:
    """The records of a device. The first ones are of one of two stages."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("gpu_check_*.json"))]
    return [record for record in records if not record["is_rehearsal"]]


def table(records: Iterable[Mapping]) -> str:
    """A row for each device and commit, from the records alone.

    Args:
        records: What ``gpu_check.py`` has written.
    """
    rows: dict[tuple[str, str], list[Mapping]] = {}
    for record in sorted(records, key=lambda record: record["date"]):
        rows.setdefault((record["device"], record["commit"]), []).append(record)
    if not rows:
        return NONE
    titles = ["device", "date", "commit", "parts passed", *RATES]
    lines = [titles, ["---"] * len(titles)]
    for (device, commit), found in rows.items():
        parts = {name: part for record in found for name, part in record["parts"].items()}
        passed = sum(part["outcome"] == "passed" for part in parts.values())
        rates = [rate_of(parts.get(name)) for name in RATES.values()]
        short = f"{commit[:7]}{commit[40:]}"  # "-dirty" stays
        lines.append([device, found[-1]["date"][:10], short, f"{passed} of {len(parts)}", *rates])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rate_of(part: Mapping | None) -> str:
    """Tokens per second of a part, or why there are none."""
    if part is None or part["outcome"] == "left":
        return "not run"
    result = part.get("result", {})
    if result.get("fits") is False:
        return "does not fit"
    return f"{result['tokens_per_second']:,.0f}" if "tokens_per_second" in result else part["outcome"]


def written(page: str, rows: str) -> str:
    """The page with another table between its marks."""
    before, _, rest = page.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n{rows}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(written(PAGE.read_text(), table(read_records(RESULTS))))


if __name__ == "__main__":
    main()
