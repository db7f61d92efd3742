"""The function mode of a step: it intercepts every torch operation outside units, and every call of a unit.

``StepMode`` is shared by recording and replay: it classifies each call as an operation that is the same on all ranks
(on the batch alone), a read of a tensor's metadata or content, or an *event*: an operation on a parameter or on a
value computed from one. A subclass defines what an event does.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.errors import ControlFlowError
from lightning_hybrid.randomness.generators import draws
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.objects.names import CONTENT_READS, NUMBER_READS, PACKAGE, READS, TEXT_READS, TORCH
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.marks import Marks
from lightning_hybrid.step.standins.numbers import (
    AbsentFloat,
    answer_guessed_read,
    branch_message,
    content_message,
    stand_in_for_content,
    tell_absent,
)
from lightning_hybrid.step.standins.tensors import SHAPE_METHODS, SHAPE_PROPERTIES, full_shape_meta, is_absent
from lightning_hybrid.step.tracing.compiled import EagerSwitch

# Properties that create a tensor; all others (shape, dtype, device, grad_fn, ...) are metadata.
VIEW_PROPERTIES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
_METADATA = frozenset(
    {
        "dim", "size", "numel", "is_floating_point", "is_complex", "element_size", "ndimension", "stride",
        "is_contiguous", "__len__", "__hash__", "is_signed", "get_device", "nelement", "type_as_string",
        "storage_offset", "register_hook", "retain_grad", "requires_grad_", "is_tensor", "is_same_size", "data_ptr",
        "untyped_storage", "storage", "__dir__", "is_shared", "is_pinned", "is_inference", "is_conj", "is_neg",
        "_is_view", "names", "has_names", "broadcast_shapes", "result_type", "can_cast", "promote_types", "is_storage",
        "dim_order", "register_post_accumulate_grad_hook",
    }
)  # fmt: skip
_ARGUMENT_CHECKS = "torch.distributions."  # its branches on tensors check whether arguments are valid, and raise if not
LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning", "lightning_utilities")
# By the name that a torch function mode intercepts: the equivalent function for swapped arguments.
_SWAPPED: dict[str, tuple[str, Callable[..., Any]]] = {
    "lt": ("gt", torch.gt),
    "le": ("ge", torch.ge),
    "gt": ("lt", torch.lt),
    "ge": ("le", torch.le),
    "ne": ("ne", torch.ne),
    "eq": ("eq", torch.eq),
    "__eq__": ("__eq__", Tensor.__eq__),
}
# Operations that create a tensor from the shape, dtype and device of their first argument.
FILL_OPS = frozenset(
    {"ones_like", "zeros_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full", "new_empty"}
)


class StepMode(TorchFunctionMode, ABC):
    """Intercepts the glue operations and unit calls of one run of a step.

    Attributes:
        parameters: FQN by ``id`` of every parameter and tracked buffer.
        marks: Which values of the step tensors are.
        is_recording: Whether nothing may be sent to other ranks.
        inside_unit: Whether a unit or metric runs, where nothing is intercepted.
        checkpoint_depth: The number of checkpointed functions of the user's glue that are running.
        numbers_read: The line that last read a number from an absent tensor.
        values_read: The values that numbers were read from.
        absent_number: The number that reads of absent values return, in the search for branches on them.
        guesses: The answers to reads of absent values, in order; None where such a step is refused.
        has_guessed: Whether one of them was needed.
        units: The modules whose calls are one event each, by FQN.
        values: The values of the step, by index.
        uncompiled: Prevents compilation of the code around units.
    """

    is_recording = False

    def __init__(self, parameters: Mapping[int, str], randomness: KeyedRandomness | None = None) -> None:
        """Take ``parameters`` (FQN by id), and ``randomness``, reseeded before glue operations that draw numbers."""
        super().__init__()
        self.parameters = parameters
        self.marks = Marks()
        self._randomness = randomness
        self.inside_unit = False
        self.uncompiled = EagerSwitch()
        self.checkpoint_depth = 0
        self.numbers_read = ""
        self.values_read: dict[int, None] = {}
        self.absent_number: float | None = None
        self.guesses: Iterator[bool] | None = None
        self.has_guessed = False
        self.units: Mapping[str, nn.Module] = {}
        self.values: Any = {}

    @abstractmethod
    def event(
        self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owned: tuple[str, ...]
    ) -> Any:
        """Handle an operation or unit call; ``owned`` are the FQNs of the unit's parameters."""

    def is_absent_here(self, tensor: Tensor) -> bool:
        """Whether the content of ``tensor``, of any shape, is not on this rank: all computed from parameters is not."""
        return isinstance(tensor, FakeTensor) or tensor in self.marks

    def is_elsewhere(self, tensor: Tensor) -> bool:
        """Whether another stage computes this value, of any shape."""
        return False

    def __enter__(self) -> Any:
        self.uncompiled.on()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.uncompiled.off()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Classify and handle one torch function call of the glue."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
            if name not in VIEW_PROPERTIES:
                return self._shape_query(func, args, kwargs) if name in SHAPE_PROPERTIES else func(*args, **kwargs)
            name = "get_" + name
        elif name in _METADATA or (name == "__set__" and func.__self__.__name__ != "data"):
            # The gradient passes a value once, on the stage that computes it; a received copy is the same value.
            if name == "register_hook" and self.is_elsewhere(args[0]):
                return RemovableHandle(OrderedDict())
            return self._shape_query(func, args, kwargs) if name in SHAPE_METHODS else func(*args, **kwargs)
        elif name in READS:
            return self._read(name, func, args, kwargs)
        elif name.startswith("_foreach_"):
            return self._foreach(name, func, args, kwargs)
        elif self._randomness is not None and draws(name, args, kwargs):
            self._randomness.reseed()
        elif name in FILL_OPS and self._has_static_shape(args):
            if (result := run_fill_op(func, args, kwargs)) is not None:
                return result
        elif name == "_pack_padded_sequence" and not self.is_model_value(args[1]):
            data, _ = self.event(name, func, args, kwargs, ())
            return data, packed_sizes(args)
        elif name in COMPARISONS:
            name, func, args = in_canonical_order(name, func, args, self.marks, self.parameters)
        return self.event(name, func, args, kwargs, ())

    def _shape_query(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer a query of a tensor's shape; for a parameter, of the full one."""
        if id(args[0]) in self.parameters:
            return func(full_shape_meta(args[0]), *args[1:], **kwargs)
        self.size_read(args[0])
        return func(*args, **kwargs)

    def is_model_value(self, leaf: Any) -> bool:
        """Whether ``leaf`` is a value of the model, present or absent."""
        return isinstance(leaf, Tensor) and (leaf in self.marks or self.is_absent_here(leaf))

    def _has_static_shape(self, args: Any) -> bool:
        """Whether the first argument is a value of the model whose shape is the same on every stage."""
        mark = self.marks.of(args[0]) if args else None
        return mark is not None and not self.values[mark].dynamic

    def _foreach(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Split a ``_foreach_`` operation into one event per member, since members may be on different stages."""
        count = len(args[0])

        def member(value: Any, index: int) -> Any:
            return [value[index]] if isinstance(value, list | tuple) and len(value) == count else value

        results: list[Any] = []
        for index in range(count):
            member_args = tuple(member(arg, index) for arg in args)
            results.extend(
                self.event(name, func, member_args, {k: member(v, index) for k, v in kwargs.items()}, ()) or ()
            )
        return results or None

    def _read(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        absent = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor) and self.is_absent_here(leaf)]
        if not absent:
            return self.read_here(name, func(*args, **kwargs), args)
        if name == "__bool__" and _calling_module().startswith(_ARGUMENT_CHECKS):
            return True  # an argument check; the stage that has the content does it
        line = user_line()
        values = frozenset(self.marks.among(absent))
        if self.guesses is not None:
            self.has_guessed = True
            return answer_guessed_read(name, absent[0], next(self.guesses))
        if name in NUMBER_READS:
            self.numbers_read = line
            self.values_read.update(dict.fromkeys(values))
            if self.absent_number is not None:
                return self.absent_number
            number = AbsentFloat(line, values)
            # Python requires a plain float there, and would warn.
            return float(number) if name == "__float__" else number
        if name in TEXT_READS:
            tell_absent(line)
            return "nan" if name == "__format__" else f"absent{tuple(absent[0].shape)}"
        if name in CONTENT_READS:
            if name not in ("tolist", "numpy") or any(self.values[value].dynamic for value in values):
                raise ControlFlowError(content_message(line, name), entry="content")
            self.numbers_read = line
            self.values_read.update(dict.fromkeys(values))
            return stand_in_for_content(name, line, absent[0], values, self.absent_number)
        raise ControlFlowError(branch_message(line), entry="branch")

    def read_here(self, name: str, result: Any, args: Any) -> Any:
        """Called after a read of a tensor that has content; a recording records it."""
        return result

    def size_read(self, tensor: Tensor) -> None:
        """Called when user code reads the shape of a tensor; does nothing by default."""

    @contextlib.contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Mark that the code inside runs under the user's activation checkpointing."""
        self.checkpoint_depth += 1
        try:
            yield
        finally:
            self.checkpoint_depth -= 1

    def sink_method(self, fqn: str, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function that runs for a call of a metric's method; a recording replaces it by a dry run."""
        del fqn, method
        return original

    def call(
        self, name: str, owned: tuple[str, ...], original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a call of a unit or metric as one event, without this mode inside; the hot path of every unit."""
        modes_above = self._pop_self()
        self.inside_unit = True
        randomness = self._randomness
        watched = randomness is not None and randomness.watched
        if randomness is not None:
            randomness.watched = False
        if not self.is_recording:
            self.uncompiled.pause()
        try:
            return self.event(name, original, args, kwargs, owned)
        finally:
            if not self.is_recording:
                self.uncompiled.resume()
            self.inside_unit = False
            if randomness is not None:
                randomness.watched = watched
            self._push_back(modes_above)

    def _pop_self(self) -> list[Any] | None:
        """Remove this mode from the stack; returns the user's modes above it, None if it is not on the stack."""
        top = _pop_mode() if _len_torch_function_stack() else None
        if top is self:
            return []
        if top is not None:
            _push_mode(top)
        if not any(mode is self for mode in _get_current_function_mode_stack()):
            return None
        modes_above: list[Any] = []
        while (mode := _pop_mode()) is not self:
            modes_above.append(mode)
        for mode in reversed(modes_above):
            _push_mode(mode)
        return modes_above

    def _push_back(self, modes_above: list[Any] | None) -> None:
        """Undo ``_pop_self``."""
        if modes_above is None:
            return
        for _ in modes_above:
            _pop_mode()
        _push_mode(self)
        for mode in reversed(modes_above):
            _push_mode(mode)


class CurrentRun:
    """Holds the current run of a step, for the patched methods of the user's modules.

    Attributes:
        watch: The function mode of the current run; None outside of runs.
        uncompiled: The compilation switch shared by all runs.
    """

    __slots__ = ("uncompiled", "watch")

    def __init__(self) -> None:
        self.watch: StepMode | None = None
        self.uncompiled = EagerSwitch()

    @contextlib.contextmanager
    def watched_by(self, mode: StepMode) -> Iterator[None]:
        """Make this the mode of the current run inside."""
        self.watch = mode
        try:
            yield
        finally:
            self.watch = None

    @property
    def glue(self) -> StepMode | None:
        """The mode of the current run while code around units runs; None inside of units and outside of runs."""
        watch = self.watch
        return None if watch is None or watch.inside_unit else watch


def _calling_module() -> str:
    """Name of the Python module that called the current torch function, below any function modes."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def user_line() -> str:
    """``file:line`` of the innermost frame of the user's own code."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if _is_of_user(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown line"


def failed_line(error: BaseException) -> str:
    """``file:line`` of the innermost frame of the user's own code that an error has left."""
    lines = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_of_user(frame)]
    return f"{lines[-1][0].f_code.co_filename}:{lines[-1][1]}" if lines else "unknown line"


def _is_of_user(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    package = str(frame.f_globals.get("__name__")).split(".")[0]
    return not path.startswith((PACKAGE, TORCH)) and package not in LIGHTNING and path != "<string>"


# A canonical operand order for comparisons, whichever reflected method Python called.
# For ``a <= b`` Python calls ``b >= a`` first where the class of ``b`` is derived from that of ``a``; stand-ins are of
# a derived class. So ``le`` of two present tensors is ``ge`` where ``b`` is absent: in a recording, or on another
# stage.


def in_canonical_order(
    name: str, func: Callable[..., Any], args: Any, marks: Marks, parameters: Container[int]
) -> tuple[str, Callable[..., Any], Any]:
    """The equivalent comparison of tensors of any shapes, in the order: values by index, parameters, of the batch."""

    def _rank(tensor: Tensor) -> tuple[int, int]:
        mark = marks.of(tensor)
        return (0, mark) if mark is not None else (1 if id(tensor) in parameters else 2, 0)

    if len(args) != 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
        return name, func, args
    if _rank(args[0]) <= _rank(args[1]):
        return name, func, args
    return *_SWAPPED[name], (args[1], args[0])


COMPARISONS = frozenset(_SWAPPED)


# Operations whose result depends on shapes alone: they run on every rank with real memory.
# User code builds masks with them once and caches these: so they must not be nodes of the step graph.


def run_fill_op(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation of ``FILL_OPS`` with real memory; None if its result depends on contents after all."""
    source, *rest = args if args else [kwargs.get("input")]
    if not isinstance(source, Tensor) or source.layout is not torch.strided:
        return None
    other_inputs = [leaf for leaf in flatten((rest, dict(kwargs)))[0] if leaf is not source]
    if any(isinstance(leaf, Tensor) or is_absent(leaf) for leaf in other_inputs):
        return None
    with torch._C.DisableTorchFunction():
        # A meta tensor with the strides of `source`; nothing is computed.
        shape = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
        where = {"device": source.device, **kwargs}
        where.pop("input", None)
        return func(shape, *rest, **where)


def packed_sizes(args: Sequence[Any]) -> Tensor:
    """The batch sizes of packed sequences, of shape (longest sequence,), which depend on the lengths alone."""
    padded, lengths, batch_first = args
    batch, time = padded.shape[:2] if batch_first else padded.shape[1::-1]
    with torch._C.DisableTorchFunction():
        empty = torch.zeros((batch, time, 1) if batch_first else (time, batch, 1))
        return torch._pack_padded_sequence(empty, lengths, batch_first)[1]
