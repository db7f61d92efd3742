"""A function mode for user hooks: sharded parameters, and their gradients, read as full ones.

    p.shape, p.numel()      those of the whole
    p.norm(), p.grad.max()  of the whole, which the ranks that hold the parts send each other
    p.grad.mul_(x)          done to the whole, of which each rank keeps its part

What is not read is not sent. All these ranks must read the same; they run the same hooks on the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid.parts.local_shards import HeldParts
from lightning_hybrid.step.objects.pytree import flatten_call, memory_of, rebuild_call
from lightning_hybrid.step.standins.absent_tensors import SHAPE_METHODS, SHAPE_PROPERTIES, is_absent

IDENTITY = frozenset({"__hash__", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"})
_OWN_PROPERTIES = frozenset({"requires_grad", "grad_fn", "is_leaf", "device", "dtype", "_backward_hooks", "layout"})


class CutReads(TorchFunctionMode):
    """Shows whole parameters and gradients while it is entered."""

    def __init__(
        self,
        parts: HeldParts,
        parameters: Mapping[str, Tensor],
        note: Callable[[Tensor, str], None] | None = None,
        meet: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Begin a run.

        Args:
            parts: What is cut.
            parameters: All of the module's, by FQN.
            note: Called with each whole tensor and the FQN of its parameter when it is made.
            meet: Called with the FQN of a parameter before its parts are sent; finds ranks that read something else.
        """
        super().__init__()
        self._parts, self._note, self._meet = parts, note, meet
        cut = parts.names
        self._cut = {id(parameter): name for name, parameter in parameters.items() if name in cut}
        self._locals = [parameter for name, parameter in parameters.items() if name in cut]
        self._wholes: dict[int, tuple[Tensor, int, Tensor]] = {}  # by id of the local tensor: it, version, the whole
        self._origins: dict[int, tuple[Tensor, int, Tensor, str]] = {}  # by id of the whole, and its FQN
        self._memories: set[Any] | None = None  # of parts, while it is entered

    def make_state_whole(self, state: Mapping[Any, Any]) -> None:
        """Let an optimizer whose steps see wholes keep wholes; collective.

        Args:
            state: By parameter, as optimizers hold it.
        """
        for parameter, entries in state.items():
            if self._is_cut(parameter) and isinstance(entries, dict):
                for name, value in entries.items():
                    if isinstance(value, Tensor):
                        entries[name] = self._parts.whole_like(parameter, value)

    @contextlib.contextmanager
    def following(self, states: Iterable[Mapping[Any, Any]], copies: Iterable[nn.Module]) -> Iterator[None]:
        """Also what optimizers keep of parameters, and the parameters of copies of the module, are whole ones inside.

        Args:
            states: Of optimizers, by parameter.
            copies: In parts as the module is.
        """
        before = self._cut
        self._cut = dict(before)
        held: list[Tensor] = []  # ids are of what lives
        for name, parameter in (named for other in copies for named in other.named_parameters()):
            if name in before.values():
                self._cut[id(parameter)] = name
        for parameter, entries in (entry for state in states for entry in state.items()):
            if id(parameter) in before and not is_absent(parameter) and isinstance(entries, dict):
                like = [value for value in entries.values() if isinstance(value, Tensor)]
                held += like
                with torch._C.DisableTorchFunction():
                    self._cut |= {id(value): before[id(parameter)] for value in like if value.shape == parameter.shape}
        try:
            yield
        finally:
            self._cut = before
            held.clear()

    def is_part(self, tensor: Tensor) -> bool | None:
        """Whether this rank has a part of what is meant by a tensor; None for the memory of one under no known name."""
        if self._is_cut(tensor):
            return True
        if self._memories is None:
            self._memories = {memory_of(local) for local in self._locals if not is_absent(local)}
        return None if not is_absent(tensor) and memory_of(tensor) in self._memories else False

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a parameter of which this rank has a part, or what is given; collective."""
        return self._whole(tensor, self._cut[id(tensor)]) if self._is_cut(tensor) else tensor

    def __enter__(self) -> Any:
        """See wholes from now on; what was seen before may have changed."""
        self._wholes, self._origins, self._memories = {}, {}, None
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        """Forget the wholes."""
        super().__exit__(*exception)
        self._wholes, self._origins, self._memories = {}, {}, None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on wholes; what it writes to one is written to this rank's part."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__") and id(args[0]) in self._cut and not is_absent(args[0]):
            member = func.__self__.__name__
            if member == "grad":
                return self._gradient(name, func, args)
            if member == "data" and name == "__get__":
                return self._whole(args[0], self._cut[id(args[0])])
            if member in _OWN_PROPERTIES:
                return func(*args, **kwargs)
            if name == "__get__" and member in SHAPE_PROPERTIES:
                return func(self._shape_of(args[0]))
        elif name in SHAPE_METHODS and self._is_cut(args[0]):
            return func(self._shape_of(args[0]), *args[1:], **kwargs)
        elif name == "__get__" and func.__self__.__name__ == "data" and id(args[0]) in self._origins:
            return args[0]  # `.data` would hide from the version that it is written
        elif name in IDENTITY:
            return func(*args, **kwargs)
        leaves, plain = flatten_call(args, kwargs)
        places = [place for place, leaf in enumerate(leaves) if self._is_cut(leaf)]
        given: dict[int, Tensor] = {}  # the parameters, by id of the whole
        for place in places:
            local = leaves[place]
            leaves[place] = self._whole(local, self._cut[id(local)])
            given[id(leaves[place])] = local
        if places:
            args, kwargs = rebuild_call(leaves, args, kwargs, plain)
        out = func(*args, **kwargs)
        if name == "__set__" and id(leaves[0]) in self._origins:  # p.data = whole
            self._write_back(leaves[0])
        elif name.endswith("_") or "out" in kwargs:
            for whole, version, *_ in list(self._origins.values()):
                if whole._version != version:  # also through views
                    self._write_back(whole)
            return given.get(id(out), out)  # `layer.weight += x` sets the module's parameter to what this gives
        return out

    def _shape_of(self, local: Tensor) -> Tensor:
        """The whole without content; its shape needs no message."""
        with torch._C.DisableTorchFunction():
            shape = self._parts.whole_shape(self._cut[id(local)], local)
            return torch.empty(shape, dtype=local.dtype, device="meta")

    def _is_cut(self, leaf: Any) -> bool:
        return id(leaf) in self._cut and not is_absent(leaf)

    def _whole(self, local: Tensor, name: str) -> Tensor:
        known = self._wholes.get(id(local))
        if known is not None and known[0] is local and known[1] == local._version:
            return known[2]
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._meet(name)
            whole = self._parts.joined(name, local.detach())
        self._remember(whole, local, name)
        if self._note is not None:
            self._note(whole, name)
        return whole

    def _remember(self, whole: Tensor, local: Tensor, name: str) -> None:
        self._wholes[id(local)] = local, local._version, whole
        self._origins[id(whole)] = whole, whole._version, local, name

    def _write_back(self, whole: Tensor) -> None:
        _, _, local, name = self._origins[id(whole)]
        with torch._C.DisableTorchFunction(), torch.no_grad():
            local.detach().copy_(self._parts.part(name, whole.detach()))
        self._remember(whole, local, name)

    def _gradient(self, how: str, func: Any, args: Any) -> Any:
        parameter = args[0]
        name = self._cut[id(parameter)]
        if how == "__get__":
            local = func(parameter)
            return None if local is None else self._whole(local, name)
        if how == "__set__" and args[1] is not None:
            value = args[1]
            with torch._C.DisableTorchFunction():
                if id(value) in self._origins and self._origins[id(value)][2] is parameter.grad:
                    return None  # the same, given back
                parameter.grad = self._parts.part(name, value.detach()).contiguous()
            return None
        return func(*args)
