r"""Preference optimization with TRL's DPOTrainer, in chunks.

::

    python recipes/trl_dpo.py --model_name_or_path MODEL --dataset_name DATASET --output_dir out --patrickstar

``DATASET`` is a hub id, or a directory or file that ``datasets.load_dataset`` reads, with the columns that TRL expects
(``chosen`` and ``rejected``, with or without ``prompt``). Every option of ``DPOConfig`` can be given. Without
``--patrickstar`` it is the stock trainer. Scripts of TRL itself need no recipe: ``hf-patrickstar run -m
trl.scripts.dpo ... --patrickstar``.
"""

import common
from common import ScriptArguments, load_for_trl

from hf_patrickstar import deferred_weights
from hf_patrickstar.integrations.trl import PatrickStarDPOConfig, PatrickStarDPOTrainer


def main(argv: list[str] | None = None) -> PatrickStarDPOTrainer:
    """Runs the recipe.

    Args:
        argv: Options; those of the command line by default.

    Returns:
        The trainer, when it has trained and saved.

    Raises:
        ValueError: If the options or the data cannot work.
    """
    script_args, args = common.parse_arguments((ScriptArguments, PatrickStarDPOConfig), argv)
    dataset = load_for_trl(script_args)
    with deferred_weights(enabled=args.patrickstar):
        trainer = PatrickStarDPOTrainer(
            model=script_args.model_name_or_path, args=args, train_dataset=dataset[script_args.dataset_train_split]
        )
        trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    common.run(main)
