"""How fast the optimizer's update on the host is, as a share of what memory allows.

The yardstick is an in-place addition over as many bytes. In 16-bit an update reads the gradient (2 bytes per
parameter), master, ``exp_avg`` and ``exp_avg_sq`` (12), and writes those three (12) and the new parameter (2): 28
bytes. An in-place addition over 14 bytes per parameter reads and writes 28, too. In fp32 it is 28 as well: gradient,
parameter and states are read (16), and all but the gradient written (12).

Each way of updating runs with each number of threads, in turns, an addition with as many threads before and after it.
Printed are medians: nanoseconds per parameter; the share, that is seconds of the addition over seconds of the update;
and the nanoseconds over those of torch's fused optimizer with casts. Where other programs use the cores, too, ``quiet``
says in how many rounds they had less than a fifth of one core; if those are five or more, the others do not count. The
masters of this package must be those of torch, bit for bit.

The last row is ``optimizer.step()`` of a GPT-2 with a vocabulary of 50,257, per parameter of its own: how far a model,
whose parameters are small and large, is from equal ones.

The engine's step has a millisecond or two that do not grow with the model, and a small ``--numel`` shows those rather
than the update. A model that is trained in chunks has more parameters than the default. All updates together take
13 GiB of memory, and more with DeepSpeed.

    python benchmarks/bench_adam.py [--dtype bf16] [--numel 67108864] [--threads 1 2] [--rounds 15]
"""

import statistics
import time

import common
import psutil
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_patrickstar import PatrickStarEngine

TENSOR_NUMEL = 2**21
NBYTES = 28
FUSED = "torch fused + casts"
MODEL = "patrickstar, GPT-2"
QUIET = 0.2
LEAST_ROUNDS = 5


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
        self.model = self.make_model(gradients)
        self.numel = sum(parameter.numel() for parameter in self.model.parameters())
        config = {"dtype": dtype, "autocast": False, "host_threads": threads}
        self.engine = PatrickStarEngine(self.model, config, make(self.model.parameters()), device="cpu")

    def make_model(self, gradients):
        """Parameters that have these gradients."""
        return Weights(gradients)

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


class ModelUpdate(OurUpdate):
    """The step of this package's optimizer over a GPT-2 of six layers (82 M parameters)."""

    def make_model(self, gradients):
        """The model."""
        return GPT2LMHeadModel(GPT2Config(n_layer=6))

    def prepare(self):
        """A forward and a backward."""
        self.model.zero_grad()
        tokens = torch.arange(16)[None]
        self.model(input_ids=tokens, labels=tokens).loss.backward()


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
        updates[FUSED, threads] = PlainUpdate(gradients, fused, threads)
        updates["torch default + casts", threads] = PlainUpdate(gradients, default, threads)
        updates["torch foreach + casts", threads] = PlainUpdate(gradients, foreach, threads)
        if common.package_version("deepspeed") is not None:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            updates["DeepSpeed CPU Adam + casts", threads] = PlainUpdate(
                gradients, lambda parameters: DeepSpeedCPUAdam(parameters, lr=1e-3), threads
            )
        updates["patrickstar, fused", threads] = OurUpdate(gradients, fused, threads, options.dtype)
        updates["patrickstar, default", threads] = OurUpdate(gradients, default, threads, options.dtype)
        updates[MODEL, threads] = ModelUpdate(gradients, fused, threads, options.dtype)
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


def others_seconds():
    """Processor seconds of all other programs so far."""
    everybody, own = psutil.cpu_times(), psutil.Process().cpu_times()
    return sum(everybody) - everybody.idle - everybody.iowait - own.user - own.system


def measure(updates, buffer, rounds):
    """Seconds of each update and of the additions beside it, and whether it was quiet; the first round is left out."""
    samples = {key: [] for key in updates}
    for number in range(rounds + 1):
        for key in sorted(updates, reverse=bool(number % 2)):
            update = updates[key]
            update.prepare()
            since, busy = time.perf_counter(), others_seconds()
            beside = seconds_of(lambda: buffer.add_(1), update.threads)
            # Ours has its threads by its own setting.
            taken = seconds_of(update.run, update.threads if isinstance(update, PlainUpdate) else 1)
            beside += seconds_of(lambda: buffer.add_(1), update.threads)
            is_quiet = others_seconds() - busy < QUIET * (time.perf_counter() - since)
            if number:
                samples[key].append((taken, beside / 2, is_quiet))
    return samples


def make_row(key, samples, numel, added_numel):
    """Medians of an update's quiet rounds, or of all if there are too few; its addition is over other parameters."""
    quiet = [sample for sample in samples if sample[2]]
    chosen = quiet if len(quiet) >= LEAST_ROUNDS else samples
    return {
        "update": key[0],
        "threads": key[1],
        "quiet": len(quiet),
        "ns": statistics.median(own for own, _, _ in chosen) / numel * 1e9,
        "addition_ns": statistics.median(beside for _, beside, _ in chosen) / added_numel * 1e9,
        "share": statistics.median(beside / own for own, beside, _ in chosen) * numel / added_numel,
    }


def check_bits(updates):
    """Fails if masters of ours are not those of torch."""
    for (name, threads), update in updates.items():
        if type(update) is OurUpdate:
            twin = updates[f"torch {name.rpartition(' ')[2]} + casts", threads]
            if not all(map(torch.equal, update.final(), twin.final())):
                raise SystemExit(f"{name}, {threads} threads: masters differ from torch's")


def main():
    """Prints a row for each update."""
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=list(common.DTYPES), default="bf16")
    parser.add_argument("--numel", type=int, default=2**26)
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
    samples = measure(updates, torch.zeros(numel * NBYTES // 8), options.rounds)
    check_bits(updates)
    rows = [make_row(key, samples[key], getattr(update, "numel", numel), numel) for key, update in updates.items()]
    print(f"{'':28s}{'threads':>8s}{'quiet':>7s}{'ns':>8s}{'addition':>10s}{'share':>8s}{'to fused':>10s}")
    for row in rows:
        (fused,) = (r["ns"] for r in rows if r["update"] == FUSED and r["threads"] == row["threads"])
        row["to_fused"] = row["ns"] / fused
        if row["update"] == MODEL:
            (ours,) = (r["ns"] for r in rows if r["update"] == "patrickstar, fused" and r["threads"] == row["threads"])
            row["to_equal_parameters"] = row["ns"] / ours
        figures = f"{row['ns']:8.2f}{row['addition_ns']:10.2f}{row['share']:8.2f}{row['to_fused']:10.2f}"
        print(f"{row['update']:28s}{row['threads']:8d}{row['quiet']:7d}{figures}")
    for row in rows:
        if row["update"] == MODEL:
            print(f"a GPT-2 to equal parameters, {row['threads']} threads: {row['to_equal_parameters']:.2f}")
    deepspeed = common.package_version("deepspeed") or "not installed"
    print(f"{numel / 1e6:.1f} M parameters, {options.dtype}; masters equal, bit for bit; DeepSpeed: {deepspeed}")
    result = {"parameters": numel, "rounds": options.rounds, "deepspeed": deepspeed, "masters_equal": True}
    common.finish(f"bench_adam_{options.dtype}", options, {**result, "rows": rows})
    least = min(row["share"] for row in rows if row["update"] == "patrickstar, fused")
    if options.limit is not None and least < options.limit:
        raise SystemExit(f"bench_adam: a share of {least:.2f} is below the limit of {options.limit}")


if __name__ == "__main__":
    main()
