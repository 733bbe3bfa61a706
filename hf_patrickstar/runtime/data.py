"""The places where values and gradients are, together."""

import dataclasses

from hf_patrickstar.runtime.buckets import Buckets
from hf_patrickstar.runtime.gradient_mirrors import GradientMirrors
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.mirrors import ValueMirrors
from hf_patrickstar.runtime.originals import Originals
from hf_patrickstar.runtime.values import Values
from hf_patrickstar.runtime.watch import Watch
from hf_patrickstar.runtime.writes import Writes


@dataclasses.dataclass(frozen=True, slots=True)
class Data:
    """The places where values and gradients are.

    Attributes:
        originals: Values of frozen parameters, with bits that chunks do not hold.
        values: Reads and writes values.
        mirrors: What was handed out of values.
        gradient_mirrors: What was handed out of gradients.
        watch: Finds what was written to copies on the device.
        gradients: Where gradients are at home.
        writes: Takes what is written to parameters to every place where they are.
        buckets: Where gradients wait until their group is complete.
    """

    originals: Originals
    values: Values
    mirrors: ValueMirrors
    gradient_mirrors: GradientMirrors
    watch: Watch
    gradients: Gradients
    writes: Writes
    buckets: Buckets
