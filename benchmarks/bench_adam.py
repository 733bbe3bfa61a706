"""How fast the optimizer's update on the host is, as a share of what memory allows.

The yardstick is an in-place addition over as many bytes. In 16-bit an update reads the gradient (2 bytes per
parameter), master, ``exp_avg`` and ``exp_avg_sq`` (12), and writes those three (12) and the new parameter (2): 28
bytes. An in-place addition over 14 bytes per parameter reads and writes 28, too. In fp32 it is 28 as well: gradient,
parameter and states are read (16), and all but the gradient written (12).

Each way of updating runs with each number of threads, in turns, an addition with as many threads before and after it.
Printed are medians: nanoseconds per parameter; the share, that is seconds of the addition over seconds of the update;
and the seconds of the same round over those of torch's fused optimizer with casts. The masters of this package must be
those of torch, bit for bit.

    python benchmarks/bench_adam.py [--dtype bf16] [--numel 16777216] [--threads 1 2] [--rounds 15]
"""

import importlib.util
import statistics
import time

import common
import torch

from hf_patrickstar import PatrickStarEngine

TENSOR_NUMEL = 2**21
NBYTES = 28


class Weights(torch.nn.Module):
    """Parameters whose gradients are given numbers.

    Args:
        gradients: The gradient of each.
    """

    def __init__(self, gradients):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = torch.nn.ParameterList([torch.randn(g.numel(), generator=generator) for g in gradients])
        self.gradients = gradients

    def forward(self):
        """A sum, of which each parameter has its gradient."""
        return sum((weight * gradient).sum() for weight, gradient in zip(self.weights, self.gradients, strict=True))


class PlainUpdate:
    """An optimizer of torch, or one like those, over fp32 masters: widens gradients, steps, rounds masters.

    Args:
        gradients: The gradient of each parameter.
        make: Makes the optimizer over the masters.
        threads: How many threads torch has.
    """

    def __init__(self, gradients, make, threads):
        self.gradients, self.threads = gradients, threads
        self.masters = [torch.nn.Parameter(weight.detach().clone()) for weight in Weights(gradients).weights]
        self.parameters = [master.detach().to(g.dtype) for master, g in zip(self.masters, gradients, strict=True)]
        self.optimizer = make(self.masters)

    def prepare(self):
        """Nothing: the gradients are there."""

    def run(self):
        """One update, with the casts that 16-bit parameters need."""
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = gradient.float()
        self.optimizer.step()
        if self.parameters[0].dtype is not torch.float32:
            torch._foreach_copy_(self.parameters, [master.detach() for master in self.masters])

    def final(self):
        """The masters."""
        return [master.detach() for master in self.masters]


class OurUpdate:
    """The step of this package's optimizer.

    Args:
        gradients: The gradient of each parameter.
        make: Makes the optimizer.
        threads: The setting ``host_threads``.
        dtype: The type of parameters.
    """

    def __init__(self, gradients, make, threads, dtype):
        self.threads = threads
        self.model = Weights(gradients)
        config = {"dtype": dtype, "autocast": False, "host_threads": threads}
        self.engine = PatrickStarEngine(self.model, config, make(self.model.parameters()), device="cpu")

    def prepare(self):
        """A forward and a backward."""
        self.model.zero_grad()
        self.model().backward()

    def run(self):
        """The step."""
        self.engine.optimizer.step()

    def final(self):
        """The masters."""
        return list(self.model.state_dict().values())


def make_updates(options, gradients):
    """The ways of updating, by name and number of threads."""

    def fused(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    def default(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3)

    def foreach(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)

    updates = {}
    for threads in options.threads:
        updates["torch fused + casts", threads] = PlainUpdate(gradients, fused, threads)
        updates["torch default + casts", threads] = PlainUpdate(gradients, default, threads)
        updates["torch foreach + casts", threads] = PlainUpdate(gradients, foreach, threads)
        if importlib.util.find_spec("deepspeed") is not None:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            updates["DeepSpeed CPU Adam + casts", threads] = PlainUpdate(
                gradients, lambda parameters: DeepSpeedCPUAdam(parameters, lr=1e-3), threads
            )
        updates["patrickstar, fused", threads] = OurUpdate(gradients, fused, threads, options.dtype)
        updates["patrickstar, default", threads] = OurUpdate(gradients, default, threads, options.dtype)
    return updates


def seconds_of(work, threads):
    """The seconds of a call while torch has a number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    begin = time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    torch.set_num_threads(before)
    return seconds


def measure(updates, buffer, rounds):
    """Seconds of each update and of the additions beside it, by round, the first round left out."""
    seconds = {key: [] for key in updates}
    additions = {key: [] for key in updates}
    for number in range(rounds + 1):
        for key in sorted(updates, reverse=bool(number % 2)):
            update = updates[key]
            update.prepare()
            beside = seconds_of(lambda: buffer.add_(1), update.threads)
            # Ours has its threads by its own setting.
            taken = seconds_of(update.run, update.threads if isinstance(update, PlainUpdate) else 1)
            beside += seconds_of(lambda: buffer.add_(1), update.threads)
            if number:
                seconds[key].append(taken)
                additions[key].append(beside / 2)
    return seconds, additions


def check_bits(updates):
    """Fails if masters of ours are not those of torch."""
    for (name, threads), update in updates.items():
        if isinstance(update, OurUpdate):
            twin = updates[f"torch {name.rpartition(' ')[2]} + casts", threads]
            if not all(map(torch.equal, update.final(), twin.final())):
                raise SystemExit(f"{name}, {threads} threads: masters differ from torch's")


def main():
    """Prints a row for each update."""
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=list(common.DTYPES), default="bf16")
    parser.add_argument("--numel", type=int, default=2**24)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit", type=float, help="fail if the share of ours, fused, is below this")
    options = parser.parse_args()
    options.device = "cpu"
    generator = torch.Generator().manual_seed(0)
    gradients = [
        torch.randn(TENSOR_NUMEL, generator=generator).to(common.DTYPES[options.dtype])
        for _ in range(-(-options.numel // TENSOR_NUMEL))
    ]
    numel = len(gradients) * TENSOR_NUMEL
    updates = make_updates(options, gradients)
    seconds, additions = measure(updates, torch.zeros(numel * NBYTES // 8), options.rounds)
    check_bits(updates)
    rows = []
    print(f"{'':28s}{'threads':>8s}{'ns':>8s}{'addition':>10s}{'share':>8s}{'to fused':>10s}")
    for name, threads in updates:
        own, beside = seconds[name, threads], additions[name, threads]
        fused = seconds["torch fused + casts", threads]
        row = {
            "update": name,
            "threads": threads,
            "ns": statistics.median(own) / numel * 1e9,
            "addition_ns": statistics.median(beside) / numel * 1e9,
            "share": statistics.median(a / b for a, b in zip(beside, own, strict=True)),
            "to_fused": statistics.median(a / b for a, b in zip(own, fused, strict=True)),
        }
        rows.append(row)
        figures = f"{row['ns']:8.2f}{row['addition_ns']:10.2f}{row['share']:8.2f}{row['to_fused']:10.2f}"
        print(f"{name:28s}{threads:8d}{figures}")
    deepspeed = "installed" if importlib.util.find_spec("deepspeed") is not None else "not installed"
    print(f"{numel / 1e6:.1f} M parameters, {options.dtype}; masters equal, bit for bit; DeepSpeed: {deepspeed}")
    result = {"parameters": numel, "rounds": options.rounds, "deepspeed": deepspeed, "masters_equal": True}
    common.finish(f"bench_adam_{options.dtype}", options, {**result, "rows": rows})
    least = min(row["share"] for row in rows if row["update"] == "patrickstar, fused")
    if options.limit is not None and least < options.limit:
        raise SystemExit(f"bench_adam: a share of {least:.2f} is below the limit of {options.limit}")


if __name__ == "__main__":
    main()
