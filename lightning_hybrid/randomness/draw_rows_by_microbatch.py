"""Random draws of a full batch that are those of its microbatches, row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_ATTENTION = "multi_head_attention_forward"
_BY_SHAPE = frozenset({"rand", "randn"})
# Their arguments do not tell which dimension has the samples.
_OTHER = frozenset({"randint", "randperm", "lstm", "gru", "rnn_tanh", "rnn_relu"})


def draw_by_microbatch(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sizes: Sequence[int],
    seed: Callable[[int], None],
) -> Any:
    """Run a drawing function on the rows of each microbatch, one after the other, and concatenate its results.

    Args:
        name: Name of the function.
        function: The function.
        args: Its positional arguments; tensors of the full batch are (samples * k, ...) or (length, samples, ...).
        kwargs: Its keyword arguments.
        sizes: Samples of each microbatch.
        seed: Seeds the generators for microbatch ``i``.

    Returns:
        The result for all rows. Where no dimension of the samples is found, that of one call, seeded for microbatch 0.
    """
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    split = _batch_dims(name, args, kwargs, leaves, sum(sizes))
    rows = next((_rows(leaves[index], dim) for index, dim in split.items()), 0)
    per_sample, rest = divmod(rows, sum(sizes))
    if not rows or rest:
        seed(0)
        return function(*args, **kwargs)
    split = {index: dim for index, dim in split.items() if not _rows(leaves[index], dim) % rows}
    results, begin = [], 0
    for number, size in enumerate(sizes):
        own = list(leaves)
        for index, dim in split.items():
            own[index] = _chunk(leaves[index], dim, begin, size * per_sample, rows)
        begin += size * per_sample
        own_args, own_kwargs = tree_unflatten(own, spec)
        seed(number)
        results.append(function(*own_args, **own_kwargs))
    return args[0] if name.endswith("_") else _concatenated(name, results, split[min(split)])


def _rows(leaf: Any, dim: int) -> int:
    return leaf.shape[dim] if isinstance(leaf, Tensor) else int(leaf)


def _chunk(leaf: Any, dim: int, begin: int, length: int, rows: int) -> Any:
    """The share of a tensor of which each of the ``rows`` has one or more entries; or a number of rows."""
    if not isinstance(leaf, Tensor):
        return length
    each = leaf.shape[dim] // rows
    return leaf.narrow(dim, begin * each, length * each)


def _batch_dims(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Sequence[Any], samples: int
) -> dict[int, int]:
    """The dimension of the samples of each argument that has one, by its index among the leaves."""
    positions = {id(leaf): index for index, leaf in reversed([*enumerate(leaves)]) if isinstance(leaf, Tensor)}
    if name in _OTHER:
        return {}
    if name in _BY_SHAPE:
        return {0: 0} if leaves and type(leaves[0]) is int else {}
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not first.dim():
        return {}
    if name == _ATTENTION:
        if first.dim() != 3:
            return {}
        dims = {index: 1 for index, leaf in enumerate(leaves[:3]) if isinstance(leaf, Tensor)}
        for mask, of_samples in (("key_padding_mask", 2), ("attn_mask", 3)):
            given = kwargs.get(mask)
            if given is not None and given.dim() == of_samples:
                dims[positions[id(given)]] = 0
        return dims
    second = first.dim() > 2 and first.shape[0] != samples and first.shape[1] == samples  # (length, samples, features)
    dim = 1 if second else 0
    return {
        index: dim
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.dim() == first.dim() and leaf.shape[dim] == first.shape[dim]
    }


def _concatenated(name: str, results: Sequence[Any], dim: int) -> Any:
    columns = [tree_flatten(result) for result in results]
    joined = [
        torch.cat(column, 0 if name == _ATTENTION and position == 1 else dim)  # 1: the weights
        if isinstance(column[0], Tensor)
        else column[0]
        for position, column in enumerate(zip(*(leaves for leaves, _ in columns), strict=True))
    ]
    return tree_unflatten(joined, columns[0][1])
