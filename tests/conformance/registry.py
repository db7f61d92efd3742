"""All cases of the conformance suite, by the name of the module."""

from conformance import (
    chemistry,
    few_parameters,
    forecasting,
    generative,
    hard,
    operators,
    reinforcement,
    self_supervised,
    single_cell,
    speech,
    vision,
)
from conformance.case import Case

FIELDS = (
    forecasting,
    single_cell,
    chemistry,
    speech,
    vision,
    reinforcement,
    generative,
    self_supervised,
    few_parameters,
    hard,
    operators,
)
CASES: dict[str, Case] = {case.name: case for field in FIELDS for case in field.CASES}
