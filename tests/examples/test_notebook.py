"""The notebook is executed from its first cell to its last."""

import json
import os
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebooks" / "pipeline_stages.ipynb"


def test_it_is_stored_without_outputs():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.slow
def test_it_trains_draws_and_predicts(tmp_path, monkeypatch):
    for name, value in {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.startswith(("PL_", "SLURM_", "LOCAL_RANK"))]:
        monkeypatch.delenv(name)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    *_, fit, picture, predict = [cell["outputs"] for cell in notebook.cells if cell["cell_type"] == "code"]
    assert "100 steps" in "".join(output.get("text", "") for output in fit if output["output_type"] == "stream")
    assert "<svg" in picture[0]["data"]["image/svg+xml"]
    printed = "".join(output.get("text", "") for output in predict if output.get("name") == "stdout")
    accuracy, is_equal = printed.split()[-2:]
    assert float(accuracy.removeprefix("tensor(").removesuffix(")")) > 0.6 and is_equal == "True"
