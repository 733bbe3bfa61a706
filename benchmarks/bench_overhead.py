"""What the engine costs when nothing has to move: step time against plain torch, everything resident.

A plain model with torch's fused AdamW and the same model under the engine train on the same batches, interleaved, in
the same type; in 16-bit both have fp32 masters. The losses must be equal bit for bit. It says whether the aim of the
project is met, 1.02 times the step of plain torch, and fails above ``--limit``.

``--deep`` measures Python: a deep model of tiny layers, whose time is that of the host alone. It prints what the engine
adds to the forward and to the backward of a module where everything is resident, where copies of all chunks stay on
the device, and where chunks come and go; and of a GPT-2 with 148 parameters in 115 modules where everything is
resident. There the aim is 5 microseconds for each pass; it says whether that is met, and does not fail where it is not.
"""

import copy
import statistics
import time

import common
import torch

from hf_patrickstar import PatrickStarEngine

MAX_NORM = 1.0
AIM = 1.02  # times the step of plain torch
DEEP_AIM_US = 5.0  # per module and pass, where everything is resident


def say(is_met):
    """Whether an aim is met, in words."""
    return "met" if is_met else "not met"


def make_plain_step(model, optimizer):
    """Forward, backward, clipping and update as everybody writes them."""

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def make_plain_master_step(model, masters, optimizer):
    """The same in 16-bit with fp32 masters, as a short loop of plain torch does it."""

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        parameters = list(model.parameters())
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        return loss.detach()

    return step


def make_our_step(model, engine):
    """The same under the engine."""

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        engine.optimizer.clip_grad_norm_(model.parameters(), MAX_NORM)
        engine.optimizer.step()
        model.zero_grad()
        return loss.detach()

    return step


def measure(steps, device, options):
    """Runs both steps on the same batches, in alternating order.

    Returns:
        Seconds per step and losses of each, first steps left out of the seconds.
    """
    seconds = {name: [] for name in steps}
    losses = {name: [] for name in steps}
    for number in range(options.warmup + options.steps):
        batch = common.make_batch(number, options.batch_size, options.length, 256, device)
        for name in sorted(steps, reverse=bool(number % 2)):
            common.synchronize(device)
            begin = time.perf_counter()
            loss = steps[name](batch)
            common.synchronize(device)
            if number >= options.warmup:
                seconds[name].append(time.perf_counter() - begin)
            losses[name].append(loss.item())
    return seconds, losses


def make_steps(device, options):
    """The two steps by name, the engine of the second, and the number of parameters."""
    plain = common.make_gpt2(options.layers, options.hidden, positions=options.length)
    ours = copy.deepcopy(plain)
    plain.to(device=device)
    masters = [parameter.detach().clone().requires_grad_() for parameter in plain.parameters()]
    plain.to(dtype=common.DTYPES[options.dtype])
    optimizer = torch.optim.AdamW(plain.parameters() if options.dtype == "fp32" else masters, lr=1e-3, fused=True)
    engine = PatrickStarEngine(
        ours,
        {"dtype": options.dtype, "autocast": False, "cpu_embedding": False},
        torch.optim.AdamW(ours.parameters(), lr=1e-3, fused=True),
        device=device,
    )
    if options.dtype == "fp32":
        steps = {"plain": make_plain_step(plain, optimizer), "patrickstar": make_our_step(ours, engine)}
    else:
        steps = {
            "plain": make_plain_master_step(plain, masters, optimizer),
            "patrickstar": make_our_step(ours, engine),
        }
    return steps, engine, ours.num_parameters()


DEEP_WIDTH = 8
DEEP_CHUNK = 8 * (DEEP_WIDTH * DEEP_WIDTH + DEEP_WIDTH)  # elements: eight layers


def deep_settings(num_layers):
    """Ways to keep the chunks of so many tiny layers; without room for optimizer states homes stay on the host."""
    all_copies = int(1.25 * 4 * DEEP_CHUNK * -(-num_layers // 8))
    at_home = {"placement": "host", "chunk_numel": DEEP_CHUNK}
    return {
        "resident": {},
        "copies": {**at_home, "chunk_budget": f"{all_copies}B"},
        "moving": {**at_home, "chunk_budget": f"{8 * 4 * DEEP_CHUNK}B"},
    }


class Deep(torch.nn.Module):
    """Tiny layers, one after the other."""

    def __init__(self, num_layers):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(DEEP_WIDTH, DEEP_WIDTH) for _ in range(num_layers))

    def forward(self, x):
        """The mean square of what comes out."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Words(torch.nn.Module):
    """A GPT-2 of twelve tiny blocks."""

    def __init__(self):
        super().__init__()
        self.model = common.make_gpt2(12, 16, positions=16)

    def forward(self, x):
        """The loss of some tokens."""
        return self.model(input_ids=x, labels=x).loss


def time_passes(model, optimizer, x):
    """Seconds of forward and of backward of one step, and its loss."""
    begin = time.perf_counter()
    loss = model(x)
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    return middle - begin, end - middle, loss.item()


def measure_deep(device, options):
    """Prints microseconds per module and pass over plain torch for each way to keep chunks; returns them."""
    rows = []
    torch.set_num_threads(1)  # a second one is no use to such layers, and disturbs the first
    for name, settings in {**deep_settings(options.deep), "gpt2": {}}.items():
        is_gpt2 = name == "gpt2"
        plain, ours = (Words() if is_gpt2 else Deep(options.deep) for _ in range(2))
        ours.load_state_dict(plain.to(device).state_dict())
        num = (
            sum(1 for module in plain.modules() if any(True for _ in module.parameters())) if is_gpt2 else options.deep
        )
        x = torch.arange(8, device=device).view(1, 8) if is_gpt2 else torch.randn(4, DEEP_WIDTH, device=device)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
        made = torch.optim.AdamW(ours.parameters(), lr=1e-3, fused=True)
        engine = PatrickStarEngine(ours, settings, made, device=device)
        seconds = {"plain": [], "patrickstar": []}
        for number in range(options.warmup + options.steps * options.repeats):
            found = time_passes(plain, optimizer, x), time_passes(ours, engine.optimizer, x)
            if found[0][2] != found[1][2]:
                raise SystemExit(f"losses differ: {found}")
            if number >= options.warmup:
                for times, figures in zip(seconds.values(), found, strict=True):
                    times.append(figures[:2])
        row = {"chunks": name, "loads": engine.stats()["chunk_loads"]}
        for place, what in enumerate(("forward", "backward")):
            own, over = (statistics.median(times[place] for times in seconds[who]) for who in seconds)
            row[f"plain_{what}_us"] = own / num * 1e6
            row[f"{what}_us"] = (over - own) / num * 1e6
        print(
            f"{name:>9}: {row['forward_us']:.1f} us per module of forward and {row['backward_us']:.1f} us of backward "
            f"over the {row['plain_forward_us']:.1f} and {row['plain_backward_us']:.1f} us of plain torch"
        )
        if name in ("resident", "gpt2"):
            row |= {"aim_us": DEEP_AIM_US, "aim_met": max(row["forward_us"], row["backward_us"]) <= DEEP_AIM_US}
            print(f"{name:>9}: aim of {DEEP_AIM_US:g} us per module and pass: {say(row['aim_met'])}")
        rows.append(row)
        engine.detach()
    print("losses: equal, bit for bit")
    return rows


def main():
    """Prints the ratio of step times and fails if losses differ."""
    parser = common.parser(__doc__)
    parser.add_argument("--dtype", choices=list(common.DTYPES), default="fp32")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=AIM, help="fail if the median ratio is above this")
    parser.add_argument("--deep", type=int, nargs="?", const=300, metavar="LAYERS", help="measure hooks instead")
    options = parser.parse_args()
    common.repeat_bit_for_bit(options.device)
    device = torch.device(options.device)
    if options.deep is not None:
        common.finish("bench_overhead_deep", options, {"rows": measure_deep(device, options)})
        return
    ratios, plain_seconds, our_seconds, numel = [], [], [], 0
    for repeat in range(options.repeats):
        steps, engine, numel = make_steps(device, options)
        seconds, losses = measure(steps, device, options)
        stats = engine.stats()
        if stats["chunk_loads"]:
            raise SystemExit(f"not everything was resident: {stats['chunk_loads']} chunk loads")
        if losses["plain"] != losses["patrickstar"]:
            raise SystemExit(f"losses differ: {losses}")
        ratios += [ours / plain for ours, plain in zip(seconds["patrickstar"], seconds["plain"], strict=True)]
        plain_seconds += seconds["plain"]
        our_seconds += seconds["patrickstar"]
        print(
            f"repeat {repeat + 1}: plain {statistics.median(seconds['plain']):.4f} s, "
            f"patrickstar {statistics.median(seconds['patrickstar']):.4f} s, "
            f"last loss {losses['plain'][-1]:.6f} / {losses['patrickstar'][-1]:.6f}"
        )
        engine.detach()
    ratio = statistics.median(ratios)
    quartiles = statistics.quantiles(ratios, n=4)
    print(
        f"{numel / 1e6:.1f} M parameters, {options.dtype}, batch {options.batch_size} x {options.length}: "
        f"step time ratio {ratio:.3f} (quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f}), "
        f"aim of {AIM}: {say(ratio <= AIM)}"
    )
    print("losses: equal, bit for bit")
    common.finish(
        f"bench_overhead_{options.dtype}",
        options,
        {
            "parameters": numel,
            "ratio": ratio,
            "ratio_quartiles": quartiles,
            "plain_seconds": statistics.median(plain_seconds),
            "patrickstar_seconds": statistics.median(our_seconds),
            "losses_equal": True,
            "aim": AIM,
            "aim_met": ratio <= AIM,
            "limit": options.limit,
        },
    )
    if ratio > options.limit:
        raise SystemExit(f"bench_overhead: {ratio:.3f} is above the limit of {options.limit}")


if __name__ == "__main__":
    main()
