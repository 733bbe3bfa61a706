"""First contact with a GPU: each check stands alone, prints a line of JSON at once, and hides no other.

``scripts/gpu_check.py --only smoke`` runs it in a process of its own, since the engine has to be the first that takes
memory of the device: only then ``expandable_segments`` is set, as in a training. Exit code 1: a check has failed.
"""

import argparse
import collections
import concurrent.futures
import functools
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

import hf_patrickstar.homes
from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.memory.accelerator import (
    device_name,
    is_accelerator,
    lock_pages,
    memory_info,
    unlock_pages,
    used_nbytes,
)
from hf_patrickstar.memory.pages import new_on_host
from hf_patrickstar.memory.pinning import TorchPinning, make_pinning
from hf_patrickstar.memory.streams import make_streams
from hf_patrickstar.optim.adam_script import Range, adam_script, rule_of, torch_adam
from hf_patrickstar.optim.elementwise import SHARE_NUMEL, TILE_NUMEL
from hf_patrickstar.optim.workers import SMALL_NUMEL, HostWorkers

CHECKS = []
HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage")
FILES = ("/proc/version", "/proc/meminfo", HUGE_PAGES / "enabled", HUGE_PAGES / "shmem_enabled", HUGE_PAGES / "defrag")
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
    hf_patrickstar.homes.UNMEASURED_SHARE = 0.0  # the model is tiny, and what libraries take is not
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
        chunks, settings = engine.manager.chunks, torch.cuda.memory._snapshot(device).get("allocator_settings", {})
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
    return {"was_done_at_once": is_early, "works": len(times.works()), "stops": len(times.stops())}


@check(needs_device=False)
def adam_on_the_host(device, numel):
    """Adam on all cores, and what the launch of a kernel takes meanwhile: whether workers hold Python's lock."""
    workers, script, step, x = HostWorkers(), adam_script(), torch.tensor(1.0), torch.zeros(8, device=device)
    lists = [torch.zeros(numel) for _ in range(3)] + [torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2)]
    rule = rule_of(ADAMW, 0, True)
    if script is None:
        raise RuntimeError("the scripted update has other bits than torch's Adam")

    def in_one_call(_, at, most=SHARE_NUMEL):
        script([Range(*lists, at, min(most, numel - at), rule, False)], fused=True, factor=None)

    def from_python(_, at):
        masters, firsts, seconds, gradients, values = ([values[at : at + TILE_NUMEL]] for values in lists)
        torch_adam(masters, [gradients[0].float()], firsts, seconds, step, ADAMW, fused=True, decoupled=True)
        torch._foreach_copy_(values, masters)

    found = {"workers": workers.num, "launch_us_alone": launch_us(x, lambda number: number < 20_000)}
    for update, most in ((in_one_call, SHARE_NUMEL), (from_python, TILE_NUMEL)):
        workers.submit(update, range(0, numel, most)).wait()
        begin = time.perf_counter()
        workers.submit(update, range(0, numel, most)).wait()
        found[f"{update.__name__}_g_parameters_s"] = numel / (time.perf_counter() - begin) / 1e9
        ticket = workers.submit(update, range(0, numel, most))
        found[f"{update.__name__}_launch_us"] = launch_us(x, lambda _, ticket=ticket: not ticket.is_done)
        ticket.wait()
    for batch_numel, num_ahead in itertools.product((numel // 16, numel // 4), (0, 1)):
        found[f"batches_of_{batch_numel}_{num_ahead}_ahead_g_parameters_s"] = (
            numel / 1e9 / seconds_in_batches(workers, in_one_call, numel, batch_numel, num_ahead)
        )
    return found


def seconds_in_batches(workers, update, numel, batch_numel, num_ahead):
    """Seconds of updates that are waited for batch by batch, with so many batches begun ahead."""
    tickets, begin = collections.deque(), time.perf_counter()
    for start in range(0, numel, batch_numel):
        share = max(batch_numel // workers.num // 64 * 64, SMALL_NUMEL)
        tickets.append(workers.submit(functools.partial(update, most=share), range(start, start + batch_numel, share)))
        if len(tickets) > num_ahead:
            tickets.popleft().wait()
    for ticket in tickets:
        ticket.wait()
    return time.perf_counter() - begin


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
