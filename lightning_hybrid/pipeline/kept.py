"""Entries that a step appends to lists of its modules: one per batch, joined from the microbatches' entries.

``self.outputs.append(loss)`` is Lightning's idiom for values that the end of an epoch reads. If every microbatch has
appended equally many entries to a list, they are joined entry by entry; modules change otherwise as if gradients were
accumulated over the microbatches.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.batch.merge import Microbatches, join, with_numbers
from lightning_hybrid.step.module_state.snapshots import AttributePath, can_restore, reachable_leaves
from lightning_hybrid.step.objects.pytree import map_leaves, tensors_inside
from lightning_hybrid.step.objects.tensors import as_plain_tensor, detached_leaf, storage_id
from lightning_hybrid.step.recording.kept import ListPath, RecordedCall, find_lists, list_containing
from lightning_hybrid.step.standins.numbers import AbsentFloat

Rows: TypeAlias = dict[ListPath, list[list[Any]]]  # the entries that each microbatch has appended


_UNMEASURED = Microbatches((), ())


class AppendedEntries:
    """Records and joins the entries that one batch appends to the lists of one module."""

    def __init__(self, root: nn.Module) -> None:
        """Record the lengths of the lists of the user's module before the batch."""
        self._root = root
        self._before = {path: len(entries) for path, entries in find_lists(root).items()}
        self._ends = [self._before]
        self.rows: Rows = {}

    def after_microbatch(self) -> None:
        """Record the entries that a microbatch has appended."""
        lists, last = find_lists(self._root), self._ends[-1]
        self._ends.append({path: len(entries) for path, entries in lists.items()})
        for path, entries in lists.items():
            begin = last.get(path, 0)
            if len(entries) > begin or path in self.rows:
                earlier: list[list[Any]] = [[] for _ in range(len(self._ends) - 2)]
                new = [map_leaves(detached_leaf, entry) for entry in entries[begin:]]
                self.rows.setdefault(path, earlier).append(new)

    def evenly(self, count: int, contents: Sequence[Mapping[int, Tensor]] = ()) -> Rows:
        """Split the appended entries evenly over the ``count`` microbatches that have run.

        ``contents`` has the values from which numbers among the entries were read, by microbatch and index; each a
        scalar, or a tensor of one element.
        """
        rows: Rows = {}
        for path, entries in find_lists(self._root).items():
            grown = entries[self._before.get(path, 0) :]
            each, rest = divmod(len(grown), count)
            if not each or rest:
                continue
            rows[path] = []
            for index in range(count):
                fill = partial(_filled, contents[index] if contents else {})
                appended = grown[index * each : (index + 1) * each]
                rows[path].append([map_leaves(fill, entry) for entry in appended])
        return rows

    def put(
        self,
        rows: Rows,
        weights: Sequence[float],
        sizes: Sequence[int | None],
        losses: Sequence[float | None] = (),
        loss_weights: Sequence[float] = (),
        numbers: Microbatches = _UNMEASURED,
    ) -> None:
        """Replace the appended entries by entries joined over all microbatches, other ranks' too.

        Entries that equal the ``losses`` are joined by ``loss_weights``; ``numbers`` tells what is known of others.
        """

        def joined_of(path: ListPath, index: int, column: list[Any]) -> Any:
            if not _are_equal(list(map(_number, column)), losses):
                return with_numbers(join(column, weights, sizes), column, numbers, place_of(path), index)
            present = [index for index, weight in enumerate(loss_weights) if weight]
            entries, shares = [column[index] for index in present], [loss_weights[index] for index in present]
            return join(entries, shares, [sizes[index] for index in present])

        lists = find_lists(self._root)
        for path, of_each in rows.items():
            counts = {len(entries) for entries in of_each}
            if path not in lists or len(of_each) != len(weights) or len(counts) != 1 or counts == {0}:
                continue
            are_calls = isinstance(of_each[0][0], RecordedCall)
            if not are_calls and any(size is not None and size > 1 and counts == {size} for size in sizes):
                # An entry per sample.
                joined = [entry for entries in of_each for entry in entries]
            else:
                columns = enumerate(zip(*of_each, strict=True))
                joined = [joined_of(path, index, list(column)) for index, column in columns]
            lists[path][self._before.get(path, 0) :] = joined


def place_of(path: ListPath) -> str:
    """The place of the entries of a list, as in ``Leaf``."""
    fqn, name, key = path
    return "appends to " + ".".join(filter(None, ("self", fqn, name))) + ("" if key is None else f"[{key!r}]")


def merged(rows: Sequence[Rows], counts: Sequence[int]) -> Rows:
    """The appended entries of the microbatches of several ranks, in the order of the ranks."""
    joined: Rows = {}
    for path in dict.fromkeys(path for row in rows for path in row):
        of_ranks = zip(rows, counts, strict=True)
        joined[path] = [entries for row, count in of_ranks for entries in row.get(path, [[] for _ in range(count)])]
    return joined


def _filled(content: Mapping[int, Tensor], leaf: Any) -> Any:
    """A detached leaf; a number that was read on another rank, or computed from such, is replaced by its value."""
    if isinstance(leaf, AbsentFloat) and leaf.is_affine and leaf.values and leaf.values <= content.keys():
        return leaf.computed(content)
    return detached_leaf(leaf)


def _are_equal(some: Sequence[float | None], others: Sequence[float | None]) -> bool:
    """Whether numbers are equal; NaN (a mean over no element) equals NaN."""
    return list(map(str, some)) == list(map(str, others))


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return value if isinstance(value, float) else None


_NOTHING = object()


class ModuleChanges:
    """Compares the modules after a step, and the batch that it was given, with their state before it."""

    def __init__(self, root: nn.Module, batch: Any = None, *, by_content: bool = False) -> None:
        """Record the state before the step.

        ``by_content`` compares contents of modules' tensors too: a write to ``buffer.data`` leaves the version counter.
        """
        self._root, self._by_content = root, by_content
        self._given = [(tensor, tensor._version) for tensor in tensors_inside(batch) if can_restore(tensor)]
        self._before = _state(root, by_content)
        self._lengths = {path: len(entries) for path, entries in find_lists(root).items()}

    def something(self) -> bool:
        """Whether the step has written a buffer or into its batch, or stored a new tensor or float."""
        if any(tensor._version != version for tensor, version in self._given):
            return True
        lists = {path: self._lengths.get(path, 0) for path in find_lists(self._root)}
        return any(
            not (isinstance(key, AttributePath) and list_containing(key, lists) is not None) for key in self._changed()
        )

    def rows(self, samples: int | None) -> bool:
        """Whether a changed tensor may have a row for each sample of the batch, so that a microbatch needs some."""
        changed = self._changed()
        tensors = [leaf for path, leaf in reachable_leaves(self._root, plain=False) if path in changed]
        tensors += [
            buffer
            for fqn, module in self._root.named_modules()
            for name, buffer in module._buffers.items()
            if (fqn, name) in changed and buffer is not None
        ]
        return any(isinstance(leaf, Tensor) and (samples is None or samples in leaf.shape) for leaf in tensors)

    def _changed(self) -> set[Any]:
        now = _state(self._root, self._by_content)
        gone = self._before.keys() - now.keys()
        return gone | {key for key, value in now.items() if not _is_same(self._before.get(key, _NOTHING), value)}


def _is_same(before: Any, now: Any) -> bool:
    is_counter = type(now) is int and (now - before == 1 if type(before) is int else now in (0, 1))
    return is_counter or bool(before == now)


def _state(root: nn.Module, by_content: bool) -> dict[Any, Any]:
    metrics = {inner for module in root.modules() if isinstance(module, Metric) for inner in module.modules()}
    state: dict[Any, Any] = {}
    for fqn, module in root.named_modules():
        for name, buffer in module._buffers.items() if module not in metrics else ():
            if buffer is not None:
                state[fqn, name] = _fingerprint(buffer, by_content)
    for path, leaf in reachable_leaves(root, metrics):
        if isinstance(leaf, Tensor):
            state[path] = _fingerprint(leaf, by_content)
        elif isinstance(leaf, numpy.ndarray):
            state[path] = leaf.shape, leaf.dtype.str, zlib.crc32(numpy.ascontiguousarray(leaf).tobytes())
        elif isinstance(leaf, float | int | str | numpy.generic):
            state[path] = leaf.item() if isinstance(leaf, numpy.generic) else leaf
    return state


def _fingerprint(tensor: Tensor, by_content: bool) -> tuple[Any, ...]:
    identity = id(tensor), tensor._version, storage_id(tensor)
    tensor = as_plain_tensor(tensor)
    if not by_content or tensor.layout is not torch.strided or not tensor.numel() or tensor.is_quantized:
        return identity
    numbers = torch.nan_to_num(tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64))
    return *identity, numbers.sum().item(), numbers.abs().sum().item()
