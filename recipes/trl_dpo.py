r"""Preference optimization with TRL's DPOTrainer, in chunks.

::

    python recipes/trl_dpo.py --model_name_or_path MODEL --dataset_name DATASET --output_dir out --patrickstar

``DATASET`` is a hub id, or a directory or file that ``datasets.load_dataset`` reads, with the columns that TRL expects
(``chosen`` and ``rejected``, with or without ``prompt``). Every option of ``DPOConfig`` can be given. Without
``--patrickstar`` it is the stock trainer. Scripts of TRL itself need no recipe: ``hf-patrickstar run -m
trl.scripts.dpo ... --patrickstar``.
"""

import common

from hf_patrickstar import deferred_weights
from hf_patrickstar.integrations.trl import PatrickStarDPOConfig as DPOConfig
from hf_patrickstar.integrations.trl import PatrickStarDPOTrainer as Trainer


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Runs the recipe.

    Args:
        argv: Options; those of the command line by default.

    Returns:
        The metrics of training and, with ``--do_eval``, of evaluation.

    Raises:
        FileNotFoundError: If a file or directory that was named does not exist.
        ValueError: If the options or the data cannot work.
    """
    script_args, args = common.parse_arguments((common.ScriptArguments, DPOConfig), argv)
    args.do_train = True
    evaluates = args.do_eval or args.eval_strategy != "no"
    kinds = [("chosen", "rejected")]
    splits = common.load_for_trl(script_args, kinds, evaluates)
    checkpoint = common.find_checkpoint(args)
    with deferred_weights(enabled=args.patrickstar):
        trainer = Trainer(
            model=script_args.model_name_or_path,
            args=args,
            train_dataset=splits["train"],
            eval_dataset=splits.get("validation"),
        )
    results = common.train_and_evaluate(trainer, checkpoint)
    if args.patrickstar:
        common.print_patrickstar_stats(trainer)
    return results


if __name__ == "__main__":
    common.run(main)
