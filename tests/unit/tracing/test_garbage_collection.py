"""How often Python looks for garbage while the command loads libraries and plans."""

import gc

from hf_patrickstar.cli import plan_run
from hf_patrickstar.cli.main import main
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.tracing.garbage_collection import frozen_objects, garbage_collection_off


def test_objects_of_libraries_are_set_aside_inside_alone_and_while_the_command_plans(monkeypatch):
    gc.unfreeze()
    with frozen_objects():
        with frozen_objects():
            pass
        assert gc.get_freeze_count() > 1000, "the outer block goes on"
    assert not gc.get_freeze_count()
    seen = []

    def arrange(options):
        seen.append((gc.get_freeze_count() > 1000, gc.isenabled()))
        raise ConfigError("seen")

    monkeypatch.setattr(plan_run, "_arrange", arrange)
    assert main(["plan", "gpt2:n_layer=2,n_embd=32,n_head=2", "--device-memory", "1GiB"]) == 2
    assert (seen, gc.get_freeze_count()) == ([(True, True)], 0)


def test_collections_that_are_off_stay_off():
    gc.disable()
    try:
        with garbage_collection_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
