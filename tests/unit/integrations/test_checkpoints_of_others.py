"""Checkpoints that DeepSpeed or FSDP has written, whose optimizer states cannot be read."""

import pytest
from support.trainers import make_trainer

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.integrations.trainer_checkpoints import check_origin


@pytest.mark.parametrize(
    ("name", "sign"), [("DeepSpeed", "global_step5"), ("FSDP", "pytorch_model_fsdp_0"), ("FSDP", "optimizer_0")]
)
def test_checkpoints_of_others_are_refused_or_warned_of_in_a_sentence(tmp_path, name, sign):
    assert check_origin(tmp_path) is None
    (tmp_path / sign).mkdir()
    with pytest.raises(CheckpointError, match=f"checkpoint of {name}, .*--model_name_or_path"):
        check_origin(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert f"checkpoint of {name}: its weights are loaded, its optimizer states are not" in check_origin(tmp_path)


def test_resuming_from_a_checkpoint_of_deepspeed_says_what_to_do(tmp_path):
    (tmp_path / "checkpoint-5" / "global_step5").mkdir(parents=True)
    trainer = make_trainer(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path, patrickstar=True)
    with pytest.raises(CheckpointError, match="zero_to_fp32"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
