import torch

from hf_patrickstar.layout.specs import ModuleSpec, TensorSpec, collect_specs


class Branching(torch.nn.Module):
    """Parameters of its own, in submodules, frozen, absent, of one number, and tied."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.register_parameter("absent", None)
        self.embed = torch.nn.Embedding(5, 3)
        self.layer = torch.nn.Linear(3, 4)
        self.norm = torch.nn.LayerNorm(4).requires_grad_(False)
        self.act = torch.nn.ReLU()
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_order_shapes_ties_and_frozen():
    model = Branching()
    tensors, modules, parameters = collect_specs(model)
    assert tensors == [
        TensorSpec(0, "scale", (), True, (), (0,)),
        TensorSpec(1, "embed.weight", (5, 3), True, ("head.weight",), (1, 5)),
        TensorSpec(2, "layer.weight", (4, 3), True, (), (2,)),
        TensorSpec(3, "layer.bias", (4,), True, (), (2,)),
        TensorSpec(4, "norm.weight", (4,), False, (), (3,)),
        TensorSpec(5, "norm.bias", (4,), False, (), (3,)),
    ]
    assert modules == [
        ModuleSpec("", "Branching", (0,)),
        ModuleSpec("embed", "Embedding", (0, 1)),
        ModuleSpec("layer", "Linear", (0, 2, 3)),
        ModuleSpec("norm", "LayerNorm", (0, 4, 5)),
        ModuleSpec("head", "Linear", (0, 1)),
    ]
    by_name = dict(model.named_parameters())
    assert all(parameters[spec.index] is by_name[spec.name] for spec in tensors)
    assert len(parameters) == 6


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
