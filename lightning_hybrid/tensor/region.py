"""Values in tensor-parallel regions: their marks, random numbers that differ by rank, and the calls they come from."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hybrid.params.placement import Shard
from lightning_hybrid.randomness.generators import draws, mix
from lightning_hybrid.step.objects.names import PACKAGE, TENSOR, TORCH, names, operator_names
from lightning_hybrid.tensor.plan import Site

AroundDraw = Callable[[], AbstractContextManager[Any]]


class RankDraws:
    """Random numbers that differ by rank in sharded regions, for dropout; those outside stay equal.

    The region's generator state, on ``device``, is separate from the default one, which advances equally on all ranks.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._state: Tensor | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """A context around one draw."""
        generator = _generator_of(self._device)
        before = generator.get_state()
        if self._state is None:
            generator.manual_seed((generator.initial_seed() * 1_000_003 + self._rank + 1) % 2**63)
        else:
            generator.set_state(self._state)
        try:
            yield
        finally:
            self._state = generator.get_state()
            generator.set_state(before)


class KeyedDraws:
    """Random numbers that differ by rank in sharded regions, on ``device``, and depend on the draw's key alone."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """A context around one draw."""
        generator = _generator_of(self._device)
        # The same number on each rank, whether the draw is keyed or goes on from the one before.
        key = int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator))
        before = generator.get_state()
        generator.manual_seed(mix(key, self._rank + 1))
        try:
            yield
        finally:
            generator.set_state(before)


def _generator_of(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


class LocalPositionDraws(TorchFunctionMode):
    """The function mode by which ranks draw different random numbers for their positions, and equal ones elsewhere."""

    def __init__(self, is_local: Callable[[], bool], around_draw: AroundDraw) -> None:
        """Takes whether the running code works on local positions, and a context that makes draws differ by rank."""
        super().__init__()
        self._is_local, self._around_draw = is_local, around_draw

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_local() and draws(getattr(func, "__name__", ""), args, kwargs):
            with self._around_draw():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def mark(tensor: Tensor, size: int, column: tuple[Shard, int] | None = None, *, linear: str = "") -> Tensor:
    """Marks a local value, of any shape, as sharded over ``size`` ranks.

    ``column`` has its placement and dim, if code uses full offsets; ``linear`` is the linear whose output it is.
    """
    tensor._sharded_over = size  # type: ignore[attr-defined]
    if column is not None:
        tensor._column = column  # type: ignore[attr-defined]
    if linear:
        tensor._linear = linear  # type: ignore[attr-defined]
    return tensor


def linear_of(tensor: Tensor) -> str:
    """The FQN of the linear whose output a sharded value, of any shape, is; "" for other values."""
    fqn: str = getattr(tensor, "_linear", "")
    return fqn


def sharded_over(value: Any) -> int:
    """The number of ranks that a value is sharded over; 0 if it is not sharded."""
    size: int = getattr(value, "_sharded_over", 0)
    return size


def mark_all(value: Any, size: int) -> Any:
    """Marks all tensors of a result as sharded over ``size`` ranks."""
    if isinstance(value, Tensor):
        value._sharded_over = size  # type: ignore[attr-defined]
    elif isinstance(value, (tuple, list)):
        for item in value:
            mark_all(item, size)
    return value


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yields the tensors, of any shape, among values and inside tuples and lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (tuple, list):
            yield from tensors_in(value)


# Operations whose operands torch broadcasts to one shape.
BROADCAST = operator_names(("add", "sub", "mul", "div", "truediv", "pow", "and", "or")) | names(
    "where masked_fill masked_fill_ maximum minimum lerp addcmul rsub true_divide logical_and"
)
_SITE_DEPTH = 3


def site_of_call(*operation: str) -> Site:
    """The key of the current call of user code: operation, then file and line of the innermost frames."""
    site: list[object] = [*operation]
    frame = sys._getframe(1)
    while frame is not None and len(site) < len(operation) + _SITE_DEPTH:
        path = frame.f_code.co_filename
        if path.startswith(TENSOR):
            if frame.f_code.co_name == "run_sharded":
                break
        elif not path.startswith((TORCH, PACKAGE)):  # frames of this package in between are skipped
            site.append((path, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(site)
