"""The examples run as their users run them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]


def run_example(name, *arguments, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=folder,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "experts"),
    [
        (["--devices", "1"], "8 experts each"),
        ([], "8 experts, 4 on each of 2 ranks"),
        (["--pipeline", "2"], "8 experts each"),
    ],
    ids=["one process", "two expert ranks", "two stages"],
)
def test_gpt_is_upcycled_and_compared(tmp_path, options, experts):
    small = {"dense-steps": 2, "steps": 3, "width": 16, "layers": 2, "length": 32, "batch": 4, "val-batches": 1}
    arguments = [text for name, value in small.items() for text in (f"--{name}", str(value))]
    output = run_example("moe.py", *arguments, *options, "--out", tmp_path, folder=tmp_path)
    assert experts in output
    rows = re.findall(r"^(dense, continued|upcycled, continued) +3 +([\d,]+) +([\d,]+)", output, re.MULTILINE)
    assert [name for name, *_ in rows] == ["dense, continued", "upcycled, continued"]
    (_, dense, dense_active), (_, sparse, sparse_active) = rows
    dense, dense_active, sparse, sparse_active = (
        int(n.replace(",", "")) for n in (dense, dense_active, sparse, sparse_active)
    )
    assert dense == dense_active and sparse > 3 * dense
    assert sparse_active == dense + 2 * 8 * 16  # and the routers
    assert (tmp_path / "expert_load.png").exists()
    assert len(list(tmp_path.glob("lightning_logs/version_*/checkpoints/*.ckpt"))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--bits", "4"], ["--zero", "3"]], ids=["stages", "zero3"])
def test_own_technique_trains(tmp_path, options):
    output = run_example("technique.py", *options, folder=tmp_path)
    bits = 4 if "4" in options else 8
    assert f"weights of layers: {bits} bits in the forward" in output and "max_epochs=1` reached" in output


@pytest.mark.slow
def test_tensorboard_has_curves_and_pictures(tmp_path):
    run_example("tensorboard_pictures.py", "there", folder=tmp_path)
    events = EventAccumulator(str(tmp_path / "there" / "lightning_logs" / "version_0"))
    events.Reload()
    images = {tag: events.Images(tag)[0] for tag in events.Tags()["images"]}
    assert {tag: image.step for tag, image in images.items()} == {
        "pipeline_timeline": 20,
        "memory_timeline": 20,
        "run": 64,
    }
    assert all(image.width > 900 and image.height > 300 for image in images.values())
    assert {"loss", "lr-AdamW", "pipeline_bubble", "pipeline_bubble_bound"} <= set(events.Tags()["scalars"])
    assert sorted(path.name for path in (tmp_path / "there").iterdir() if path.is_file()) == [
        *("memory.svg", "run.png", "timeline.svg", "trace.json")
    ]
    trace = json.loads((tmp_path / "there" / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2, 3}
