"""What the two bare loops share: options, a model, rows of tokens, and the search for the last checkpoint."""

import argparse
import os
import types

import common
import torch
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.trainer_utils import get_last_checkpoint

from hf_patrickstar import deferred_weights

SIZES = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 128}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
BATCH_SIZE = 2
SEED = 7


def make_parser(text):
    """The options of both loops.

    Args:
        text: The docstring of the loop; its first line is shown.
    """
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--model_name_or_path", help="checkpoint; default: a small GPT-2 with random weights")
    parser.add_argument("--dataset_name", help="data set: a hub id, or a directory with data files")
    parser.add_argument("--dataset_config_name", help="configuration (subset) of the data set")
    parser.add_argument("--train_file", help="texts: a txt, json, jsonl, csv or parquet file")
    parser.add_argument("--text_column_name", help="default: text, content or sentence")
    parser.add_argument("--block_size", type=int, help="tokens per row; default: what the model takes, at most 1024")
    parser.add_argument("--chunk_budget", default="256KiB", help="bytes of chunks on the device, or a size as 8GiB")
    parser.add_argument("--steps", type=int, default=8, help="steps of the optimizer in all")
    parser.add_argument("--save_steps", type=int, default=4, help="steps from one checkpoint to the next")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output_dir")
    parser.add_argument("--stock", action="store_true", help="train without chunks")
    return parser


def make_model(options):
    """A checkpoint, whose weights are read straight into chunks; or a small model with random weights."""
    if options.model_name_or_path is None:
        return AutoModelForCausalLM.from_config(GPT2Config(**SIZES))
    with deferred_weights(enabled=not options.stock):
        return AutoModelForCausalLM.from_pretrained(options.model_name_or_path)


def make_rows(options):
    """A tensor of rows of tokens: of texts, or, for the small model, of random numbers.

    Raises:
        FileNotFoundError: If a file or directory that was named does not exist.
        ValueError: If options are missing, or the data cannot work.
    """
    data = common.DataArguments(
        dataset_name=options.dataset_name,
        dataset_config_name=options.dataset_config_name,
        train_file=options.train_file,
    )
    if options.model_name_or_path is None:
        if options.dataset_name or options.train_file:
            raise ValueError("texts need a checkpoint with a tokenizer; add --model_name_or_path")
        return torch.randint(0, 100, (64, 16), generator=torch.Generator().manual_seed(SEED))
    model_args = common.ModelArguments(options.model_name_or_path)
    todo = types.SimpleNamespace(do_train=True, do_eval=False, do_predict=False, seed=SEED)
    common.check_arguments(model_args, data, todo)
    split = common.load_splits(data, todo, keep_linebreaks=True)["train"]
    config, tokenizer = common.load_config_and_tokenizer(model_args, padding=False)
    size = common.choose_length(options.block_size, 1024, config, tokenizer, "--block_size")
    candidates = [("text",), ("content",), ("sentence",)]
    column = common.choose_text_columns(split, options.text_column_name, candidates, "--text_column_name")[0]
    # Not verbose: rows longer than the model takes are fine, they are cut into blocks.
    tokens = split.map(
        lambda rows: {"input_ids": tokenizer(rows[column], verbose=False)["input_ids"]},
        batched=True,
        remove_columns=split.column_names,
    )
    blocks = common.group_into_blocks(tokens, size, "--block_size")
    return torch.tensor(blocks["input_ids"][:])


def make_loader(rows, steps, rows_per_step):
    """Batches for all steps: the rows in random order, drawn anew whenever all were used; alike in every run."""
    count, generator = steps * rows_per_step, torch.Generator().manual_seed(SEED)
    order = torch.cat([torch.randperm(len(rows), generator=generator) for _ in range(-(-count // len(rows)))])
    # With a generator of its own it draws nothing from the random state that a checkpoint restores.
    order = order[:count].tolist()
    return torch.utils.data.DataLoader(rows, batch_size=BATCH_SIZE, sampler=order, generator=generator)


def find_checkpoint(options):
    """The last ``checkpoint-N`` of a run, and N.

    Raises:
        FileNotFoundError: If there is none.
    """
    last = get_last_checkpoint(options.output_dir) if os.path.isdir(options.output_dir) else None
    if last is None:
        raise FileNotFoundError(
            f"--resume: '{options.output_dir}' has no checkpoint-N directory; leave the option out to begin"
        )
    return last, int(last.rpartition("-")[2])
