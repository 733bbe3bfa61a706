"""States on the disk in two processes, each with files of its own: the bits of one process, and checkpoints."""

import pytest
import torch.distributed as dist
from support import inside
from support.disk import share_on_disk
from support.models import make_model
from support.together import (
    copy_state,
    differences,
    engaged,
    hf_loss,
    make_optimizer,
    on_one_rank,
    train_alone,
    train_together,
)


def reference(name, steps):
    """Weights and losses of plain torch with the batches of two ranks."""
    model = make_model(name)
    _, losses, _ = train_alone(model, hf_loss(name), 2, steps, optimizer=make_optimizer(model))
    return copy_state(model), losses


def train_with(rank, name, share, folder, settings):
    assert dist.get_world_size() == 2
    values, losses = on_one_rank(reference, name, 4)
    model = make_model(name)
    config = {"placement": "host", "chunk_budget": 400_000, "disk_path": str(folder), **settings}
    with share_on_disk(share), engaged(model, config) as engine:
        chunks = [chunk for chunk in inside.chunks(engine) if chunk.is_on_disk]
        assert chunks
        found, _ = train_together(engine, hf_loss(name), 4)
        assert found == losses[dist.get_rank() :: 2]
        assert differences(values, engine.model.state_dict()) == {}
        engine.save_checkpoint(folder / "checkpoint")
        more, _ = train_together(engine, hf_loss(name), 2, first=4)
        after = copy_state(engine.model)
        engine.load_checkpoint(folder / "checkpoint")
        assert differences(values, engine.model.state_dict()) == {}
        assert train_together(engine, hf_loss(name), 2, first=4)[0] == more
        assert differences(after, engine.model.state_dict()) == {}
        assert engine.counts.disk_written_nbytes > 0


@pytest.mark.parametrize(
    ("name", "share", "settings"),
    [("gpt2", 0.3, {}), ("gpt2", 1.0, {"optimizer_format": "torch"}), ("gpt2", 1.0, {"background_save": True})],
)
def test_the_bits_are_those_of_one_process(pair, tmp_path, name, share, settings):
    pair.run(train_with, name, share, tmp_path, settings)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
