"""The conformance suite's layouts, recorded: the numbers are right with poison, and no rule is broken.

`host_syncs.json` has the host synchronisations of a step, by file and function, on the rank that has most. What each
layout costs is a property of its test, as JSON: host synchronisations by line, messages by communicator, bytes in
flight by line; ``pytest --junitxml=report.xml`` writes it to a file.
"""

import json
from pathlib import Path

import pytest
from conformance.harness import LAYOUTS, Checked, layouts_of, observe_and_save
from conformance.registry import CASES

from harness.nccl import judges
from harness.nccl.recording import RecordedWorlds
from harness.nccl.trace import summary
from lightning_hybrid.verify import Layout

# One of each layout.
BY_DEFAULT = [
    ("DCGAN", "dp2"),
    ("SchNet", "zero3"),
    ("TwoTower", "tp2"),
    ("TaskAdapters", "pp2"),
    ("TaskAdapters", "dp2 x pp2"),
    ("TaskAdapters", "pp2 x 4 microbatches"),
    ("TemporalFusion", "cp2"),
    ("SwitchClassifier", "ep2"),
    ("TaskAdapters", "planned"),
]


def marks_of(key):
    return [] if key in BY_DEFAULT else [pytest.mark.slow]


ALL = [
    pytest.param(name, layout, id=f"{name}-{layout.name}", marks=marks_of(key))
    for name, case in CASES.items()
    for layout in layouts_of(case)
    for key in [(name, layout.name)]
]
LIMIT = 10  # host synchronisations of a step without experts
KNOWN = json.loads(Path(__file__).with_name("host_syncs.json").read_text())


@pytest.mark.parametrize(("name", "layout"), ALL)
def test_layout_is_ready_for_nccl(worlds, record_property, name, layout):
    recorded = RecordedWorlds(worlds, observe_and_save)
    outcome = Checked(recorded, CASES[name]).outcome(layout)
    assert outcome.is_parity, f"{outcome.summary}: {outcome.reason}"
    record_property("nccl", json.dumps(summary(recorded.traces)))
    assert judges.judge(recorded.traces) == {}
    key = f"{name}, {layout.name}"
    found = judges.host_syncs(recorded.traces)
    if key in KNOWN:
        assert not judges.more_syncs(found, KNOWN[key]), "more host synchronisations; or change host_syncs.json"
        assert layout.name == "ep2" or judges.most_syncs(recorded.traces) < LIMIT


BY_LAYER = Layout("zero3 by layer", 2, {"num_microbatches": 1, "zero_stage": 3, "reshard_after_forward": True})


@pytest.mark.parametrize("name", ["SwitchClassifier", "LayerDrop"])
def test_layers_that_only_some_ranks_call(worlds, name):
    """No sum of gradients waits for a rank that does not use the layer before other gathers."""
    recorded = RecordedWorlds(worlds, observe_and_save)
    outcome = Checked(recorded, CASES[name]).outcome(BY_LAYER)
    assert outcome.is_parity, f"{outcome.summary}: {outcome.reason}"
    assert judges.judge(recorded.traces) == {}


def test_a_backward_over_expert_ranks_waits_where_that_of_replicas_does(worlds):
    """Boolean masks of the module itself, whose derivative torch finds on the host."""
    found = {}
    for name in ("ep2", "dp2"):
        recorded = RecordedWorlds(worlds, observe_and_save)
        Checked(recorded, CASES["SwitchClassifier"]).outcome(LAYOUTS[name])
        found[name] = judges.host_syncs(recorded.traces)
    own = found["dp2"]["lightning/pytorch/core/module.py backward"]
    assert found["ep2"]["pipeline/shares.py _backward"] == own > 0


def test_the_table_has_a_module_of_each_layout():
    assert KNOWN.keys() == {f"{name}, {layout}" for name, layout in BY_DEFAULT}
