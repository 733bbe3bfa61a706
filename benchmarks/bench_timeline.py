"""Seconds of a training step on machines that are not here, in virtual time, against its bounds.

A machine of several devices trains with a process on each of them, and what is said is of one of these processes:
tokens are its own, and bounds and lanes are those of its device and its part of the host.

Llama-like models are simulated on every machine by the plan for its memory (``hf_patrickstar.planner.simulation``);
what a micro-batch does is traced once. All chunks are at home on the host (placement=host), and have 16 GiB of the
devices of all processes; clipping by norm is on, blocks are recomputed. With ``--placement auto`` a machine has chunks
at home on its device, too, where it has room. ``--chunk_budget`` says how many bytes chunks take there at most. A step
is what lies between two calls of ``optimizer.step()``. "serial" is a schedule that overlaps nothing: computation,
copies, the whole optimizer, copies.
The figures are simulated: nothing here was measured on these machines.
"""

import functools
import itertools
import json
import pathlib
import time

import common
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.optimization import Adafactor

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.machine import MACHINES, find_machine
from hf_patrickstar.planner.optimizers import find_optimizer
from hf_patrickstar.planner.planning import make_adamw
from hf_patrickstar.planner.simulation import Trained, simulate
from hf_patrickstar.report.page import Page, render
from hf_patrickstar.report.sections import time_of_step
from hf_patrickstar.report.timeline import to_trace
from hf_patrickstar.schedule.bounds import bounds_of
from hf_patrickstar.schedule.clock import Lane
from hf_patrickstar.tracing.fake import FakeTensors
from hf_patrickstar.tracing.micro_batch import MicroBatch, trace
from hf_patrickstar.tracing.recorder import Setting
from hf_patrickstar.units import GIB, format_nbytes

VOCABULARY = 32_000
LENGTH = 4096
MODELS = {
    "1.5b": {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 5632, "num_attention_heads": 16},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "num_attention_heads": 32},
    "14b": {"hidden_size": 5120, "num_hidden_layers": 45, "intermediate_size": 13824, "num_attention_heads": 40},
    "8b-head": {
        **{"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "vocab_size": 128_256},
    },
}
"""Sizes of the models; ``8b-head`` has an embedding and a head of 1 GiB each, as Llama 3 has."""
OPTIMIZERS = {
    "adamw": make_adamw,
    "adamw_8bit": find_optimizer("adamw_8bit"),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": lambda parameters: Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=False),
}
USUAL = ("1.5b", "8b", "14b")


CHUNK_NBYTES = 16 * GIB
"""Bytes of chunks on the devices of all processes for ``--placement host``.

Any of these models needs more with its optimizer states, which are then at home on the host.
"""


def simulation_of(name, num_tokens, num_micro_batches, num_processes, machine, optimizer="adamw", **settings):
    """Simulates a step of a model with so many tokens in each micro-batch of each process.

    Raises:
        BudgetError: If the device has too little memory.
    """
    config = {"dtype": "bf16", "host_budget": 2048 * GIB}
    if settings.get("placement") == "host":
        config["chunk_budget"] = CHUNK_NBYTES // num_processes
    config |= {key: value for key, value in settings.items() if value is not None}
    make_model = micro_batch_of(name, num_tokens, num_micro_batches).make_model
    trained = Trained(make_model, OPTIMIZERS[optimizer], config, num_micro_batches, 1.0, num_processes)
    given = name, num_tokens, num_micro_batches, settings.get("chunked_loss")
    return simulate(trained, machine, functools.partial(traced, *given))


@functools.cache
def traced(name, num_tokens, num_micro_batches, chunked_loss, looked_up):
    """What a model does in a micro-batch, which is the same on every machine."""
    with FakeTensors():
        return trace(micro_batch_of(name, num_tokens, num_micro_batches, chunked_loss), Setting(looked_up))


def micro_batch_of(name, num_tokens, num_micro_batches, chunked_loss=None):
    """What is trained: a Llama-like model, on so many tokens in each micro-batch."""

    def make_model():
        sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "use_cache": False, **MODELS[name]}
        model = LlamaForCausalLM(LlamaConfig(attn_implementation="sdpa", **sizes)).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    make_inputs = functools.partial(zeros, (num_tokens // LENGTH, LENGTH))
    config = {"dtype": "bf16", "chunked_loss": bool(chunked_loss)}
    return MicroBatch(make_model, make_inputs, loss_of, config, num_micro_batches=num_micro_batches)


def zeros(shape):
    """A batch of tokens."""
    tokens = torch.zeros(shape, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def loss_of(model, inputs):
    """The loss of a batch."""
    return model(**inputs).loss


def row_of(simulated, machine, num_tokens):
    """What a line of the table says of a step, as data."""
    over_bus = [index for index, load in enumerate(simulated.loads) if load.states_nbytes]
    numel = sum(simulated.layout.chunks[index].used_numel for index in over_bus)
    row = {
        "parameters": simulated.num_parameters,
        "over_bus": numel / simulated.num_parameters,
        "on_device": 1 - (simulated.num_on_host * simulated.world_size + numel) / simulated.num_parameters,
    }
    if simulated.host_nbytes > machine.host_nbytes:
        missing = format_nbytes(simulated.host_nbytes - machine.host_nbytes)
        return {**row, "refused": f"the host has {missing} too little"}
    timeline = simulated.timeline
    loads, updated = simulated.loads, simulated.updated_nbytes
    bounds = bounds_of(simulated.script, timeline, machine, updated, loads=loads)
    seconds = timeline.duration_ns / 1e9
    return {
        **row,
        "seconds": seconds,
        "tokens_per_s": num_tokens * len(simulated.plans) * simulated.world_size / seconds,
        "lower_bound_s": bounds.lower_ns / 1e9,
        "binding": bounds.binding,
        "over_lower_bound": timeline.duration_ns / bounds.lower_ns,
        "clipped_bound_s": bounds.clipped_ns / 1e9,
        "over_clipped_bound": timeline.duration_ns / bounds.clipped_ns,
        "serial_s": sum(bounds.lanes_ns.values()) / 1e9,
        "busy_s": {lane.value: nanoseconds / 1e9 for lane, nanoseconds in timeline.busy_ns().items()},
        "critical_s": {lane.value: nanoseconds / 1e9 for lane, nanoseconds in timeline.critical_ns().items()},
        "waits_s": {place: nanoseconds / 1e9 for place, nanoseconds in timeline.waits_by_place().items()},
    }


def show(row):
    """Prints one line of the table."""
    head = f"{row['machine']:>8} {row['model']:>5} {row['tokens']:>7}{row['accumulation']:>4}{row['processes']:>5}"
    if "refused" in row:
        print(f"{head}  does not fit: {row['refused']}")
        return
    busy = "".join(f"{row['busy_s'][lane.value] / row['seconds']:>6.0%}" for lane in LANES) + "  "
    longest = [(place.removeprefix("hf_patrickstar."), seconds) for place, seconds in row["waits_s"].items()][:2]
    waits = "; ".join(f"{place} {seconds:.2f} s" for place, seconds in longest)
    print(
        f"{head}{row['seconds']:>9.2f}{row['lower_bound_s']:>8.2f}{row['over_lower_bound']:>6.2f}x"
        f"{row['clipped_bound_s']:>10.2f}{row['over_clipped_bound']:>6.2f}x{row['serial_s']:>8.2f}{busy}  "
        f"{row['binding']}; {waits}"
    )


def draw(timeline, machine, folder, row):
    """Writes the timeline of a row as a trace and as a page."""
    folder.mkdir(parents=True, exist_ok=True)
    what = "_".join(str(row[key]) for key in ("machine", "model", "tokens", "accumulation", "processes"))
    (folder / f"{what}.json").write_text(json.dumps(to_trace(timeline)))
    title = f"A step of {row['model']} on {machine.name}"
    blocks = {"Time": list(time_of_step(timeline, is_measured=False))}
    page = Page(title, f"{row['tokens']} tokens per step and process", "Simulated.", None, (), blocks, f"{what}.json")
    (folder / f"{what}.html").write_text(render(page), encoding="utf-8")


PAPER_LENGTH = 1024
PAPER_MODELS = {
    "1B": (20, 2048),
    "4B": (64, 2304),
    "6B": (53, 3072),
    "8B": (72, 3072),
    "10B": (50, 4096),
    "12B": (60, 4096),
}
"""Layers and hidden sizes of Table 2 of the papers."""
PAPER_TFLOPS = {"1B": (51, None), "6B": (40, 56), "8B": (34, 40), "10B": (32, 44), "12B": (23, 34)}
"""TFLOP/s on one V100, the best of several batch sizes: the first paper's section 9.2.2, and the later one's."""


def simulate_paper(name: str, batch_size: int):
    """Simulates a step of one of the papers' models on their machine, chunks and optimizer states where they fit."""
    num_layers, hidden = PAPER_MODELS[name]
    config = {"dtype": "fp16"}

    def make_model():
        sizes = {"n_layer": num_layers, "n_embd": hidden, "n_head": 16, "n_positions": PAPER_LENGTH, "use_cache": False}
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, loss_type="ForCausalLM")).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def ops_of(looked_up):
        make_inputs = functools.partial(zeros, (batch_size, PAPER_LENGTH))
        with FakeTensors():
            return trace(MicroBatch(make_model, make_inputs, loss_of, config), Setting(looked_up))

    return simulate(Trained(make_model, make_adamw, config), MACHINES["v100"], ops_of)


def compare_with_papers(names, batch_size):
    """Prints TFLOP/s beside the papers', and what the critical path consists of."""
    print(
        f"simulated: one V100, GPT-2 of Table 2, batch {batch_size}, {PAPER_LENGTH} tokens; the papers' best of 4 to 64"
    )
    print(f"{'model':>6}{'seconds':>9}{'TFLOP/s':>9}{'papers':>10}   critical path")
    rows = []
    for name in names:
        simulated = simulate_paper(name, batch_size)
        timeline = simulated.timeline
        flops = 8 * simulated.num_parameters * batch_size * PAPER_LENGTH  # with recomputation, as the papers count
        row = {
            "model": name,
            "parameters": simulated.num_parameters,
            "batch_size": batch_size,
            "seconds": timeline.duration_ns / 1e9,
            "tflops": flops / timeline.duration_ns / 1e3,
            "papers_tflops": PAPER_TFLOPS.get(name),
            "critical_s": {lane.value: nanoseconds / 1e9 for lane, nanoseconds in timeline.critical_ns().items()},
        }
        path = ", ".join(f"{lane} {seconds:.1f} s" for lane, seconds in row["critical_s"].items() if seconds > 0.05)
        papers = " / ".join("-" if figure is None else str(figure) for figure in row["papers_tflops"] or ("-", "-"))
        print(f"{name:>6}{row['seconds']:>9.2f}{row['tflops']:>9.1f}{papers:>10}   {path}")
        rows.append(row)
    return rows


LANES = (Lane.COMPUTE, Lane.TO_DEVICE, Lane.TO_HOST, Lane.HOST, Lane.HOST_WORK)


def main():
    """Prints the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(USUAL), choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384], help="per micro-batch and process")
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1], help="micro-batches per step")
    parser.add_argument("--placement", choices=["host", "auto"], default="host", help="where chunks are at home")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="bounds are those of adamw")
    parser.add_argument(
        "--no-overlap", dest="overlap_optimizer", action="store_false", help="update chunks before step() returns"
    )
    parser.add_argument("--updates", nargs="+", default=["auto"], help="where chunks on the host are updated")
    parser.add_argument("--cores", type=int, help="cores of the host for each process, at most")
    parser.add_argument("--chunked_loss", action="store_true", default=None, help="logits are never whole")
    parser.add_argument("--chunk_budget", help="bytes of chunks on each device at most")
    parser.add_argument("--processes", type=int, help="processes; by default one on every device of the machine")
    parser.add_argument(
        "--machines",
        nargs="+",
        default=["v100", "rtx4090", "a100-40", "h100", "8xh100"],
        help="known names, or JSON files",
    )
    parser.add_argument("--traces", metavar="DIR", help="write a Perfetto trace and a page of every row there")
    parser.add_argument("--papers", nargs="*", metavar="MODEL", help=f"the papers' models instead: {[*PAPER_MODELS]}")
    parser.add_argument("--batch_size", type=int, default=16, help="sequences per step, for --papers")
    options = parser.parse_args()
    if options.papers is not None:
        rows = compare_with_papers(options.papers or PAPER_MODELS, options.batch_size)
        common.finish("bench_timeline_papers", options, {"simulated": True, "rows": rows})
        return
    machines = [find_machine(name) for name in options.machines]
    machines = [machine.with_cores(options.cores or machine.num_cores) for machine in machines]
    if options.processes is not None:
        for machine in machines:
            machine.check_processes(options.processes)
    homes = "all chunks at home on the host" if options.placement == "host" else "chunks at home where it is fastest"
    print(f"simulated: virtual time of one process, {homes}, clipping on")
    print(
        f"{'machine':>8} {'model':>5} {'tokens':>7}{'acc':>4}{'proc':>5}{'seconds':>9}"
        f"{'lower':>8}{'ratio':>7}{'clipped':>10}{'ratio':>7}{'serial':>8}"
        f"{'dev':>6}{'in':>6}{'out':>6}{'host':>6}{'thread':>8}  what binds; the longest waits of the host"
    )
    rows = []
    by_processes = {}
    for machine in machines:
        by_processes.setdefault(options.processes or machine.num_devices, []).append(machine)
    for name, num_tokens, num, num_processes, updates in itertools.product(
        options.models, options.tokens, options.accumulation, by_processes, options.updates
    ):
        begin = time.time()
        settings = {"optimizer": options.optimizer, "placement": options.placement}
        settings |= {} if options.overlap_optimizer else {"overlap_optimizer": False}
        settings |= {"updates": updates, "chunk_budget": options.chunk_budget, "chunked_loss": options.chunked_loss}
        for machine in by_processes[num_processes]:
            row = {"machine": machine.name, "model": name, "tokens": num_tokens, "updates": updates}
            rows.append(row | {"accumulation": num, "processes": num_processes})
            try:
                simulated = simulation_of(name, num_tokens, num, num_processes, machine, **settings)
            except BudgetError as error:
                rows[-1]["refused"] = f"the device has too little: {str(error).partition(';')[0]}"
            else:
                rows[-1] |= row_of(simulated, machine, num_tokens)
            show(rows[-1])
            if options.traces is not None and "refused" not in rows[-1]:
                draw(simulated.timeline, machine, pathlib.Path(options.traces), rows[-1])
        seconds = time.time() - begin
        print(f"{name} with {num} x {num_tokens} tokens, {num_processes} processes: simulated in {seconds:.0f} s")
    name = "bench_timeline" if options.accumulation == [1] else "bench_timeline_accumulation"
    name = f"{name}_chunked_loss" if options.chunked_loss else name
    name = "bench_timeline_updates" if len(options.updates) > 1 else name
    common.finish(name if options.placement == "host" else f"{name}_margin", options, {"simulated": True, "rows": rows})


if __name__ == "__main__":
    main()
