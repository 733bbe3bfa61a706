"""Several models that are held together."""

import torch

from hf_patrickstar.runtime.together import Together, roots_of


def test_a_model_is_its_own_root():
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    assert roots_of(model) == [model]


def test_models_that_are_held_together_are_the_roots():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1, bias=False)
    together = Together([first, second])
    assert roots_of(together) == [first, second]
    assert [name for name, _ in together.named_parameters()] == ["0.weight", "0.bias", "1.weight"]
