"""Recomputable values: the operation that made each, its inputs, and its random numbers.

A recipe repeats one operation with the same arguments, so its result has the same bits and no user code runs twice.
Results live as long as they are referenced: by autograd, or by the recipe of another value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Geometry(NamedTuple):
    """Size, stride and offset of a tensor in its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """Returns the geometry of a tensor of any shape."""
        return cls(tensor.size(), tensor.stride(), int(tensor.storage_offset()))


class Value:
    """Content of a storage between two writes.

    Attributes:
        tensor: The tensor; None while there is only the recipe.
        geometry: Geometry of that tensor.
        recipe: Operation that made it; None for a value from outside, or one that cannot be recomputed.
        is_weight: Whether it is a parameter, which takes memory anyway.
        is_pinned: Whether something else refers to the tensor.
        is_returned: Whether the layer returns it.
        num_saved: How often autograd has saved it.
        num_reads: How many recipes read it.
    """

    __slots__ = (
        "__weakref__",
        "device",
        "dtype",
        "geometry",
        "is_pinned",
        "is_returned",
        "is_weight",
        "nbytes",
        "num_reads",
        "num_saved",
        "recipe",
        "tensor",
        "version",
    )

    def __init__(self, tensor: Tensor, recipe: Operation | None, *, is_weight: bool = False) -> None:
        self.tensor: Tensor | None = tensor
        self.geometry, self.dtype, self.device, self.recipe = Geometry.of(tensor), tensor.dtype, tensor.device, recipe
        self.nbytes = tensor.untyped_storage().nbytes()
        self.is_weight, self.is_pinned, self.is_returned = is_weight, False, False
        self.num_saved = self.num_reads = 0
        self.version: int | None = None

    def drop_tensor(self) -> None:
        """Frees the tensor and keeps the recipe."""
        assert self.recipe is not None
        self.tensor, self.version = None, None

    def copy(self) -> None:
        """Replaces the tensor by a copy, because its storage is about to be written to."""
        assert self.tensor is not None
        copied = torch.empty(0, dtype=self.dtype, device=self.tensor.device)
        self.tensor = copied.set_(self.tensor.untyped_storage().clone(), self.geometry.offset, *self.geometry[:2])

    def seal(self) -> None:
        """Records the tensor's version: writes from now on are detected by it alone."""
        if self.tensor is not None:
            self.version = self.tensor._version

    @property
    def is_available(self) -> bool:
        """Whether the tensor is in memory.

        Raises:
            RuntimeError: Code outside of the layer wrote to the tensor.
        """
        if self.tensor is None:
            return False
        if self.version is not None and self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.geometry.size)} that a recomputed layer reads in its backward was"
                f" changed in place after the layer had run (version {self.tensor._version}, was {self.version}); write"
                " `x = x + y` for `x += y`, or take this layer out of recompute"
            )
        return True


class GatheredValue(Value):
    """A value that is gathered on each read: a tensor of a parameter that is freed between forward and backward."""

    __slots__ = ("_copied", "_gather")

    def __init__(self, tensor: Tensor, gather: Callable[[], Tensor]) -> None:
        self._gather, self._copied = gather, False
        super().__init__(tensor, None, is_weight=True)

    @property
    def tensor(self) -> Tensor:
        """The current tensor, gathered; of the shape of ``geometry``."""
        return self._gather()

    @tensor.setter
    def tensor(self, tensor: Tensor) -> None:
        """Sets a copy, of the shape of ``geometry``."""
        if self._copied:
            self._gather = lambda: tensor

    def copy(self) -> None:
        """Replaces the gathered tensor by a copy, because its storage is about to be written to."""
        self._copied = True
        super().copy()

    def seal(self) -> None:
        """Does nothing: the owner of the parameter guarantees that it is unchanged."""


class ParameterGatherer(Protocol):
    """Gathers parameters of layers whose full tensors are freed between their forward and their backward."""

    def inside(self, fqn: str) -> AbstractContextManager[Callable[[Any], Any]]:
        """Gathers the layer's parameters inside the context, and when a backward reaches the layer's output.

        It yields a function that takes this output, and returns it.
        """

    def view_getter(self, fqn: str, tensor: Tensor) -> Callable[[], Tensor] | None:
        """Returns a function that gathers a tensor of the layer's parameters and holds none; None for other tensors.

        The tensor is a parameter or a view of one; the function returns the same elements, shape and stride.
        """


class Use(NamedTuple):
    """An argument of an operation: a value, or a view of it."""

    value: Value
    geometry: Geometry | None  # None: as the value itself

    @classmethod
    def of(cls, tensor: Tensor, value: Value) -> Use:
        """Returns the use of a value by a tensor of any shape in its storage."""
        geometry = Geometry.of(tensor)
        return cls(value, None if geometry == value.geometry else geometry)

    def read(self) -> Tensor:
        """Returns the tensor or view, of the shape of its geometry; the value must be available."""
        tensor = self.value.tensor
        assert tensor is not None
        return tensor if self.geometry is None else tensor.as_strided(*self.geometry)


class Operation:
    """A recorded operation that can be repeated.

    Attributes:
        function: Operator of torch's dispatcher.
        reads: Values among its arguments.
        makes: Weak references to its results, in order.
        writes_first: Whether it writes to its first argument, which is then its result.
    """

    __slots__ = ("args", "function", "kwargs", "makes", "reads", "states", "writes_first")

    def __init__(self, function: Any, states: list[tuple[torch.Generator, Tensor]], *, writes_first: bool) -> None:
        self.function, self.states, self.writes_first = function, states, writes_first
        self.args: Any = ()
        self.kwargs: Any = {}
        self.reads: list[Value] = []
        self.makes: list[weakref.ref[Value] | None] = []

    def repeat(self) -> None:
        """Recomputes its results; all that it reads must be available."""
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
            out = self.function(*args, **tensors_of(self.kwargs))
        finally:
            for generator, state in saved:
                generator.set_state(state)
        for made, tensor in zip(self.makes, out if isinstance(out, tuple | list) else (out,), strict=True):
            value = None if made is None else made()
            if value is not None and value.tensor is None:
                if Geometry.of(tensor) != value.geometry:
                    raise RuntimeError(
                        f"{self.function} gave {Geometry.of(tensor)} when it was recomputed, and {value.geometry} in"
                        " the forward; make it the same in both, or take this layer out of recompute"
                    )
                value.tensor = tensor
        for value in self.reads:
            if value.recipe is not None and value.num_reads == 1 and not value.num_saved:
                value.drop_tensor()


def materialize(value: Value) -> None:
    """Recomputes the tensor of a value, and what its recipe reads, where they are not available.

    Raises:
        RuntimeError: Code outside of the layer has changed a tensor that the recipe reads.
    """
    if value.is_available:
        return
    assert value.recipe is not None
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
        waiting = [value.recipe]
        while waiting:
            missing = [read.recipe for read in waiting[-1].reads if not read.is_available]
            if missing:
                waiting += [recipe for recipe in missing if recipe is not None]
            else:
                waiting.pop().repeat()


def tensors_of(argument: Any) -> Any:
    """Returns arguments of an operation with each ``Use`` replaced by its tensor."""
    kind = type(argument)
    if kind is Use:
        return argument.read()
    if kind is list or kind is tuple:
        return [tensors_of(each) for each in argument]
    if kind is dict:
        return {name: tensors_of(each) for name, each in argument.items()}
    return argument
