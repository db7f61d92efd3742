"""Gather on read, outside of layers: operations of user code see full parameters, gradients and optimizer states.

    p.shape, p.numel()      the full shape; nothing is sent
    p.norm(), p.grad.max()  of the full tensor, which the ranks that hold it send
    p.grad.mul_(2)          done to what each rank holds
    p.grad.add_(q)          done to the full tensor, of which each rank keeps what it holds

All ranks of a copy of the module run the same code on the same values. So each result is on every rank, a plain tensor,
and nothing is known of it: code may keep, pickle and compare what it computes. What is not read is not sent.

[Note: the same reads] Ranks gather together, so whether a tensor is gathered or still here must not depend on a rank:
not on what it holds, nor on a version that only some ranks see. Gathered tensors are dropped at the same lines.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid.params.gradient_hooks import REGISTRATIONS, on_full_gradient
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.step.objects.names import names
from lightning_hybrid.step.objects.pytree import flatten_call, rebuild_call, tensors_inside
from lightning_hybrid.step.objects.tensors import storage_id
from lightning_hybrid.step.standins.tensors import SHAPE_METHODS, SHAPE_PROPERTIES, is_absent
from lightning_hybrid.step.tracing.mode import VIEW_PROPERTIES

_PROPERTIES = names("__get__ __set__ __delete__")
# What needs no content, and is the same for a shard.
OWN_PROPERTIES = names(
    "requires_grad grad_fn is_leaf device dtype layout is_cuda is_sparse is_quantized is_meta is_mps is_cpu"
    " retains_grad _backward_hooks _post_accumulate_grad_hooks names _version"
)
IDENTITY = names(
    "__hash__ requires_grad_ register_hook register_post_accumulate_grad_hook is_floating_point is_complex element_size"
    " is_signed get_device retain_grad is_tensor is_storage is_shared is_pinned is_inference is_conj is_neg __dir__"
)
# Written element by element, with numbers alone: a shard needs no other rank.
_ELEMENTWISE = names(
    "mul_ div_ zero_ fill_ clamp_ clamp_min_ clamp_max_ clip_ neg_ nan_to_num_ sign_ __imul__ __itruediv__ __idiv__"
)
_FOREACH = "_foreach_"
_EXPORTS = names("numpy __array__ __dlpack__ untyped_storage data_ptr")
# Given the full tensor itself: code may write into it, or gets its content without a graph.
_WHOLE = _EXPORTS | names("data detach __set__ __setitem__ __deepcopy__ __reduce_ex__")
_AHEAD = 16 << 20  # bytes of one message, if code reads parameters one after the other
_ALIGNMENT = 16  # bytes; in a message, tensors begin at multiples of it


class OneStage:
    """All ranks that run the code hold each parameter, or shards of it."""

    def is_partial(self, name: str) -> bool:
        """Whether some pipeline ranks lack a parameter."""
        return False

    def is_shared(self, name: str) -> bool:
        """Whether several pipeline ranks hold a parameter."""
        return False

    def send(self, tensors: Sequence[tuple[str, Tensor]], contents: Sequence[Tensor | None]) -> list[Tensor]:
        """The contents, in full shapes, of tensors given by name and what this rank has of each; collective."""
        return [content for content in contents if content is not None]


class Stages(OneStage):
    """The pipeline ranks that hold each parameter; the first one sends it."""

    def __init__(self, holders: Callable[[str], Sequence[int]], group: dist.ProcessGroup, device: torch.device) -> None:
        """Take the pipeline ranks that hold a parameter, all ranks of the pipeline, and where they communicate."""
        self.holders, self.group, self.device = holders, group, device

    def is_partial(self, name: str) -> bool:
        """Whether some pipeline ranks lack a parameter."""
        return len(set(self.holders(name))) < self.group.size()

    def is_shared(self, name: str) -> bool:
        """Whether several pipeline ranks hold a parameter."""
        return len(set(self.holders(name))) > 1

    def send(self, tensors: Sequence[tuple[str, Tensor]], contents: Sequence[Tensor | None]) -> list[Tensor]:
        """The contents, in full shapes, of tensors given by name and what this rank has of each; collective."""
        found = list(contents)
        by_source: dict[int, list[int]] = {}
        for number, (name, _) in enumerate(tensors):
            if self.is_partial(name):
                by_source.setdefault(self.holders(name)[0], []).append(number)
        for source, numbers in sorted(by_source.items()):
            sizes = [_num_bytes(tensors[number][1] if found[number] is None else found[number]) for number in numbers]
            starts = list(itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
            message = torch.zeros(starts[-1], dtype=torch.uint8, device=self.device)
            if source == self.group.rank():
                for number, start, size in zip(numbers, starts, sizes, strict=False):
                    message[start : start + size] = _bytes_of(found[number])
            dist.broadcast(message, group=self.group, group_src=source)
            for number, start, size in zip(numbers, starts, sizes, strict=False):
                if found[number] is None:  # a copy: tensors of one message would share the version of their memory
                    found[number] = _like(message[start : start + size].clone(), tensors[number][1])
        return [content for content in found if content is not None]


def _is_in_place(operation: str) -> bool:
    return operation.endswith("_") and not operation.endswith("__")


def _num_bytes(tensor: Tensor | None) -> int:
    """The bytes of a tensor of any shape as a dense one, so that they are the same on all ranks."""
    assert tensor is not None
    return tensor.numel() * tensor.element_size()


def _bytes_of(content: Tensor | None) -> Tensor:
    assert content is not None
    dense = content.to_dense() if content.layout is not torch.strided else content
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _like(received: Tensor, absent: Tensor) -> Tensor:
    """Received bytes as the tensor that is absent here."""
    content = received.view(absent.dtype).view(absent.shape).to(absent.device)
    return content.to_sparse(absent.sparse_dim()) if absent.is_sparse else content


@dataclass(eq=False)
class _FullTensor:
    """A full tensor that is here."""

    # what this rank holds of it: a parameter, a gradient or a state; a shard, all of it, or an absent one
    tensor: Tensor
    name: str  # FQN of the parameter
    full: Tensor  # the full tensor
    version: int  # its version when the rank's own was last equal to it
    is_kept: bool = False  # whether code refers to its memory
    is_exported: bool = False  # whether NumPy or another library refers to it, whose writes count no versions

    def keep(self) -> None:
        """Hold the full tensor until all are dropped: code refers to its memory."""
        self.is_kept = True


class GatherOnRead(TorchFunctionMode):
    """Runs operations on full tensors where they read or write parameters; each kind of code has a subclass."""

    gives_contents = True
    reads_ahead = True

    def __init__(
        self, parameters: Mapping[str, Tensor], shards: LocalShards, stages: OneStage, *, room: int = 4 * _AHEAD
    ) -> None:
        """Record what must be gathered.

        Gathered tensors are kept up to ``room`` bytes, the same on every rank, as is the order of parameters.
        """
        super().__init__()
        self._parameters, self._shards, self._stages, self._room = dict(parameters), shards, stages, room
        sharded = shards.names
        self._partial = [name for name in parameters if name in sharded or stages.is_partial(name)]
        self._positions = {name: position for position, name in enumerate(self._partial)}
        # Where other stages are not read, what is absent here is of another stage, and left alone.
        here = (name for name in self._partial if stages.is_partial(name) or not is_absent(parameters[name]))
        self._names = {id(parameters[name]): name for name in here}
        self._full_tensors: dict[int, _FullTensor] = {}
        self._last_read = (False, -2)

    # -- what the subclasses answer ------------------------------------------------------------------------------------

    def _agree(self, what: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Check that all ranks are about to gather the same; raises where they are not."""
        raise NotImplementedError

    def _gradient(self, access: str, func: Any, args: Any) -> Any:
        """Read, set or delete ``parameter.grad``."""
        raise NotImplementedError

    def _refuse(self, operation: str, tensor: Tensor) -> None:
        """Raise because an operation reads a tensor without content that is no parameter."""
        raise NotImplementedError

    def _following(self, name: str, *, is_gradient: bool) -> Tensor | None:
        """What this rank has of a parameter, or of its gradient, that is read ahead; None for none on any rank."""
        return None if is_gradient else self._parameters[name]

    def _before(self, name: str, args: Any, kwargs: Any) -> None:
        """Prepare an operation."""

    def _operand(self, gathered: _FullTensor) -> Tensor:
        """What an operation that writes nothing gets of a full tensor."""
        return gathered.full

    def _name_of(self, leaf: Any) -> str | None:
        """FQN of the parameter, if a leaf of an operation's arguments is one that must be gathered."""
        return self._names.get(id(leaf))

    # -- operations ----------------------------------------------------------------------------------------------------

    def __exit__(self, *exception: Any) -> None:
        """Leave the mode: what code has written is written back, and full tensors are dropped."""
        super().__exit__(*exception)
        self.forget()

    def forget(self) -> None:
        """Drop full tensors: what ranks hold may change."""
        self._write_back()
        for held in self._full_tensors.values():
            self._room += _num_bytes(held.full)
        self._full_tensors, self._last_read = {}, (False, -2)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on full tensors; what it writes to one is also written to what this rank holds."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_property = name in _PROPERTIES
        member = func.__self__.__name__ if is_property else name
        first: Any = args[0] if args else None
        fqn = self._name_of(first)
        if fqn is None and is_property and member not in VIEW_PROPERTIES:
            return func(*args)
        if fqn is not None:
            if member == "grad":
                return self._gradient(name, func, args)
            if member in SHAPE_METHODS or (name == "__get__" and member in SHAPE_PROPERTIES):
                return func(self._shape_of(first, fqn), *args[1:], **kwargs)
        if member in IDENTITY or (is_property and member in OWN_PROPERTIES):
            if member in REGISTRATIONS and fqn is not None and fqn in self._shards.names:
                args = first, on_full_gradient(member, self._shards, fqn, args[1])
            return func(*args, **kwargs)
        self._before(name, args, kwargs)
        if name.startswith(_FOREACH):
            return self._each(name, func, args, kwargs)
        if fqn is not None and self._runs_here(name, first, [*args[1:], *kwargs.values()]):
            return first if is_absent(first) else func(*args, **kwargs)
        if name == "__deepcopy__" and is_absent(first):
            return self._copied(first, fqn, *args[1:])
        return self._on_full(name, member, func, args, kwargs)

    def _on_full(self, name: str, member: str, func: Any, args: Any, kwargs: Any) -> Any:
        leaves, plain = flatten_call(args, kwargs)
        found = {}
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if (fqn := self._name_of(leaf)) is not None:
                    found[id(leaf)] = fqn, leaf
                elif is_absent(leaf):
                    self._refuse(name, leaf)
        held = self._hold(found)
        if held:
            is_written = member in _WHOLE or name.startswith("__i") or _is_in_place(name) or "out" in kwargs
            given = {key: each.full if is_written else self._operand(each) for key, each in held.items()}
            leaves = [given.get(id(leaf), leaf) for leaf in leaves]
            args, kwargs = rebuild_call(leaves, args, kwargs, plain)
        if member == "data" and name == "__get__" and (held or self._is_full(args[0])):
            # A write through `.data` would not increase the version.
            for each in held.values():
                each.keep()
            return args[0]
        out = func(*args, **kwargs)
        if held:
            memories = {storage_id(tensor) for tensor in tensors_inside(out)}
            for each in held.values():
                each.is_exported |= name in _EXPORTS
                each.is_kept |= each.is_exported or storage_id(each.full) in memories
        if name == "__set__" and self._is_full(leaves[0]):  # p.data = full
            self._write_back(always=leaves[0])
        elif (name.endswith("_") and name != "__get__") or "out" in kwargs:
            self._write_back()
            # `layer.weight += x` sets the module's parameter to this result.
            return next((each.tensor for each in held.values() if each.full is out), out)
        return out

    def _each(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on lists member by member: full tensors of all of them may have no room."""
        lists = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple)]
        if not any(self._name_of(leaf) is not None for members in lists for leaf in members):
            return func(*args, **kwargs)
        count = len(args[0])
        results: list[Any] = []
        for index in range(count):

            def member(value: Any, index: int = index) -> Any:
                return [value[index]] if isinstance(value, list | tuple) and len(value) == count else value

            one = tuple(member(arg) for arg in args)
            further = {key: member(arg) for key, arg in kwargs.items()}
            others = [each for arg in (*one[1:], *further.values()) for each in (arg if type(arg) is list else [arg])]
            first = one[0][0]
            if self._name_of(first) is not None and self._runs_here(name.removeprefix(_FOREACH), first, others):
                result = None if is_absent(first) else func(*one, **further)
            else:
                result = self._on_full(name, name, func, one, further)
            results.extend(result or ())
        return results or None

    def _runs_here(self, name: str, first: Tensor, others: Sequence[Any]) -> bool:
        """Whether an operation writes element by element to what this rank holds; drops the full tensor of it."""
        if name not in _ELEMENTWISE or any(isinstance(other, Tensor) and other.dim() for other in others):
            return False
        if any(self._name_of(other) is not None for other in others) or self._is_kept(first):
            return False
        if (held := self._full_tensors.pop(id(first), None)) is not None:
            self._room += _num_bytes(held.full)
        return True

    def _copied(self, tensor: Tensor, fqn: str | None, memo: dict[int, Any]) -> Any:
        """A copy of an absent parameter with its content; torch copies none of its attributes."""
        if fqn is None:
            self._refuse("__deepcopy__", tensor)
        if id(tensor) not in memo:
            full = self.full(tensor).detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(full, tensor.requires_grad) if is_parameter else full
        return memo[id(tensor)]

    # -- full tensors --------------------------------------------------------------------------------------------------

    def full(self, tensor: Tensor) -> Tensor:
        """The tensor of full shape of a parameter, gradient or state; other tensors as they are; collective."""
        fqn = self._name_of(tensor)
        return tensor if fqn is None else self._hold({id(tensor): (fqn, tensor)})[id(tensor)].full

    def _shape_of(self, tensor: Tensor, fqn: str) -> Tensor:
        """A meta tensor of the full shape, which needs no message."""
        with torch._C.DisableTorchFunction():
            return torch.empty(self._shards.full_shape(fqn, tensor), dtype=tensor.dtype, device="meta")

    def _is_full(self, tensor: Any) -> bool:
        return any(held.full is tensor for held in self._full_tensors.values())

    def _is_kept(self, tensor: Tensor) -> bool:
        return id(tensor) in self._full_tensors and self._full_tensors[id(tensor)].is_kept

    def _hold(self, tensors: Mapping[int, tuple[str, Tensor]]) -> dict[int, _FullTensor]:
        """The full tensors of what this rank holds, by its id; collective if some are not here."""
        missing = [tensors[key] for key in tensors if key not in self._full_tensors]
        if missing:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._gather(missing if len(missing) > 1 else self._read_ahead(*missing[0]), busy=tensors)
        return {key: self._full_tensors[key] for key in tensors}

    def _read_ahead(self, fqn: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """The tensor, with those after it if code reads one after the other."""
        found = [(fqn, tensor)]
        is_gradient = tensor is not self._parameters[fqn]
        last, position = self._last_read, self._positions[fqn]
        if self.reads_ahead and last == (is_gradient, position - 1):
            size = tensor.numel() * tensor.element_size()
            for name in self._partial[position + 1 :]:
                size += self._parameters[name].element_size() * self._shape_of(self._parameters[name], name).numel()
                following = self._following(name, is_gradient=is_gradient)
                if size > _AHEAD or following is None or id(following) in self._full_tensors:
                    break
                found.append((name, following))
        self._last_read = is_gradient, position + len(found) - 1
        return found

    def _gather(self, tensors: Sequence[tuple[str, Tensor]], busy: Mapping[int, Any]) -> None:
        what = "; ".join(
            f"{'' if tensor is self._parameters[name] else 'the gradient or a state of '}{name!r}"
            for name, tensor in tensors[:2]
        )
        self._agree(f"reads {what}", tensors)
        contents = [None if is_absent(tensor) else self._joined(name, tensor.detach()) for name, tensor in tensors]
        fulls = self._stages.send(tensors, contents)
        self._make_room(sum(_num_bytes(full) for full in fulls), busy)
        for (name, tensor), full in zip(tensors, fulls, strict=True):
            self._full_tensors[id(tensor)] = _FullTensor(tensor, name, full, full._version)
            self._room -= _num_bytes(full)

    def _keep(self, name: str, tensor: Tensor, full: Tensor) -> None:
        """Keep the full tensor, to which code refers, of what this rank has made of it, a shard."""
        self._full_tensors[id(tensor)] = _FullTensor(tensor, name, full, full._version, is_kept=True)
        self._room -= _num_bytes(full)

    def _joined(self, name: str, local: Tensor) -> Tensor:
        """The full tensor of a shard; collective over the ranks that hold shards."""
        return by_rows(local, partial(self._shards.unshard, name))

    def _make_room(self, needed: int, busy: Mapping[int, Any]) -> None:
        for key, held in list(self._full_tensors.items()):
            if self._room >= needed:
                return
            if not held.is_kept and key not in busy:
                del self._full_tensors[key]
                self._room += _num_bytes(held.full)

    @torch.no_grad()
    def _write_back(self, always: Tensor | None = None) -> None:
        """Copy what code has written to full tensors to what this rank holds of them."""
        with torch._C.DisableTorchFunction():
            for held in list(self._full_tensors.values()):
                if held.full is always or held.is_exported or held.full._version != held.version:
                    held.version = held.full._version
                    self._write(held.name, held.full.detach(), held.tensor)

    def _write(self, name: str, full: Tensor, tensor: Tensor) -> None:
        if is_absent(tensor) or storage_id(full) == storage_id(tensor):
            return
        tensor.detach().copy_(by_rows(full, partial(self._shards.shard_of, name, tensor)))


def by_rows(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A change of dense tensors of any shape, also for a sparse one, which keeps its rows; zeros too."""
    if not tensor.is_sparse:
        return change(tensor)
    tensor = tensor.coalesce()
    ones = torch.sparse_coo_tensor(tensor.indices(), torch.ones_like(tensor.values()), tensor.shape)
    content, is_here = change(tensor.to_dense()), change(ones.to_dense())
    rows = is_here.flatten(1).any(1).nonzero()[:, 0]
    return torch.sparse_coo_tensor(rows[None], content[rows], content.shape, is_coalesced=True)
