"""A function mode for user hooks: sharded parameters, and their gradients, read as full ones.

    p.shape, p.numel()      the full shape
    p.norm(), p.grad.max()  of the full tensor, for which its ranks send each other their shards
    p.grad.mul_(x)          done to the full tensor, of which each rank keeps its shard

What is not read is not sent. All these ranks must read the same; they run the same hooks on the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid.params.gradient_hooks import REGISTRATIONS, on_full_gradient
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.step.objects.pytree import flatten_call, rebuild_call
from lightning_hybrid.step.objects.tensor_storage_and_subclasses import storage_id
from lightning_hybrid.step.standins.absent_tensors import SHAPE_METHODS, SHAPE_PROPERTIES, is_absent

IDENTITY = frozenset({"__hash__", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"})
_OWN_PROPERTIES = frozenset({"requires_grad", "grad_fn", "is_leaf", "device", "dtype", "_backward_hooks", "layout"})


class ShardedParameterReads(TorchFunctionMode):
    """Replaces sharded parameters and gradients by full ones in operations, while it is entered."""

    def __init__(
        self,
        parts: LocalShards,
        parameters: Mapping[str, Tensor],
        note: Callable[[Tensor, str], None] | None = None,
        agree_on: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Record the sharded parameters of a run.

        Args:
            parts: Local shards of the module.
            parameters: All parameters of the module, by FQN.
            note: Called with each full tensor that is gathered, and the FQN of its parameter.
            agree_on: Called with the FQN of a parameter before its shards are sent; raises if ranks differ.
        """
        super().__init__()
        self._shards, self._note, self._agree_on = parts, note, agree_on
        sharded = parts.names
        self._sharded = {id(parameter): name for name, parameter in parameters.items() if name in sharded}
        self._locals = [parameter for name, parameter in parameters.items() if name in sharded]
        self._forget()

    def _forget(self) -> None:
        """Drop full tensors, as shards may change outside the mode."""
        self._full_tensors: dict[int, tuple[Tensor, int, Tensor]] = {}  # by id of the shard: it, version, full tensor
        self._origins: dict[int, tuple[Tensor, int, Tensor, str]] = {}  # by id of the full tensor; with its FQN
        self._memories: set[Any] | None = None  # of local shards, while it is entered

    def unshard_state(self, state: Mapping[Any, Any]) -> None:
        """Gather the states, by parameter, of an optimizer whose steps use full parameters; collective."""
        for parameter, entries in state.items():
            if self._is_sharded(parameter) and isinstance(entries, dict):
                for name, value in entries.items():
                    if isinstance(value, Tensor):
                        entries[name] = self._shards.full_state_of(parameter, value)

    @contextlib.contextmanager
    def tracking(self, states: Iterable[Mapping[Any, Any]], copies: Iterable[nn.Module]) -> Iterator[None]:
        """Inside, treat optimizer states, by parameter, and parameters of copies of the module as sharded ones too."""
        before = self._sharded
        self._sharded = dict(before)
        alive: list[Tensor] = []  # keeps the tensors alive whose ids are recorded
        for name, parameter in (named for other in copies for named in other.named_parameters()):
            if name in before.values():
                self._sharded[id(parameter)] = name
        for parameter, entries in (entry for state in states for entry in state.items()):
            if id(parameter) in before and not is_absent(parameter) and isinstance(entries, dict):
                tensors = [value for value in entries.values() if isinstance(value, Tensor)]
                alive += tensors
                with torch._C.DisableTorchFunction():
                    self._sharded |= {id(t): before[id(parameter)] for t in tensors if t.shape == parameter.shape}
        try:
            yield
        finally:
            self._sharded = before
            alive.clear()

    def is_shard(self, tensor: Tensor) -> bool | None:
        """Whether a tensor of a shard's shape is one; None for an unrecorded one of any shape in a shard's memory."""
        if self._is_sharded(tensor):
            return True
        if self._memories is None:
            self._memories = {storage_id(local) for local in self._locals if not is_absent(local)}
        return None if not is_absent(tensor) and storage_id(tensor) in self._memories else False

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Gather the tensor of full shape of a sharded parameter; return other tensors unchanged; collective."""
        return self._full(tensor, self._sharded[id(tensor)]) if self._is_sharded(tensor) else tensor

    def __enter__(self) -> Any:
        """Enter the mode; tensors that were gathered before are dropped."""
        self._forget()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        """Leave the mode; drops full tensors."""
        super().__exit__(*exception)
        self._forget()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on full tensors; what it writes to one is also written to the local shard."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__") and id(args[0]) in self._sharded and not is_absent(args[0]):
            member = func.__self__.__name__
            if member == "grad":
                return self._gradient(name, func, args)
            if member == "data" and name == "__get__":
                return self._full(args[0], self._sharded[id(args[0])])
            if member in _OWN_PROPERTIES:
                return func(*args, **kwargs)
            if name == "__get__" and member in SHAPE_PROPERTIES:
                return func(self._shape_of(args[0]))
        elif name in SHAPE_METHODS and self._is_sharded(args[0]):
            return func(self._shape_of(args[0]), *args[1:], **kwargs)
        elif name == "__get__" and func.__self__.__name__ == "data" and id(args[0]) in self._origins:
            return args[0]  # a write through `.data` would not increase the version
        elif name in IDENTITY:
            if name in REGISTRATIONS and self._is_sharded(args[0]):
                args = args[0], on_full_gradient(name, self._shards, self._sharded[id(args[0])], args[1])
            return func(*args, **kwargs)
        leaves, plain = flatten_call(args, kwargs)
        positions = [position for position, leaf in enumerate(leaves) if self._is_sharded(leaf)]
        shards: dict[int, Tensor] = {}  # the parameters, by id of the full tensor
        for position in positions:
            local = leaves[position]
            leaves[position] = self._full(local, self._sharded[id(local)])
            shards[id(leaves[position])] = local
        if positions:
            args, kwargs = rebuild_call(leaves, args, kwargs, plain)
        out = func(*args, **kwargs)
        if name == "__set__" and id(leaves[0]) in self._origins:  # p.data = full
            self._write_back(leaves[0])
        elif name.endswith("_") or "out" in kwargs:
            for full, version, *_ in list(self._origins.values()):
                if full._version != version:  # also through views
                    self._write_back(full)
            return shards.get(id(out), out)  # `layer.weight += x` sets the module's parameter to this result
        return out

    def _shape_of(self, local: Tensor) -> Tensor:
        """A meta tensor of the full shape, which needs no message."""
        with torch._C.DisableTorchFunction():
            shape = self._shards.full_shape(self._sharded[id(local)], local)
            return torch.empty(shape, dtype=local.dtype, device="meta")

    def _is_sharded(self, leaf: Any) -> bool:
        return id(leaf) in self._sharded and not is_absent(leaf)

    def _full(self, local: Tensor, name: str) -> Tensor:
        cached = self._full_tensors.get(id(local))
        if cached is not None and cached[0] is local and cached[1] == local._version:
            return cached[2]
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._agree_on(name)
            full = _by_rows(local.detach(), partial(self._shards.unshard, name))
        self._record(full, local, name)
        if self._note is not None:
            self._note(full, name)
        return full

    def _record(self, full: Tensor, local: Tensor, name: str) -> None:
        self._full_tensors[id(local)] = local, local._version, full
        self._origins[id(full)] = full, full._version, local, name

    def _write_back(self, full: Tensor) -> None:
        _, _, local, name = self._origins[id(full)]
        with torch._C.DisableTorchFunction(), torch.no_grad():
            local.detach().copy_(_by_rows(full.detach(), partial(self._shards.shard_of, name, local)))
        self._record(full, local, name)

    def _gradient(self, access: str, func: Any, args: Any) -> Any:
        parameter = args[0]
        name = self._sharded[id(parameter)]
        if access == "__get__":
            local = func(parameter)
            return None if local is None else self._full(local, name)
        if access == "__set__" and args[1] is not None:
            value = args[1]
            with torch._C.DisableTorchFunction():
                if id(value) in self._origins and self._origins[id(value)][2] is parameter.grad:
                    return None  # the gradient that was read is set again
                before = parameter.grad
                if before is not None and before.shape != parameter.shape:  # not averaged yet, so that it is no shard
                    before.detach().copy_(_by_rows(value.detach(), partial(self._shards.shard_of, name, before)))
                else:
                    parameter.grad = _by_rows(value.detach(), lambda full: self._shards.shard(name, full).contiguous())
            return None
        return func(*args)


def _by_rows(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A change of dense tensors, also for a sparse one; that keeps the rows that it has in one process, zeros too."""
    if not tensor.is_sparse:
        return change(tensor)
    tensor = tensor.coalesce()
    ones = torch.sparse_coo_tensor(tensor.indices(), torch.ones_like(tensor.values()), tensor.shape)
    content, is_here = change(tensor.to_dense()), change(ones.to_dense())
    rows = is_here.flatten(1).any(1).nonzero()[:, 0]
    return torch.sparse_coo_tensor(rows[None], content[rows], content.shape, is_coalesced=True)
