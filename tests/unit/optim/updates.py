"""What tests of optimizers have in common: chunks with more lists and random numbers, and a kernel that is easy to
calculate by hand.
"""

import functools

import torch
from unit.runtime.parts import Parts

from hf_patrickstar.optim.kernel import Kernel
from hf_patrickstar.runtime.chunk import MASTER
from hf_patrickstar.runtime.gradient_place import GradientPlace
from hf_patrickstar.runtime.update import Update

ROOMY = 2**20


def make_parts(*chunks, collectives=None, **settings):
    """Parts with a chunk of each list of numbers of elements; ``settings`` are those of all chunks."""
    parts = Parts(collectives, ROOMY, ROOMY)
    for numels in chunks:
        parts.add_chunk(*numels, **settings)
    return parts


def add_lists(parts, *names):
    """Gives every chunk lists of zeros."""
    for chunk in parts.chunks:
        for name in names:
            chunk.lists[name] = parts.pool.allocate(chunk.home, chunk.param.numel(), chunk.state_dtype, name, zero=True)


def randomize(parts):
    """Gives every parameter a random master, and the value that follows from it."""
    for chunk in parts.chunks:
        for tensor in chunk.owned:
            tensor.view(chunk.lists[MASTER]).normal_()
            tensor.view(chunk.param).copy_(tensor.view(chunk.lists[MASTER]))


def masters(parts):
    return [tensor.view(tensor.chunk.lists[MASTER]) for tensor in parts.tensors]


def values(parts):
    return [tensor.view(tensor.chunk.param) for tensor in parts.tensors]


def firsts(tensors):
    """The first element of each."""
    return [tensor.flatten()[0].item() for tensor in tensors]


def twins(parts):
    """An ordinary fp32 parameter beside each one, with the same value."""
    return [torch.nn.Parameter(master.clone()) for master in masters(parts)]


def give(parts, **gradients):
    """Gives parameters gradients, by name: numbers, all the same."""
    for name, value in gradients.items():
        tensor = parts.tensors[int(name[1:])]
        parts.gradients.add(tensor, torch.full(tensor.spec.shape, float(value), dtype=tensor.chunk.param.dtype))


def end_update(parts):
    """What follows a kernel's update: the value is in the place of the gradient."""
    for tensor in parts.tensors:
        if tensor.gradient is GradientPlace.PARAM:
            parts.gradients.clear(tensor)


def group_of(*groups):
    """The group of each tensor index, from the indices of each group."""
    return {index: number for number, indices in enumerate(groups) for index in indices}


class PlainKernel(Kernel):
    """Subtracts gradients from masters; its state of a parameter is how often, and the last gradient.

    Attributes:
        told: What it was told, in words and numbers of chunks.
    """

    list_names = (MASTER, "last")
    follows_homes = splits_tensors = True
    updates_at_once = runs_beside = False
    batch_numel = 0

    def __init__(self, optimizer, parts):
        super().__init__(optimizer, parts.pool)
        self.parts, self.told, self.counts = parts, [], {}

    def workspace_numel(self, capacity_numel, *, widens=True):
        return 2 * capacity_numel

    def begin_step(self):
        self.told.append("begin")

    def end_step(self):
        self.told.append("end")

    def prepare(self, chunks, groups, coefficient, *, keeps=True):
        return Update(functools.partial(self._update, chunks, groups, coefficient))

    def _update(self, chunks, groups, coefficient):
        factor = None if coefficient is None else coefficient.item()
        self.told.append(([chunk.spec.index for chunk in chunks], dict(groups), factor))
        for tensor in (tensor for chunk in chunks for tensor in chunk.owned):
            gradient = self.parts.gradients.of(tensor)
            if tensor.spec.index in groups and gradient is not None:
                gradient = gradient.float() * (1 if factor is None else factor)
                self.counts[tensor.spec.index] = self.counts.get(tensor.spec.index, 0) + 1
                tensor.view(tensor.chunk.lists["last"]).copy_(gradient)
                tensor.view(tensor.chunk.lists[MASTER]).sub_(gradient)
                tensor.view(tensor.chunk.param).copy_(tensor.view(tensor.chunk.lists[MASTER]))

    def update_others(self, parameters):
        self.told.append(("others", list(parameters)))

    def own_state(self, tensor):
        count = self.counts.get(tensor.spec.index)
        return {} if count is None else {"count": count, **self.state_places(tensor)}

    def state_places(self, tensor):
        return {"last": tensor.view(tensor.chunk.lists["last"])}

    def load_own_state(self, tensor, state):
        if state:
            self.counts[tensor.spec.index] = state["count"]
        else:
            self.counts.pop(tensor.spec.index, None)
            self.state_places(tensor)["last"].zero_()
