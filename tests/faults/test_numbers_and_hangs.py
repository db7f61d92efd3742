"""Inputs that gave wrong numbers or hung, and variants of them, equal the plain Trainer under every layout."""

from faults.batch_cases import CASES as OF_BATCHES
from faults.layouts import check, each
from faults.parameter_cases import CASES as OF_PARAMETERS
from faults.state_cases import CASES as OF_STATES

DEFAULT = {  # where faults were
    "A scales, recomputed": ("zero3 layerwise",),
    "B two optimizers": ("zero1",),
    "C every third": ("zero3 layerwise",),
    "D fan-in": ("tp2",),
    "E hidden": ("pp2, 4 microbatches",),
    "F TimesWorldSize": ("pp2",),
    "G masked": ("pp2",),
    "I metric": ("pp2",),
    "J concatenated": ("pp2, 4 microbatches",),
    "M renamed by hooks": ("zero1",),
    "R wrapped": ("tp2",),
    "S in the step": ("zero3",),
}


@each({**OF_PARAMETERS, **OF_BATCHES, **OF_STATES}, DEFAULT)
def test_equals_one_process(worlds, tmp_path, case, layout):
    check(worlds, case, layout, tmp_path)
