"""Temporary replacement of attributes: of users' objects, of classes, and of Python modules.

``replace`` and ``around`` return a function that undoes one replacement. Several may be on one attribute, and be undone
in any order; after the last one the owner has what it had, also where its ``__dict__`` had nothing. Two more changes
are undone and listed alike: another class of an object (``switch_class``), and warnings that Python leaves out
(``ignore_warnings``). ``active_patches`` lists what is replaced now.

Copies and pickles of an object do not contain its replacements: the original attribute is restored, and a reference to
a replacement elsewhere becomes the attribute of that name of the copy. A loaded pickle needs nothing of this package.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import operator
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, NamedTuple

MARK = "_hybrid"  # begins the name of each attribute that this package adds to objects of users
_NOTHING = object()
_partial = functools.partial.__new__


class Patch(NamedTuple):
    """Description of one attribute that is replaced now."""

    owner: str
    name: str
    reason: str


class TemporaryHook(functools.partial[Any]):
    """A torch hook that is registered on a user's module during a run; pickles of the module do not contain it."""


class Replacement(functools.partial[Any]):
    """The replacement of one function of one object."""

    owner: Any  # the object
    name: str  # name of the attribute
    own: Any  # the previous value in the object's ``__dict__``
    reason: str  # why it is replaced, for ``active_patches``
    is_undone: bool  # whether it was undone while a later replacement of the same attribute still calls it
    __wrapped__: Any

    def __new__(cls, owner: Any, name: str, function: Callable[..., Any], original: Any, *, reason: str) -> Any:
        """Stand in for ``name`` of ``owner``, with the signature of ``original``."""
        self = _partial(cls, function)
        # A single update, for speed: layers get replacements in each step.
        self.__dict__.update(
            owner=owner,
            name=name,
            own=owner.__dict__.get(name, _NOTHING),
            reason=reason,
            is_undone=False,
            __wrapped__=original,
            __module__=getattr(original, "__module__", None),
        )
        if type(owner) not in copyreg.dispatch_table:
            keep_clean(type(owner))
        return self

    def put_back(self) -> None:
        """Restore the previous attribute; if a later replacement calls this one, call the original from now on."""
        _functions.pop(id(self), None)
        if self.owner.__dict__.get(self.name) is not self:
            self.is_undone = True
            if callable(self.__wrapped__):
                self.__setstate__((self.__wrapped__, (), {}, self.__dict__))  # from now on it calls the original
        else:
            _set_own(self.owner, self.name, self.own)

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


class _MethodAround(Replacement):
    """A replacement by ``around_method``, which deep copies of the owner have as a method of theirs."""

    around: Callable[..., Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner, below = copy.deepcopy(self.owner, memo), _own_value(self.own, on_copy=True)
        of_class: Any = getattr(type(owner), self.name, None)
        original = of_class.__get__(owner) if below is _NOTHING else copy.deepcopy(below, memo)
        if self.is_undone:
            return original
        method = _method_around(owner, self.name, self.around, original, self.reason)
        method.own = below if below is _NOTHING else original  # the copy has no attributes yet
        return method


class _Value:
    """A replaced attribute of a class or a Python module, or a value that is no function on an object."""

    def __init__(self, owner: Any, name: str, value: Any, reason: str) -> None:
        self.owner, self.name, self.value, self.reason = owner, name, value, reason
        # From the __dict__: `getattr` gives a function that, put back on a class, might not be bound.
        self.own = vars(owner).get(name, _NOTHING)
        _values.setdefault((id(owner), name), []).append(self)
        _set_own(owner, name, value)

    def put_back(self) -> None:
        """Restore the previous attribute, or let a later replacement restore it."""
        key = (id(self.owner), self.name)
        layers = _values.get(key, [])
        if self not in layers:
            return
        place = layers.index(self)
        above = layers[place + 1] if place + 1 < len(layers) else vars(self.owner).get(self.name, _NOTHING)
        if above is self.value:
            _set_own(self.owner, self.name, self.own)
        while isinstance(above, _Value | Replacement):  # it restores what this one would
            if above.own is self.value:
                above.own = self.own
                break
            above = above.own
        del layers[place]
        if not layers:
            del _values[key]


# All that is replaced now: functions of objects by their id, other attributes by owner and name, the oldest first.
_functions: dict[int, Replacement] = {}
_values: dict[tuple[int, str], list[_Value]] = {}
# Other changes, by a key of their own.
_others: dict[object, Patch] = {}


def _set_own(owner: Any, name: str, own: Any) -> None:
    """Give an owner an attribute of its own, or take it away."""
    while isinstance(own, Replacement) and own.is_undone:
        own = own.own
    if not isinstance(owner, type):
        if own is _NOTHING:
            owner.__dict__.pop(name, None)
        else:
            owner.__dict__[name] = own
    elif own is _NOTHING:
        delattr(owner, name)
    else:
        setattr(owner, name, own)


def active_patches() -> list[Patch]:
    """Describe all attributes that are replaced now, by ``replace`` and what is built on it."""
    layers: list[Replacement | _Value] = [*_functions.values()]
    for values in list(_values.values()):
        layers += values
    patches = [Patch(_described(layer.owner), layer.name, layer.reason) for layer in layers]
    return [*patches, *_others.values()]


def _described(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return f"module {owner.__name__}"
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{'class' if kind is owner else 'object of'} {kind.__module__}.{kind.__qualname__}"


def replace(owner: Any, name: str, value: Any, *, reason: str) -> Callable[[], None]:
    """Replace one attribute.

    Args:
        owner: An object, of whose class other instances are unchanged; a class; or a Python module.
        name: Name of the attribute.
        value: Takes its place. `inspect.signature` of a function of an object gives that of the original.
        reason: Why, for ``active_patches``.

    Returns:
        A function that undoes it; further calls do nothing.
    """
    if isinstance(owner, type | ModuleType):
        return _Value(owner, name, value, reason).put_back
    if not callable(value):
        keep_clean(type(owner))
        return _Value(owner, name, value, reason).put_back
    return _installed(Replacement(owner, name, value, getattr(owner, name, None), reason=reason))


def _installed(replacement: Replacement) -> Callable[[], None]:
    replacement.owner.__dict__[replacement.name] = replacement
    _functions[id(replacement)] = replacement
    return replacement.put_back


def switch_class(thing: Any, kind: type, *, reason: str) -> Callable[[], None]:
    """Give an object a subclass of its class, whose ``__reduce_ex__`` is `reduced_as` the class that it has now.

    Returns:
        A function that undoes it. The object is not kept alive.
    """
    own, key = type(thing), object()
    this = weakref.ref(thing, lambda _: _others.pop(key, None))

    def put_back() -> None:
        found = this()
        if _others.pop(key, None) is not None and found is not None:
            object.__setattr__(found, "__class__", own)

    _others[key] = Patch(_described(thing), "__class__", reason)
    object.__setattr__(thing, "__class__", kind)  # Lightning notes what is set in the hooks that make loaders
    return put_back


def ignore_warnings(message: str, category: type[Warning] = Warning, *, reason: str) -> Callable[[], None]:
    """Let Python leave out warnings whose text a regular expression matches; returns a function that undoes it."""
    key = object()
    # A comment in the expression makes the filter ours: undone, it leaves an equal one of the user's.
    warnings.filterwarnings("ignore", f"(?:{message})(?#{id(key)})", category)
    added = warnings.filters[0]

    def put_back() -> None:
        if _others.pop(key, None) is not None and added in warnings.filters:  # not where the user has reset all
            warnings.filters.remove(added)  # type: ignore[attr-defined]

    _others[key] = Patch(_described(warnings), "filters", reason)
    return put_back


def wraps(original: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As `functools.wraps`, with the marks of a function that was replaced: schedulers mark an optimizer's step."""
    while isinstance(original, Replacement):
        original = original.func
    return functools.wraps(original)


def around(owner: Any, name: str, function: Callable[..., Any], *, reason: str) -> Callable[[], None]:
    """Replace one function by one that calls it, as `replace` does.

    ``function`` is called with the original, then the arguments; of a class, the instance is the first of these.
    """
    original = getattr(owner, name)
    if not isinstance(owner, type | ModuleType):
        return replace(owner, name, functools.partial(function, original), reason=reason)
    called = [functools.partial(function, original)]

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return called[0](*args, **kwargs)

    undo = replace(owner, name, call, reason=reason)

    def leave() -> None:
        undo()
        called[0] = original  # a later replacement may still call this one

    return leave


def around_method(owner: Any, name: str, function: Callable[..., Any], *, reason: str) -> Callable[[], None]:
    """Replace one method of an object and of its deep copies by one that calls it, as `replace` does.

    ``function`` is called with the object, or its copy, and a function that runs the method on the arguments.
    """
    return _installed(_method_around(owner, name, function, getattr(owner, name), reason))


def _method_around(
    owner: Any, name: str, function: Callable[..., Any], original: Callable[..., Any], reason: str
) -> _MethodAround:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(owner, functools.partial(original, *args, **kwargs))

    method = _MethodAround(owner, name, call, original, reason=reason)
    method.around = function
    return method


def replaced(owner: Any, name: str, value: Any, *, reason: str) -> ReplacedAll:
    """Context in which one attribute is replaced, as by ``replace``."""
    return ReplacedAll([(owner, name, value)], reason=reason)


def replaced_forwards(
    modules: Mapping[str, Any], wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]], *, reason: str
) -> ReplacedAll:
    """Context in which the forward of each module is ``wrap(FQN, forward)``, on the instance and below its hooks.

    The signature is that of the user's forward, which transformers inspects before it generates.
    """
    return ReplacedAll(((m, "forward", wrap(fqn, m.forward)) for fqn, m in modules.items()), reason=reason)


class ReplacedAll(AbstractContextManager[None]):
    """Context in which attributes are replaced, once. A class, not a generator: it is entered for every step."""

    def __init__(self, patches: Iterable[tuple[Any, str, Any]], *, reason: str) -> None:
        self._patches, self._reason = patches, reason
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        try:
            for owner, name, value in self._patches:
                self._undo.append(replace(owner, name, value, reason=self._reason))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()


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
    on_copy = sys._getframe(1).f_globals.get("__name__") == copy.__name__
    given = thing.__reduce_ex__(4)
    if isinstance(given, str) or len(given) < 3:
        return given
    function, arguments, state, *rest = given
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):  # attributes and slots
        state = _own_attributes(thing, state[0], on_copy), state[1]
    elif isinstance(state, dict):
        state = _own_attributes(thing, state, on_copy)
    return function, arguments, state, *rest


def _own_attributes(thing: Any, attributes: dict[Any, Any], on_copy: bool) -> dict[Any, Any]:
    own = {}
    for name, value in attributes.items():
        if isinstance(name, str) and name.startswith(MARK):
            continue
        value, layers = _own_value(value, on_copy), _values.get((id(thing), name))
        if layers and value is layers[-1].value:
            value = _own_value(layers[0].own, on_copy)
        if value is _NOTHING:
            continue
        if not on_copy and isinstance(value, dict) and any(map(_is_temporary, value.values())):
            value = type(value)((key, hook) for key, hook in value.items() if not _is_temporary(hook))
        own[name] = value
    return own


def _own_value(value: Any, on_copy: bool = False) -> Any:
    """The attribute of the user's object before the first of several replacements; a copy has those by methods."""
    while isinstance(value, Replacement) and not (on_copy and isinstance(value, _MethodAround)):
        value = value.own
    return value


def _is_temporary(hook: Any) -> bool:
    return isinstance(getattr(hook, "hook", hook), TemporaryHook)  # torch wraps some
