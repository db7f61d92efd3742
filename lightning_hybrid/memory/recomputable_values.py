"""Recomputable values: the operation that made each, its inputs, and its random numbers.

A recipe repeats one operation with the arguments that it had, so its result has the same bits, and no code of the user
runs a second time. Results live as long as somebody refers to them: autograd, or the recipe of another value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Geometry(NamedTuple):
    """Where the elements of a tensor lie in its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """Of this tensor."""
        return cls(tensor.size(), tensor.stride(), int(tensor.storage_offset()))


class Value:
    """What a storage holds between two writes.

    Attributes:
        held: The tensor; None while there is only the recipe.
        geometry: Of that tensor.
        recipe: What makes it; None for what came from outside or cannot be made again.
        is_weight: Whether it is a parameter, which is there anyway.
        is_pinned: Whether something else holds the tensor.
        is_returned: Whether the layer returns it.
        num_saved: How often autograd has saved it.
        num_reads: How many recipes read it.
    """

    __slots__ = (
        "__weakref__",
        "device",
        "dtype",
        "geometry",
        "held",
        "is_pinned",
        "is_returned",
        "is_weight",
        "nbytes",
        "num_reads",
        "num_saved",
        "recipe",
        "version",
    )

    def __init__(self, held: Tensor, recipe: Operation | None, *, is_weight: bool = False) -> None:
        self.held: Tensor | None = held
        self.geometry, self.dtype, self.device, self.recipe = Geometry.of(held), held.dtype, held.device, recipe
        self.nbytes = held.untyped_storage().nbytes()
        self.is_weight, self.is_pinned, self.is_returned = is_weight, False, False
        self.num_saved = self.num_reads = 0
        self.version: int | None = None

    def lose(self) -> None:
        """Hold the recipe alone."""
        assert self.recipe is not None
        self.held, self.version = None, None

    def keep(self) -> None:
        """Hold the tensor alone."""
        self.recipe = None

    def copy(self) -> None:
        """Hold a copy, because the storage is about to be written to."""
        assert self.held is not None
        copied = torch.empty(0, dtype=self.dtype, device=self.held.device)
        self.held = copied.set_(self.held.untyped_storage().clone(), self.geometry.offset, *self.geometry[:2])

    def seal(self) -> None:
        """From now on writes are seen by the tensor's version alone."""
        if self.held is not None:
            self.version = self.held._version

    @property
    def is_there(self) -> bool:
        """Whether it is held.

        Raises:
            RuntimeError: It is held, and was written to by code outside of the layer.
        """
        if self.held is None:
            return False
        if self.version is not None and self.held._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.geometry.size)} that a recomputed layer reads in its backward was"
                f" changed in place after the layer had run (version {self.held._version}, was {self.version}); write"
                " `x = x + y` for `x += y`, or take this layer out of recompute"
            )
        return True


class Lent(Value):
    """A value that somebody else has, and gives whenever it is asked for: a parameter that is freed between times."""

    __slots__ = ("_copied", "_give")

    def __init__(self, held: Tensor, give: Callable[[], Tensor]) -> None:
        self._give, self._copied = give, False
        super().__init__(held, None, is_weight=True)

    @property
    def held(self) -> Tensor:
        """What it is now."""
        return self._give()

    @held.setter
    def held(self, tensor: Tensor) -> None:
        if self._copied:
            self._give = lambda: tensor

    def copy(self) -> None:
        """Hold a copy, because the storage is about to be written to."""
        self._copied = True
        super().copy()

    def seal(self) -> None:
        """Who lends it sees to it that it stays what it was."""


class Lender(Protocol):
    """Who has the parameters of layers whose wholes are freed between their forward and their backward."""

    def inside(self, fqn: str) -> AbstractContextManager[None]:
        """The layer's parameters are there inside."""

    def giver(self, fqn: str, tensor: Tensor) -> Callable[[], Tensor] | None:
        """What gives a tensor of the layer's parameters at any time, and none of it holds; None for other tensors."""

    def come_to(self, fqn: str) -> None:
        """The backward has come to the layer: its parameters are there until it comes to another one."""


class Use(NamedTuple):
    """An argument of an operation: a value, or a view of it."""

    value: Value
    geometry: Geometry | None  # None: as the value itself

    def tensor(self) -> Tensor:
        """What it stands for; the value is held."""
        held = self.value.held
        assert held is not None
        return held if self.geometry is None else held.as_strided(*self.geometry)


class Operation:
    """One that can be repeated.

    Attributes:
        function: Of torch's dispatcher.
        reads: Values among its arguments.
        makes: Its results, in order, as long as anybody refers to them.
        writes_first: Whether it writes to its first argument, which is then its result.
    """

    __slots__ = ("args", "function", "kwargs", "makes", "reads", "states", "writes_first")

    def __init__(self, function: Any, states: list[tuple[torch.Generator, Tensor]], *, writes_first: bool) -> None:
        self.function, self.states, self.writes_first = function, states, writes_first
        self.args: Any = ()
        self.kwargs: Any = {}
        self.reads: list[Value] = []
        self.makes: list[weakref.ref[Value] | None] = []

    def call(self, args: Any = None) -> Any:
        """Run it on what its values hold."""
        args = tensors_of(self.args) if args is None else args
        return self.function(*args, **tensors_of(self.kwargs))

    def repeat(self) -> None:
        """Make its results again; all that it reads is there."""
        args = tensors_of(self.args)
        if self.writes_first:
            before: Value = self.args[0].value
            is_last = before.recipe is not None and before.num_reads == 1 and not before.num_saved
            if not is_last:
                args[0] = args[0].clone(memory_format=torch.preserve_format)
        saved = [(generator, generator.get_state()) for generator, _ in self.states]
        for generator, state in self.states:
            generator.set_state(state)
        try:
            out = self.call(args)
        finally:
            for generator, state in saved:
                generator.set_state(state)
        for made, tensor in zip(self.makes, out if isinstance(out, tuple | list) else (out,), strict=True):
            value = None if made is None else made()
            if value is not None and value.held is None:
                if Geometry.of(tensor) != value.geometry:
                    raise RuntimeError(f"{self.function} gave {Geometry.of(tensor)} and, before, {value.geometry}")
                value.held = tensor
        for value in self.reads:
            if value.recipe is not None and value.num_reads == 1 and not value.num_saved:
                value.lose()


def make(value: Value) -> Tensor:
    """What a value holds; made again, with what it needs for it, where it holds nothing.

    Raises:
        RuntimeError: Code outside of the layer has changed what the recipe reads.
    """
    if value.is_there:
        assert value.held is not None
        return value.held
    assert value.recipe is not None
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
        waiting = [value.recipe]
        while waiting:
            missing = [read.recipe for read in waiting[-1].reads if not read.is_there]
            if missing:
                waiting += [recipe for recipe in missing if recipe is not None]
            else:
                waiting.pop().repeat()
    assert value.held is not None
    return value.held


def tensors_of(argument: Any) -> Any:
    """Arguments of an operation with tensors for their uses."""
    kind = type(argument)
    if kind is Use:
        return argument.tensor()
    if kind is list or kind is tuple:
        return [tensors_of(each) for each in argument]
    if kind is dict:
        return {name: tensors_of(each) for name, each in argument.items()}
    return argument
