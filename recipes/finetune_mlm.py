r"""Fine-tunes a masked language model (the BERT family) on text.

From the hub::

    python recipes/finetune_mlm.py --model_name_or_path MODEL --dataset_name DATASET --output_dir out \
        --do_train --do_eval --patrickstar

From files, one example per line::

    python recipes/finetune_mlm.py --model_name_or_path ./my-model --train_file train.txt \
        --validation_file validation.txt --line_by_line --max_seq_length 128 --output_dir out --do_train --do_eval

Without ``--patrickstar`` it is the stock Trainer.
"""

import dataclasses

import common
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling, set_seed

from hf_patrickstar import PatrickStarTrainer as Trainer
from hf_patrickstar import PatrickStarTrainingArguments as TrainingArguments


@dataclasses.dataclass
class DataArguments(common.DataArguments):
    """The data, and how it becomes sequences with masked tokens."""

    text_column_name: str | None = dataclasses.field(
        default=None, metadata={"help": "Column with the text. Default: 'text', 'content' or 'sentence'."}
    )
    max_seq_length: int | None = dataclasses.field(
        default=None, metadata={"help": "Tokens per sequence. Default: what the model takes, at most 1024."}
    )
    mlm_probability: float = dataclasses.field(default=0.15, metadata={"help": "Part of the tokens that is masked."})
    line_by_line: bool = dataclasses.field(
        default=False,
        metadata={"help": "Make one sequence of each row, cut to --max_seq_length, in place of blocks of all text."},
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
    if not 0 < data_args.mlm_probability < 1:
        raise ValueError(f"--mlm_probability is {data_args.mlm_probability}; give a number between 0 and 1")
    common.set_up_logging(args)
    checkpoint = common.find_checkpoint(args) if args.do_train else None
    # Before the model is made: a head that the checkpoint lacks is drawn at random.
    set_seed(args.seed)

    splits = common.load_splits(data_args, args)
    config, tokenizer = common.load_config_and_tokenizer(model_args, padding=True)
    if tokenizer.mask_token is None:
        name = model_args.tokenizer_name or model_args.model_name_or_path
        raise ValueError(f"tokenizer '{name}' has no mask token; give a model that was pretrained with masks")
    length = common.choose_length(data_args.max_seq_length, 1024, config, tokenizer, "--max_seq_length")
    sequences = {name: make_sequences(split, tokenizer, length, data_args, args) for name, split in splits.items()}
    train_dataset = common.take(sequences["train"], data_args.max_train_samples) if args.do_train else None
    eval_dataset = common.take(sequences["validation"], data_args.max_eval_samples) if args.do_eval else None

    with common.reading_weights(args, config, tokenizer):
        model = AutoModelForMaskedLM.from_pretrained(
            model_args.model_name_or_path, config=config, revision=model_args.model_revision, dtype=model_args.dtype
        )
    common.fit_embeddings(model, tokenizer)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        # Draws new masks every time a sequence is used.
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=data_args.mlm_probability),
    )

    results = common.train_and_evaluate(trainer, checkpoint, perplexity=True)
    if args.patrickstar:
        common.print_patrickstar_stats(trainer)
    return results


def make_sequences(split, tokenizer, length, data_args, args):
    """Turns rows of text into sequences of tokens; special tokens are marked, as they are never masked."""
    candidates = [("text",), ("content",), ("sentence",)]
    (column,) = common.choose_text_columns(split, data_args.text_column_name, candidates, "--text_column_name")[:1]

    def tokenize(rows):
        if not data_args.line_by_line:
            # Not verbose: rows longer than the model takes are fine, they are cut into blocks.
            return tokenizer(rows[column], return_special_tokens_mask=True, verbose=False)
        return tokenizer(rows[column], truncation=True, max_length=length, return_special_tokens_mask=True)

    num_proc = data_args.preprocessing_num_workers
    # Tokenized by one process per machine; the others take it from the cache.
    with args.main_process_first(desc="tokenizing"):
        if data_args.line_by_line:
            filled = split.filter(lambda text: text.strip() != "", input_columns=column, num_proc=num_proc)
            if len(filled) == 0:
                raise ValueError(f"all {len(split)} rows are blank; give data with text")
            split = filled
        tokens = split.map(
            tokenize, batched=True, num_proc=num_proc, remove_columns=split.column_names, desc="Tokenizing"
        )
        if data_args.line_by_line:
            return tokens
        return common.group_into_blocks(tokens, length, "--max_seq_length", num_proc)


if __name__ == "__main__":
    common.run(main)
