"""What a replay replaces in the user's modules, put there once per step.

The forwards of units and of drawing modules, the methods of metrics, and torch's checkpoint function ask a `Current`
which run of the step is under way. Putting them there for each microbatch would cost more than what they do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

from torch import nn

from lightning_hybrid.step.randomness import KeyedRandomness
from lightning_hybrid.step.replay import StageReplay
from lightning_hybrid.step.user_checkpointing import adopted_checkpoints
from lightning_hybrid.step.user_functions import watched_functions
from lightning_hybrid.step.watch import Current, watched_sinks, watched_units


@contextlib.contextmanager
def installed(replays: Collection[StageReplay], randomness: KeyedRandomness) -> Iterator[Current]:
    """Let the user's modules ask which run of the step is under way.

    Args:
        replays: All that will run inside; their recordings may know different units.
        randomness: Keys what the modules draw.

    Yields:
        To be handed to ``StageReplay.run``.
    """
    units: dict[str, nn.Module] = {}
    owned: dict[str, tuple[str, ...]] = {}
    drawing: dict[str, nn.Module] = {}
    sinks: Mapping[str, nn.Module] = {}
    for replay in dict.fromkeys(replays):
        units.update(replay.recording.units)
        owned.update(replay.recording.owned)
        drawing.update(replay.drawing)
        sinks = replay.sinks
    current = Current()
    with (
        randomness.modules(drawing),
        watched_units(current, units, owned),
        watched_sinks(current, sinks),
        watched_functions(current),
        adopted_checkpoints(current, randomness),
    ):
        yield current
