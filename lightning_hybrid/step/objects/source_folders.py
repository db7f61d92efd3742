"""Folders of source code: this package's, and torch's; lines in all others are the user's."""

from pathlib import Path

import torch

PACKAGE = str(Path(__file__).parents[2])
TENSOR = str(Path(PACKAGE, "tensor"))
TORCH = str(Path(torch.__file__).parent)
EXPERT_RANKS = str(Path(PACKAGE, "experts", "parallel"))
