"""States of the random generators that user code draws from, as plain values, saved so that a run can continue.

Random numbers in steps under stages and microbatches are keyed by seed and step (``randomness``) and need no state.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch


def generator_states(device: torch.device) -> dict[str, Any]:
    """Read the states of the generators of Python, numpy, torch and the device of this rank."""
    version, numbers, gauss = random.getstate()
    name, keys, *others = numpy.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, [int(key) for key in keys], *others],
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_generators(states: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to the states that ``generator_states`` returned."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *others = states["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *others))
    torch.set_rng_state(states["torch"])
    if states["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["device"], device)
