"""Adam over many tiles in one call, in which no Python runs.

[Note: one call for many tiles]
The lists of a tile stay in the caches of a core while some ten operators go over them. Called from Python, each of
these operators takes the interpreter's lock for some microseconds; sixteen workers would hold it for half of the time
in which another thread launches the kernels of the next forward. So the loop over tiles is TorchScript: the lock is
released when the call begins and taken again when it ends. Views of buffers are made there as well, since each operator
gives the lock away and waits for it among all workers. What it runs are torch's own operators in the order of torch's
own Adam, so every bit is the same. This is looked at once in a process; where a version of torch computes otherwise, or
has no TorchScript, torch's Adam is called for each tile.

The script cannot start threads itself: torch's fused Adam uses all cores from any thread that has not been told to
compute alone, and only Python can do that.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.adam import adam

from hf_patrickstar.units import ALIGNMENT_NUMEL

logger = logging.getLogger(__name__)

TILE_NUMEL = 2**15
"""The elements of a tile: its fp32 lists and scratch space take 640 KiB, and torch computes it in one thread."""
# ``slots`` are lists of the caller's, because a write through a list that is made here would be taken for dead code.
_SOURCE = """
def update(masters: List[Tensor], firsts: List[Tensor], seconds: List[Tensor], gradients: List[Tensor],
           values: List[Tensor], starts: List[int], places: List[int], numels: List[int], rules: List[List[float]],
           stays: List[bool], factor: Optional[Tensor], fused: bool, tile: int, slots: List[List[Tensor]]):
    wide = masters[0].new_empty([0])
    root = wide
    states = [wide, wide]
    for i in range(len(masters)):
        (lr, beta1, beta2, weight_decay, eps, maximize, decoupled, count, decay, weight1, weight2, scale,
         size) = rules[i]
        step = torch.full([], count, dtype=torch.float32, device=torch.device("cpu"))
        numel = numels[i]
        room = min(tile, numel)
        scales = factor is not None and not stays[i]
        changes = not fused and (maximize != 0.0 or (weight_decay != 0.0 and decoupled == 0.0))
        if wide.dtype != masters[i].dtype:
            wide = masters[i].new_empty([0])
            root = wide
        if wide.numel() < room and (scales or changes or gradients[i].dtype != masters[i].dtype):
            wide = masters[i].new_empty([room])
        if root.numel() < room and not fused:
            root = masters[i].new_empty([room])
        if firsts[i].dtype != masters[i].dtype:
            states = [masters[i].new_empty([room]), masters[i].new_empty([room])]
        begin = 0
        while begin < numel:
            num = min(tile, numel - begin)
            master = masters[i].narrow(0, starts[i] + begin, num)
            kept = [firsts[i].narrow(0, starts[i] + begin, num), seconds[i].narrow(0, starts[i] + begin, num)]
            first = kept[0]
            second = kept[1]
            if first.dtype != master.dtype:
                first = states[0].narrow(0, 0, num).copy_(kept[0])
                second = states[1].narrow(0, 0, num).copy_(kept[1])
            gradient = gradients[i].narrow(0, places[i] + begin, num)
            scratch = wide.narrow(0, 0, min(num, wide.numel()))
            if gradient.dtype != master.dtype:
                gradient = scratch.copy_(gradient)
                if factor is not None:
                    gradient.mul_(factor)
            elif factor is not None:
                if stays[i]:
                    gradient.mul_(factor)
                else:
                    gradient = torch.mul(gradient, factor, out=scratch)
            if fused:
                slots[0][0] = master
                slots[1][0] = gradient
                slots[2][0] = first
                slots[3][0] = second
                slots[4][0] = step
                if decoupled != 0.0:
                    torch._fused_adamw_(slots[0], slots[1], slots[2], slots[3], [], slots[4], lr=lr, beta1=beta1,
                                        beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False,
                                        maximize=maximize != 0.0)
                else:
                    torch._fused_adam_(slots[0], slots[1], slots[2], slots[3], [], slots[4], lr=lr, beta1=beta1,
                                       beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False,
                                       maximize=maximize != 0.0)
            else:
                if maximize != 0.0:
                    gradient = torch.neg(gradient, out=scratch)
                if weight_decay != 0.0:
                    if decoupled != 0.0:
                        master.mul_(decay)
                    else:
                        gradient = torch.add(gradient, master, alpha=weight_decay, out=scratch)
                first.lerp_(gradient, weight1)
                second.mul_(beta2).addcmul_(gradient, gradient, value=weight2)
                below = torch.sqrt(second, out=root.narrow(0, 0, num)).div_(scale).add_(eps)
                master.addcdiv_(first, below, value=size)
            if first.dtype != kept[0].dtype:
                kept[0].copy_(first)
                kept[1].copy_(second)
            values[i].narrow(0, starts[i] + begin, num).copy_(master)
            begin += num
"""


def rule_of(settings: Mapping[str, Any], step: int, decoupled: bool) -> list[float] | None:
    """The numbers of a step as torch's Adam computes them; ``None`` if one of the settings is no number.

    Args:
        settings: The settings of a param group.
        step: How many steps there were before.
        decoupled: Whether weight decay is that of AdamW.
    """
    beta1, beta2 = settings["betas"]
    lr, weight_decay, eps = settings["lr"], settings["weight_decay"], settings["eps"]
    for number in (lr, beta1, beta2, weight_decay, eps):
        if not isinstance(number, (int, float)):
            return None
    scale = (1 - beta2 ** (step + 1.0)) ** 0.5
    size = -(lr / (1 - beta1 ** (step + 1.0)))
    numbers = lr, beta1, beta2, weight_decay, eps, settings["maximize"], decoupled, step + 1
    return [float(n) for n in (*numbers, 1 - lr * weight_decay, 1 - beta1, 1 - beta2, scale, size)]


def torch_adam(
    *lists: Sequence[torch.Tensor], step: int, settings: Mapping[str, Any], fused: bool | None, decoupled: bool
) -> None:
    """Calls torch's own Adam; a fused update with plain numbers launches two kernels.

    Args:
        *lists: Parameters of one group, their gradients, of the same type, their ``exp_avg``, and ``exp_avg_sq``.
        step: How many steps there were before.
        settings: The settings of the group.
        fused: Whether it is the fused kernel; ``None`` if torch may choose between the other two.
        decoupled: Whether weight decay is that of AdamW.
    """
    beta1, beta2 = settings["betas"]
    options: dict[str, Any] = {name: settings[name] for name in ("lr", "weight_decay", "eps", "maximize")}
    options |= {"beta1": beta1, "beta2": beta2, "amsgrad": False}
    masters = lists[0]
    # A kernel makes counters: torch.tensor would copy from the host, and wait for it. Of fake masters they are fake.
    device = masters[0].device if fused else torch.device("cpu")
    make_count = functools.partial(masters[0].new_full, (), dtype=torch.float32, device=device)
    update: Any
    if fused and all(isinstance(number, float) for number in (options["lr"], beta1, beta2)):
        # What adam() comes to, without a counter for each tensor, and without sorting tensors by device and type.
        update = torch._fused_adamw_ if decoupled else torch._fused_adam_
        counts = [make_count(step + 1.0)] * len(masters)
    else:
        update = adam
        counts = [make_count(float(step)) for _ in masters]
        options |= {"foreach": settings.get("foreach"), "fused": fused, "decoupled_weight_decay": decoupled}
    update(*map(list, lists), [], counts, **options)


class Range(NamedTuple):
    """Elements that are updated alike.

    Attributes:
        masters: A buffer on the host, like the next four.
        firsts: The ``exp_avg`` of its elements.
        seconds: Their ``exp_avg_sq``.
        gradients: Their gradients; may be the buffer of the values.
        values: What masters are rounded into.
        start: The first element in each of the buffers but that of the gradients.
        place: The first element there.
        numel: How many there are.
        rule: What ``rule_of`` returned.
        stays: Whether the gradient stays where it is, multiplied; else its place may have anything afterwards.
    """

    masters: torch.Tensor
    firsts: torch.Tensor
    seconds: torch.Tensor
    gradients: torch.Tensor
    values: torch.Tensor
    start: int
    place: int
    numel: int
    rule: list[float]
    stays: bool


@functools.cache
def adam_script() -> Callable[..., None] | None:
    """The scripted update, or ``None`` where it has not the bits of torch's Adam.

    It takes ranges, ``fused`` (whether Adam is torch's fused kernel), ``factor`` (gradients are multiplied with it,
    unless it is ``None``) and ``tile_numel``.
    """
    why = "this version of torch rounds differently"
    try:
        script = functools.partial(_call, torch.jit.CompilationUnit(_SOURCE).update)
        if _has_bits_of_torch(script):
            return script
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        why = f"TorchScript does not compile it: {error}"
    logger.info("patrickstar: Adam is called tile by tile on the host, and not in one call per worker, because %s", why)
    return None


def _call(
    script: Callable[..., None],
    ranges: Sequence[Range],
    *,
    fused: bool,
    factor: torch.Tensor | None,
    tile_numel: int | None = None,
) -> None:
    columns, first = [list(column) for column in zip(*ranges, strict=True)], ranges[0]
    slots = [[first.masters], [first.gradients], [first.firsts], [first.seconds], [first.masters]]
    script(*columns, factor, fused, tile_numel or TILE_NUMEL, slots)


@torch.no_grad()
def _has_bits_of_torch(script: Callable[..., None]) -> bool:
    """Compares the script with torch's Adam, over a tile and a part of one, with all kinds of settings."""
    tile_numel = 16 * ALIGNMENT_NUMEL  # so few elements that torch computes them in this thread
    numel = tile_numel + 37
    wave = torch.linspace(-9.0, 9.0, numel, dtype=torch.float32, device="cpu").sin()
    factor = torch.full((), 0.3, dtype=torch.float32, device="cpu")
    for fused, decoupled, maximize in itertools.product((False, True), repeat=3):
        settings = {"lr": 3e-3, "betas": (0.9, 0.999), "weight_decay": 0.1, "eps": 1e-8, "maximize": maximize}
        narrow = (wave * 0.7).to(torch.bfloat16)
        expected = [wave.clone(), wave.roll(5), wave.roll(9).square()]
        found = [*(tensor.clone() for tensor in expected), narrow.clone()]
        lists = [[tensor] for tensor in (expected[0], narrow.float() * factor, *expected[1:])]
        torch_adam(*lists, step=2, settings=settings, fused=fused or None, decoupled=decoupled)
        rule = rule_of(settings, 2, decoupled)
        assert rule is not None
        master, first, second, value = found
        ranges = [Range(master, first, second, narrow, value, 0, 0, numel, rule, False)]
        script(ranges, fused=fused, factor=factor, tile_numel=tile_numel)
        if not all(map(torch.equal, [*expected, expected[0].to(torch.bfloat16)], found)):
            return False
    return True
