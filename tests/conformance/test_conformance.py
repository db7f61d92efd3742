"""Each module of the suite, under each layout: to the numbers of one process, saved, and loaded by plain Lightning.

What is refused or fails today is listed in `expected.py`, and nothing else is; different numbers never are.
"""

import pytest
from conformance.expected import NOT_YET
from conformance.harness import DIFFERENT, DRAWS, PARITY, Checked, Outcome, layouts_of
from conformance.registry import CASES

# One of each kind of module and layout; the slow tests run them all.
BY_DEFAULT = {
    ("NBeats", "pp2"),
    ("TwoTower", "tp2"),
    ("SwitchClassifier", "ep2"),
    ("TaskAdapters", "pp2 x 4 microbatches"),
    ("SchNet", "zero3"),
    ("DCGAN", "dp2"),
    ("ForceField", "planned"),
}
ALL = [
    pytest.param(name, layout, id=f"{name}-{layout.name}", marks=[] if key in BY_DEFAULT else [pytest.mark.slow])
    for name, case in CASES.items()
    for layout in layouts_of(case)
    for key in [(name, layout.name)]
]
checked = {}  # references are run once per module


@pytest.mark.parametrize(("name", "layout"), ALL)
@pytest.mark.extended  # by default in tests/idioms, by topic
def test_module_under_layout(worlds, name, layout):
    if name not in checked:
        checked.clear()
        checked[name] = Checked(worlds, CASES[name])
    outcome = checked[name].outcome(layout)
    assert outcome.kind != DIFFERENT, outcome.reason
    expected = NOT_YET.get((name, layout.name))
    if expected is not None:
        assert outcome.summary == expected, f"{outcome.summary}: {outcome.reason}; change expected.py if it is better"
    else:
        assert outcome.is_parity, f"{outcome.summary}: {outcome.reason}"
        assert outcome.kind != DRAWS or CASES[name].draws


def test_what_is_expected_to_fail_is_in_the_suite():
    known = {(name, layout.name) for name, case in CASES.items() for layout in layouts_of(case)}
    assert NOT_YET.keys() <= known and known - NOT_YET.keys() >= BY_DEFAULT
    assert not any(summary.startswith(DIFFERENT) for summary in NOT_YET.values())


def test_a_summary_is_the_kind_and_the_error():
    assert Outcome("failed", "rank 1: StepChanged: x.py:3: a value").summary == "failed: StepChanged"
    assert Outcome("refused", "the batch is empty").summary == "refused: ?"
    assert Outcome(PARITY).summary == PARITY
