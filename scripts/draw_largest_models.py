"""Draws docs/largest_models.svg, the picture of README.md, from benchmarks/results/bench_paper_scale_today_cpu.json."""

import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "bench_paper_scale_today_cpu.json"
PICTURE = ROOT / "docs" / "largest_models.svg"
SYSTEMS = (("hf_patrickstar", "#1f5fa8"), ("ZeRO-3, CPU offload", "#c4660a"), ("FSDP2, CPU offload", "#7a7a7a"))
NUM_MACHINES = 4  # those with one GPU
_LEFT, _TOP, _BAR, _GROUP, _PER_BILLION = 180, 84, 17, 66, 15.0


def rows() -> list[tuple[str, tuple[str, ...]]]:
    """The machines with one GPU, and the largest model of each system there."""
    found = json.loads(RESULT.read_text())["rows"][:NUM_MACHINES]
    return [(row["machine"], (row["largest"], row["others"]["zero3"], row["others"]["fsdp2"])) for row in found]


def draw() -> str:
    """The picture as text."""
    parts = [_text(16, 26, "Largest Llama-like model that trains on one GPU", "font-size='17' font-weight='bold'")]
    parts.append(
        _text(16, 46, "bf16, 4096 tokens; simulated or computed, not measured on a GPU", "font-size='13' fill='#555'")
    )
    left = 16
    for name, colour in SYSTEMS:
        parts += [_bar(left, 58, 12, 12, colour), _text(left + 18, 69, name, "font-size='13'")]
        left += 180
    top = _TOP
    for machine, sizes in rows():
        gpu, host = machine.split(", ")
        parts.append(_text(16, top + 24, gpu, "font-size='14' font-weight='bold'"))
        parts.append(_text(16, top + 42, f"{host} host memory", "font-size='12' fill='#555'"))
        for place, (size, (_, colour)) in enumerate(zip(sizes, SYSTEMS, strict=True)):
            height, width = top + place * _BAR, float(size.removesuffix("B")) * _PER_BILLION
            parts.append(_bar(_LEFT, height, width, _BAR - 3, colour))
            parts.append(_text(_LEFT + width + 6, height + 12, f"{size[:-1]} B", "font-size='13'"))
        top += _GROUP
    size = f"viewBox='0 0 740 {top}' width='740' height='{top}'"
    style = "font-family='Helvetica, Arial, sans-serif' fill='#222'"
    body = "\n".join(parts)
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} {style}>\n{_bar(0, 0, 740, top, 'white')}\n{body}\n</svg>\n"


def _text(left: float, bottom: float, text: str, style: str) -> str:
    return f"<text x='{left:g}' y='{bottom:g}' {style}>{text}</text>"


def _bar(left: float, top: float, width: float, height: float, colour: str) -> str:
    return f"<rect x='{left:g}' y='{top:g}' width='{width:g}' height='{height:g}' fill='{colour}'/>"


if __name__ == "__main__":
    PICTURE.write_text(draw())
