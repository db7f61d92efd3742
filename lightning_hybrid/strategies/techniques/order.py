"""The techniques of a run, in the order in which they nest around a layer: the first one is the outermost."""

from __future__ import annotations

from typing import Any

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.strategies.options.options import Options
from lightning_hybrid.strategies.techniques.zero import Zero
from lightning_hybrid.techniques.technique import Technique

# ZeRO shards what the others leave of a parameter, so it comes last.
_ORDER = (Zero,)


def check_techniques(options: Options, mesh: Mesh, precision: object, *, is_manual: bool) -> None:
    """Refuse options that do not go with this mesh, precision or kind of optimization; errors as of each technique."""
    for technique in _ORDER:
        technique.check(options, mesh, precision, is_manual=is_manual)


def techniques_of(run: Any) -> tuple[Technique, ...]:
    """Return those that the user wants, or the layout needs; nothing is decided yet."""
    return tuple(made for technique in _ORDER for made in technique.of(run))
