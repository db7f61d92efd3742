"""The file of measured costs is read as it was written, and refused where it is none."""

import dataclasses
import json

import pytest

from lightning_hybrid.schedule.measured.lost_time import TimeByCause
from lightning_hybrid.schedule.measured.seconds import (
    FILE_NAME,
    MeasuredCosts,
    StageSeconds,
    UnitSeconds,
    load_measured_costs,
    save_measured_costs,
)

COSTS = MeasuredCosts(
    hardware={"device": "a CPU", "device_type": "cpu", "num_hosts": 1},
    software={"torch": "2.13.0", "precision": "32-true"},
    layout={"pp": 2, "dp_replicate": 1},
    schedule="1f1b",
    num_microbatches=4,
    microbatch_size=8,
    steps=(10, 20),
    step=TimeByCause(work=2.0, bubble=0.5, input=0.25),
    stages=(StageSeconds(0, 0.1, 0.2), StageSeconds(1, 0.1, 0.1, 0.1)),
    units=(UnitSeconds("layers.0", 0, 1e9, 0.1, 0.2), UnitSeconds("", 1, 0.0, 0.0, 0.0)),
    cuts=("layers.1",),
    model={"name": "Decoder", "parameters": 5},
    options={"zero_stage": 1, "recompute": None, "offload": {"gradients": "cpu"}},
    batch_size=30,
    first_step=7,
    step_times=(TimeByCause(work=2.0, bubble=0.5, input=0.25), TimeByCause(work=3.0)),
    peak_memory=(10, 20),
)


def test_costs_are_read_as_written(tmp_path):
    path = tmp_path / "checkpoints" / FILE_NAME
    save_measured_costs(COSTS, path)
    assert load_measured_costs(path) == load_measured_costs(path.parent) == load_measured_costs(tmp_path) == COSTS
    assert COSTS.step_seconds == 2.75
    assert [one.name for one in path.parent.iterdir()] == [FILE_NAME]
    later = dataclasses.replace(COSTS, steps=(30,))
    save_measured_costs(later, path)
    assert load_measured_costs(path) == later


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 2}', '{"version": 2, "step": {"sleep": 1}}'])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / FILE_NAME
    path.write_text(content)
    with pytest.raises(ValueError, match=r"measured_costs.json is no file of measured costs; PipelineTimeline writes"):
        load_measured_costs(path)


def test_another_version_is_refused(tmp_path):
    path = tmp_path / FILE_NAME
    save_measured_costs(COSTS, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 1}))
    with pytest.raises(ValueError, match="has version 1 of measured costs, and this package reads 2"):
        load_measured_costs(path)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_measured_costs(tmp_path)
