"""An independent watch over the compute tier: what is alive after every operator, model and non-model data alike."""

import weakref

from hf_patrickstar.memory.operators import EngineMode


class Watch(EngineMode):
    """Follows every storage that an operator returns.

    Args:
        is_known: Tells from a storage whether something else counts it.
        extra: Bytes that something else counts, asked after every operator.
        is_settled: Tells whether nobody is making room just now.

    Attributes:
        peak: The most bytes as an operator returns.
        settled_peak: The most bytes as an operator begins, when whoever watches the one before has made room for it.
    """

    def __init__(self, is_known=lambda storage: False, extra=lambda: 0, is_settled=lambda: True):
        super().__init__()
        self.is_known, self.extra, self.is_settled = is_known, extra, is_settled
        self.alive, self.live, self.peak, self.settled_peak, self.non_model_peak = {}, 0, 0, 0, 0

    @classmethod
    def is_infra_mode(cls):
        """The engine's own mode steps aside for modes of users, which may come off before backward has run."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.is_settled():
            self.settled_peak = max(self.settled_peak, self.live + self.extra())
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if hasattr(tensor, "untyped_storage"):
                self.follow(tensor.untyped_storage())
        self.non_model_peak = max(self.non_model_peak, self.live)
        self.peak = max(self.peak, self.live + self.extra())
        return result

    def follow(self, storage):
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.alive or self.is_known(storage):
            return

        def forget(_):
            if self.alive.pop(key, None) is not None:
                self.live -= nbytes

        self.alive[key] = weakref.ref(storage, forget)
        self.live += nbytes


def non_model_peak(model, step):
    """The most bytes beside parameters that a step of the plain model takes, gradients as they come counted in."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    handles = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)))
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    with Watch(lambda storage: storage._cdata in parameters) as watch:
        step(model)
    for handle in handles:
        handle.remove()
    return watch.non_model_peak + buffers
