"""Calls into the package in one steady step of a small GPT-2 on the CPU tier, beside those of FSDP2 into torch's.

A call of a Python function is what a module pays for being in chunks, on any device. Counted, not timed: two runs give
the same numbers. Last come all calls, of Python and of torch, for one copy over streams: of a chunk that is brought
ahead and joined, and of a gradient on its way home.

    python benchmarks/bench_calls.py [--top N] [--peer] [--output results]
"""

import collections
import os
import sys
import warnings

import common
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hf_patrickstar
from hf_patrickstar.memory.driver import Driver
from hf_patrickstar.memory.streams import DeviceStreams

MODES = {"resident": (None, False), "moving": (320 * 1024, False), "moving, torch's clipping": (320 * 1024, True)}
"""The budget for chunks in bytes, and whether the loop calls ``torch.nn.utils.clip_grad_norm_``."""


def make_model():
    """A GPT-2 of four layers, 52 parameters and 60 modules, without dropout."""
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 64}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=1)).train()


class Calls:
    """Counts calls of functions whose files are in a folder, while it is the profile function of this thread.

    Attributes:
        functions: How often each was called, by its file and name.
        deepest: The most calls that were inside of each other.
        to_copy: The most calls from a hook of a module to the load of a chunk, both counted.
    """

    def __init__(self, root):
        self.functions = collections.Counter()
        self.deepest = self.to_copy = 0
        self._root = root
        self._stack = []

    def __call__(self, frame, event, arg):
        """Is called by Python; see ``sys.setprofile``."""
        path = frame.f_code.co_filename
        if not path.startswith(self._root):
            return
        key = f"{path[len(self._root) :]} {frame.f_code.co_qualname}"
        if event == "call":
            self.functions[key] += 1
            self._stack.append(key)
            self.deepest = max(self.deepest, len(self._stack))
            if key.endswith(" Chunk.load"):
                hooks = [place for place, name in enumerate(self._stack) if "before" in name and "hooks.py" in name]
                self.to_copy = max(self.to_copy, len(self._stack) - hooks[0] if hooks else 0)
        elif event == "return" and self._stack:
            self._stack.pop()

    @property
    def files(self):
        """Files of the functions."""
        return {key.split()[0] for key in self.functions}


def count(step, root):
    """The calls of one step, after five that record and plan."""
    for _ in range(5):
        step()
    calls = Calls(root)
    sys.setprofile(calls)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def count_ours(mode):
    """Calls of a step of the engine, and how many chunks it loads."""
    budget, clips = MODES[mode]
    model = make_model()
    config = {"chunk_numel": 16384, **({"chunk_budget": f"{budget}B"} if budget else {})}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = hf_patrickstar.PatrickStarEngine(model, config, optimizer, device="cpu")
    x = torch.randint(0, 512, (2, 32))

    def step():
        model(input_ids=x, labels=x).loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    before = 0
    for _ in range(5):
        before = engine.stats()["chunk_loads"]
        step()
    loads = engine.stats()["chunk_loads"] - before
    calls = count(step, os.path.dirname(hf_patrickstar.__file__) + os.sep)
    engine.detach()
    return calls, loads


def count_fsdp():
    """Calls of a step of FSDP2 over one process, its blocks and the model each a group."""
    import torch.distributed as dist
    from torch.distributed import fsdp

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, mesh = make_model(), dist.init_device_mesh("cpu", (1,))
        for block in model.transformer.h:
            fsdp.fully_shard(block, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.randint(0, 512, (2, 32))

        def step():
            model(input_ids=x, labels=x).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return count(step, os.path.dirname(fsdp.__file__) + os.sep)
    finally:
        dist.destroy_process_group()


def tell(stream, *_):
    """Whatever a stream is told."""
    return stream


METHODS = ("wait_stream", "wait_event", "record_event", "__enter__", "__exit__")
STREAM = type("Stream", (), dict.fromkeys(METHODS, tell))()
"""Stands in for the streams of a device."""


class Streamed(Driver):
    """The driver of a device that is not there."""

    def new_stream(self):
        """See ``Driver``."""
        return STREAM

    current_stream = new_stream

    def inside(self, stream):
        """See ``Driver``."""
        return STREAM

    def is_on_device(self, tensor):
        """See ``Driver``."""
        return True

    def is_pinned(self, tensor):
        """See ``Driver``."""
        return super().is_pinned(tensor) or True


def count_copies():
    """All calls for a copy in each direction."""
    streams, found = DeviceStreams(torch.device("cpu"), Streamed(torch.device("cpu"))), {}
    one, other = torch.zeros(8), torch.zeros(8)
    copies = {  # as the engine calls them
        "fetch and join": lambda: streams.fetch(one, other).join(),
        "to_host": lambda: streams.to_host(one, other, is_beside=streams.is_on_device(one)),
    }
    for name, copy in copies.items():
        calls = []
        copy()
        sys.setprofile(
            lambda _, event, arg, calls=calls: calls.append(
                event == "call" or (event == "c_call" and "Tensor" in repr(arg))
            )
        )
        try:
            copy()
        finally:
            sys.setprofile(None)
        found[name] = sum(calls) - 1  # that of ``copy``
    return found


def row(name, calls, loads=""):
    """One line of the table."""
    numbers = sum(calls.functions.values()), len(calls.functions), len(calls.files), calls.deepest, calls.to_copy
    return f"{name:28}{numbers[0]:8}{numbers[1]:11}{numbers[2]:7}{numbers[3]:9}{numbers[4]:9}{loads:>7}"


def main():
    """Prints the table, and the functions that are called most."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.add_argument("--top", type=int, default=0, help="how many functions to list for each row")
    parser.add_argument("--peer", action="store_true", help="count FSDP2, too")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(f"{'':28}{'calls':>8}{'functions':>11}{'files':>7}{'deepest':>9}{'to copy':>9}{'loads':>7}")
    counted = [(name, *count_ours(name)) for name in MODES]
    if options.peer:
        counted.append(("FSDP2", count_fsdp(), ""))
    result = {}
    for name, calls, loads in counted:
        print(row(name, calls, loads), flush=True)
        for key, number in calls.functions.most_common(options.top):
            print(f"    {number:6} {key}")
        result[name] = {
            "calls": sum(calls.functions.values()),
            "functions": len(calls.functions),
            "files": len(calls.files),
            "deepest": calls.deepest,
            "frames_to_copy": calls.to_copy,
            "loads": loads,
        }
    result["copies"] = count_copies()
    print(", ".join(f"{name}: {num} calls" for name, num in result["copies"].items()))
    common.finish("bench_calls", options, result)


if __name__ == "__main__":
    main()
