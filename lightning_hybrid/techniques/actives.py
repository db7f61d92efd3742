"""The techniques of a run as one, while its steps run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from itertools import chain
from typing import Any

from lightning_hybrid.techniques.technique import Active


class Actives(Active):
    """Several techniques, from the outermost around a layer to the innermost.

    Each method calls those of its members that do something, so that a step pays for nothing else.
    """

    def __init__(self, members: Sequence[Active] = ()) -> None:
        self.members = tuple(members)
        self.reduces_gradients = any(each.reduces_gradients for each in members)
        self.can_roll_back = all(each.can_roll_back for each in members)
        self.guards_loaders = all(each.guards_loaders for each in members)
        self.replaces_layers = any(type(each).running is not Active.running for each in members)
        self._of: dict[str, list[Any]] = {}

    def _methods(self, name: str) -> list[Any]:
        """The methods of this name that do something, the innermost technique's first."""
        if name not in self._of:
            members = [each for each in self.members if getattr(type(each), name) is not getattr(Active, name)]
            self._of[name] = [getattr(each, name) for each in reversed(members)]
        return self._of[name]

    @property
    def groups(self) -> Sequence[Any]:
        """Those of all."""
        return [group for each in self.members for group in each.groups]

    @property
    def regions(self) -> dict[int, Any]:
        """Those of all."""
        return dict(chain.from_iterable(each.regions.items() for each in self.members))

    @cached_property
    def of_steps(self) -> Actives:
        """The members whose layers run so while a training step runs."""
        return Actives([each for each in self.members if not each.keeps_compiled])

    @cached_property
    def until_backward(self) -> Actives:
        """The members whose layers run so in evaluation too, and until the backward is over."""
        return Actives([each for each in self.members if each.keeps_compiled])


@contextmanager
def _entered(methods: Collection[Callable[..., AbstractContextManager[Any]]], args: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for method in methods:
            stack.enter_context(method(*args))
        yield


def _context_of_all(name: str) -> Callable[..., AbstractContextManager[Any]]:
    """Return the method that enters the context of each member, the innermost technique's first."""

    def around(self: Actives, *args: Any) -> AbstractContextManager[Any]:
        methods = self._methods(name)
        if len(methods) < 2:
            return methods[0](*args) if methods else nullcontext()
        return _entered(methods, args)

    return around


def _call_of_all(name: str) -> Callable[..., None]:
    """Return the method that calls each member, the innermost technique first."""

    def call(self: Actives, *args: Any) -> None:
        for method in self._methods(name):
            method(*args)

    return call


for _name, _method in vars(Active).items():
    if callable(_method):
        _is_context = str(_method.__annotations__["return"]).startswith("AbstractContextManager")
        setattr(Actives, _name, (_context_of_all if _is_context else _call_of_all)(_name))
