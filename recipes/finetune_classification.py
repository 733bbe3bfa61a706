r"""Fine-tunes a model (the BERT family) to classify text, or to give it a score.

From the hub::

    python recipes/finetune_classification.py --model_name_or_path MODEL --dataset_name DATASET --output_dir out \
        --do_train --do_eval --patrickstar

From files with the columns ``sentence1``, ``sentence2`` and ``label``; predictions are written to
``out/predictions.csv``::

    python recipes/finetune_classification.py --model_name_or_path ./my-model --train_file train.csv \
        --validation_file validation.csv --test_file test.csv --output_dir out --do_train --do_eval --do_predict

Labels may be classes, integers or text, which are classified; or decimal numbers, which are regressed. Without
``--patrickstar`` it is the stock Trainer.
"""

import csv
import dataclasses
import os

import common
import numpy as np
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, set_seed

from hf_patrickstar import PatrickStarTrainer as Trainer
from hf_patrickstar import PatrickStarTrainingArguments as TrainingArguments


@dataclasses.dataclass
class ModelArguments(common.ModelArguments):
    """Which checkpoint is fine-tuned, and what becomes of its head."""

    ignore_mismatched_sizes: bool = dataclasses.field(
        default=False,
        metadata={"help": "Replace the classification head if the checkpoint's has another number of labels."},
    )


@dataclasses.dataclass
class DataArguments(common.DataArguments):
    """The data, and which columns matter."""

    test_file: str | None = dataclasses.field(
        default=None, metadata={"help": "Data to predict: a txt, json, jsonl, csv or parquet file."}
    )
    max_predict_samples: int | None = dataclasses.field(
        default=None, metadata={"help": "Predict this many examples at most."}
    )
    text_column_names: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": "Column with the text, or two, separated by a comma, with a pair of texts. Default: "
            "'sentence1,sentence2', 'text' or 'sentence'."
        },
    )
    label_column_name: str = dataclasses.field(default="label", metadata={"help": "Column with the labels."})
    max_seq_length: int | None = dataclasses.field(
        default=None,
        metadata={"help": "Tokens per example; longer ones are cut. Default: what the model takes, at most 128."},
    )


@dataclasses.dataclass
class Labels:
    """What the labels are.

    Attributes:
        names: Name of each class, by id; empty for regression.
        to_id: Id of each value as it appears in the data; empty for regression.
    """

    names: list[str]
    to_id: dict[object, int]


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
    model_args, data_args, args = common.parse_arguments((ModelArguments, DataArguments, TrainingArguments), argv)
    common.check_arguments(model_args, data_args, args)
    common.set_up_logging(args)
    checkpoint = common.find_checkpoint(args) if args.do_train else None
    # Before the model is made: a head that the checkpoint lacks is drawn at random.
    set_seed(args.seed)

    # Shuffled: files are often sorted by label, and their end would not be like the rest.
    splits = common.load_splits(data_args, args, shuffle_split=True)
    config, tokenizer = common.load_config_and_tokenizer(model_args, padding=True)
    length = common.choose_length(data_args.max_seq_length, 128, config, tokenizer, "--max_seq_length")
    labels = set_labels(config, splits, data_args.label_column_name, args.do_train)
    limits = {
        "train": data_args.max_train_samples,
        "validation": data_args.max_eval_samples,
        "test": data_args.max_predict_samples,
    }
    splits = {name: common.take(split, limits[name]) for name, split in splits.items()}
    # GPT-like classifiers look for the last token that is not padding.
    config.pad_token_id = tokenizer.pad_token_id
    examples = {
        name: make_examples(split, tokenizer, length, labels if name != "test" else None, data_args, args)
        for name, split in splits.items()
    }

    with common.reading_weights(args, config, tokenizer):
        model = load_model(model_args, config)
    common.fit_embeddings(model, tokenizer)
    regression = not labels.names
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=examples.get("train"),
        eval_dataset=examples.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=mean_squared_error if regression else accuracy,
    )

    results = common.train_and_evaluate(trainer, checkpoint)
    if args.do_predict:
        scores = first(trainer.predict(examples["test"], metric_key_prefix="predict").predictions)
        if regression:
            predictions = [float(score) for score in np.reshape(scores, -1)]
        else:
            predictions = [labels.names[best] for best in np.argmax(scores, axis=-1)]
        if trainer.is_world_process_zero():
            write_predictions(os.path.join(args.output_dir, "predictions.csv"), predictions)
    if args.patrickstar:
        common.print_patrickstar_stats(trainer)
    return results


def load_model(model_args, config):
    """Loads the checkpoint with a head for the labels of the data."""
    try:
        return AutoModelForSequenceClassification.from_pretrained(
            model_args.model_name_or_path,
            config=config,
            revision=model_args.model_revision,
            dtype=model_args.dtype,
            ignore_mismatched_sizes=model_args.ignore_mismatched_sizes,
        )
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"the head of checkpoint '{model_args.model_name_or_path}' does not fit {config.num_labels} label(s); pass "
            "--ignore_mismatched_sizes to train a new one"
        ) from error


def set_labels(config, splits, column, training):
    """Finds out what the labels are, and tells the model's configuration.

    A checkpoint that knows all labels of the data keeps its head and its ids. The same holds if nothing is trained,
    where a new head would only guess.
    """
    # Heads that were saved without names call their labels LABEL_0, LABEL_1 and so on.
    known = {str(config.id2label[i]).removeprefix("LABEL_"): i for i in range(config.num_labels)}
    labelled = {name: split for name, split in splits.items() if name != "test"}
    if not labelled:
        # Prediction alone: the head decides, and only it.
        return Labels([] if config.num_labels == 1 else list(known), {})
    for name, split in labelled.items():
        common.check_column(split, column, "--label_column_name")
        hidden = sum(value == -1 for value in split[column]) if hasattr(split.features[column], "names") else 0
        if hidden:
            raise ValueError(
                f"{hidden} of {len(split)} rows of split '{name}' have the label -1, which means that it is hidden; "
                "use a split with labels"
            )

    source = labelled["train"] if "train" in labelled else labelled["validation"]
    feature = source.features[column]
    kind = str(getattr(feature, "dtype", type(feature).__name__))
    if kind.startswith("float"):
        if not training and config.num_labels != 1:
            raise ValueError(
                f"column '{column}' holds decimal numbers, and the checkpoint tells {config.num_labels} labels apart; "
                "train it first, or use integers or text"
            )
        config.num_labels = 1
        config.problem_type = "regression"
        return Labels([], {})

    if hasattr(feature, "names"):
        values, names = list(range(len(feature.names))), list(feature.names)
    elif kind in ("bool", "string", "large_string") or kind.startswith(("int", "uint")):
        values = sorted(source.unique(column))
        names = [str(value) for value in values]
    else:
        raise ValueError(
            f"column '{column}' holds {kind}; labels are classes, integers, text, or decimal numbers for regression; "
            "name another column with --label_column_name"
        )
    if not set(names) <= set(known):
        if not training:
            raise ValueError(
                f"the data has the labels {quoted(names)}, and the checkpoint knows only {quoted(known)}; train it "
                "first, or evaluate on data with its labels"
            )
        known = {name: i for i, name in enumerate(names)}
        config.num_labels = len(names)
        config.label2id = known
        config.id2label = {i: name for name, i in known.items()}
    if len(known) < 2:
        raise ValueError(f"all labels in column '{column}' are {quoted(known)}; give data with at least two labels")
    config.problem_type = "single_label_classification"
    to_id = {value: known[name] for value, name in zip(values, names, strict=True)}
    return Labels(list(known), to_id)


def make_examples(split, tokenizer, length, labels, data_args, args):
    """Turns rows into tokens and, unless ``labels`` is ``None``, labels."""
    candidates = [("sentence1", "sentence2"), ("text",), ("sentence",)]
    columns = common.choose_text_columns(split, data_args.text_column_names, candidates, "--text_column_names")
    if len(columns) > 2:
        raise ValueError(f"--text_column_names: {quoted(columns)} are {len(columns)} columns; give one or two")
    column = data_args.label_column_name
    if labels is not None and labels.to_id:
        unknown = sorted(set(split.unique(column)) - set(labels.to_id), key=str)
        if unknown:
            raise ValueError(
                f"the labels {quoted(unknown)} in column '{column}' are not among those trained on, "
                f"{quoted(labels.to_id)}; remove those rows, or train on such rows as well"
            )

    def tokenize(rows):
        tokens = tokenizer(*(rows[name] for name in columns), truncation=True, max_length=length)
        if labels is not None:
            tokens["labels"] = [labels.to_id[v] if labels.to_id else float(v) for v in rows[column]]
        return tokens

    # Tokenized by one process per machine; the others take it from the cache.
    with args.main_process_first(desc="tokenizing"):
        return split.map(
            tokenize,
            batched=True,
            num_proc=data_args.preprocessing_num_workers,
            remove_columns=split.column_names,
            desc="Tokenizing",
        )


def first(predictions):
    """The scores of a model that gives more than scores."""
    return predictions[0] if isinstance(predictions, tuple) else predictions


def accuracy(outcome):
    """Part of the examples whose label was found."""
    return {"accuracy": float((np.argmax(first(outcome.predictions), axis=-1) == outcome.label_ids).mean())}


def mean_squared_error(outcome):
    """Mean of the squared differences between scores and labels."""
    return {"mse": float(((np.reshape(first(outcome.predictions), -1) - outcome.label_ids) ** 2).mean())}


def write_predictions(path, predictions):
    """Writes one row per example, in the order of the data."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["index", "prediction"])
        writer.writerows(enumerate(predictions))
    common.logger.info(f"predictions are in {path}")


def quoted(values):
    """Names in a message; a long list is cut short."""
    values = [f"'{value}'" for value in values]
    return ", ".join(values[:10]) + (f" and {len(values) - 10} more" if len(values) > 10 else "")


if __name__ == "__main__":
    common.run(main)
