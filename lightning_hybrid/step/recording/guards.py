"""What a recorded trace depends on: the state that guards compare, and the reads that none covers.

Unguarded reads: state that a step reads and that no guard compares, so that the next batch may take another trace.

They are: the number of the batch, the trainer (its steps and epochs), random numbers, the content of the batch, and
attributes that the step changes itself. A step without any of these takes the same trace as long as the plain
attributes around its units (``plain_state``) are unchanged.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import numpy
from torch import Tensor, nn

from lightning_hybrid.patching import replaced
from lightning_hybrid.randomness.generators import generator_state, is_generator
from lightning_hybrid.step.module_state.snapshots import PLAIN, inside, is_state
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.tracing.metrics import find_sinks

# Of a longer list only the length and the last entries are compared.
_LAST = 16
_DEEPEST = 4
# Hooks around a forward may be part of the step; other attributes that every module has are not.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_forward_hooks", "_forward_pre_hooks"}

_OF_THE_RUN = "_hybrid_"  # calls to loggers that wait, say: no code of the user reads them


def modules_around(root: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules whose code is glue, by FQN: those outside of units and metrics."""
    inside_units = {inner for outer in (*units.values(), *find_sinks(root).values()) for inner in outer.modules()}
    return {fqn: module for fqn, module in root.named_modules() if module not in inside_units}


def plain_state(modules: Sequence[nn.Module]) -> list[Any]:
    """The numbers, strings, lengths and generator states in the attributes of modules."""
    return PlainState(modules).values


class PlainState:
    """The numbers, strings, lengths and generator states in the attributes of modules.

    A container is compared by its entries: by identity those that were read, by type those that have nothing to read.

    Attributes:
        values: What was read.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.values: list[Any] = []
        self._visited: set[int] = set()  # layers share their configuration object
        self._mappings, self._keys = list[Any](), list[tuple[Any, ...]]()
        self._empty = list[Any]()  # mappings without entries, of which a layer has most
        self._same, self._of_type = _Entries(), _Entries()  # those of the mappings that were read, and the others
        self._sequences: list[tuple[Any, int, list[Any]]] = []
        self._is_volatile = not modules
        for module in modules:
            attributes = module.__dict__
            names = [name for name in attributes if name not in _OF_EVERY_MODULE and is_state(name)]
            names = [name for name in names if not name.startswith(_OF_THE_RUN)]
            mode = [name for name in ("training",) if name in attributes]  # a compiled module has its original's
            self._keep_entries(attributes, [*mode, *names])
            self._keep_entries(module._modules, list(module._modules), read=False)
            for value in [attributes[name] for name in names]:
                if type(value) in PLAIN:
                    self.values.append(value)
                else:
                    self._collect(value, 0)
        if self._is_volatile:
            self._mappings, self._sequences, self._empty = [], [], []
            self._same, self._of_type = _Entries(), _Entries()

    def is_current(self) -> bool:
        """Whether the modules, and their attributes, are still as they were read."""
        if self._is_volatile:
            return False
        # Without a line of Python for each mapping: a layer has dozens.
        if (
            any(self._empty)
            or list(map(tuple, self._mappings)) != self._keys
            or not all(map(is_, self._same.now(), self._same.wanted))
        ):
            return False
        if not all(map(is_, map(type, self._of_type.now()), self._of_type.wanted)):
            return False
        return all(
            len(sequence) == length and all(map(is_, _marks(_last_of(sequence)), marks))
            for sequence, length, marks in self._sequences
        )

    def _keep_entries(self, mapping: Any, keys: Sequence[Any], *, read: bool = True) -> None:
        if not mapping:
            self._empty.append(mapping)
            return
        self._mappings.append(mapping)
        self._keys.append(tuple(mapping))
        same = [key for key in keys if not read or _is_read(mapping[key])]
        self._same.add(mapping, same, [mapping[key] for key in same])
        others = [key for key in keys if read and not _is_read(mapping[key])]
        self._of_type.add(mapping, others, [type(mapping[key]) for key in others])

    def _collect(self, value: Any, depth: int) -> None:
        inner = value if type(value) is tuple else inside(value)
        if inner is None or depth > _DEEPEST:
            if is_generator(value):
                self._is_volatile = True
                self.values.append(generator_state(value))
            return
        if id(inner) in self._visited:
            return
        self._visited.add(id(inner))
        self.values.append(len(inner))
        items = list(inner.values() if isinstance(inner, dict) else _last_of(inner)) if inner else []
        if isinstance(inner, dict):
            self._keep_entries(inner, list(inner))
        elif type(inner) is not tuple:
            self._sequences.append((inner, len(inner), _marks(items)))
        for item in items:
            if type(item) in PLAIN:
                self.values.append(item)
            elif isinstance(item, Tensor):
                self._is_volatile = True  # its container is not kept, which would keep it from being freed
            else:
                self._collect(item, depth + 1)


class _Entries:
    """Some entries of mappings, fetched without Python code for each: an attribute costs 30 ns.

    Attributes:
        wanted: What is compared with each entry.
    """

    def __init__(self) -> None:
        self.wanted: list[Any] = []
        self._getters, self._mappings = list[Any](), list[Any]()

    def add(self, mapping: Any, keys: Sequence[Any], wanted: Sequence[Any]) -> None:
        """Take one more mapping, with what is wanted at some of its keys."""
        if keys:
            self._mappings.append(mapping)
            self._getters.append(itemgetter(*keys, keys[0]))  # of one key it would be no tuple
            self.wanted += [*wanted, wanted[0]]

    def now(self) -> Iterator[Any]:
        """The present entries of all mappings, which have these keys."""
        return chain.from_iterable(map(itemgetter.__call__, self._getters, self._mappings))


def _is_read(value: Any) -> bool:
    return type(value) in PLAIN or type(value) is tuple or inside(value) is not None


def _marks(items: Sequence[Any]) -> list[Any]:
    return [item if _is_read(item) else type(item) for item in items]


def _last_of(sequence: Any) -> Any:
    return sequence[-_LAST:] if isinstance(sequence, list) else list(sequence)


class UnguardedReads:
    """Collects the unguarded reads of one recording of a step.

    Attributes:
        first: Description of the first one, for messages; empty if there is none.
        of_batch: Whether one is of the content of the batch.
    """

    def __init__(self) -> None:
        self.first, self.of_batch = "", False

    def add(self, description: str, *, of_batch: bool = False) -> None:
        """Record an unguarded read."""
        self.first, self.of_batch = self.first or description, self.of_batch or of_batch

    def track_arguments(self, batch: Any, rest: Sequence[Any]) -> list[Any]:
        """Record non-tensors in the batch as read; return the other arguments, the number of the batch tracked."""
        for leaf in flatten(batch)[0]:
            if not isinstance(leaf, Tensor | bool | None):
                self.add(f"a {type(leaf).__name__} in the batch", of_batch=True)
        # C code that takes it as an index (a list, `operator.index`) reads it unseen: such a step may leave its trace.
        number = [TrackedInt(each, self) if type(each) is int else each for each in rest[:1]]
        return [*number, *rest[1:]]

    @contextlib.contextmanager
    def watching(self, root: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Record the reads of a step of ``root`` that runs inside; ``modules`` are those whose code is glue."""
        generators, state = _generator_states(), plain_state(modules)
        with self._trainer_watched(root):
            yield
        if _generator_states() != generators:
            self.add("random numbers of Python or numpy")
        if plain_state(modules) != state:
            self.add("attributes that it changes")

    @contextlib.contextmanager
    def _trainer_watched(self, root: nn.Module) -> Iterator[None]:
        """Wrap the property of the root's class: `self.trainer`, also as read by others such as `self.global_step`."""
        owner: Any = next((c for c in type(root).__mro__ if isinstance(vars(c).get("trainer"), property)), None)
        if owner is None:
            yield
            return
        original: property = vars(owner)["trainer"]

        def trainer(module: Any) -> Any:
            self.add("the trainer")
            assert original.fget is not None
            return original.fget(module)

        watched = property(trainer, original.fset, original.fdel)
        with replaced(owner, "trainer", watched, reason="guards: a step reads the trainer"):
            yield


def _generator_states() -> Any:
    _, keys, position, *_ = numpy.random.get_state()
    return random.getstate(), numpy.asarray(keys).tobytes(), position


class TrackedInt(int):
    """An integer that records when anything is computed from it or branches on it."""

    _unguarded_reads: UnguardedReads

    def __new__(cls, number: int, unguarded_reads: UnguardedReads) -> TrackedInt:
        """Make it of ``number``; ``unguarded_reads`` records the reads."""
        self = super().__new__(cls, number)
        self._unguarded_reads = unguarded_reads
        return self

    def _record(self) -> None:
        self._unguarded_reads.add("a number that it is given, such as batch_idx")

    def __reduce__(self) -> Any:
        """Pickle or copy as an ordinary number, whose reads cannot be recorded."""
        self._record()
        return int, (int.__index__(self),)


def _tracked(name: str) -> Callable[..., Any]:
    original = getattr(int, name)

    def method(self: TrackedInt, *others: Any) -> Any:
        self._record()
        return original(self, *others)

    return method


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor", "lshift", "rshift")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY = ("hash", "bool", "index", "int", "float", "str", "neg", "pos", "abs", "invert")
_ROUNDING = ("round", "trunc", "floor", "ceil")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_COMPARISONS, *_UNARY, *_ROUNDING):
    setattr(TrackedInt, f"__{_name}__", _tracked(f"__{_name}__"))
