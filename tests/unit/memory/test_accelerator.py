"""What is asked of an accelerator beside its streams, over modules that are made up."""

import types

import pytest
import torch

from hf_patrickstar.memory.accelerator import device_name

DEVICE = torch.device("xpu", 1)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (types.SimpleNamespace(get_device_name=lambda device: f"Fake {device.index}"), "Fake 1"),
        (types.SimpleNamespace(), "xpu"),
    ],
)
def test_an_accelerator_has_the_name_that_its_driver_knows(module, name, monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert device_name(DEVICE) == name
