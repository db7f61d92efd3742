"""Draw all pictures of the documentation again, from the package's own code.

PYTHONPATH=. python .ci/pictures/draw.py [FOLDER]

A picture does not depend on the machine, so a test compares those in docs/pictures with those that this makes.
`quickstart_timeline.png` there is measured, by examples/quickstart.py.
"""

import sys
from pathlib import Path

import checkpoints
import data_path
import experts
import halos
import mesh
import schedules
import step_graph
import tensor_block
import zero_memory

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
PICTURES = {
    "activations": schedules.draw_activations,
    "checkpoints": checkpoints.draw,
    "data_path": data_path.draw,
    "experts": experts.draw,
    "halos": halos.draw,
    "mesh": mesh.draw,
    "schedules": schedules.draw,
    "stage_widths": schedules.draw_widths,
    "step_graph": step_graph.draw,
    "tensor_block": tensor_block.draw,
    "zero_memory": zero_memory.draw,
}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")
