r"""Fine-tunes an encoder-decoder (the T5 and BART families) to turn a text into another, and generates to evaluate.

From the hub::

    python recipes/finetune_seq2seq.py --model_name_or_path MODEL --dataset_name DATASET --output_dir out \
        --do_train --do_eval --predict_with_generate --patrickstar

From files with the columns ``source`` and ``target``::

    python recipes/finetune_seq2seq.py --model_name_or_path ./my-model --train_file train.jsonl \
        --validation_file validation.jsonl --output_dir out --do_train --do_eval --predict_with_generate --patrickstar

Without ``--patrickstar`` it is the stock Seq2SeqTrainer.
"""

import dataclasses

import common
import numpy as np
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from hf_patrickstar import PatrickStarArgumentsMixin, PatrickStarTrainerMixin


class Trainer(PatrickStarTrainerMixin, Seq2SeqTrainer):
    """``Seq2SeqTrainer``, which trains in chunks with ``--patrickstar``."""


@dataclasses.dataclass
class TrainingArguments(PatrickStarArgumentsMixin, Seq2SeqTrainingArguments):
    """``Seq2SeqTrainingArguments`` with ``--patrickstar``."""


@dataclasses.dataclass
class DataArguments(common.DataArguments):
    """The data, and how long its texts may be."""

    source_column: str = dataclasses.field(default="source", metadata={"help": "Column with the texts to read."})
    target_column: str = dataclasses.field(default="target", metadata={"help": "Column with the texts to write."})
    source_prefix: str = dataclasses.field(
        default="", metadata={"help": "Text before every source, as T5 wants it: 'summarize: ', say."}
    )
    max_source_length: int | None = dataclasses.field(
        default=None, metadata={"help": "Tokens of a source; longer ones are cut. Default: at most 512."}
    )
    max_target_length: int | None = dataclasses.field(
        default=None,
        metadata={"help": "Tokens of a target, read or generated; longer ones are cut. Default: at most 64."},
    )


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Runs the recipe.

    Args:
        argv: Options; those of the command line by default.

    Returns:
        The metrics of training and evaluation; ``exact_match`` and ``token_f1`` with ``--predict_with_generate``.

    Raises:
        FileNotFoundError: If a file or directory that was named does not exist.
        ValueError: If the options or the data cannot work.
    """
    model_args, data_args, args = common.parse_arguments(
        (common.ModelArguments, DataArguments, TrainingArguments), argv
    )
    common.check_arguments(model_args, data_args, args)
    if args.do_predict:
        raise ValueError("--do_predict: this recipe has nothing to predict; use --do_eval --predict_with_generate")
    common.set_up_logging(args)
    checkpoint = common.find_checkpoint(args) if args.do_train else None
    set_seed(args.seed)

    splits = common.load_splits(data_args, args, shuffle_split=True)
    config, tokenizer = common.load_config_and_tokenizer(model_args, padding=True)
    if not config.is_encoder_decoder:
        raise ValueError(f"'{model_args.model_name_or_path}' is no encoder-decoder; use recipes/finetune_clm.py")
    lengths = (
        common.choose_length(data_args.max_source_length, 512, config, tokenizer, "--max_source_length"),
        common.choose_length(data_args.max_target_length, 64, config, tokenizer, "--max_target_length"),
    )
    limits = {"train": data_args.max_train_samples, "validation": data_args.max_eval_samples}
    examples = {
        name: make_examples(common.take(split, limits[name]), tokenizer, lengths, data_args, args)
        for name, split in splits.items()
    }
    with common.reading_weights(args, config, tokenizer):
        model = AutoModelForSeq2SeqLM.from_pretrained(
            model_args.model_name_or_path, config=config, revision=model_args.model_revision, dtype=model_args.dtype
        )
    common.fit_embeddings(model, tokenizer)
    if args.generation_max_length is None:
        args.generation_max_length = lengths[1]
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=examples.get("train"),
        eval_dataset=examples.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=(lambda found: compare(found, tokenizer)) if args.predict_with_generate else None,
    )
    results = common.train_and_evaluate(trainer, checkpoint)
    if args.patrickstar:
        common.print_patrickstar_stats(trainer)
    return results


def make_examples(split, tokenizer, lengths, data_args, args):
    """Turns pairs of texts into tokens and labels."""
    columns = [
        common.choose_text_columns(split, name, [], option)[0]
        for name, option in ((data_args.source_column, "--source_column"), (data_args.target_column, "--target_column"))
    ]

    def tokenize(rows):
        sources = [data_args.source_prefix + text for text in rows[columns[0]]]
        tokens = tokenizer(sources, truncation=True, max_length=lengths[0])
        # On their own: a target that is cut keeps its end-of-text token only if the tokenizer cuts it.
        targets = tokenizer(text_target=rows[columns[1]], truncation=True, max_length=lengths[1])
        return {**tokens, "labels": targets["input_ids"]}

    # Tokenized by one process per machine; the others take it from the cache.
    with args.main_process_first(desc="tokenizing"):
        return split.map(
            tokenize,
            batched=True,
            num_proc=data_args.preprocessing_num_workers,
            remove_columns=split.column_names,
            desc="Tokenizing",
        )


def compare(found, tokenizer):
    """The share of texts that were generated exactly, and the mean overlap of their tokens with the right ones."""
    pad = tokenizer.pad_token_id
    texts = [
        [text.strip() for text in tokenizer.batch_decode(np.where(ids < 0, pad, ids), skip_special_tokens=True)]
        for ids in (found.predictions, found.label_ids)
    ]
    pairs = list(zip(*texts, strict=True))
    return {
        "exact_match": sum(made == right for made, right in pairs) / len(pairs),
        "token_f1": sum(overlap(made.split(), right.split()) for made, right in pairs) / len(pairs),
    }


def overlap(made, right):
    """F1 of two lists of words as bags."""
    left = list(right)
    common_words = sum(left.remove(word) is None for word in made if word in left)
    return 2 * common_words / (len(made) + len(right)) if made and right else float(made == right)


if __name__ == "__main__":
    common.run(main)
