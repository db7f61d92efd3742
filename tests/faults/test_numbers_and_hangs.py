"""Inputs that gave wrong numbers or hung, and variants of them, equal the plain Trainer under every layout."""

from faults.batch_cases import CASES as OF_BATCHES
from faults.layouts import check, each
from faults.parameter_cases import CASES as OF_PARAMETERS
from faults.state_cases import CASES as OF_STATES


@each({**OF_PARAMETERS, **OF_BATCHES, **OF_STATES}, {})
def test_equals_one_process(worlds, tmp_path, case, layout):
    check(worlds, case, layout, tmp_path)
