"""What the benchmarks share: the model, the batches, the machine's description and where results go."""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: the cores of a laptop or CI machine are shared
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before torch: for deterministic algorithms

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_gpt2(
    num_layers: int = 8, hidden: int = 512, vocabulary: int = 256, positions: int = 256, tied: bool = True
) -> GPT2LMHeadModel:
    """A GPT-2 without dropout; the defaults make 25.5 M parameters. The same weights at every call."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=positions,
        n_embd=hidden,
        n_layer=num_layers,
        n_head=max(hidden // 64, 1),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
        tie_word_embeddings=tied,
    )
    return GPT2LMHeadModel(config).train()


def make_batch(seed: int, batch_size: int, length: int, vocabulary: int, device: torch.device) -> dict:
    """Random tokens that are their own labels; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (batch_size, length), generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens}


def synchronize(device: torch.device) -> None:
    """Waits for the device, so that a clock read afterwards means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def repeat_bit_for_bit(device: str) -> None:
    """Makes losses comparable bit for bit, which torch's fast attention backward on a GPU does not repeat."""
    if device.startswith("cuda"):
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument(
        "--output", help="write the result to this JSON file, benchmarks/results/NAME_DEVICE.json if it is 'results'"
    )
    return options


def finish(name: str, options: argparse.Namespace, result: dict) -> None:
    """Writes a result with everything that is needed to read and repeat it.

    Results in ``benchmarks/results`` are committed. Nobody can repeat what ran with changes that are in no commit, so a
    line says so.
    """
    words = [word for place, word in enumerate(sys.argv) if "--output" not in sys.argv[max(place - 1, 0) : place + 1]]
    record = {"benchmark": name, "command": " ".join(words), **machine(options.device), **result}
    text = json.dumps(record, indent=2)
    if options.output is None:
        return
    named = RESULTS / f"{name}_{options.device}.json"
    target = named if options.output == "results" else pathlib.Path(options.output)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text + "\n")
    print(f"written to {os.path.relpath(target)}")
    if options.output == "results" and record["commit"].endswith("-dirty"):
        print(
            f"not to be committed: this ran with changes that are in no commit ({record['commit']}); commit them and "
            "run it again"
        )


def machine(device: str) -> dict:
    """Hardware, versions and commit; results that were written before are no change of what runs."""
    what_runs = ("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks/results")
    commit = _git("describe", "--always") or os.environ.get("COMMIT", "unknown")
    deepspeed = package_version("deepspeed")
    hardware = torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor()
    return {
        "hardware": f"{hardware}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            **({} if deepspeed is None else {"deepspeed": deepspeed}),
        },
        "commit": f"{commit}-dirty" if _git(*what_runs) else commit,
    }


def package_version(name: str) -> str | None:
    """The version of a package, or ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed; a copy of the sources without it is measured all the same
        return ""


def _processor() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
