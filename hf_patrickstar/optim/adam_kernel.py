"""The kernel for Adam, which works over the chunk lists.

Two roads that would be faster have other bits than torch ([Note: same bits as torch]). torch's fused kernel rounds a
few elements in ten thousand differently from its other two, which agree, so an optimizer that has not asked for it does
not get it on the host. And its ``grad_scale`` divides, where clipping multiplies; that takes longer, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_patrickstar.layout.specs import GRADIENT, MASTER
from hf_patrickstar.optim.adam_script import Range, adam_script, rule_of, torch_adam
from hf_patrickstar.optim.elementwise import ElementwiseKernel, Job, Segment
from hf_patrickstar.optim.kernel import Means
from hf_patrickstar.runtime.parameter import GradientPlace, ManagedParameter, round_masters

EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"


def is_plain_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer is torch's Adam or AdamW with options that the chunk lists can hold."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        group.get("amsgrad") or group.get("capturable") or group.get("differentiable")
        for group in optimizer.param_groups
    )


class AdamKernel(ElementwiseKernel):
    """Runs Adam or AdamW over the lists ``master``, ``exp_avg`` and ``exp_avg_sq``.

    Of each element the gradient is widened to fp32 and multiplied with the factor, torch's Adam computes the new master
    and states, and the new master is rounded into ``param``. On the host each worker does so with a share of the
    elements, in one call; see [Note: one call for many tiles].

    Updates compute in the type of the master, whatever the type is in which ``exp_avg`` and ``exp_avg_sq`` are kept.

    Args:
        optimizer: See ``ElementwiseKernel``.
        means: See ``Kernel``.
    """

    list_names = (MASTER, EXP_AVG, EXP_AVG_SQ)

    def __init__(self, optimizer: torch.optim.Optimizer, means: Means) -> None:
        super().__init__(optimizer, means)
        self._states = "" if means.state_dtype == "auto" else "bfloat16"
        self.num_narrow_states = 2 if self._states else 0

    def state_type(self, parameter: torch.Tensor, numel: int) -> str:
        """See ``Kernel``."""
        return self._states

    def _numbers(
        self, segments: Sequence[Segment], settings: Sequence[Mapping[str, Any]]
    ) -> dict[tuple[int, int], list[float]] | None:
        """See ``Job``. The script is for numbers and ordinary tensors; in 16 bits it would round numbers, too."""
        rules: dict[tuple[int, int], list[float]] = {}
        if segments and self._is_on_device(segments[0].chunk):
            return None
        for segment in segments:
            param = segment.payloads["param"]
            is_wide = segment.chunk.state_dtype.itemsize >= torch.float32.itemsize
            if not (is_wide and type(param) is torch.Tensor and param.is_cpu):
                return None
            key, own = (segment.rule, segment.step), settings[segment.rule]
            if key in rules:
                continue
            rule = rule_of(own, segment.step, self._is_decoupled(own))
            is_alike = self._is_fused(own) == self._is_fused(settings[segments[0].rule])
            if rule is None or not is_alike or adam_script() is None:
                return None
            rules[key] = rule
        return rules

    def _is_fused(self, settings: Mapping[str, Any]) -> bool:
        fused, foreach = settings.get("fused"), settings.get("foreach")
        return bool(fused) or (fused is None and foreach is None and self._means.prefer_fused)

    def _is_decoupled(self, settings: Mapping[str, Any]) -> bool:
        return bool(settings.get("decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW)))

    def _update(self, job: Job, share: Sequence[Segment]) -> None:
        if job.numbers is not None:
            self._update_by_script(job, job.numbers, share)
            return
        alike: dict[tuple[Any, ...], list[Segment]] = {}
        for segment in share:
            chunk = segment.chunk
            alike.setdefault((segment.rule, segment.step, chunk.state_dtype, chunk.dtype), []).append(segment)
        for segments in alike.values():
            self._update_alike(job, segments)

    def _update_by_script(
        self, job: Job, rules: Mapping[tuple[int, int], list[float]], share: Sequence[Segment]
    ) -> None:
        """Updates ranges in one call; see [Note: one call for many tiles]."""
        script, fused = adam_script(), self._is_fused(job.settings[share[0].rule])
        assert script is not None
        ranges = []
        for segment in share:
            payloads = segment.payloads
            gradient = payloads[GRADIENT] if segment.place is GradientPlace.LIST else payloads["param"]
            begin = place = segment.start - segment.offset
            if segment.left is not None:
                gradient, place = segment.left, segment.start - segment.first
            lists = payloads[MASTER], payloads[EXP_AVG], payloads[EXP_AVG_SQ], gradient, payloads["param"]
            # The value is written where its gradient is. A list would be written to memory for nothing.
            stays = job.keeps or segment.place is GradientPlace.PARAM
            rule = rules[segment.rule, segment.step]
            ranges.append(Range(*lists, begin, place, segment.stop - segment.start, rule, stays))
        script(ranges, fused=fused, factor=job.factor)

    def _update_alike(self, job: Job, segments: Sequence[Segment]) -> None:
        """Updates ranges of one param group and step by torch's Adam, in one call, because many small ones are slow."""
        step, settings = segments[0].step, job.settings[segments[0].rule]
        masters, *kept = ([segment.part(name) for segment in segments] for name in self.list_names)
        narrow = [*(segment.gradient for segment in segments), *kept[0], *kept[1]]
        wide, num = self._widened(segments[0].chunk, narrow), len(segments)
        gradients, firsts, seconds = wide[:num], wide[num : 2 * num], wide[2 * num :]
        if job.factor is not None:
            torch._foreach_mul_(gradients, job.factor)
        fused, decoupled = self._is_fused(settings) or settings.get("fused"), self._is_decoupled(settings)
        lists = masters, gradients, firsts, seconds
        torch_adam(*lists, step=step, settings=settings, fused=fused, decoupled=decoupled)
        if firsts[0].dtype != kept[0][0].dtype:
            torch._foreach_copy_([*kept[0], *kept[1]], [*firsts, *seconds])
        round_masters(masters, [segment.part("param") for segment in segments])

    # States

    def own_state(self, tensor: ManagedParameter) -> dict[str, Any]:
        """See ``Kernel``. The state is ``step`` and ``state_places``."""
        places = self.state_places(tensor)  # an update that fails changes the number before this returns
        step = self._steps.get(tensor.spec.index)
        if step is None:
            return {}
        if not isinstance(step, torch.Tensor):
            step = self._steps[tensor.spec.index] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        return {"step": step, **places}

    def state_places(self, tensor: ManagedParameter) -> dict[str, torch.Tensor]:
        """See ``Kernel``. They are ``exp_avg`` and ``exp_avg_sq``, in the chunk lists."""
        lists = tensor.chunk.lists
        return {EXP_AVG: tensor.view(lists[EXP_AVG]), EXP_AVG_SQ: tensor.view(lists[EXP_AVG_SQ])}
