"""Saved tensors of layers are encoded, and moved to the host or a file, until the backward needs them.

While a layer runs, hooks on saved tensors replace each tensor that autograd saves by a view of a stored storage:

    tensor ──► hooks around the layer (ZeRO, checkpoints) ──► encoded? ──► moved? ──► SavedView
               take parameters, and what is recomputed

A storage is stored once, however many views of it autograd saves. Parameters, inputs from outside of the graph and
values received from other stages stay, since something else keeps them alive. Results of a recomputation stay too.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree as pytree

from lightning_hybrid.memory.saved_activations.encoding import (
    Encoded,
    ExponentialWatch,
    Role,
    as_it_is,
    encode,
    role_of,
)
from lightning_hybrid.memory.saved_activations.places import InPlace
from lightning_hybrid.memory.saved_activations.requests import Compression
from lightning_hybrid.memory.saved_activations.storage import (
    KeptStorage,
    OnDevice,
    SavedTensor,
    SavedView,
    StoredStorage,
    no_storage,
)
from lightning_hybrid.params.guards import below_read_guards
from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.randomness.generators import mix
from lightning_hybrid.step.objects.tensors import storage_id
from lightning_hybrid.step.standins.counts import PackedByOuterHooks

_MIN_MOVED_PART = 4096  # bytes; parts of an encoded tensor below stay on the device
# Operations whose result is a view or a cast of their input.
_VIEWS_AND_CASTS = ("ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Expand")
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


@dataclass
class Moving:
    """Where saved tensors are moved to, and which share of them."""

    place: InPlace  # where to
    min_bytes: int  # of a storage that is moved
    shares: Mapping[str, float]  # share of the bytes that is moved, by layer


# What leaves all tensors as they are.
_EXACT, _STAYING = Compression(8, sys.maxsize), Moving(InPlace(), sys.maxsize, {})


@dataclass
class SavedBytes:
    """Bytes of saved storages, each counted once, without parameters and what something else keeps alive."""

    saved: int = 0  # of the tensors that autograd has saved
    on_device: int = 0  # of what is on the device in their place


@dataclass
class _LayerRun:
    """One run of a layer."""

    fqn: str
    outside: Collection[int]  # ids of storages that something else keeps alive
    outer: Any  # the hooks on saved tensors around the layer's
    key: int = 0  # of its random numbers
    num_drawn: int = 0  # tensors that it has quantized
    seen: int = 0  # bytes of storages that could be moved
    moved: int = 0  # bytes of those that were
    is_measured: bool = False  # whether the error of its gradients is measured
    measured: list[StoredStorage] = field(default_factory=list)  # storages that are kept exactly too, for that


class LayerActivations:
    """Stores the tensors that the layers of one module save on this rank.

    Attributes:
        bytes: What was saved since the count was set to zero.
        error: Measures the error of gradients that compression causes.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        device: torch.device,
        *,
        compression: Compression | None,
        moving: Moving | None,
        microbatch_key: Callable[[], tuple[int, int]],
    ) -> None:
        """Set up for the layers of this rank, by FQN.

        ``microbatch_key`` returns a key of the microbatch that runs, which does not depend on the layout, and the
        number of the run: a microbatch that runs again is rounded as before.
        """
        self._layers, self._rounds = layers, compression is not None
        self._compression, self._moving = compression or _EXACT, moving or _STAYING
        self._microbatch_key, self._calls_of, self._calls = microbatch_key, (-1, -1), Counter[str]()
        self._exponentials = ExponentialWatch()
        self._generator, self._is_exact = torch.Generator(device), False
        self._stored: weakref.WeakValueDictionary[Any, StoredStorage | KeptStorage] = weakref.WeakValueDictionary()
        self._latest: Callable[[], StoredStorage | None] = no_storage
        self._run: _LayerRun | None = None
        self._pack_hook, self._unpack_hook = self._pack, _unpack  # the same objects always: compiled code guards them
        self.bytes, self.error = SavedBytes(), GradientError(layers)

    def begin_measurement(self) -> None:
        """Count bytes, and sum errors of gradients, from zero."""
        self.bytes = SavedBytes()
        self.error.begin()

    @contextlib.contextmanager
    def running(self, *, is_exact: bool = False) -> Iterator[None]:
        """Stores the saved tensors of layers that run inside the context; ``is_exact`` if none is to be rounded."""
        before, self._is_exact = self._is_exact, is_exact
        try:
            with replaced_forwards(self._layers, self._storing, reason="stores saved tensors of layers"):
                yield
        finally:
            self._is_exact = before

    def _storing(self, fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        layer = self._layers[fqn]

        def run(*args: Any, **kwargs: Any) -> Any:
            is_recomputation = torch._C._current_graph_task_id() != -1
            if not torch.is_grad_enabled() or is_recomputation or torch._C._are_functorch_transforms_active():
                return forward(*args, **kwargs)
            outer, before = _top_hooks(False), self._run
            this = _LayerRun(fqn, self._outside_storages(layer, args, kwargs), outer, key=self._key(fqn))
            this.is_measured = not self._is_exact and self.error.begins(fqn)
            self._run = this
            watch = self._exponentials if self._compression.bits < 8 else nullcontext()
            try:
                with saved_tensors_hooks(self._pack_hook, self._unpack_hook), watch:
                    out = forward(*args, **kwargs)
            finally:
                self._run = before
            if this.is_measured:
                self.error.measure(fqn, out, this.measured)
            return out

        return run

    @below_read_guards
    def _outside_storages(self, layer: nn.Module, args: Any, kwargs: Any) -> frozenset[int]:
        """Returns the storages that something else keeps alive: of parameters, buffers, and inputs without a node."""
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is Tensor and leaf.grad_fn is None]
        if self._rounds:  # a value received from another stage is rounded as in a run without stages
            inputs = [tensor for tensor in inputs if not tensor.requires_grad]
        return frozenset(storage_id(tensor) for tensor in (*layer.parameters(), *layer.buffers(), *inputs))

    def _key(self, fqn: str) -> int:
        """Returns a key of the random numbers of one run of a layer."""
        microbatch = self._microbatch_key()
        if microbatch != self._calls_of:
            self._calls_of, self._calls = microbatch, Counter()
        self._calls[fqn] += 1
        return mix(microbatch[0], zlib.crc32(fqn.encode()), self._calls[fqn])

    def _keyed_generator(self) -> torch.Generator:
        assert self._run is not None
        self._run.num_drawn += 1
        return self._generator.manual_seed(mix(self._run.key, self._run.num_drawn))

    def _pack(self, tensor: Tensor) -> SavedView | SavedTensor | PackedByOuterHooks:
        """Packs a tensor of any shape for autograd."""
        run = self._run
        assert run is not None
        if run.outer is not None:
            packed = run.outer[0](tensor)
            if not isinstance(packed, Tensor):
                return PackedByOuterHooks(packed, run.outer[1])
            tensor = packed
        with torch.no_grad(), torch._C.DisableTorchFunction():
            stored = None if self._stays(tensor, run) else self._store(tensor, run)
            if isinstance(stored, StoredStorage):
                return SavedView(stored, tensor)
            return SavedTensor(tensor, stored, may_be_written=run.outer is not None)

    def _stays(self, tensor: Tensor, run: _LayerRun) -> bool:
        """Returns whether something else keeps the tensor, of any shape, alive, or it is no plain memory."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return True
        if tensor.is_quantized or tensor.is_nested or not tensor.numel():
            return True
        return storage_id(tensor) in run.outside or _is_of_parameter(tensor)

    def _store(self, tensor: Tensor, run: _LayerRun) -> StoredStorage | KeptStorage:
        """Stores the storage of a tensor of any shape, if it is not stored yet."""
        role = role_of(tensor)
        key = storage_id(tensor), tensor._version, tensor.dtype, role == "sign"
        stored = self._stored.get(key)
        if stored is None:
            stored = self._stored[key] = self._new(tensor, role, run)
        return stored

    def _new(self, tensor: Tensor, role: Role, run: _LayerRun) -> StoredStorage | KeptStorage:
        storage = tensor.untyped_storage()
        flat = tensor.new_empty(0).set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
        encoded = self._encoded(flat, role, tensor.requires_grad, run)
        is_moved = self._is_moved(storage.nbytes(), run)
        self.bytes.saved += storage.nbytes()
        parts: list[OnDevice] = []
        for part in encoded.parts:
            if is_moved and (encoded.is_same or part.nbytes >= _MIN_MOVED_PART):
                parts.append(self._moving.place.put(part, tensor if encoded.is_same else part))
            else:
                self.bytes.on_device += part.nbytes
                parts.append(OnDevice(part))
        if encoded.is_same and not is_moved:
            return KeptStorage(tensor)
        stored = StoredStorage(tensor, tuple(parts), encoded.decode, self._latest)
        self._latest = weakref.ref(stored)
        if run.is_measured and role != "sign" and not encoded.is_same:
            stored.keep_exact(flat)
            run.measured.append(stored)
        return stored

    def _encoded(self, flat: Tensor, role: Role, in_graph: bool, run: _LayerRun) -> Encoded:
        compression = self._compression
        if self._is_exact or flat.nbytes < compression.min_bytes:
            return as_it_is(flat)
        bits = 0 if compression.excludes(run.fqn) else compression.bits
        if bits and self._exponentials.is_inside:
            bits = 8
        return encode(flat, role, in_graph=in_graph, bits=bits, generator=self._keyed_generator)

    def _is_moved(self, nbytes: int, run: _LayerRun) -> bool:
        """Returns whether a storage is moved: by the layer's share, spread evenly over what it saves."""
        if nbytes < self._moving.min_bytes:
            return False
        run.seen += nbytes
        if run.moved + nbytes > self._moving.shares[run.fqn] * run.seen:
            return False
        run.moved += nbytes
        return True


def _unpack(saved: SavedView | SavedTensor | PackedByOuterHooks) -> Tensor:
    """Unpacks a tensor, of the shape it was saved with."""
    return saved.restore()


def _is_of_parameter(tensor: Tensor) -> bool:
    """Returns whether a tensor of any shape is a view or a cast of a parameter."""
    node = tensor.grad_fn
    while node is not None and node.name().rstrip("0").removesuffix("Backward") in _VIEWS_AND_CASTS:
        node = node.next_functions[0][0]
        if node is not None and node.name().endswith("AccumulateGrad"):
            return isinstance(getattr(node, "variable", None), nn.Parameter)
    base = tensor._base if tensor._is_view() else None
    return isinstance(base, nn.Parameter)


# The error that compression causes in the gradients of a layer, measured in its backward.
# In one microbatch the layer keeps its saved tensors exactly too. When the gradient of its output arrives, the
# gradients of its parameters are computed twice: from the exact tensors, and from the compressed ones.


class GradientError:
    """Measures one layer in a microbatch, the next one when it is asked again.

    Attributes:
        sums: Squared norms of the error and of the exact gradient, of the layers measured since they were set to zero.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers, self._number = layers, 0
        self._due: str | None = None  # the root module is a layer named ""
        self.sums = [0.0, 0.0]
        uses = Counter(id(parameter) for layer in layers.values() for parameter in set(layer.parameters()))
        self._shared = {parameter for parameter, count in uses.items() if count > 1}

    def begin(self) -> None:
        """Sums from zero, over the next layer."""
        self.sums = [0.0, 0.0]
        self.request()

    def request(self) -> None:
        """Measures the next layer of this rank that stores what can be measured, in the microbatches to come."""
        if self._layers:
            self._due = list(self._layers)[self._number % len(self._layers)]
            self._number += 1

    def begins(self, fqn: str) -> bool:
        """Returns whether this run of a layer is measured; no other one is, then."""
        if self._due != fqn:
            return False
        self._due = None
        return True

    def measure(self, fqn: str, out: Any, stored: Sequence[StoredStorage]) -> None:
        """Measures once the gradient of the layer's output, a tensor of any shape, has arrived."""
        outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
        trained = [
            parameter
            for parameter in self._layers[fqn].parameters()
            if parameter.requires_grad and id(parameter) not in self._shared  # whose gradient comes from others too
        ]
        if not stored or len(outputs) != 1 or type(outputs[0]) is not Tensor or not trained:
            for each in stored:
                each.keep_exact(None)
            self.request()
            return
        edge = get_gradient_edge(outputs[0])
        # Autograd holds them as long as it needs them.
        references = [weakref.ref(each) for each in stored]

        def on_gradient(gradient: Tensor) -> None:
            handle.remove()
            alive = [each for reference in references if (each := reference()) is not None]
            found = []
            for uses_exact in (True, False):
                for each in alive:
                    each.return_exact(uses_exact)
                found.append(torch.autograd.grad([edge], trained, [gradient], retain_graph=True, allow_unused=True))
            for each in alive:
                each.keep_exact(None)
            each_gradient = zip(*found, strict=True)
            pairs = [(one, other) for one, other in each_gradient if one is not None and other is not None]
            errors = [float((other - one).double().square().sum()) for one, other in pairs]
            if any(errors):  # else nothing that it stores is rounded, such as masks and indices
                self.sums[0] += sum(errors)
                self.sums[1] += sum(float(one.double().square().sum()) for one, _ in pairs)

        handle = outputs[0].register_hook(on_gradient)
