"""Guards of a trace: what a step looks at that may be another one in the next batch.

While a step is recorded, it is noted whether its Python asks for anything of this kind: the number of the batch, the
trainer (its steps and epochs), random numbers, the content of the batch, attributes that it changes itself. A step
that asks for none of it does the same as long as the plain attributes around its units stay as they are.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy
from torch import Tensor, nn

from lightning_hybrid.step.module_state.snapshot import PLAIN, generator_state, inside, is_generator, is_state
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.tracing.metric_nodes import find_sinks

# Of a longer list only the length and the last entries are looked at.
_LAST = 16
_DEEPEST = 4
# Hooks around a forward may be part of what the step does; other attributes that every module has are not.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_forward_hooks", "_forward_pre_hooks"}


class Looks:
    """Collects what one recording of a step looks at.

    Attributes:
        first: The first such thing, for messages; empty if there is none.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.first = ""

    def note(self, what: str) -> None:
        """Note one."""
        self.first = self.first or what

    def given(self, batch: Any, rest: Sequence[Any]) -> list[Any]:
        """Arguments of a step that tell when they are looked at; what the batch holds beside tensors is taken as such.

        Args:
            batch: The first argument.
            rest: The others; whole numbers among them are watched.
        """
        for leaf in flatten(batch)[0]:
            if not isinstance(leaf, Tensor | bool | None):
                self.note(f"a {type(leaf).__name__} in the batch")
        return [NotedInt(argument, self) if type(argument) is int else argument for argument in rest]

    @contextlib.contextmanager
    def during(self, root: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Note what the step inside looks at, as far as this is seen from outside.

        Args:
            root: The user's module.
            modules: Those whose attributes are looked at by the step itself.
        """
        drawn, state = _drawn(), plain_state(modules)
        with self._trainer_watched(root):
            yield
        if _drawn() != drawn:
            self.note("random numbers of Python or numpy")
        if plain_state(modules) != state:
            self.note("attributes that it changes")

    @contextlib.contextmanager
    def _trainer_watched(self, root: nn.Module) -> Iterator[None]:
        """Through the property of the root's class: `self.trainer`, and what goes there, such as `self.global_step`."""
        owner: Any = next((c for c in type(root).__mro__ if isinstance(vars(c).get("trainer"), property)), None)
        if owner is None:
            yield
            return
        original: property = vars(owner)["trainer"]

        def trainer(module: Any) -> Any:
            self.note("the trainer")
            assert original.fget is not None
            return original.fget(module)

        owner.trainer = property(trainer, original.fset, original.fdel)
        try:
            yield
        finally:
            owner.trainer = original


def modules_around(root: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules whose code is glue, by FQN: those that lie in no unit and no metric."""
    inside_units = {part for outer in (*units.values(), *find_sinks(root).values()) for part in outer.modules()}
    return {fqn: module for fqn, module in root.named_modules() if module not in inside_units}


def _drawn() -> Any:
    _, keys, position, *_ = numpy.random.get_state()
    return random.getstate(), numpy.asarray(keys).tobytes(), position


def plain_state(modules: Sequence[nn.Module]) -> list[Any]:
    """The numbers, strings, lengths and generators in the attributes of modules; equal while they stay as they are."""
    found: list[Any] = []
    seen: set[int] = set()  # layers share what configures them
    for module in modules:
        for name, value in module.__dict__.items():
            if name in _OF_EVERY_MODULE or not is_state(name):
                continue
            if type(value) in PLAIN:
                found.append(value)
            else:
                _look_into(value, found, seen, 0)
    return found


def _look_into(value: Any, found: list[Any], seen: set[int], depth: int) -> None:
    inner = value if type(value) is tuple else inside(value)
    if inner is None or depth > _DEEPEST:
        if is_generator(value):
            found.append(generator_state(value))
        return
    if id(inner) in seen:
        return
    seen.add(id(inner))
    found.append(len(inner))
    items = list(inner.values() if isinstance(inner, dict) else inner) if inner else []
    for item in items[-_LAST:] if isinstance(inner, list) else items:
        if type(item) in PLAIN:
            found.append(item)
        elif not isinstance(item, Tensor):
            _look_into(item, found, seen, depth + 1)


class NotedInt(int):
    """A whole number that tells when anything is computed from it or decided by it."""

    _looks: Looks
    _noting: ClassVar[tuple[str, ...]] = (
        *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__bool__", "__index__", "__int__"),
        *(
            "__float__",
            "__neg__",
            "__pos__",
            "__abs__",
            "__invert__",
            "__round__",
            "__trunc__",
            "__floor__",
            "__ceil__",
        ),
        *("__add__", "__sub__", "__mul__", "__truediv__", "__floordiv__", "__mod__", "__divmod__", "__pow__"),
        *("__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "__radd__", "__rsub__", "__rmul__"),
        *("__rtruediv__", "__rfloordiv__", "__rmod__", "__rdivmod__", "__rpow__", "__rand__", "__ror__", "__rxor__"),
        *("__rlshift__", "__rrshift__"),
    )

    def __new__(cls, number: int, looks: Looks) -> NotedInt:
        """Args: number: the number. looks: who is told."""
        self = super().__new__(cls, number)
        self._looks = looks
        return self

    def __reduce__(self) -> Any:
        """A copy is an ordinary number; whoever has one may look at it unseen."""
        self._looks.note("a number that it is given, such as batch_idx")
        return int, (int.__index__(self),)


def _noting(name: str) -> Callable[..., Any]:
    original = getattr(int, name)

    def method(self: NotedInt, *others: Any) -> Any:
        self._looks.note("a number that it is given, such as batch_idx")
        return original(self, *others)

    return method


for _name in NotedInt._noting:
    setattr(NotedInt, _name, _noting(_name))
