"""The tide: non-model bytes, chunk bytes and the budget over the moments of one step (the paper's figure 2, and 8.1).

A GPT-2 is trained with a small and with a large batch under the same device budget, which covers model and non-model
data together. After the plan is made, one more step is measured at every moment: what chunks take, and the most that
everything else takes until the next moment. Chunk bytes give way as activations rise in forward and come back as they
fall in backward, and both together never exceed the budget. Prints a table, writes a PNG if matplotlib is there.
"""

import pathlib

import common
import torch

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.units import format_nbytes

LENGTH = 128
NUM_ROWS = 24
MIB = 1024**2


class Gauge:
    """Measures a step at its moments: wraps the way by which the engine comes to every chunk."""

    def __init__(self, engine):
        self.engine, self.parameters, self.meter = engine, engine.manager.parameters, engine.resources.meter
        self.chunks, self.others = [], []
        self._visit, self.parameters._visit = self.parameters._visit, self.visit

    def visit(self, chunk, caller):
        """Closes the moment before and opens the next one."""
        self.close()
        payload = self._visit(chunk, caller)
        self.meter.restart()
        self.chunks.append(self.engine.resources.pool.in_use(Tier.DEVICE))
        return payload

    def close(self):
        """Notes the most that others took since the last moment."""
        if len(self.others) < len(self.chunks):
            self.others.append(self.meter.peak(self.engine.ledger.used(Tier.DEVICE)))

    def end(self):
        """Ends the measurement."""
        self.close()
        self.parameters._visit = self._visit


def measure(batch_size, budget, options):
    """Chunk bytes and other bytes at every moment of a planned step, bytes that it moved, chunks in the margin."""
    device = torch.device(options.device)
    model = common.make_gpt2(options.layers, options.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config = {"dtype": "bf16", "autocast": False, "device_budget": f"{budget}B", "placement": options.placement}
    engine = PatrickStarEngine(model, config, optimizer, device=device)
    for seed in range(3):
        model(**common.make_batch(seed, batch_size, LENGTH, 256, device)).loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    steps = engine.manager.steps
    steps.diverging.update(steps.traces)  # a step that follows its plan is not measured otherwise
    before = engine.stats()["host_to_device_nbytes"]
    gauge = Gauge(engine)
    loss = model(**common.make_batch(3, batch_size, LENGTH, 256, device)).loss
    loss.backward()
    gauge.end()
    moved = engine.stats()["host_to_device_nbytes"] - before
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return gauge.chunks, gauge.others, moved, engine.stats()["chunks_in_margin"]


def find_budget(options):
    """The non-model peak of the large batch and room for a part of the parameters."""
    device = torch.device(options.device)
    model = common.make_gpt2(options.layers, options.hidden)
    numel = model.num_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    budget = 64 * 1024 * MIB if device.type == "cpu" else "auto"  # a number, so that all is measured
    engine = PatrickStarEngine(
        model,
        {"dtype": "bf16", "autocast": False, "device_budget": f"{budget}B", "placement": "host"},
        optimizer,
        device=device,
    )
    model(**common.make_batch(0, options.large, LENGTH, 256, device)).loss.backward()
    peak = max(trace.non_model_peak_nbytes for trace in engine.traces.values())
    engine.detach()
    return peak + int(options.share * 2 * numel), numel


def print_table(name, chunks, others, budget):
    """Every nth moment, and the one with the most."""
    print(f"\n{name}: {len(chunks)} moments")
    print(f"{'moment':>8}{'chunks':>14}{'non-model':>14}{'together':>14}{'budget':>14}")
    together = [left + right for left, right in zip(chunks, others, strict=True)]
    every = max(len(chunks) // NUM_ROWS, 1)
    most = together.index(max(together))
    for moment in sorted({*range(0, len(chunks), every), most}):
        cells = (chunks[moment], others[moment], together[moment], budget)
        mark = "  <- most" if moment == most else ""
        print(f"{moment:>8}" + "".join(f"{format_nbytes(nbytes):>14}" for nbytes in cells) + mark)
    return max(together)


def plot(runs, budget, target):
    """Stacked areas below the line of the budget; says so if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(runs), figsize=(6 * len(runs), 4), sharey=True, squeeze=False)
    for axis, (name, chunks, others) in zip(axes[0], runs, strict=True):
        moments = range(len(chunks))
        layers = [[nbytes / MIB for nbytes in others], [nbytes / MIB for nbytes in chunks]]
        axis.stackplot(moments, *layers, labels=["non-model data", "chunks"], step="post")
        axis.axhline(budget / MIB, color="black", linestyle="--", label="device budget")
        axis.set(title=name, xlabel="moment of the step")
    axes[0][0].set_ylabel("MiB on the compute tier")
    axes[0][0].legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    print(f"picture written to {target}")


def main():
    """Measures both batches and fails if a moment exceeds the budget or the tide does not turn."""
    parser = common.parser(__doc__)
    parser.add_argument("--small", type=int, default=1, help="small batch size")
    parser.add_argument("--large", type=int, default=8, help="large batch size")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument(
        "--share", type=float, default=0.25, help="room for chunks at the highest tide, of the parameters"
    )
    parser.add_argument("--placement", default="auto", choices=("auto", "host"))
    parser.add_argument("--plot", help="where the picture goes; by default beside the result, or into this folder")
    options = parser.parse_args()
    if options.plot is None and options.output == "results":
        options.plot = str(common.RESULTS / f"bench_tide_{options.device}.png")
    budget, numel = find_budget(options)
    runs, rows, failures = [], [], []
    for size in (options.small, options.large):
        name = f"batch {size} x {LENGTH}"
        chunks, others, moved, in_margin = measure(size, budget, options)
        most = print_table(name, chunks, others, budget)
        turn = others.index(max(others))
        if most > budget:
            failures.append(f"{name}: {most} bytes of {budget}")
        runs.append((name, chunks, others))
        print(
            f"most together {format_nbytes(most)} of {format_nbytes(budget)}; {in_margin} chunks in the margin; "
            f"{format_nbytes(moved)} moved to the device in this step"
        )
        row = {"batch_size": size, "chunk_nbytes": chunks, "non_model_nbytes": others, "most_nbytes": most}
        rows.append(row | {"turn": turn, "host_to_device_nbytes": moved, "chunks_in_margin": in_margin})
    _, chunks, others = runs[-1]
    turn = others.index(max(others))
    if not max(chunks[:turn]) > chunks[turn] < max(chunks[turn + 1 :]):
        failures.append("chunks did not give way to the highest tide, or did not come back")
    plot(runs, budget, pathlib.Path(options.plot or f"bench_tide_{options.device}.png"))
    result = {"numel": numel, "budget_nbytes": budget, "placement": options.placement, "runs": rows}
    common.finish("bench_tide", options, result)
    if failures:
        raise SystemExit("bench_tide: " + "; ".join(failures))
    print("at no moment did chunks and non-model data together exceed the budget")


if __name__ == "__main__":
    main()
