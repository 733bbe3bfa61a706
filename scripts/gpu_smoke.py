"""First contact with a GPU: each check stands alone, prints a line of JSON at once, and hides no other.

``scripts/gpu_check.py --only smoke`` runs it in a process of its own, since the engine has to be the first that takes
memory of the device: only then ``expandable_segments`` is set, as in a training. Exit code 1: a check has failed.
"""

import argparse
import concurrent.futures
import functools
import importlib.util
import itertools
import json
import logging
import os
import pathlib
import sys
import time
import traceback

import torch
from models import make_batch, make_model
from torch.nn.attention import SDPBackend, sdpa_kernel

import hf_patrickstar.setup.homes
from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.memory.compute_device import (
    device_name,
    is_accelerator,
    lock_pages,
    memory_info,
    unlock_pages,
    used_nbytes,
)
from hf_patrickstar.memory.pages import new_on_host
from hf_patrickstar.memory.pinning import TorchPinning, make_pinning
from hf_patrickstar.memory.streams import make_streams, seconds_of
from hf_patrickstar.optim.adam_script import Range, adam_script, rule_of, torch_adam
from hf_patrickstar.optim.elementwise import SHARE_NUMEL, TILE_NUMEL
from hf_patrickstar.optim.workers import HostWorkers

CHECKS = []
HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage")
FILES = ("/proc/version", "/proc/meminfo", HUGE_PAGES / "enabled", HUGE_PAGES / "shmem_enabled", HUGE_PAGES / "defrag")
NUMS_OF_WORKERS = (8, 12, 16)
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LENGTHS, LENGTHS_OF_CPU = (4096, 16384, 65536), (64, 128)
HEADS, HEAD_DIM = 8, 128
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01, "eps": 1e-8, "maximize": False}


def check(*, needs_device):
    """Makes a function a check: it gets the device and how many elements to work on, and returns what it has found."""

    def note(function):
        CHECKS.append((function, needs_device))
        return function

    return note


def run(function, device, numel):
    """What a check has found, or the error that it has ended with."""
    begin = time.perf_counter()
    try:
        found = {"outcome": "passed", **function(device, numel)}
    except Exception as error:
        found = {"outcome": "failed", "error": f"{type(error).__name__}: {error}"[:600]}
        found["where"] = traceback.format_exc()[-900:]
    return {"check": function.__name__, "seconds": round(time.perf_counter() - begin, 2), **found}


@check(needs_device=False)
def engine_first(device, numel):
    """A few steps whose chunks move; nothing has taken memory of the device before."""
    hf_patrickstar.setup.homes.UNMEASURED_SHARE = 0.0  # the model is tiny, and what libraries take is not
    model = make_model("gpt2").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    settings = {"chunk_numel": 2048, "placement": "host", "cpu_embedding": False, "chunk_budget": "120000B"}
    engine = PatrickStarEngine(model, settings, optimizer, device=device)
    batch, losses = {key: value.to(device) for key, value in make_batch("gpt2", seed=0).items()}, []
    for _ in range(4):
        loss = model(**batch).loss
        loss.backward()
        engine.optimizer.clip_grad_norm_(model.parameters(), 1.0)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        losses.append(loss.item())
    stats, found = engine.stats(), {}
    if is_accelerator(device):
        chunks, settings = engine.chunks, torch.cuda.memory._snapshot(device).get("allocator_settings", {})
        found["pinned"] = f"{sum(chunk.param.is_pinned() for chunk in chunks)} of {len(chunks)} chunks"
        found["expandable_segments"] = settings.get("expandable_segments")
    engine.detach()
    if not losses[-1] < losses[0] or not stats["chunk_evictions"]:
        raise RuntimeError(f"losses {losses}, {stats['chunk_evictions']} evictions")
    return {"losses": losses, "loads": stats["chunk_loads"], "evictions": stats["chunk_evictions"], **found}


@check(needs_device=False)
def machine(device, numel):
    """What is here."""
    texts = {str(file): pathlib.Path(file).read_text().split("\n")[0] for file in FILES if pathlib.Path(file).exists()}
    found = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cores": len(os.sched_getaffinity(0))}
    if is_accelerator(device):
        found |= {"name": device_name(device), "free_and_total": memory_info(device)}
    return {**found, **texts}


@check(needs_device=True)
def memory_of_others(device, numel):
    """NVML tells the bytes that anybody has taken."""
    ask = used_nbytes(device)
    return {"used_nbytes": ask(), "asked": ask.__qualname__}


@check(needs_device=True)
def pinning(device, numel):
    """Rates of locking and of copies each way, and whether copies are asynchronous, for both kinds of locked memory."""
    ours, how = make_pinning(device)
    found, nbytes = {"how": how, **locking(device, numel)}, 4 * numel
    for name, source in (("ours", ours), ("torch", TorchPinning())):
        begin = time.perf_counter()
        host = source.begin(nbytes, torch.uint8, zero=False)
        source.lock(host)
        found[f"{name}_lock_gb_s"] = nbytes / (time.perf_counter() - begin) / 1e9
        there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        for way, (target, origin) in {"to_device": (there, host), "to_host": (host, there)}.items():
            target.copy_(origin, non_blocking=True)
            torch.accelerator.synchronize(device)
            begin = time.perf_counter()
            target.copy_(origin, non_blocking=True)
            is_back = time.perf_counter() - begin
            torch.accelerator.synchronize(device)
            seconds = time.perf_counter() - begin
            found[f"{name}_{way}_gb_s"] = nbytes / seconds / 1e9
            found[f"{name}_{way}_is_asynchronous"] = is_back < seconds / 4
        del host, there, target, origin
    torch.zeros(8, device=device).add_(1)
    torch.accelerator.synchronize(device)
    return found


def locking(device, nbytes):
    """What locking of pages takes that have been touched, by one thread and by four at once."""
    buffers = [new_on_host(nbytes, dtype=torch.uint8, device=torch.device("cpu")) for _ in range(8)]
    begin = time.perf_counter()
    for buffer in buffers:
        buffer.zero_()
    found = {"touch_gb_s": 8 * nbytes / (time.perf_counter() - begin) / 1e9}
    for threads, part in ((1, buffers[:4]), (4, buffers[4:])):
        begin = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda buffer: lock_pages(device, buffer.data_ptr(), buffer.nbytes), part))
        found[f"lock_by_{threads}_gb_s"] = 4 * nbytes / (time.perf_counter() - begin) / 1e9
    for buffer in buffers:
        unlock_pages(device, buffer.data_ptr())
    return found


@check(needs_device=True)
def refused_lock(device, numel):
    """The error of a lock that is refused is not raised by the next kernel."""
    try:
        lock_pages(device, 4096, 4096)  # an address that no program has
        said = "accepted"
    except RuntimeError as error:
        said = str(error)
    torch.zeros(8, device=device).add_(1)
    torch.accelerator.synchronize(device)
    return {"said": said}


@check(needs_device=True)
def streams(device, numel):
    """A copy that is waited for has arrived, and lanes have times."""
    lanes = make_streams(device)
    times = lanes.begin_timing()
    source, target = torch.ones(numel, pin_memory=True), torch.zeros(numel, device=device)
    torch.cuda._sleep(50_000_000)
    ticket = lanes.fetch(source, target)
    is_early = ticket.is_done
    ticket.join()
    if not target.eq(1).all():
        raise RuntimeError("the target was read before the copy was done")
    waits = [bool(one.waiter) for one in times.found()]
    return {"was_done_at_once": is_early, "works": waits.count(False), "waits": waits.count(True)}


class HostAdam:
    """Adam on the host, in one call for each share, by so many workers."""

    def __init__(self, numel, num_workers=None):
        self.workers, self.script, self.numel = HostWorkers(num_workers), adam_script(), numel
        self.lists = [torch.zeros(numel) for _ in range(3)] + [
            torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2)
        ]
        self._rule = rule_of(ADAMW, 0, True)
        if self.script is None:
            raise RuntimeError("the scripted update has other bits than torch's Adam")
        self.submit().wait()

    def submit(self):
        """Begins to update all elements; returns a ticket."""
        return self.workers.submit(self._update, range(0, self.numel, SHARE_NUMEL))

    def _update(self, at):
        self.script(
            [Range(*self.lists, at, at, min(SHARE_NUMEL, self.numel - at), self._rule, False)], fused=True, factor=None
        )

    def g_parameters_s(self):
        """Billions of parameters in a second."""
        begin = time.perf_counter()
        self.submit().wait()
        return self.numel / (time.perf_counter() - begin) / 1e9


@check(needs_device=False)
def adam_on_the_host(device, numel):
    """Adam on all cores, and what the launch of a kernel takes meanwhile: whether workers hold Python's lock."""
    adam, step, x = HostAdam(numel), torch.tensor(1.0), torch.zeros(8, device=device)

    def from_python(at):
        masters, firsts, seconds, gradients, values = ([values[at : at + TILE_NUMEL]] for values in adam.lists)
        lists = masters, [gradients[0].float()], firsts, seconds
        torch_adam(*lists, step=step, settings=ADAMW, fused=True, decoupled=True)
        torch._foreach_copy_(values, masters)

    found = {"workers": adam.workers.num, "launch_us_alone": launch_us(x, lambda number: number < 20_000)}
    tiles = range(0, numel, TILE_NUMEL)
    ways = {"in_one_call": adam.submit, "from_python": lambda: adam.workers.submit(from_python, tiles)}
    for name, submit in ways.items():
        submit().wait()
        begin = time.perf_counter()
        submit().wait()
        found[f"{name}_g_parameters_s"] = numel / (time.perf_counter() - begin) / 1e9
        ticket = submit()
        found[f"{name}_launch_us"] = launch_us(x, lambda _, ticket=ticket: not ticket.future.done())
        ticket.wait()
    for num in NUMS_OF_WORKERS:
        found[f"{num}_workers_g_parameters_s"] = HostAdam(numel, num).g_parameters_s()
    return found


@check(needs_device=True)
def bus(device, numel):
    """Copies each way alone, both ways at once, and both ways beside Adam on the host, which slows down, too."""
    lanes = {}
    for way in ("to_device", "to_host"):
        host, there = torch.empty(numel, pin_memory=True), torch.empty(numel, device=device)
        target, source = (there, host) if way == "to_device" else (host, there)
        lanes[way] = target, source, torch.cuda.Stream(device)
    found = {
        f"{way}_alone_gb_s": copy_rates({way: lane}, lambda number: number < 4)[way] for way, lane in lanes.items()
    }
    found |= {f"{way}_both_gb_s": rate for way, rate in copy_rates(lanes, lambda number: number < 4).items()}
    adam = HostAdam(numel)
    found["adam_alone_g_parameters_s"] = adam.g_parameters_s()
    begin, tickets = time.perf_counter(), [adam.submit() for _ in range(4)]
    beside = copy_rates(lanes, lambda _: not tickets[-1].future.done())
    found |= {f"{way}_beside_adam_gb_s": rate for way, rate in beside.items()}
    found["adam_beside_g_parameters_s"] = len(tickets) * numel / (time.perf_counter() - begin) / 1e9
    return found


def copy_rates(lanes, goes_on):
    """GB/s of copies that are started together, one in each lane, again and again."""
    seconds, number = dict.fromkeys(lanes, 0.0), 0
    while not number or goes_on(number):
        moments = {way: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for way in lanes}
        for way, (target, source, stream) in lanes.items():
            moments[way][0].record(stream)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            moments[way][1].record(stream)
        for way, (begin, end) in moments.items():
            end.synchronize()
            seconds[way] += begin.elapsed_time(end) / 1e3
        number += 1
    return {way: number * lanes[way][0].nbytes / seconds[way] / 1e9 for way in lanes}


@check(needs_device=False)
def update_in_8_bits(device, numel):
    """AdamW of bitsandbytes with 8-bit states, on the device and on the host."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return {"outcome": "skipped", "why": "bitsandbytes is not installed"}
    import bitsandbytes

    found = {"bitsandbytes": bitsandbytes.__version__}
    for where, num in {device: numel, torch.device("cpu"): numel // 16}.items():
        parameter = torch.nn.Parameter(torch.zeros(num, device=where))
        parameter.grad = torch.ones_like(parameter)
        optimizer = bitsandbytes.optim.AdamW8bit([parameter])
        optimizer.step()
        found[f"{where.type}_g_parameters_s"] = num / seconds_of(where, optimizer.step) / 1e9
    return found


@check(needs_device=False)
def attention(device, numel):
    """Causal attention in bf16, forward and backward, by each backend of torch: TFLOP/s, or why there are none."""
    found, is_cuda = {}, is_accelerator(device)
    for length, backend in itertools.product(LENGTHS if is_cuda else LENGTHS_OF_CPU, ATTENTION):
        make = functools.partial(torch.randn, 1, HEADS, length, HEAD_DIM, device=device, dtype=torch.bfloat16)
        given, slope = [make(requires_grad=True) for _ in range(3)], make()

        def train(given=given, slope=slope):
            out = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
            torch.autograd.grad(out, given, slope)

        name = f"{backend.name.removesuffix('_ATTENTION').lower()}_{length}"
        try:
            with sdpa_kernel(backend):
                train()
                seconds = seconds_of(device, lambda train=train: [train() for _ in range(3)]) / 3
            # Two products forward and five backward, of which half of the pairs of tokens count.
            found[name] = 7 * HEADS * HEAD_DIM * length**2 / seconds / 1e12
        except RuntimeError as error:  # no memory for all pairs, or no such backend
            found[name] = str(error).splitlines()[0][:120]
    return found


def launch_us(x, goes_on):
    """Microseconds of the host for one kernel."""
    number, begin = 0, time.perf_counter()
    while goes_on(number):
        x.add_(1)
        number += 1
    seconds = time.perf_counter() - begin
    if is_accelerator(x.device):
        torch.accelerator.synchronize(x.device)
    return seconds / max(number, 1) * 1e6


def main():
    """Runs all checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="'cpu' rehearses the checks that need no device")
    parser.add_argument("--numel", type=int, default=2**28, help="elements to copy and to update")
    parser.add_argument("--output", type=pathlib.Path, help="write what was found to this JSON file after every check")
    options = parser.parse_args()
    logging.basicConfig(level="INFO", stream=sys.stderr)
    device, found = torch.device(options.device), []
    for function, needs_device in CHECKS:
        if needs_device and not is_accelerator(device):
            record = {"check": function.__name__, "outcome": "skipped", "why": "needs a CUDA device"}
        else:
            record = run(function, device, options.numel)
        found.append(record)
        print(json.dumps(record, default=str), flush=True)
        if options.output:
            options.output.write_text(json.dumps(found, default=str))
    return int(any(record["outcome"] == "failed" for record in found))


if __name__ == "__main__":
    sys.exit(main())
