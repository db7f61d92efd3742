"""Requests of the user for the tensors that layers save: offload, by layer and stage, and compression."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from lightning_hybrid.errors import ActivationError
from lightning_hybrid.memory.saved_activations.encoding import BITS
from lightning_hybrid.text import meant_of

Fraction: TypeAlias = float | Sequence[float] | Mapping[str, float]
DISK = "disk:"


@dataclass(frozen=True)
class Offload:
    """Which saved tensors are offloaded, and where to."""

    min_bytes: int  # of a storage; smaller ones stay
    # share of the bytes that is offloaded: of all layers; of each stage; or by pattern of FQNs, of which the last
    # that matches a layer counts, and others stay. None: all of it in a run without stages; with them, as much as
    # leaves the bytes of one microbatch
    fraction: Fraction | None = None
    to: str = "cpu"  # "cpu", or "disk:" and a folder

    def __post_init__(self) -> None:
        _check_bytes("ActivationOffload", self.min_bytes)
        if self.to != "cpu" and not (isinstance(self.to, str) and self.to.startswith(DISK) and self.to != DISK):
            raise ValueError(f"ActivationOffload(to={self.to!r}); use 'cpu', or 'disk:' and a folder: 'disk:/scratch'")
        given: Any = self.fraction
        if given is None:
            return
        shares = given.values() if isinstance(given, Mapping) else [given] if isinstance(given, int | float) else given
        for share in shares:
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise ValueError(
                    f"ActivationOffload(fraction={given!r}): {share!r} is no share of bytes; use a number between 0 and"
                    " 1, a list of one per stage, or a mapping of names of layers such as {'model.layers.*': 0.5}"
                )

    def share_of_layers(
        self, layers: Mapping[str, int], all_layers: Collection[str], in_flight: Sequence[int]
    ) -> dict[str, float]:
        """Returns the share of the saved bytes to offload, by layer of this rank, whose stages are given by FQN.

        ``in_flight`` are the most microbatches between their forward and their backward, by stage.

        Raises:
            ActivationError: A pattern matches no layer, or there is not one share for each stage.
        """
        given = self.fraction
        if given is None:
            by_stage = [1 - 1 / number if max(in_flight) > 1 else 1.0 for number in in_flight]
            return {fqn: by_stage[stage] for fqn, stage in layers.items()}
        if isinstance(given, int | float):
            return dict.fromkeys(layers, float(given))
        if isinstance(given, Mapping):
            shares = dict.fromkeys(layers, 0.0)
            for pattern, share in given.items():
                if not fnmatch.filter(all_layers, pattern):
                    raise ActivationError(
                        f"ActivationOffload(fraction=...) names {pattern!r}, which matches no"
                        f" layer{meant_of(pattern, all_layers)}",
                        entry="activation-offload-name",
                    )
                shares |= dict.fromkeys(fnmatch.filter(layers, pattern), float(share))
            return shares
        if len(given) != len(in_flight):
            raise ActivationError(
                f"ActivationOffload(fraction={list(given)}) has {len(given)} shares and the run has {len(in_flight)}"
                " stages; give one share for each stage, or a single number",
                entry="activation-offload-stages",
            )
        return {fqn: float(given[stage]) for fqn, stage in layers.items()}


@dataclass(frozen=True)
class Compression:
    """How saved tensors are compressed."""

    bits: int  # of a value of a floating-point tensor
    min_bytes: int  # of a storage; smaller ones stay exact
    exclude: tuple[str, ...] = ()  # patterns of FQNs of layers whose tensors are not quantized

    def __post_init__(self) -> None:
        if self.bits not in BITS or isinstance(self.bits, bool):
            raise ValueError(f"ActivationCompression(bits={self.bits!r}); use 8, 4, 2 or 1")
        _check_bytes("ActivationCompression", self.min_bytes)

    def excludes(self, fqn: str) -> bool:
        """Returns whether the tensors of a layer are not quantized."""
        return any(self.matches(pattern, fqn) for pattern in self.exclude)

    @staticmethod
    def matches(pattern: str, fqn: str) -> bool:
        """Returns whether a pattern matches the name of a layer."""
        return fnmatch.fnmatchcase(fqn, pattern)


@dataclass(frozen=True)
class ActivationRequests:
    """The requests of all callbacks."""

    offload: Offload | None = None
    compression: Compression | None = None

    def __bool__(self) -> bool:
        """Whether there is one."""
        return self.offload is not None or self.compression is not None

    def __str__(self) -> str:
        """A line for the start of a run."""
        parts = []
        if self.compression is not None:
            parts.append(f"compressed to {self.compression.bits} bits")
        if self.offload is not None:
            parts.append(f"offloaded to {self.offload.to} from {self.offload.min_bytes} bytes")
        return f"saved activations: {', '.join(parts)}"

    def adding(self, request: Offload | Compression) -> ActivationRequests:
        """Returns these and another one.

        Raises:
            ValueError: There is another one of its kind.
        """
        before = self.offload if isinstance(request, Offload) else self.compression
        if before not in (None, request):
            raise ValueError(f"{before} and {request} are both requested; leave one of the callbacks out")
        return replace(self, offload=request) if isinstance(request, Offload) else replace(self, compression=request)


def _check_bytes(name: str, min_bytes: Any) -> None:
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0:
        raise ValueError(f"{name}(min_bytes={min_bytes!r}) must be an int of at least 0, such as 65536")
