"""Replace attributes of users' objects for the time of a run, so that copies and pickles of them never show it.

A replacement stands in the ``__dict__`` of one object. Where that object is copied or pickled, it has its own attribute
again; a reference to the replacement elsewhere becomes the attribute of that name of the copy. So what is loaded needs
nothing of this package.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

MARK = "_hybrid"  # begins the name of each attribute that this package adds to objects of users
_NOTHING = object()
_partial = functools.partial.__new__


class TemporaryHook(functools.partial[Any]):
    """A hook of torch that a user's module has for the time of a run; pickles of the module lack it."""


class Replacement(functools.partial[Any]):
    """What stands in the place of one attribute of one object.

    Attributes:
        owner: The object.
        name: Of the attribute.
        own: What the ``__dict__`` of the object had there.
        is_undone: Whether it was put back while another function of the same name called it.
    """

    owner: Any
    name: str
    own: Any
    is_undone: bool
    __wrapped__: Any

    def __new__(cls, owner: Any, name: str, function: Callable[..., Any], original: Any) -> Replacement:
        """Args: owner, name: of the attribute. function: what is called. original: whose signature it shows."""
        self = _partial(cls, function)
        # All at once: layers get some in each step.
        self.__dict__.update(
            owner=owner,
            name=name,
            own=owner.__dict__.get(name, _NOTHING),
            is_undone=False,
            __wrapped__=original,
            __module__=getattr(original, "__module__", None),
        )
        if type(owner) not in copyreg.dispatch_table:
            keep_clean(type(owner))
        return self

    def put_back(self) -> None:
        """Let the object have again what it had; others may have replaced this by a function that calls it."""
        if self.owner.__dict__.get(self.name) is not self:
            self.is_undone = True
            self.__setstate__((self.__wrapped__, (), {}, self.__dict__))  # from now on it calls the original
            return
        own = self.own
        while isinstance(own, Replacement) and own.is_undone:
            own = own.own
        if own is _NOTHING:
            self.owner.__dict__.pop(self.name, None)
        else:
            self.owner.__dict__[self.name] = own

    def __getattr__(self, name: str) -> Any:
        """Names, code and marks are those of the function."""
        return getattr(self.func, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Apart from its owner: the attribute of the copy of the owner."""
        del protocol
        own = _own_value(self)
        if own is _NOTHING:
            return getattr, (self.owner, self.name)
        return operator.itemgetter(0), ((own,),)


def replace(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Let one object have another function.

    Args:
        owner: The object; others of its class keep theirs.
        name: Of the attribute.
        function: Called in its place, with the same arguments. `inspect.signature` gives that of the original.

    Returns:
        Puts back what was there.
    """
    replacement = owner.__dict__[name] = Replacement(owner, name, function, getattr(owner, name, None))
    return replacement.put_back


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let one object have another function inside; as ``replace``."""
    undo = replace(owner, name, function)
    try:
        yield
    finally:
        undo()


def temporary_hook(module: Any, function: Callable[..., Any]) -> TemporaryHook:
    """A hook to be registered on a module for the time of a run."""
    keep_clean(type(module))
    return TemporaryHook(function)


def keep_clean(kind: type) -> None:
    """Let objects of exactly this class be copied and pickled without what this file puts on them.

    A class that brings its own function for pickles by `copyreg` keeps it.
    """
    copyreg.dispatch_table.setdefault(kind, _reduced)


def reduced_as(own: type) -> Callable[[Any, Any], Any]:
    """The ``__reduce_ex__`` of a class that takes the place of an object's own: copies and pickles have their own."""

    def reduced(thing: Any, protocol: Any) -> Any:
        del protocol  # in those after the first, pickle sees to it that the class stays
        this = type(thing)
        object.__setattr__(thing, "__class__", own)
        try:
            return thing.__reduce_ex__(1)
        finally:
            object.__setattr__(thing, "__class__", this)

    return reduced


def _reduced(thing: Any) -> Any:
    """What the object's own methods give to `copy` and `pickle`, with its own attributes."""
    # A copy may be in parts as the original is, and its hooks refuse what cannot be had of it; a pickle is full.
    hooks_stay = sys._getframe(1).f_globals.get("__name__") == copy.__name__
    given = thing.__reduce_ex__(4)
    if isinstance(given, str) or len(given) < 3:
        return given
    function, arguments, state, *rest = given
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):  # attributes and slots
        state = _own_attributes(state[0], hooks_stay), state[1]
    elif isinstance(state, dict):
        state = _own_attributes(state, hooks_stay)
    return function, arguments, state, *rest


def _own_attributes(attributes: dict[Any, Any], hooks_stay: bool) -> dict[Any, Any]:
    own = {}
    for name, value in attributes.items():
        if isinstance(name, str) and name.startswith(MARK):
            continue
        if isinstance(value, Replacement):
            value = _own_value(value)
            if value is _NOTHING:
                continue
        elif not hooks_stay and isinstance(value, dict) and any(map(_is_temporary, value.values())):
            value = type(value)((key, hook) for key, hook in value.items() if not _is_temporary(hook))
        own[name] = value
    return own


def _own_value(value: Any) -> Any:
    """What the user's object had before the first of several replacements."""
    while isinstance(value, Replacement):
        value = value.own
    return value


def _is_temporary(hook: Any) -> bool:
    return isinstance(getattr(hook, "hook", hook), TemporaryHook)  # torch wraps some
