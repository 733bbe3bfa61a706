r"""Fine-tunes a causal language model (the GPT family) on text.

From the hub::

    python recipes/finetune_clm.py --model_name_or_path MODEL --dataset_name DATASET --output_dir out \
        --do_train --do_eval --patrickstar

From files, with a device budget::

    python recipes/finetune_clm.py --model_name_or_path ./my-model --train_file corpus.txt --output_dir out \
        --do_train --do_eval --bf16 --patrickstar --patrickstar_config '{"device_budget": "8GiB"}'

Without ``--patrickstar`` it is the stock Trainer.
"""

import dataclasses

import common
from transformers import AutoModelForCausalLM, default_data_collator, set_seed

from hf_patrickstar import PatrickStarTrainer as Trainer
from hf_patrickstar import PatrickStarTrainingArguments as TrainingArguments


@dataclasses.dataclass
class DataArguments(common.DataArguments):
    """The data, and how it becomes blocks of tokens."""

    text_column_name: str | None = dataclasses.field(
        default=None, metadata={"help": "Column with the text. Default: 'text', 'content' or 'sentence'."}
    )
    block_size: int | None = dataclasses.field(
        default=None, metadata={"help": "Tokens per training example. Default: what the model takes, at most 1024."}
    )
    append_eos: bool = dataclasses.field(
        default=False,
        metadata={"help": "Put an end-of-text token after every row; for data with one document per row."},
    )


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Runs the recipe.

    Args:
        argv: Options; those of the command line by default.

    Returns:
        The metrics of training and evaluation.

    Raises:
        FileNotFoundError: If a file or directory that was named does not exist.
        ValueError: If the options or the data cannot work.
    """
    model_args, data_args, args = common.parse_arguments(
        (common.ModelArguments, DataArguments, TrainingArguments), argv
    )
    common.check_arguments(model_args, data_args, args)
    if args.do_predict:
        raise ValueError("--do_predict: this recipe has nothing to predict; use --do_eval")
    common.set_up_logging(args)
    checkpoint = common.find_checkpoint(args) if args.do_train else None
    # Before the model is made: a head that the checkpoint lacks is drawn at random.
    set_seed(args.seed)

    splits = common.load_splits(data_args, args, keep_linebreaks=True)
    config, tokenizer = common.load_config_and_tokenizer(model_args, padding=False)
    block_size = common.choose_length(data_args.block_size, 1024, config, tokenizer, "--block_size")
    blocks = {name: make_blocks(split, tokenizer, block_size, data_args, args) for name, split in splits.items()}
    train_dataset = common.take(blocks["train"], data_args.max_train_samples) if args.do_train else None
    eval_dataset = common.take(blocks["validation"], data_args.max_eval_samples) if args.do_eval else None

    with common.reading_weights(args, config, tokenizer):
        model = AutoModelForCausalLM.from_pretrained(
            model_args.model_name_or_path, config=config, revision=model_args.model_revision, dtype=model_args.dtype
        )
    common.fit_embeddings(model, tokenizer)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        # Blocks have equal length, so there is nothing to pad.
        data_collator=default_data_collator,
    )

    results = common.train_and_evaluate(trainer, checkpoint, perplexity=True)
    if args.patrickstar:
        common.print_patrickstar_stats(trainer)
    return results


def make_blocks(split, tokenizer, block_size, data_args, args):
    """Turns rows of text into blocks of tokens that are their own labels."""
    candidates = [("text",), ("content",), ("sentence",)]
    (column,) = common.choose_text_columns(split, data_args.text_column_name, candidates, "--text_column_name")[:1]
    if data_args.append_eos and tokenizer.eos_token is None:
        raise ValueError("--append_eos: the tokenizer has no end-of-text token; leave the option out")
    ending = tokenizer.eos_token if data_args.append_eos else ""

    def tokenize(rows):
        # Not verbose: rows longer than the model takes are fine, they are cut into blocks.
        return tokenizer([text + ending for text in rows[column]], verbose=False)

    num_proc = data_args.preprocessing_num_workers
    # Tokenized by one process per machine; the others take it from the cache.
    with args.main_process_first(desc="tokenizing"):
        tokens = split.map(
            tokenize, batched=True, num_proc=num_proc, remove_columns=split.column_names, desc="Tokenizing"
        )
        blocks = common.group_into_blocks(tokens, block_size, "--block_size", num_proc)
        return blocks.map(lambda rows: {"labels": rows["input_ids"]}, batched=True, num_proc=num_proc)


if __name__ == "__main__":
    common.run(main)
