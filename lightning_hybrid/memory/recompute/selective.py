"""Results that a selective layer keeps between its forward and its backward: a pair of contexts for torch's checkpoint.

    x ──► norm ──► n ──► linear ──► a ──► gelu ──► g ──► linear ──►
    kept: x, a     the backward runs the layer again: norm, gelu; the first linear takes its result, the last never runs

The pair of ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` raises an error where a layer writes to a
kept result (``ReLU(inplace=True)`` after a linear) and where a graph has two backwards (forces); here these results are
recomputed. And it costs Python for each operation (torch 2.13: a count, a policy, a walk over the result); here, for
products only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import noop_context_fn
from torch.utils.flop_counter import flop_registry

from lightning_hybrid.step.objects.tensors import storage_id

# Cost of moving a byte, in floating-point operations of a matrix product.
WORK_PER_BYTE = {"cpu": 16.0, "cuda": 100.0}
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_BELOW = torch._C.DispatchKey.ADInplaceOrView


class Product(NamedTuple):
    """One matrix product, convolution or attention of a layer, or a collective."""

    work: float  # in floating-point operations; infinite for a collective, whose result is always kept
    nbytes: int  # of its results
    is_saved: bool  # whether autograd saves a result, so that it takes no more memory to keep it


@dataclass(frozen=True)
class LayerCosts:
    """What one run of a layer would save without recomputation, and what it computes."""

    # in order, without those after the last tensor that autograd saves: a recomputation ends there
    products: tuple[Product, ...]
    input_bytes: int  # of its inputs, which each policy saves
    saved_bytes: int  # that autograd saves besides inputs, outputs and weights
    work: float  # in floating-point operations of a matrix product

    def chosen(self, share: float) -> frozenset[int]:
        """Returns the products whose results are kept: the most work per byte first, until the share is used.

        A layer that keeps a result spares this product alone, as its code runs again. So the choice is a plain
        knapsack, and this greedy one is within one result of the optimum.
        """
        left = share * (self.saved_bytes + self.input_bytes) - self.input_bytes
        ratios = [product.work / max(product.nbytes, 1) for product in self.products]
        kept = set()
        for number in sorted(range(len(ratios)), key=lambda number: -ratios[number]):
            nbytes = self.products[number].nbytes
            if nbytes <= left or math.isinf(ratios[number]):
                kept.add(number)
                left -= nbytes
        return frozenset(kept)

    def kept_bytes(self, kept: Iterable[int], *, unsaved: bool = False) -> int:
        """Returns the bytes of these results, or only of the ones that autograd does not save."""
        found = (self.products[number] for number in kept if number < len(self.products))
        return sum(product.nbytes for product in found if not (unsaved and product.is_saved))


NO_COSTS = LayerCosts((), 0, 0, 0.0)


class SelectedResults:
    """The results that one layer keeps: a share of the bytes that its first run, which keeps nothing, would save."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._first: MeasuredRun | None = None
        self._chosen: frozenset[int] | None = None

    def next_run(self, inputs: Iterable[Tensor]) -> LayerRun:
        """Begins a run with these inputs of any shape."""
        if self._chosen is None and self._first is not None and self._first.has_ended:
            self._chosen = self._first.costs().chosen(self._share)
            self._first = None
        if self._chosen is not None:
            return LayerRun(self._chosen)
        self._first = MeasuredRun(inputs)
        return self._first


class LayerRun(TorchDispatchMode):
    """The forward of one run of a layer, which keeps the results of some of its products.

    Attributes:
        kept: By the number of the product.
        has_ended: Whether the forward is over.
        is_paused: Whether a repetition runs.
    """

    def __init__(self, chosen: frozenset[int] = frozenset(), most: int = sys.maxsize) -> None:
        """Keeps the ``chosen`` products, up to ``most`` bytes: experts inside may get more rows than in another run."""
        super().__init__()
        self._chosen, self._count, self._left = chosen, 0, most
        self._number_at: dict[int, int] = {}  # by storage
        self.kept: dict[int, KeptResult] = {}
        self.has_ended = self.is_paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Functions that the user compiles run compiled, and their products unseen."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.is_paused:
            return out
        if is_product(func, args, kwargs):
            self._count += 1
            if _kind(func).is_collective:
                self._keep(self._count - 1, func, args, out)
            elif self._count - 1 in self._chosen and (nbytes := storage_bytes(plain_tensors(out))) <= self._left:
                self._left -= nbytes
                self._keep(self._count - 1, func, args, out)
        elif self.kept and (written := _kind(func).written):
            for tensor in _written_tensors(written, args, kwargs):
                self.kept.pop(self._number_at.pop(storage_id(tensor), -1), None)
        return out

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self.has_ended = exc_type is None
        # Also what code wrote to below the mode. It cannot be used, so it takes no memory.
        self.kept = {number: result for number, result in self.kept.items() if result.is_unchanged}
        self._number_at = {}

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Returns the pair for ``torch.utils.checkpoint.checkpoint(context_fn=...)``."""
        return (self, Repetition(self)) if self._chosen else noop_context_fn()

    def returned(self, out: Any) -> None:
        """Called with the output of the layer, after its forward."""

    def begin_repetition(self) -> dict[int, KeptResult]:
        """Returns the kept results, which the repetition takes."""
        self.is_paused = True
        if not self.has_ended:  # derivatives inside of the layer come before that, and repeat everything
            return {}
        kept, self.kept = self.kept, {}
        return kept

    def end_repetition(self) -> None:
        """Ends what `begin_repetition` began."""
        self.is_paused = False

    def _keep(self, number: int, func: Any, args: Any, out: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        if all(map(_is_plain, tensors)):
            self.kept[number] = KeptResult(func, args, out)
            self._number_at.update((storage_id(tensor), number) for tensor in tensors)


class Repetition(TorchDispatchMode):
    """The forward of a layer as it runs again, once its backward begins: kept results are taken, once."""

    def __init__(self, run: LayerRun) -> None:
        super().__init__()
        self._run, self._count, self._kept = run, 0, dict[int, KeptResult]()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As of `LayerRun`, whose products these are."""
        return True

    def __enter__(self) -> Any:
        self._count, self._kept = 0, self._run.begin_repetition()
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._kept = {}
        self._run.end_repetition()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._kept and is_product(func, args, kwargs):
            result = self._kept.pop(self._count, None)
            self._count += 1
            if result is not None and not result.is_of(func, args):
                self._kept = {}  # the layer runs other code this time: torch compares what autograd saves
            elif result is not None and result.is_unchanged:
                return result.out
        return func(*args, **kwargs)


class KeptResult:
    """A result outside of any graph, which knows whether something wrote to it."""

    def __init__(self, func: Any, args: Any, out: Any) -> None:
        self._func, self._shapes = func, _shapes(args)
        self.out = pytree.tree_map_only(Tensor, _alias, out)
        tensors = [leaf for leaf in pytree.tree_leaves(self.out) if isinstance(leaf, Tensor)]
        self._versions = [(tensor, tensor._version) for tensor in tensors]

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing wrote to it."""
        return all(tensor._version == version for tensor, version in self._versions)

    def is_of(self, func: Any, args: Any) -> bool:
        """Whether it is the result of such a call."""
        return self._func is func and self._shapes == _shapes(args)


class MeasuredRun(LayerRun):
    """The forward of a layer that keeps nothing, and measures what it would save, and its work."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self._inputs = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in inputs if _is_plain(tensor)}
        self._saved: dict[int, int] = {}
        self._made: list[tuple[float, int, int]] = []  # work, storage and bytes of each product
        self._references: list[StorageWeakRef] = []  # so that no other storage gets the same address
        self._num_needed, self._work = 0, 0.0
        self._hooks: Any = None

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """As of `LayerRun`."""
        return self, Repetition(self)

    def __enter__(self) -> Any:
        # Torch calls the innermost hooks alone: these call the checkpoint's.
        pack, unpack = _top_hooks(False)

        def pack_and_count(tensor: Tensor) -> Any:
            self._count_saved(tensor)
            return pack(tensor)

        self._hooks = saved_tensors_hooks(pack_and_count, unpack)
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._hooks.__exit__()
        self._hooks = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not self.is_paused:
            moved = list(plain_tensors((args, kwargs, out)))
            work = sum(tensor.nbytes * WORK_PER_BYTE.get(tensor.device.type, 100.0) for tensor in moved)
            if is_product(func, args, kwargs or {}):
                work += _flops(func, args, kwargs or {}, out)
                results = list(plain_tensors(out))
                self._references += [StorageWeakRef(tensor.untyped_storage()) for tensor in results]
                is_collective = _kind(func).is_collective
                address = storage_id(results[0]) if results else 0
                nbytes = sum(tensor.untyped_storage().nbytes() for tensor in results)
                self._made.append((math.inf if is_collective else work, address, nbytes))
            self._work += work
        return out

    def costs(self, outputs: Iterable[Tensor] = ()) -> LayerCosts:
        """Returns the costs of the run; ``outputs`` of any shape stay alive in any case."""
        elsewhere = self._inputs.keys() | {storage_id(tensor) for tensor in outputs}
        products = (Product(work, nbytes, address in self._saved) for work, address, nbytes in self._made)
        return LayerCosts(
            tuple(products)[: self._num_needed],
            sum(self._inputs.values()),
            sum(nbytes for address, nbytes in self._saved.items() if address not in elsewhere),
            self._work,
        )

    def _count_saved(self, tensor: Tensor) -> None:
        """Counts a tensor of any shape that autograd saves."""
        if self.is_paused:
            return
        self._num_needed = len(self._made)
        with torch._C.DisableTorchFunction():
            base = tensor._base if tensor._is_view() else tensor
            is_weight = isinstance(base, nn.Parameter)
            if _is_plain(tensor) and not is_weight:
                storage = tensor.untyped_storage()
                self._references.append(StorageWeakRef(storage))
                self._saved[storage_id(tensor)] = storage.nbytes()


class _Kind(NamedTuple):
    """What an operator is; ``written`` are the positions or names of arguments that it writes to."""

    is_product: bool
    is_collective: bool
    written: tuple[int | str, ...]
    dropout: int | None  # position of the probability


@cache
def _kind(func: Any) -> _Kind:
    schema = getattr(func, "_schema", None)
    if schema is None:  # an operator of higher order, which runs others
        return _Kind(False, False, (), None)
    written: list[int | str] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else position)
    if func.namespace == "c10d":  # their schemas do not declare it: the first argument is written
        written = [0]
    is_forward = "backward" not in func._opname and not written
    # Torch counts no operations of attention on CPUs.
    is_product = func.overloadpacket in flop_registry or "scaled_dot_product" in func._opname
    is_collective = func.namespace == "_c10d_functional" and func._opname != "wait_tensor"
    names = [argument.name for argument in schema.arguments]
    return _Kind(
        is_product=is_forward and (is_product or is_collective),
        is_collective=is_forward and is_collective,
        written=tuple(written),
        dropout=names.index("dropout_p") if "dropout_p" in names else None,
    )


def is_product(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether results of a call are worth keeping; not those with random numbers, which others draw after."""
    kind = _kind(func)
    if not kind.is_product or kind.dropout is None:
        return kind.is_product
    return not (args[kind.dropout] if kind.dropout < len(args) else kwargs.get("dropout_p", 0.0))


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    count = flop_registry.get(func.overloadpacket)
    if count is not None:
        return float(count(*args, **kwargs, out_val=out))
    if _kind(func).is_collective:
        return 0.0
    query, key, value = (tensor.shape for tensor in args[:3])
    return 2.0 * query[:-2].numel() * query[-2] * key[-2] * (query[-1] + value[-1])


def _written_tensors(written: tuple[int | str, ...], args: Any, kwargs: Any) -> Iterator[Tensor]:
    for key in written:
        of_key = kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None
        yield from plain_tensors(of_key)


def plain_tensors(tree: Any) -> Iterator[Tensor]:
    """Yields the strided tensors of any shape in a tree that are of no subclass."""
    return filter(_is_plain, pytree.tree_leaves(tree))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the storages of tensors of any shape, each once."""
    return sum({storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided


def _shapes(args: Any) -> list[Any]:
    return [(value.shape, value.dtype) for value in args if isinstance(value, Tensor)]


def _alias(tensor: Tensor) -> Tensor:
    """Returns a tensor with the same elements and version, outside of any autograd graph."""
    with torch._C._SetExcludeDispatchKeyGuard(_BELOW, False):
        return tensor.detach()
