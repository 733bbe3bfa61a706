"""What is replaced in other libraries: all of it is there, is replaced for the length of a block, and comes back."""

import ast
import importlib
import importlib.metadata
import pathlib

import pytest
import safetensors
import safetensors.torch
from packaging.version import Version

import hf_patrickstar
from hf_patrickstar.checkpoint.patches import LOAD_STATE_DICT, SAFE_OPEN, SAVE_FILE, Patch, replaced

ALL = (*SAVE_FILE, *SAFE_OPEN, *LOAD_STATE_DICT)


def found(patches):
    return [getattr(importlib.import_module(patch.module), patch.name) for patch in patches]


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: f"{patch.module}.{patch.name}")
def test_the_library_has_it(patch):
    installed = importlib.metadata.version(patch.library)
    oldest, newest = patch.checked
    moved = f"{patch.library} {installed} has no {patch.module}.{patch.name} (it was there in {oldest} to {newest})"
    assert hasattr(importlib.import_module(patch.module), patch.name), f"{moved}: find what is called instead"
    release = Version(installed).release[:2]
    assert Version(oldest).release <= release <= Version(newest).release, f"{installed} is a version to check"


def test_names_are_of_the_function_that_is_meant():
    assert all(function is safetensors.torch.save_file for function in found(SAVE_FILE))
    assert all(function is safetensors.safe_open for function in found(SAFE_OPEN))


@pytest.mark.parametrize("module", sorted({patch.module for patch in ALL}))
def test_no_other_name_of_a_module_means_it(module):
    """A library that saves by two names would write deferred tensors by one of them."""
    meant = (safetensors.torch.save_file, safetensors.safe_open)
    names = {name for name, value in vars(importlib.import_module(module)).items() if value in meant}
    reading = {"safe_open"} if module in ("peft.peft_model", "safetensors.torch") else set()  # adapters are small
    assert names - reading == {patch.name for patch in ALL if patch.module == module} - {"load_state_dict"}


def test_replaced_inside_of_a_block_and_over_at_its_end():
    before, first, second = found(SAVE_FILE), object(), object()
    with replaced(SAVE_FILE, first):
        assert found(SAVE_FILE) == [first] * len(SAVE_FILE)
        with replaced(SAVE_FILE, second):
            assert found(SAVE_FILE) == [second] * len(SAVE_FILE)
        assert found(SAVE_FILE) == [first] * len(SAVE_FILE)
    assert found(SAVE_FILE) == before
    with pytest.raises(KeyError), replaced(SAVE_FILE, first):
        raise KeyError
    assert found(SAVE_FILE) == before


def test_what_is_not_there_is_passed_over():
    absent = Patch("hf_patrickstar.absent", "save_file", "absent", ("1.0", "1.0"))
    nameless = Patch("safetensors.torch", "absent", "safetensors", ("1.0", "1.0"))
    with replaced([absent, nameless], object()):
        assert not hasattr(safetensors.torch, "absent")


def test_nothing_else_in_checkpoint_sets_attributes_of_modules():
    """The list is complete: ``setattr`` stands in its file alone."""
    folder = pathlib.Path(hf_patrickstar.__file__).parent / "checkpoint"
    using = {
        path.name
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr"
    }
    assert using == {"patches.py"}
