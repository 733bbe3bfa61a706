import torch

from hf_patrickstar.layout.specs import ModuleSpec, collect_specs


def test_a_module_that_has_two_names():
    model = torch.nn.Module()
    model.first = torch.nn.Linear(2, 2, bias=False)
    model.second = model.first
    assert set(model.state_dict()) == {"first.weight", "second.weight"}
    tensors, modules, _ = collect_specs(model)
    assert [(spec.name, spec.owners) for spec in tensors] == [("first.weight", (1, 1))]
    assert [module.name for module in modules] == ["first"]
    assert tensors[0].aliases == ("second.weight",)


def test_a_recomputed_module_needs_all_that_is_inside_it():
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    )
    _, modules, _ = collect_specs(model, lambda module: module is model[1])
    assert modules == [
        ModuleSpec("0", "Linear", (0, 1)),
        ModuleSpec("1.0", "Linear", (2, 3)),
        ModuleSpec("1.1", "Linear", (4, 5)),
        ModuleSpec("1", "Sequential", (2, 3, 4, 5)),
    ]
