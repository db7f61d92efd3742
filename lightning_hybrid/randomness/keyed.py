"""Random numbers keyed by step, microbatch and module: they do not depend on stages, schedules or ranks.

Every operation that draws is seeded by a key: (seed, step, microbatch, FQN of the module that draws, number of its
draws so far in this microbatch). So each stage draws the same numbers for the same operation however the step is
partitioned, and so does one process that runs all microbatches. Outside a step the generators go on undisturbed.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.randomness.generators import GeneratorStates, accelerator_generator, draws, mix

_ATTENTION = "multi_head_attention_forward"
_BY_SHAPE = frozenset({"rand", "randn"})
# Their arguments do not tell which dimension has the samples.
_OTHER = frozenset({"randint", "randperm", "lstm", "gru", "rnn_tanh", "rnn_relu"})


class KeyedRandomness:
    """Seeds the generators by key while a microbatch of a step runs.

    Attributes:
        seed: The run's seed; stored in checkpoints.
        watched: Whether a function mode that reseeds before each draw is active; each draw must be keyed once.
        opaque_modules: FQNs of modules that are seeded on entry and not at each of their draws, since their
            operations cannot be intercepted.
        has_undivided_draws: Whether a draw of a full batch had no rows that belong to microbatches.
        num_runs: Forwards of microbatches so far; one that runs again counts again.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        """Take ``seed`` (the same on every rank), ``device`` (of the step, besides the CPU)."""
        self.seed = seed
        self.watched = self.has_undivided_draws = False
        self.num_runs = 0
        self.opaque_modules: Collection[str] = ()
        self.device = device
        self._base: int | None = None
        self._module = [0]
        self._drawn: Counter[int] = Counter()
        self._drawing: dict[str, nn.Module] = {}
        self._recorded: set[int] = set()
        self._parts: tuple[tuple[int, int], ...] = ()

    @contextlib.contextmanager
    def recording_modules(self) -> Iterator[set[int]]:
        """Record which modules draw inside: the CRC-32 of their FQNs, and 0 for code outside of modules."""
        before, self._recorded = self._recorded, set()
        try:
            yield self._recorded
        finally:
            self._recorded = before

    def microbatch(self, step: int, microbatch: int) -> AbstractContextManager[None]:
        """Key the draws inside by the number of the batch, and of the microbatch over all replicas."""
        return _Microbatch(self, mix(self.seed, step, microbatch))

    @property
    def microbatch_key(self) -> int | None:
        """The key of the running microbatch; None outside of microbatches."""
        return self._base

    @contextlib.contextmanager
    def rows_of_microbatches(self, step: int, microbatches: Collection[int], sizes: Collection[int]) -> Iterator[None]:
        """Inside of ``microbatch``, let rows of a full batch draw what they draw in microbatches of these sizes."""
        before = self._parts
        bases = (mix(self.seed, step, microbatch) for microbatch in microbatches)
        self._parts = tuple(zip(bases, sizes, strict=True))
        try:
            yield
        finally:
            self._parts = before

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """Restore all generators afterwards."""
        states = GeneratorStates(self.device)
        try:
            yield
        finally:
            states.restore()

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude draws inside from the count: later draws are the same as without them."""
        saved = self._drawn, self._recorded
        self._drawn, self._recorded = Counter(self._drawn), set(self._recorded)
        try:
            with self.isolated():
                yield
        finally:
            self._drawn, self._recorded = saved

    def reseed(self) -> None:
        """Seed torch's generators for the next draw of the running module."""
        if self._base is None:
            return
        module = self._module[-1]
        self._seed(self._base, module, self._drawn[module])
        self._drawn[module] += 1
        self._recorded.add(module)

    def draw(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function that draws random numbers, seeded for the running module."""
        if self._base is None or not self._parts:
            self.reseed()
            return function(*args, **kwargs)
        module = self._module[-1]
        drawn, bases, sizes = self._drawn[module], *zip(*self._parts, strict=True)
        self._drawn[module] += 1
        self._recorded.add(module)
        seeded = 0

        def seed(index: int) -> None:
            nonlocal seeded
            seeded += 1
            self._seed(bases[index], module, drawn)

        result = draw_by_microbatch(getattr(function, "__name__", ""), function, args, kwargs, sizes, seed)
        self.has_undivided_draws |= seeded < len(sizes)
        return result

    def _seed(self, base: int, module: int, drawn: int) -> None:
        key = mix(base, module, drawn)
        torch.default_generator.manual_seed(key)
        accelerator = accelerator_generator(self.device)
        if accelerator is not None:
            accelerator.manual_seed(key)

    @contextlib.contextmanager
    def watching(self, watched: bool) -> Iterator[None]:
        """Set inside whether a function mode that reseeds is active."""
        before, self.watched = self.watched, watched
        try:
            yield
        finally:
            self.watched = before

    @contextlib.contextmanager
    def opaque(self, fqns: Collection[str]) -> Iterator[None]:
        """Seed these modules on entry inside, and not at each of their draws."""
        self.opaque_modules = fqns
        try:
            yield
        finally:
            self.opaque_modules = ()

    def each_draw(self) -> AbstractContextManager[Any]:
        """A function mode that reseeds before each draw inside."""
        return _DrawWatch(self)

    @contextlib.contextmanager
    def modules(self, drawing: dict[str, nn.Module]) -> Iterator[None]:
        """Key what these modules draw by their FQN, also inside units, where no other mode intercepts their draws."""
        if self._drawing:  # already active: each draw must be keyed once
            yield
            return
        self._drawing = drawing
        each = {fqn: module for fqn, module in drawing.items() if not _is_within(fqn, self.opaque_modules)}
        try:
            with replaced_forwards(each, self._keyed, reason="random numbers keyed by module"):
                yield
        finally:
            self._drawing = {}

    def again(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function`` for a later second run, in which it draws the same numbers as in a run now."""
        base, stack, drawn, drawing = self._base, list(self._module), Counter(self._drawn), self._drawing
        watched, parts = self.watched, self._parts
        if base is None:
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            saved = self._base, self._module, self._drawn, self._parts
            self._base, self._module, self._drawn, self._parts = base, list(stack), Counter(drawn), parts
            try:
                # No function mode of the first run is active in a backward. If there was none, each drawing module
                # enters its own, below other modes.
                watch = _DrawWatch(self) if watched else contextlib.nullcontext()
                with self.isolated(), self.modules(drawing), self.watching(watched), watch:
                    return function(*args, **kwargs)
            finally:
                self._base, self._module, self._drawn, self._parts = saved

        return run

    def _keyed(self, fqn: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.watched:
                return original(*args, **kwargs)
            with self.watching(True), _DrawWatch(self):
                return original(*args, **kwargs)

        forward = self._keyed_by_name(fqn, original, run)
        # Code that replaces this forward by another function has that function keyed too.
        setattr(forward, FORWARD_WRAPPER, partial(self._keyed, fqn))
        return forward

    def keyed_on_entry(self, fqn: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the forward of a module of ``opaque_modules``: it is seeded on entry, also when it is recomputed."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.reseed()
            return original(*args, **kwargs)

        return self._keyed_by_name(fqn, original, run)

    def _keyed_by_name(self, fqn: str, original: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``run`` so that its draws are keyed by a module's name; outside of microbatches it is ``original``."""
        code = zlib.crc32(fqn.encode())

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._base is None:
                return original(*args, **kwargs)
            self._module.append(code)
            try:
                return run(*args, **kwargs)
            finally:
                self._module.pop()

        return forward


def _is_within(fqn: str, modules: Collection[str]) -> bool:
    """Whether a module is one of these modules, or inside one."""
    while fqn and fqn not in modules:
        fqn = fqn.rpartition(".")[0]
    return bool(fqn)


FORWARD_WRAPPER = "_hybrid_around"


class _Microbatch(AbstractContextManager[None]):
    """Sets the base of the keys of draws inside. A class, not a generator: it is entered before every forward."""

    def __init__(self, randomness: KeyedRandomness, base: int) -> None:
        self._randomness, self._base = randomness, base

    def __enter__(self) -> None:
        randomness = self._randomness
        self._saved = randomness._base, randomness._module, randomness._drawn
        randomness._base, randomness._module, randomness._drawn = self._base, [0], Counter()
        randomness.num_runs += 1
        random.seed(self._base)
        numpy.random.seed(self._base & 0xFFFFFFFF)
        randomness.reseed()

    def __exit__(self, *_: object) -> None:
        self._randomness._base, self._randomness._module, self._randomness._drawn = self._saved


class _DrawWatch(TorchFunctionMode):
    """Reseeds before each drawing operation of the module that runs inside."""

    def __init__(self, randomness: KeyedRandomness) -> None:
        super().__init__()
        self._randomness = randomness

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws(getattr(func, "__name__", ""), args, kwargs):
            return self._randomness.draw(func, args, kwargs)
        return func(*args, **kwargs)


def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` to run without the modes of this file, which would be traced with it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not _len_torch_function_stack() or not any(
            isinstance(mode, _DrawWatch) for mode in _get_current_function_mode_stack()
        ):
            return function(*args, **kwargs)
        modes = [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]
        for mode in modes:
            if not isinstance(mode, _DrawWatch):
                _push_mode(mode)
        try:
            return function(*args, **kwargs)
        finally:
            for _ in range(_len_torch_function_stack()):
                _pop_mode()
            for mode in modes:
                _push_mode(mode)

    return run


def draw_by_microbatch(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sizes: Sequence[int],
    seed: Callable[[int], None],
) -> Any:
    """Run a drawing function on the rows of each microbatch, one after the other, and concatenate its results.

    Tensors of the full batch are (samples * k, ...) or (length, samples, ...); ``seed`` seeds the generators for
    microbatch ``i``. Where no dimension of the samples is found, the result is that of one call, seeded for microbatch
    0.
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
    """Each of the ``rows``' share of a tensor, one or more entries; or a number of rows."""
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
