r"""Fine-tunes a causal language model on text that is read while it trains, so that the data set is never stored.

From the hub::

    python recipes/finetune_streaming.py --model_name_or_path MODEL --dataset_name DATASET --output_dir out \
        --max_steps 1000 --patrickstar

From a file::

    python recipes/finetune_streaming.py --model_name_or_path ./my-model --train_file corpus.txt --output_dir out \
        --max_steps 1000 --patrickstar

A stream has no length, so ``--max_steps`` says when training ends. Without ``--patrickstar`` it is the stock Trainer.
"""

import dataclasses
import itertools

import common
from transformers import AutoModelForCausalLM, default_data_collator, set_seed

from hf_patrickstar import PatrickStarTrainer as Trainer
from hf_patrickstar import PatrickStarTrainingArguments as TrainingArguments


@dataclasses.dataclass
class DataArguments(common.DataArguments):
    """The data, and how it becomes blocks of tokens."""

    text_column_name: str = dataclasses.field(
        default="text", metadata={"help": "Column with the text. Rows without text are left out."}
    )
    block_size: int | None = dataclasses.field(
        default=None, metadata={"help": "Tokens per training example. Default: what the model takes, at most 1024."}
    )
    shuffle_buffer: int = dataclasses.field(
        default=1000, metadata={"help": "Rows that are held to draw from; 0 keeps the order of the stream."}
    )


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Runs the recipe.

    Args:
        argv: Options; those of the command line by default.

    Returns:
        The metrics of training.

    Raises:
        FileNotFoundError: If a file or directory that was named does not exist.
        ValueError: If the options or the data cannot work.
    """
    model_args, data_args, args = common.parse_arguments(
        (common.ModelArguments, DataArguments, TrainingArguments), argv
    )
    args.do_train = True
    common.check_arguments(model_args, data_args, args)
    if args.do_eval or args.do_predict:
        raise ValueError("this recipe only trains; leave --do_eval and --do_predict out")
    if args.max_steps < 1:
        raise ValueError("a stream has no length; say with --max_steps when training ends")
    common.set_up_logging(args)
    checkpoint = common.find_checkpoint(args)
    set_seed(args.seed)

    config, tokenizer = common.load_config_and_tokenizer(model_args, padding=False)
    block_size = common.choose_length(data_args.block_size, 1024, config, tokenizer, "--block_size")
    train_dataset = stream_blocks(data_args, tokenizer, block_size, args.seed)
    with common.reading_weights(args, config, tokenizer):
        model = AutoModelForCausalLM.from_pretrained(
            model_args.model_name_or_path, config=config, revision=model_args.model_revision, dtype=model_args.dtype
        )
    common.fit_embeddings(model, tokenizer)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    trainer.save_model()
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    if args.patrickstar:
        common.print_patrickstar_stats(trainer)
    return metrics


def stream_blocks(data_args, tokenizer, block_size, seed):
    """Blocks of tokens that are their own labels, made as rows of text arrive."""
    origin = f"'{data_args.dataset_name or data_args.train_file}'"
    column = data_args.text_column_name

    def make(rows):
        texts = [text for text in rows[column] if text]
        # Not verbose: rows longer than the model takes are fine, they are cut into blocks.
        lists = tokenizer(texts, verbose=False)["input_ids"] if texts else []
        flat = list(itertools.chain.from_iterable(lists))
        blocks = [flat[i : i + block_size] for i in range(0, len(flat) - block_size + 1, block_size)]
        return {"input_ids": blocks, "labels": blocks}

    # Reads the first rows before any weight: what is wrong with them, or with the options, is said at once.
    try:
        rows = open_stream(data_args)
        first = next(iter(rows), None)
        if first is None:
            raise ValueError("it has no rows")
        if column not in first:
            columns = ", ".join(f"'{name}'" for name in first)
            raise ValueError(
                f"it has no column '{column}'; its columns are {columns}; name one with --text_column_name"
            )
        if not isinstance(first[column], str | None):
            raise ValueError(f"column '{column}' holds no text; name another with --text_column_name")
        blocks = rows.map(make, batched=True, remove_columns=list(first))
        if next(iter(blocks), None) is None:
            raise ValueError(f"no 1000 rows make a block of {block_size} tokens; lower --block_size or give more text")
    except ValueError as error:
        raise ValueError(f"{origin} cannot be streamed: {' '.join(str(error).split())}") from error
    if data_args.shuffle_buffer > 0:
        rows = rows.shuffle(seed=seed, buffer_size=data_args.shuffle_buffer)
    return rows.map(make, batched=True, remove_columns=list(first))


def open_stream(data_args):
    """The rows of the train split, as they arrive."""
    import datasets

    name = data_args.dataset_name
    if name:
        return datasets.load_dataset(name, data_args.dataset_config_name, split="train", streaming=True)
    builder = common.builder_of(data_args.train_file)
    # Lines keep their ends, or the last word of one would run into the first of the next.
    options = {"keep_linebreaks": True} if builder == "text" else {}
    return datasets.load_dataset(builder, data_files=data_args.train_file, split="train", streaming=True, **options)


if __name__ == "__main__":
    common.run(main)
