"""What the fine-tuning recipes share: options, data with readable errors, and a summary of the engine.

The recipes are run as ``python recipes/finetune_clm.py``, so this module is found next to them.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import transformers
from transformers import AutoConfig, AutoTokenizer, HfArgumentParser, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_patrickstar import PatrickStarError, deferred_weights
from hf_patrickstar.units import format_nbytes

# One for all recipes, so that their own notes can be shown without those of every library.
logger = logging.getLogger("recipes")

_BUILDERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}


@dataclasses.dataclass
class ModelArguments:
    """Which checkpoint is fine-tuned."""

    model_name_or_path: str | None = dataclasses.field(
        default=None, metadata={"help": "Checkpoint to start from: a hub id, or a directory."}
    )
    tokenizer_name: str | None = dataclasses.field(
        default=None, metadata={"help": "Hub id or directory of the tokenizer. Default: the model's."}
    )
    model_revision: str = dataclasses.field(
        default="main", metadata={"help": "Branch, tag or commit of the checkpoint on the hub."}
    )
    dtype: str = dataclasses.field(
        default="auto",
        metadata={
            "help": "Type to load the weights in; auto is the checkpoint's own.",
            "choices": ["auto", "float32", "bfloat16", "float16"],
        },
    )


@dataclasses.dataclass
class DataArguments:
    """Which data is used, and how much of it."""

    dataset_name: str | None = dataclasses.field(
        default=None, metadata={"help": "Data set: a hub id, or a directory with data files."}
    )
    dataset_config_name: str | None = dataclasses.field(
        default=None, metadata={"help": "Configuration (subset) of the data set."}
    )
    train_file: str | None = dataclasses.field(
        default=None, metadata={"help": "Training data: a txt, json, jsonl, csv or parquet file."}
    )
    validation_file: str | None = dataclasses.field(
        default=None, metadata={"help": "Validation data: a txt, json, jsonl, csv or parquet file."}
    )
    validation_split_percentage: float = dataclasses.field(
        default=5, metadata={"help": "Part of the train split that validates when there is no validation split."}
    )
    max_train_samples: int | None = dataclasses.field(
        default=None, metadata={"help": "Train on this many examples at most."}
    )
    max_eval_samples: int | None = dataclasses.field(
        default=None, metadata={"help": "Evaluate on this many examples at most."}
    )
    preprocessing_num_workers: int | None = dataclasses.field(
        default=None, metadata={"help": "Processes that tokenize."}
    )


# Running


def run(main: Callable[[], Any]) -> None:
    """Runs a recipe from the command line: what it or the engine refuses ends in a sentence, without a traceback.

    Args:
        main: The recipe.

    Raises:
        SystemExit: With status 1 after such an error. Any other error is a mistake of a program, with its traceback.
    """
    try:
        main()
    except Exception as error:
        if not is_expected(error):
            raise
        name, rank = os.path.basename(sys.argv[0]), os.environ.get("RANK", "0")
        who = name if os.environ.get("WORLD_SIZE", "1") == "1" else f"{name}, rank {rank}"
        print(f"{who}: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def is_expected(error: BaseException) -> bool:
    """Whether an error is one that the engine raises on purpose, or that is about the recipe's input.

    That is an error of the recipe itself, or one of the hub about a data set or a model that it does not have.

    Args:
        error: What was caught.
    """
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, (PatrickStarError, DatasetNotFoundError, HfHubHTTPError)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    place = os.path.dirname(os.path.abspath(frames[-1].filename)) if frames else ""
    if place == os.path.dirname(os.path.abspath(__file__)):
        return isinstance(error, (ValueError, FileNotFoundError))
    is_about_a_model = any(part in str(error) for part in ("is not a local folder", "does not appear to have a file"))
    return isinstance(error, OSError) and is_about_a_model


# Options


def parse_arguments(classes: Sequence[type], argv: list[str] | None) -> tuple[Any, ...]:
    """Reads the options of a recipe.

    Args:
        classes: Dataclasses that declare the options.
        argv: The words after the name of the script, or ``None`` for those of the command line. One word that ends in
            ``.json`` is a file with the options as a JSON object.

    Returns:
        One object per class.

    Raises:
        FileNotFoundError: If the JSON file is missing.
        ValueError: If an option is unknown.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = HfArgumentParser(classes)
    if len(argv) == 1 and argv[0].endswith(".json"):
        if not os.path.isfile(argv[0]):
            raise FileNotFoundError(f"there is no file of options '{argv[0]}'; give the path of a JSON file")
        return parser.parse_json_file(argv[0])
    return parser.parse_args_into_dataclasses(argv, look_for_args_file=False)


def check_arguments(model_args: ModelArguments, data_args: DataArguments, args: TrainingArguments) -> None:
    """Refuses options that cannot work, before anything is downloaded or loaded.

    Args:
        model_args: Options of the model.
        data_args: Options of the data.
        args: Options of the Trainer.

    Raises:
        FileNotFoundError: If a directory or file that was named does not exist.
        ValueError: If options are missing, contradict each other or have impossible values.
    """
    if not (args.do_train or args.do_eval or args.do_predict):
        raise ValueError("there is nothing to do; add --do_train, --do_eval or both")
    if not model_args.model_name_or_path:
        raise ValueError("--model_name_or_path is missing; give the hub id or the directory of a checkpoint")
    _check_checkpoint("--model_name_or_path", model_args.model_name_or_path, needed="config.json")
    if model_args.tokenizer_name:
        _check_checkpoint("--tokenizer_name", model_args.tokenizer_name, needed=None)

    files = _files(data_args)
    if data_args.dataset_name and files:
        options = ", ".join(f"--{split}_file" for split in files)
        raise ValueError(f"--dataset_name and {options} are both given; keep one of them")
    if not data_args.dataset_name and not files:
        raise ValueError("there is no data; give --dataset_name, or --train_file and --validation_file")
    name = data_args.dataset_name
    if name and _looks_like_path(name) and not os.path.isdir(name):
        raise FileNotFoundError(
            f"--dataset_name: there is no directory '{name}'; give a hub id or a directory that exists, or a single "
            "file with --train_file"
        )
    if args.do_train and files and "train" not in files:
        raise ValueError(f"--do_train needs --train_file; found only --{', --'.join(f'{name}_file' for name in files)}")
    for split, path in files.items():
        _check_file(f"--{split}_file", path)

    for name, value in vars(data_args).items():
        if name.startswith("max_") and value is not None and value < 1:
            raise ValueError(f"--{name} is {value}; give a number of at least 1, or leave it out")
    if not 0 <= data_args.validation_split_percentage < 100:
        raise ValueError(
            f"--validation_split_percentage is {data_args.validation_split_percentage}; give at least 0 and below 100"
        )


def _check_checkpoint(option: str, name: str, needed: str | None) -> None:
    """A directory has to be a checkpoint; anything that may be a hub id is left to the hub's client to resolve."""
    if os.path.isdir(name):
        if needed is not None and not os.path.isfile(os.path.join(name, needed)):
            found = ", ".join(sorted(os.listdir(name))[:10]) or "nothing"
            raise FileNotFoundError(
                f"{option}: directory '{name}' has no {needed} (it holds: {found}); give a directory that "
                "save_pretrained wrote"
            )
    elif os.path.exists(name):
        raise ValueError(f"{option}: '{name}' is a file; give the directory of the checkpoint, or a hub id")
    elif _looks_like_path(name):
        raise FileNotFoundError(f"{option}: there is no directory '{name}'; give one that exists, or a hub id")


def builder_of(path: str) -> str:
    """The name under which ``datasets`` reads files of this kind.

    Args:
        path: A file that ``check_arguments`` has accepted.
    """
    return _BUILDERS[os.path.splitext(path)[1].lower()]


def _check_file(option: str, path: str) -> None:
    extension = os.path.splitext(path)[1].lower()
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{option}: there is no file '{path}'; give the path of a file that exists")
    if extension not in _BUILDERS:
        known = ", ".join(sorted(_BUILDERS))
        raise ValueError(f"{option}: '{path}' has the unknown extension '{extension}'; convert it to one of {known}")
    if os.path.getsize(path) == 0:
        raise ValueError(f"{option}: '{path}' is empty; give a file with data")


def _looks_like_path(name: str) -> bool:
    """Whether it cannot be a hub id, which is ``name`` or ``owner/name``."""
    return name.startswith((".", "~")) or os.path.isabs(name) or name.count("/") > 1


def _files(data_args: DataArguments) -> dict[str, str]:
    named = {split: getattr(data_args, f"{split}_file", None) for split in ("train", "validation", "test")}
    return {split: path for split, path in named.items() if path}


def set_up_logging(args: TrainingArguments) -> None:
    """Shows what the recipe does, on the main process; transformers is as loud as ``--log_level`` says.

    Args:
        args: Options of the Trainer.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logger.setLevel(logging.INFO if args.should_log else logging.WARNING)
    transformers.utils.logging.set_verbosity(args.get_process_log_level())


def find_checkpoint(args: TrainingArguments) -> str | None:
    """Decides where training starts.

    Args:
        args: Options of the Trainer. ``--resume_from_checkpoint`` is a directory, ``true`` (the last checkpoint in
            ``--output_dir``) or ``false`` (none); without it the last checkpoint in ``--output_dir``, if any, is used,
            so a job that was interrupted goes on when it is started again.

    Returns:
        The checkpoint to resume from, or ``None`` to start with the pretrained weights.

    Raises:
        FileNotFoundError: If a checkpoint was asked for that does not exist.
    """
    wanted = args.resume_from_checkpoint
    text = "" if wanted is None else str(wanted).lower()
    if text == "false":
        return None
    if text not in ("", "true"):
        if not os.path.isdir(wanted):
            raise FileNotFoundError(
                f"--resume_from_checkpoint: there is no directory '{wanted}'; give a checkpoint-N directory, or 'true' "
                "for the last one in --output_dir"
            )
        return wanted
    last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    if last is None and text == "true":
        raise FileNotFoundError(
            f"--resume_from_checkpoint: '{args.output_dir}' has no checkpoint-N directory; leave the option out to "
            "start from the pretrained weights"
        )
    if last is not None:
        logger.warning(f"resuming from {last}; to start afresh pass --resume_from_checkpoint false")
    return last


# Data


def load_splits(
    data_args: DataArguments, args: TrainingArguments, keep_linebreaks: bool = False, shuffle_split: bool = False
) -> dict[str, Any]:
    """Loads the splits that the run needs.

    Args:
        data_args: Options of the data.
        args: Options of the Trainer; they say which splits are needed.
        keep_linebreaks: Whether lines of ``txt`` files keep their ends, which matters to a model of running text.
        shuffle_split: Whether a validation split that has to be cut from the train split is drawn at random; if not,
            it is the end of it, so that neighbouring rows stay together.

    Returns:
        Data sets by name: ``train`` (with ``--do_train``), ``validation`` (``--do_eval``), ``test`` (``--do_predict``).

    Raises:
        ValueError: If a split is missing, empty or cannot be read.
    """
    splits, origin = _load(data_args, keep_linebreaks)
    needed = {"train": args.do_train, "validation": args.do_eval, "test": args.do_predict}
    if args.do_eval and "validation" not in splits and "train" in splits:
        splits = _cut_validation(splits, data_args.validation_split_percentage, origin, args.seed, shuffle_split)
    for name, option in (("train", "--do_train"), ("validation", "--do_eval"), ("test", "--do_predict")):
        if not needed[name]:
            continue
        if name not in splits:
            raise ValueError(
                f"{origin} has no '{name}' split, which {option} needs (it has: {', '.join(splits)}); name another "
                f"data set or give --{name}_file"
            )
        if len(splits[name]) == 0:
            raise ValueError(f"split '{name}' of {origin} has no rows; give data")
    return {name: split for name, split in splits.items() if needed.get(name)}


def _load(data_args: DataArguments, keep_linebreaks: bool) -> tuple[dict[str, Any], str]:
    """All splits, and what to call their origin in messages."""
    # A heavy import that only training needs; --help and the checks above work without it.
    import datasets

    try:
        if data_args.dataset_name:
            loaded = datasets.load_dataset(data_args.dataset_name, data_args.dataset_config_name)
            return dict(loaded), f"data set '{data_args.dataset_name}'"
        files = _files(data_args)
        splits = {}
        for split, path in files.items():
            # One at a time: the files may be of different types.
            builder = builder_of(path)
            options = {"keep_linebreaks": keep_linebreaks} if builder == "text" else {}
            splits[split] = datasets.load_dataset(builder, data_files={split: path}, split=split, **options)
        return splits, " and ".join(f"'{path}'" for path in files.values())
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        if data_args.dataset_name:
            name, hint = data_args.dataset_name, "its configuration (--dataset_config_name)"
        else:
            name, hint = path, "the file"
        raise ValueError(f"'{name}' cannot be read: {reason}; check that {hint} can be parsed and has rows") from error


def _cut_validation(splits: dict[str, Any], percentage: float, origin: str, seed: int, shuffle: bool) -> dict[str, Any]:
    train = splits["train"]
    count = max(1, round(len(train) * percentage / 100)) if percentage else 0
    if count == 0 or count >= len(train):
        raise ValueError(
            f"{origin} has no validation split, and {percentage} % of its {len(train)} training rows cannot be split "
            "off; give --validation_file, change --validation_split_percentage, or leave --do_eval out"
        )
    logger.info(f"{origin} has no validation split; {count} of its {len(train)} training rows validate")
    parts = train.train_test_split(test_size=count, shuffle=shuffle, seed=seed if shuffle else None)
    return {**splits, "train": parts["train"], "validation": parts["test"]}


def choose_text_columns(
    split: Any, wanted: str | None, candidates: Sequence[tuple[str, ...]], option: str
) -> list[str]:
    """Finds the columns that hold text.

    Args:
        split: A data set.
        wanted: Names given by the user, separated by commas, or ``None``.
        candidates: Groups of names to look for if the user gave none, best first.
        option: The option with which the user names columns; it appears in messages.

    Returns:
        Names of columns with text.

    Raises:
        ValueError: If a column is missing, holds something else, or has rows without a value.
    """
    if wanted:
        names = [name.strip() for name in wanted.split(",")]
    else:
        groups = [group for group in candidates if set(group) <= set(split.column_names)]
        if not groups:
            tried = ", ".join(sorted({f"'{name}'" for group in candidates for name in group}))
            raise ValueError(
                f"no text column was found: the data has none of {tried}; its columns are {_columns(split)}; name one "
                f"with {option}"
            )
        names = list(groups[0])
    for name in names:
        check_column(split, name, option)
        if str(getattr(split.features[name], "dtype", "")) not in ("string", "large_string"):
            raise ValueError(
                f"column '{name}' holds {_kind(split, name)}, not text; name another of {_columns(split)} with {option}"
            )
    return names


def check_name_of_column(split: Any, name: str, option: str) -> None:
    """Makes sure that a column exists; it reads nothing.

    Args:
        split: A data set.
        name: Name of the column.
        option: The option with which the user names it; it appears in messages.

    Raises:
        ValueError: If it is missing.
    """
    if name not in split.column_names:
        raise ValueError(f"the data has no column '{name}'; its columns are {_columns(split)}; name one with {option}")


def check_column(split: Any, name: str, option: str) -> None:
    """Makes sure that a column exists and has a value in every row.

    Args:
        split: A data set.
        name: Name of the column.
        option: The option with which the user names it; it appears in messages.

    Raises:
        ValueError: If it is missing or has rows without a value.
    """
    check_name_of_column(split, name, option)
    missing = split.select_columns([name]).with_format("arrow")[:].column(name).null_count
    if missing:
        raise ValueError(f"{missing} of {len(split)} rows have no value in column '{name}'; remove or complete them")


def _columns(split: Any) -> str:
    return ", ".join(f"'{name}'" for name in split.column_names)


def _kind(split: Any, name: str) -> str:
    feature = split.features[name]
    return str(getattr(feature, "dtype", None) or type(feature).__name__)


def take(split: Any, count: int | None) -> Any:
    """The first ``count`` rows of a data set, or all.

    Args:
        split: A data set.
        count: How many rows at most, or ``None``.

    Returns:
        The data set.
    """
    return split if count is None or count >= len(split) else split.select(range(count))


def group_into_blocks(split: Any, size: int, option: str, num_proc: int | None = None) -> Any:
    """Concatenates tokenized rows and cuts them into blocks of equal length, so that nothing is padding.

    What is left over at the end of every 1000 rows, less than a block, is dropped.

    Args:
        split: A data set of lists of tokens.
        size: Tokens per block.
        option: The option that sets ``size``; it appears in the message.
        num_proc: Processes that work.

    Returns:
        A data set with one block per row.

    Raises:
        ValueError: If there is not enough text for one block.
    """

    def group(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        flat = {name: [token for row in lists for token in row] for name, lists in rows.items()}
        end = len(flat["input_ids"]) // size * size
        return {name: [tokens[i : i + size] for i in range(0, end, size)] for name, tokens in flat.items()}

    blocks = split.map(group, batched=True, num_proc=num_proc, desc=f"Grouping into blocks of {size}")
    if len(blocks) == 0:
        total = sum(len(row) for row in split["input_ids"])
        raise ValueError(
            f"no block of {size} tokens could be made: the text has {total} tokens in {len(split)} rows; lower "
            f"{option} or give more text"
        )
    return blocks


# Model


def load_config_and_tokenizer(model_args: ModelArguments, padding: bool) -> tuple[Any, PreTrainedTokenizerBase]:
    """Loads the configuration of the checkpoint and the tokenizer.

    Args:
        model_args: Options of the model.
        padding: Whether the tokenizer must be able to pad.

    Returns:
        The configuration and the tokenizer; one without a padding token pads with its end-of-text token.

    Raises:
        ValueError: If it has to pad and has neither token.
    """
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    if model_args.tokenizer_name:
        tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name)
    else:
        tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if padding and tokenizer.pad_token is None:
        name = model_args.tokenizer_name or model_args.model_name_or_path
        raise ValueError(f"tokenizer '{name}' has no padding and no end-of-text token; set one and save it again")
    return config, tokenizer


def choose_length(
    wanted: int | None, default: int, config: Any, tokenizer: PreTrainedTokenizerBase, option: str
) -> int:
    """Chooses how many tokens a sequence has.

    Args:
        wanted: What the user asked for, or ``None``.
        default: What is used otherwise, if the model can take that much.
        config: Configuration of the model.
        tokenizer: The tokenizer.
        option: The option that sets ``wanted``; it appears in messages.

    Returns:
        Tokens per sequence.

    Raises:
        ValueError: If it is more than the model has positions for, or no length at all.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    limit = min(tokenizer.model_max_length, positions) if positions > 0 else tokenizer.model_max_length
    if wanted is None:
        return min(default, limit)
    if wanted < 2:
        raise ValueError(f"{option} is {wanted}; give at least 2 tokens")
    if wanted > limit:
        raise ValueError(f"{option} is {wanted}, and the model takes at most {limit} tokens; lower {option}")
    return wanted


def reading_weights(
    args: TrainingArguments, config: Any, tokenizer: PreTrainedTokenizerBase
) -> contextlib.AbstractContextManager[None]:
    """Lets weights be read straight into chunks; a vocabulary that has to grow needs them in the model.

    Args:
        args: The training arguments.
        config: Configuration of the model.
        tokenizer: The tokenizer.
    """
    fits = len(tokenizer) <= config.get_text_config().vocab_size
    return deferred_weights(enabled=getattr(args, "patrickstar", False) and fits)


def fit_embeddings(model: transformers.PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives the model an embedding for every token; a smaller vocabulary than the model's is fine.

    Args:
        model: Changed in place if its vocabulary is too small.
        tokenizer: The tokenizer.
    """
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))


# After training


def train_and_evaluate(trainer: Any, checkpoint: str | None, perplexity: bool = False) -> dict[str, float]:
    """Does what ``--do_train`` and ``--do_eval`` ask for; logs and saves the metrics and the model.

    Args:
        trainer: The Trainer, with its data sets.
        checkpoint: The checkpoint directory to resume from, if any.
        perplexity: Add the exponential of the evaluation loss to the metrics.

    Returns:
        The metrics of both.
    """
    results: dict[str, float] = {}
    if trainer.args.do_train:
        metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
        metrics["train_samples"] = len(trainer.train_dataset)
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
        results.update(metrics)
    if trainer.args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(trainer.eval_dataset)
        if perplexity:
            try:
                metrics["perplexity"] = math.exp(metrics["eval_loss"])
            except OverflowError:
                metrics["perplexity"] = math.inf
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
        results.update(metrics)
    return results


def print_patrickstar_stats(trainer: Any) -> None:
    """Prints how much memory the engine used and how much it moved, and writes it to ``patrickstar_stats.json``.

    Args:
        trainer: A ``PatrickStarTrainer`` that trained or evaluated with ``--patrickstar``.
    """
    stats = trainer.patrickstar_stats()
    if trainer.is_world_process_zero():
        with open(os.path.join(trainer.args.output_dir, "patrickstar_stats.json"), "w", encoding="utf-8") as file:
            json.dump(stats, file, indent=2)
    rows = [("model data", format_nbytes(stats["model_data_nbytes"]))]
    is_capped = stats["chunk_budget_nbytes"] < stats["device_budget_nbytes"]
    for tier, setting in (("device", "chunk_budget" if is_capped else "device_budget"), ("host", "host_budget")):
        peak, budget = (format_nbytes(stats[f"{name}_nbytes"]) for name in (f"{tier}_peak", setting))
        rows.append((f"{tier} peak", f"{peak} of {budget} ({setting})"))
    rows.append(("host to device", f"{format_nbytes(stats['host_to_device_nbytes'])}, {stats['chunk_loads']} loads"))
    rows.append(
        ("device to host", f"{format_nbytes(stats['device_to_host_nbytes'])}, {stats['chunk_evictions']} evictions")
    )
    rows.append(("chunks", f"{stats['num_chunks']} of {stats['chunk_numel']:,} elements"))
    rows.append(("chunks filled", f"{stats['chunk_utilisation']:.1%}"))
    rows.append(("steps", f"{stats['steps']}, {stats['skipped_steps']} skipped"))
    print("***** patrickstar *****")
    for name, value in rows:
        print(f"  {name:<15} = {value}")


# For TRL's trainers, which prepare their data themselves


@dataclasses.dataclass
class ScriptArguments:
    """The model and the data of a recipe for TRL."""

    model_name_or_path: str = dataclasses.field(
        metadata={"help": "Checkpoint to start from: a hub id, or a directory."}
    )
    dataset_name: str = dataclasses.field(metadata={"help": "Data set: a hub id, or a directory or file with data."})
    dataset_config_name: str | None = dataclasses.field(default=None, metadata={"help": "Subset of the data set."})
    dataset_train_split: str = dataclasses.field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = dataclasses.field(
        default="test", metadata={"help": "Split to evaluate on, with --do_eval or --eval_strategy."}
    )


def load_for_trl(script_args: ScriptArguments, kinds: Sequence[tuple[str, ...]], evaluates: bool) -> dict[str, Any]:
    """Loads the splits that the run needs, with all their columns.

    Args:
        script_args: Which data set.
        kinds: Groups of columns; the data must have all columns of one group.
        evaluates: Whether a split to evaluate on is needed.

    Returns:
        Data sets by name: ``train``, and ``validation`` if the run evaluates.

    Raises:
        FileNotFoundError: If a directory or file that was named does not exist.
        ValueError: If the data cannot be read, or lack a split or columns.
    """
    name = script_args.dataset_name
    found = _read_for_trl(script_args)
    wanted = {"train": ("--dataset_train_split", script_args.dataset_train_split)}
    if evaluates:
        wanted["validation"] = ("--dataset_test_split", script_args.dataset_test_split)
    for option, split in wanted.values():
        if split not in found:
            raise ValueError(
                f"data set '{name}' has no split '{split}' (it has: {', '.join(found)}); name one with {option}"
            )
        columns = found[split].column_names
        if not any(set(kind) <= set(columns) for kind in kinds):
            groups = "; or ".join(" and ".join(f"'{column}'" for column in kind) for kind in kinds)
            raise ValueError(
                f"split '{split}' of data set '{name}' has the columns {_columns(found[split])}; this trainer needs "
                f"{groups}; rename columns of the data"
            )
    return {name: found[split] for name, (_, split) in wanted.items()}


def _read_for_trl(script_args: ScriptArguments) -> Any:
    import datasets

    name = script_args.dataset_name
    _check_checkpoint("--model_name_or_path", script_args.model_name_or_path, needed="config.json")
    if _looks_like_path(name) and not os.path.exists(name):
        raise FileNotFoundError(f"--dataset_name: there is no '{name}'; give a hub id, or a directory or file")
    try:
        if not os.path.isfile(name):
            return datasets.load_dataset(name, script_args.dataset_config_name)
        _check_file("--dataset_name", name)
        return datasets.load_dataset(builder_of(name), data_files={"train": name})
    except datasets.exceptions.DatasetGenerationError as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"'{name}' cannot be read: {reason}; check that it can be parsed and has rows") from error
