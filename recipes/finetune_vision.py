r"""Fine-tunes a vision transformer to classify images.

From the hub, with the columns ``image`` and ``label``::

    python recipes/finetune_vision.py --model_name_or_path MODEL --dataset_name DATASET --output_dir out \
        --do_train --do_eval --patrickstar

From a directory with one folder of images for each class::

    python recipes/finetune_vision.py --model_name_or_path ./my-model --dataset_name ./images --output_dir out \
        --do_train --do_eval --patrickstar

Without ``--patrickstar`` it is the stock Trainer.
"""

import dataclasses

import common
import numpy as np
import torch
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, set_seed

from hf_patrickstar import PatrickStarTrainer as Trainer
from hf_patrickstar import PatrickStarTrainingArguments as TrainingArguments
from hf_patrickstar import deferred_weights


@dataclasses.dataclass
class DataArguments(common.DataArguments):
    """The data, and which columns matter."""

    image_column_name: str = dataclasses.field(default="image", metadata={"help": "Column with the images."})
    label_column_name: str = dataclasses.field(default="label", metadata={"help": "Column with the classes."})


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
    args.remove_unused_columns = False  # images are made into tensors batch by batch
    common.set_up_logging(args)
    checkpoint = common.find_checkpoint(args) if args.do_train else None
    set_seed(args.seed)

    splits = common.load_splits(data_args, args, shuffle_split=True)
    names = class_names(next(iter(splits.values())), data_args)
    config = AutoConfig.from_pretrained(
        model_args.model_name_or_path, revision=model_args.model_revision, num_labels=len(names)
    )
    config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    processor = AutoImageProcessor.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    with deferred_weights(enabled=args.patrickstar):
        model = AutoModelForImageClassification.from_pretrained(
            model_args.model_name_or_path,
            config=config,
            revision=model_args.model_revision,
            dtype=model_args.dtype,
            ignore_mismatched_sizes=True,  # the head is new where there are other classes
        )
    limits = {"train": data_args.max_train_samples, "validation": data_args.max_eval_samples}
    splits = {name: common.take(split, limits[name]) for name, split in splits.items()}

    def collate(rows):
        images = [row[data_args.image_column_name].convert("RGB") for row in rows]
        labels = torch.tensor([row[data_args.label_column_name] for row in rows])
        return {**processor(images, return_tensors="pt"), "labels": labels}

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get("validation"),
        processing_class=processor,
        data_collator=collate,
        compute_metrics=lambda found: {
            "accuracy": float((np.argmax(found.predictions, axis=-1) == found.label_ids).mean())
        },
    )
    results = common.train_and_evaluate(trainer, checkpoint)
    if args.patrickstar:
        common.print_patrickstar_stats(trainer)
    return results


def class_names(split, data_args):
    """The names of the classes, in the order of their numbers; makes sure that there are images."""
    import datasets

    # Looks at the name alone: images are read when they are needed.
    common.check_name_of_column(split, data_args.image_column_name, "--image_column_name")
    if not isinstance(split.features[data_args.image_column_name], datasets.Image):
        raise ValueError(
            f"column '{data_args.image_column_name}' does not hold images; name another with --image_column_name, or "
            "give a directory with a folder of images for each class"
        )
    common.check_column(split, data_args.label_column_name, "--label_column_name")
    names = getattr(split.features[data_args.label_column_name], "names", None)
    if names is None:
        raise ValueError(
            f"column '{data_args.label_column_name}' does not hold classes; name another with --label_column_name, or "
            "give a directory with a folder of images for each class"
        )
    return names


if __name__ == "__main__":
    common.run(main)
