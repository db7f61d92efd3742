"""The function mode of a tensor-parallel region, from a column-parallel linear to the row-parallel one.

A value is *sharded* if an operand of its operation is: each rank holds other features of it; over tensor ranks, or over
tensor ranks times context ranks where these exchanged positions for features. The mode follows sharded values through
the user's code and rewrites operations whose code assumes full sizes:

- a replicated operand beside a sharded one enters the region, so that its gradient is summed over ranks;
- one with a dim of full size (a position bias for each head, the weight of a norm over channels) is sliced;
- sizes and offsets computed from full sizes (`view(B, T, n_head, C // n_head)`) are divided.

While learning it decides by the shapes, which are chosen so that only features can be divided, and records a rule for
each call of the user's code. Afterwards it follows the rules, whatever the shapes. Calls on outputs of different
linears are different ones, also on one line: queries, keys and values may have different numbers of heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hybrid.errors import CannotShard
from lightning_hybrid.params.placement import Shard
from lightning_hybrid.randomness.generators import draws
from lightning_hybrid.step.objects.names import names
from lightning_hybrid.tensor.collectives import Ranks
from lightning_hybrid.tensor.plan import Rule, Site
from lightning_hybrid.tensor.region import BROADCAST, linear_of, mark, mark_all, sharded_over, site_of_call, tensors_in

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_QUERIES = names("size dim numel stride is_contiguous is_floating_point __len__ requires_grad_")
_VIEWS = frozenset({"view", "reshape"})
_CHANNELS = frozenset({"batch_norm", "group_norm", "instance_norm", "prelu"})
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
# The position and the name of the number of groups.
_GROUPS_AT = {"group_norm": (1, "num_groups"), **dict.fromkeys(_CONVOLUTIONS, (6, "groups"))}
_REWRITTEN = _VIEWS | _CONVOLUTIONS | {"unflatten", "expand", "group_norm", "split", "narrow", "__getitem__"}
_ATTENTION = "scaled_dot_product_attention"
_BATCHED = "baddbmm"  # its addend has batch and heads in one dim


class RegionMode(TorchFunctionMode):
    """The function mode that is active while one rank runs a unit sharded.

    Attributes:
        rules: The rewriting at each call; filled while learning.
        inside: Names of replicated parameters that were operands beside a sharded value.
        outside: Names of parameters that were used elsewhere.
        sliced: Parameters and buffers that were sliced along a dim: name -> dim.
        entered: Whether a value that is no parameter entered the region at an operation.
        drew: Whether random numbers were drawn for a sharded value.
    """

    def __init__(
        self,
        *,
        learning: bool,
        rules: dict[Site, Rule],
        enter: Callable[[Tensor, Ranks], Tensor],
        names: dict[int, str],  # of the unit's parameters and buffers, by id
        cut_ids: Mapping[int, int],  # number of ranks of the sharded ones among them, by id
        regions: Iterable[Ranks],  # that features are sharded over: the tensor ranks, and those times context ranks
        batch: int,  # the first size of the unit's first input
        around_draw: Callable[[], AbstractContextManager[Any]],
        positions: tuple[Collection[int], int] | None = None,  # numbers that values in regions may have; the local one
    ) -> None:
        """Makes the mode of one forward; ``enter`` lets a replicated value enter a region, once for each value."""
        super().__init__()
        self._learning, self.rules = learning, rules
        self._enter, self._names, self._cut_ids, self._around_draw = enter, names, cut_ids, around_draw
        self._regions = {ranks.size: ranks for ranks in regions}
        self._over = Ranks()  # that the values of the current operation are sharded over
        self._batch, self._positions = batch, positions
        self.inside: set[str] = set()
        self.outside: set[str] = set()
        self.sliced: dict[str, int] = {}
        self.entered = False
        self.drew = False
        self._paused = False

    @contextlib.contextmanager
    def bypassed(self) -> Iterator[None]:
        """Rewrite no operations of sharded linears inside."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if self._paused or name in _QUERIES:
            return func(*args, **kwargs)
        if name == "__get__":
            value, size = func(*args, **kwargs), self._size_of(args[0])
            return mark_all(value, size) if size else value
        tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
        sharded = [tensor for tensor in tensors if self._size_of(tensor)]
        if not sharded:
            self.outside.update(self._names[id(tensor)] for tensor in tensors if id(tensor) in self._names)
            return func(*args, **kwargs)
        size = self._size_of(sharded[0]) if len(sharded) == 1 else self._common_size(sharded)
        self._over = self._regions[size]
        if name in _REWRITTEN:
            args, kwargs = self._with_local_sizes(name, args, kwargs)
        in_place = _is_in_place(name)
        if len(sharded) < len(tensors):
            args, kwargs = self._with_replicated_operands(name, args, kwargs, sharded, in_place=in_place)
        if draws(name, args, kwargs):
            self.drew = True
            with self._around_draw():
                return mark_all(func(*args, **kwargs), size)
        out = mark_all(func(*args, **kwargs), size)
        if in_place and isinstance(args[0], Tensor):
            mark(args[0], size)
        return out

    def _size_of(self, tensor: Tensor) -> int:
        return self._cut_ids.get(id(tensor)) or sharded_over(tensor)

    def _common_size(self, sharded: list[Tensor]) -> int:
        """The number of ranks that all of these values are sharded over."""
        sizes = {self._size_of(tensor) for tensor in sharded}
        if len(sizes) > 1:
            raise CannotShard(
                f"one operation has features sharded over {min(sizes)} and over {max(sizes)} ranks, context ranks"
                " among them",
                entry="unproved-code",
            )
        return sizes.pop()

    # --- replicated operands beside a sharded one ---------------------------------------------------------------------

    def _with_replicated_operands(
        self, name: str, args: Args, kwargs: Kwargs, sharded: list[Tensor], in_place: bool
    ) -> tuple[Args, Kwargs]:
        """Arguments of an operation in a region: the replicated ones enter, those with all features are sliced."""
        reference = self._reference(name, args, sharded)
        written = args[0] if in_place and args and isinstance(args[0], Tensor) else None

        def operand(value: Any) -> Any:
            if isinstance(value, Tensor):
                is_local = value is written or self._size_of(value)
                return value if is_local else self._replicated_operand(name, value, reference)
            if type(value) in (tuple, list):
                return type(value)(operand(item) for item in value)
            return value

        return tuple(operand(value) for value in args), {key: operand(value) for key, value in kwargs.items()}

    def _reference(self, name: str, args: Args, sharded: list[Tensor]) -> tuple[int, ...]:
        """The shape that replicated operands are compared with; empty where none is expected to match."""
        if name == _ATTENTION:
            return (*args[0].shape[:-1], 0)
        if name in _CHANNELS or name in _CONVOLUTIONS:
            return tuple(args[0].shape)
        if name == _BATCHED:
            return (len(sharded[0]),)
        if name in BROADCAST:
            return tuple(torch.broadcast_shapes(*(tensor.shape for tensor in sharded)))
        return ()

    def _replicated_operand(self, name: str, value: Tensor, reference: tuple[int, ...]) -> Tensor:
        parameter = self._names.get(id(value))
        dims = self._sliced_dims(name, value, reference, parameter or "")
        if value.requires_grad and torch.is_grad_enabled():
            inside = self._enter(value, self._over)
            self.entered |= parameter is None and inside is not value
            value = inside
        if parameter is not None:
            if dims and self.sliced.setdefault(parameter, dims[0]) != dims[0]:
                raise CannotShard(f"{parameter} is sliced along different dims", entry="unproved-code")
            if not dims:
                self.inside.add(parameter)
        for dim in dims:
            if name == _BATCHED:  # batch and heads are one dim, batch outermost
                value = value.unflatten(0, (self._batch, -1)).chunk(self._over.size, 1)[self._over.rank].flatten(0, 1)
            else:
                value = value.chunk(self._over.size, dim)[self._over.rank]
        return value

    def _sliced_dims(self, name: str, value: Tensor, reference: tuple[int, ...], parameter: str) -> tuple[int, ...]:
        if not reference or value.dim() == 0:
            return ()
        if name in _CHANNELS or name in _CONVOLUTIONS:
            channels = reference[1] * self._over.size
            return (0,) if value.shape[0] % channels == 0 and value.shape[0] > 1 else ()
        key = self._site(name, "side", str(value.dim()), parameter)
        if name == _BATCHED and self._learning:
            merged = self._batch * self._over.size
            fits = len(value) == reference[0] * self._over.size and len(value) % merged == 0
            self._add_rule(key, (0,) if fits else None)
        if not self._learning or name == _BATCHED:
            rule = self.rules.get(key) or ()
            return tuple(int(dim) for dim in rule if isinstance(dim, int))
        dims = tuple(
            -k
            for k in range(1, min(value.dim(), len(reference)) + 1)
            if value.shape[-k] == reference[-k] * self._over.size and value.shape[-k] > 1
        )
        self._add_rule(key, dims or None)
        return dims

    # --- sizes and offsets computed from full sizes -------------------------------------------------------------------

    def _with_local_sizes(self, name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if not args or not isinstance(args[0], Tensor) or not self._size_of(args[0]):
            return args, kwargs
        tensor = args[0]
        if name in _VIEWS and len(args) > 1:
            sizes = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
            if all(type(size) is int for size in sizes):
                sizes = self._with_all_positions(name, tensor, tuple(sizes))
                return (tensor, self._view(name, tensor, tuple(tensor.shape), sizes)), kwargs
        if name == "unflatten" and len(args) == 3 and all(type(size) is int for size in args[2]):
            return (tensor, args[1], self._view(name, tensor, (tensor.shape[args[1]],), tuple(args[2]))), kwargs
        if name == "expand" and len(args) > 1:
            sizes = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
            sizes = self._with_all_positions(name, tensor, tuple(sizes))
            return (tensor, self._expand(tensor, list(sizes))), kwargs
        if name in _GROUPS_AT:
            return self._with_local_groups(name, args, kwargs)
        return self._with_local_offsets(name, args, kwargs)

    def _with_all_positions(self, name: str, tensor: Tensor, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Replaces a size that code computed from the local positions by the number of positions of the value."""
        if self._positions is None:
            return sizes
        old, (lengths, local) = tuple(tensor.shape), self._positions
        key = self._site(name, "positions", str(len(sizes)), linear_of(tensor))
        if self._learning:
            found = find_positions(old, sizes, lengths, local, same_dims=name == "expand")
            self._add_rule(key, None if found is None else ("positions", *found))
        rule = self.rules.get(key)
        if rule is None:
            return sizes
        index, dim = int(str(rule[1])), int(str(rule[2]))
        return (*sizes[:index], old[dim], *sizes[index + 1 :])

    def _view(self, name: str, tensor: Tensor, old: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
        key = self._site(name, "view", str(len(sizes)), linear_of(tensor))
        numel, wanted = prod(old), prod(size for size in sizes if size != -1)
        fits = numel % wanted == 0 if -1 in sizes else numel == wanted
        if not self._learning:
            if key not in self.rules:
                raise CannotShard(
                    f"{name}{sizes} of a value of local shape {old} at {_where(key)} did not run when the unit's plan "
                    "was proved, so the meaning of its sizes is unknown",
                    entry="unproved-code",
                )
            rule = self.rules[key]
            if rule is None:
                return sizes
            index, ratio = int(str(rule[0])), int(str(rule[1]))
            return (*sizes[:index], sizes[index] // ratio, *sizes[index + 1 :])
        if fits:
            self._add_rule(key, None)
            return sizes
        ratio = self._over.size if -1 in sizes else wanted // numel
        if -1 not in sizes and wanted != numel * ratio:
            return sizes  # torch raises an error that explains it
        first = 0
        while first < min(len(sizes), len(old) - 1) and sizes[first] == old[first]:
            first += 1
        for index in range(first, len(sizes)):
            if sizes[index] > 0 and sizes[index] % ratio == 0:
                self._add_rule(key, (index, ratio))
                return (*sizes[:index], sizes[index] // ratio, *sizes[index + 1 :])
        return sizes

    def _expand(self, tensor: Tensor, sizes: list[int]) -> list[int]:
        """A dim that is not 1 must be requested as it is; the full size can only mean the local one."""
        for k in range(1, tensor.dim() + 1):
            if tensor.shape[-k] != 1 and sizes[-k] == tensor.shape[-k] * self._over.size:
                self.rules[self._site("expand")] = ("expand",)
                sizes[-k] = tensor.shape[-k]
        return sizes

    def _with_local_groups(self, name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        place, key = _GROUPS_AT[name]
        groups = args[place] if len(args) > place else kwargs.get(key, 1)
        if groups == 1 and name in _CONVOLUTIONS:
            return args, kwargs
        if groups % self._over.size:
            raise CannotShard(
                f"{name} has {groups} groups, which {self._over.size} ranks cannot share", entry="unproved-code"
            )
        self.rules[self._site(name)] = ("groups",)
        if len(args) > place:
            return (*args[:place], groups // self._over.size, *args[place + 1 :]), kwargs
        return args, {**kwargs, key: groups // self._over.size}

    def _with_local_offsets(self, name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        tensor = args[0]
        column = getattr(tensor, "_column", None)
        if column is None:
            return args, kwargs
        placement, feature_dim = column
        if name == "split":
            dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
            sections = args[1] if len(args) > 1 else kwargs["split_size"]
            if dim % tensor.dim() - tensor.dim() == feature_dim:
                self.rules[self._site(name)] = ("offsets",)
                return (tensor, local_sections(placement, sections)), {"dim": dim}
        if name == "narrow" and args[1] % tensor.dim() - tensor.dim() == feature_dim:
            self.rules[self._site(name)] = ("offsets",)
            start, stop = (local_offset(placement, offset) for offset in (args[2], args[2] + args[3]))
            return (tensor, args[1], start, stop - start), kwargs
        if name == "__getitem__":
            index = local_index(args[1], tensor.dim(), placement, feature_dim)
            if index is not None:
                self.rules[self._site(name)] = ("offsets",)
                return (tensor, index), kwargs
        return args, kwargs

    # --- rules --------------------------------------------------------------------------------------------------------

    def _add_rule(self, key: Site, rule: Rule) -> None:
        if self.rules.setdefault(key, rule) != rule:
            raise CannotShard(
                f"one call, {_where(key)}, needs two different rewritings of its sizes", entry="unproved-code"
            )

    def _site(self, *operation: str) -> Site:
        return site_of_call(*operation)


def _where(site: Site) -> str:
    file, line = next((item for item in site if isinstance(item, tuple)), ("?", 0))
    return f"{file}:{line}"


def _is_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__",))
    return name.endswith("_")


def local_offset(placement: Shard, offset: int) -> int:
    """Converts an offset into the full dim to an offset into a rank's shard."""
    local = placement.local_offset(offset)
    if local is None:
        raise CannotShard(
            f"offset {offset} falls inside a shard of a projection of {placement.length} features",
            entry="unproved-code",
        )
    return local


def local_sections(placement: Shard, sections: int | list[int] | tuple[int, ...]) -> list[int]:
    """Converts the sections of a ``split`` of the full dim to sections of a rank's shard."""
    if isinstance(sections, int):
        full = placement.length
        sections = [min(sections, full - start) for start in range(0, full, sections)]
    elif sum(sections) != placement.length:
        raise CannotShard(
            f"sections {list(sections)} do not fill a projection of {placement.length} features", entry="unproved-code"
        )
    bounds = [local_offset(placement, sum(sections[:k])) for k in range(len(sections) + 1)]
    return [stop - start for start, stop in pairwise(bounds)]


def local_index(index: Any, num_dims: int, placement: Shard, feature_dim: int) -> Any | None:
    """Converts an index that slices full features, in a dim from the end, to local ones; None if it slices none."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, Tensor) or item is None for item in items):
        return None
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (num_dims - len(items) + 1)
    dim = num_dims + feature_dim
    if dim >= len(items) or not isinstance(items[dim], slice):
        return None
    wanted = items[dim]
    if wanted.step not in (None, 1) or (wanted.start is None and wanted.stop is None):
        return None
    start, stop, _ = wanted.indices(placement.length)
    items[dim] = slice(local_offset(placement, start), local_offset(placement, stop))
    return tuple(items)


def find_positions(
    old: tuple[int, ...], sizes: tuple[int, ...], lengths: Collection[int], local: int, *, same_dims: bool
) -> tuple[int, int] | None:
    """Finds the index in the requested sizes that means positions, and the dim of the old shape that has all of them.

    Code computes sizes from the ``local`` number of positions; values in regions have one of ``lengths``. Dims stay
    what they are, counted from the end (``expand``), or else they are split and joined.
    """
    found = []
    for index, size in enumerate(sizes):
        for dim, have in enumerate(old):
            if size != local or have not in lengths or have == local:
                continue
            if same_dims and len(sizes) - index == len(old) - dim:
                return index, dim
            is_explained = index < len(old) and index != dim and old[index] == size  # the batch, say
            if not same_dims and not is_explained and (index == dim or _fits(old, sizes, index, have)):
                found.append((index != dim, index, dim))
    return min(found)[1:] if found else None


def _fits(old: tuple[int, ...], sizes: tuple[int, ...], index: int, length: int) -> bool:
    """Whether the value has as many elements as requested with this length; or a multiple: of all heads, say."""
    wanted = prod(size for size in (*sizes[:index], length, *sizes[index + 1 :]) if size != -1)
    return prod(old) % wanted == 0 if -1 in sizes else wanted % prod(old) == 0
