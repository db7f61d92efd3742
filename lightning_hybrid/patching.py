"""Temporary replacement of attributes of users' objects, which copies and pickles of these objects do not contain.

A replacement is stored in the ``__dict__`` of one object. If that object is copied or pickled, the original attribute
is restored; a reference to the replacement elsewhere becomes the attribute of that name of the copy. So a loaded pickle
needs nothing of this package.
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
    """A torch hook that is registered on a user's module during a run; pickles of the module do not contain it."""


class Replacement(functools.partial[Any]):
    """The replacement of one attribute of one object.

    Attributes:
        owner: The object.
        name: Name of the attribute.
        own: The previous value in the object's ``__dict__``.
        is_undone: Whether it was undone while a later replacement of the same attribute still calls it.
    """

    owner: Any
    name: str
    own: Any
    is_undone: bool
    __wrapped__: Any

    def __new__(cls, owner: Any, name: str, function: Callable[..., Any], original: Any) -> Replacement:
        """Args: owner, name: object and attribute. function: called instead. original: gives the signature."""
        self = _partial(cls, function)
        # A single update, for speed: layers get replacements in each step.
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
        """Restore the previous attribute; if a later replacement calls this one, call the original from now on."""
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
        """Forward other attributes (names, code, marks) to the function."""
        return getattr(self.func, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the attribute of the owner's copy, or to the previous value if there is one."""
        del protocol
        own = _own_value(self)
        if own is _NOTHING:
            return getattr, (self.owner, self.name)
        return operator.itemgetter(0), ((own,),)


def replace(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replace one function of one object.

    Args:
        owner: The object; other instances of its class are unchanged.
        name: Name of the attribute.
        function: Called in its place, with the same arguments. `inspect.signature` gives that of the original.

    Returns:
        A function that restores the previous attribute.
    """
    replacement = owner.__dict__[name] = Replacement(owner, name, function, getattr(owner, name, None))
    return replacement.put_back


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Context in which one function of one object is replaced, as by ``replace``."""
    undo = replace(owner, name, function)
    try:
        yield
    finally:
        undo()


def temporary_hook(module: Any, function: Callable[..., Any]) -> TemporaryHook:
    """Make a hook to be registered on a module during a run."""
    keep_clean(type(module))
    return TemporaryHook(function)


def keep_clean(kind: type) -> None:
    """Make copies and pickles of objects of exactly this class omit the replacements and hooks of this file.

    A class that has registered its own reduction with `copyreg` keeps it.
    """
    copyreg.dispatch_table.setdefault(kind, _reduced)


def reduced_as(own: type) -> Callable[[Any, Any], Any]:
    """Make the ``__reduce_ex__`` of a class that replaces an object's class: copies and pickles get class ``own``."""

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
    """Reduce an object by its class's own methods, with its original attributes."""
    # A copy may be sharded like the original, and its hooks refuse values that it does not have; a pickle is full.
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
    """The attribute of the user's object before the first of several replacements."""
    while isinstance(value, Replacement):
        value = value.own
    return value


def _is_temporary(hook: Any) -> bool:
    return isinstance(getattr(hook, "hook", hook), TemporaryHook)  # torch wraps some
