"""The engine of a model, by a function that type checkers know."""

import pytest
from support.models import make_model

from hf_patrickstar import EngineError, get_engine, initialize_engine


def test_a_model_that_was_prepared():
    model, optimizer = initialize_engine(lambda: make_model("gpt2"), {"device_budget": "1GiB"}, device="cpu")
    engine = get_engine(model)
    assert engine is model.patrickstar_engine
    assert engine.optimizer is optimizer
    engine.detach()
    with pytest.raises(EngineError, match=r"GPT2LMHeadModel has no engine: .* Prepare it by initialize_engine"):
        get_engine(model)
