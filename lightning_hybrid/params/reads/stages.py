"""A function mode for user hooks: gradients and parameters of other pipeline stages read as the full model's.

``CrossStageReads`` intercepts every torch operation of a hook, and tracks which pipeline ranks have each tensor:

    p.grad           on the ranks of p                        elsewhere a stand-in without content
    p.grad.norm()    computed on the ranks of p.grad          elsewhere a stand-in
    p.grad.mul_(x)   done on the ranks of p.grad              elsewhere nothing
    torch.stack      of tensors without a common rank:        their contents are first sent to all ranks
    .item(), bool    of a tensor that some ranks lack:        the same

A buffer that the step writes is right on one rank only: before an operation on it, it is broadcast to all ranks.

So ``clip_grad_norm_``, ``get_total_norm`` and loops over ``p.grad`` are global, under whatever name they were imported,
and a parameter that several ranks hold counts once: it is one parameter. What is not read is not sent.

All ranks must do the same in a hook. They compare their next operation before each exchange, and once more at the end
of the hook; so a read on some ranks only is an error on all, and neither a hang nor a mixture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid.collectives.tensors import as_sendable
from lightning_hybrid.errors import GlobalReadError
from lightning_hybrid.params.pickles import pickles_by, reduce_for_pickle
from lightning_hybrid.params.reads import effects as effects
from lightning_hybrid.params.reads.agreement import HookAgreement, Meet
from lightning_hybrid.params.reads.buffers import HookBuffers
from lightning_hybrid.params.reads.locations import Ranks, ValueLocations, covers
from lightning_hybrid.params.reads.remote import RemoteValues
from lightning_hybrid.randomness.random_number_ops import draws
from lightning_hybrid.step.objects.pytree import flatten, flatten_call, map_leaves, rebuild_call
from lightning_hybrid.step.standins.absent_arrays_and_lists import interceptable_tolist
from lightning_hybrid.step.standins.absent_tensors import (
    FAKE_MODE,
    fill,
    is_absent,
    make_absent,
    make_absent_rows,
    user_attributes,
)
from lightning_hybrid.step.tracing.intercept_step_operations import _METADATA, VIEW_PROPERTIES

_MEMORY = frozenset({"untyped_storage"})  # used to pickle a plain tensor
_AUTOGRAD = frozenset({"backward", "grad"})
SAVING = "trainer.save_checkpoint"  # a checkpoint is written in full, however large


class CrossStageReads(TorchFunctionMode):
    """Makes reads of user hooks refer to the full model; active inside ``hook`` only.

    Attributes:
        parameters: Ids of the module's parameters.
    """

    gives_contents = True

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        holders: Mapping[str, Sequence[int]],
        group: dist.ProcessGroup,
        device: torch.device,
        meet: Meet,
        *,
        buffer_owners: Callable[[], Sequence[tuple[Tensor, int]]] = list,
        most_elements: int = 1 << 24,
    ) -> None:
        """Record which ranks hold each parameter.

        Args:
            parameters: All of the module's, by FQN, in the same order on every rank.
            holders: Pipeline ranks that hold each parameter, by FQN.
            group: The ranks of this pipeline.
            device: Where the group communicates.
            meet: As for ``HookAgreement``.
            buffer_owners: Returns the buffers that are right on one pipeline rank only, and that rank.
            most_elements: Number of elements that one hook may exchange.
        """
        super().__init__()
        self._group, self._device, self._most_elements = group, device, most_elements
        self._rank = group.rank()
        self._locations = ValueLocations(group.size())
        self._agreement = HookAgreement(group, device, meet)
        self._remote = RemoteValues(self._locations, self._agreement, group, device)
        self._buffers = HookBuffers(buffer_owners, self._agreement, group, device)
        self._fqns = {id(parameter): fqn for fqn, parameter in parameters.items()}
        self._parameters = dict(parameters)
        self.parameters = frozenset(map(id, parameters.values()))
        self._holders = {fqn: tuple(holders[fqn]) for fqn in parameters}
        for fqn, parameter in parameters.items():
            self._locations.set_parameter_ranks(parameter, self._holders[fqn], fqn)
        self._hook: str | None = None
        self._is_complete = True
        self._elements = 0
        # In this hook: the parameters that have a gradient on their ranks, and stand-ins for gradients of other ranks.
        self._has_gradient: dict[str, int] = {}  # by FQN, as from `_kind_of`
        self._stand_ins: dict[str, Tensor | None] = {}

    @contextlib.contextmanager
    def hook(self, name: str, *, is_complete: bool = True, is_on_all_ranks: bool = True) -> Iterator[None]:
        """Run a hook inside, which reads the full model; nested hooks count as one. Collective over the pipeline.

        Args:
            name: For messages.
            is_complete: Whether gradients of shared parameters are summed over their ranks.
            is_on_all_ranks: Whether all ranks run this hook also if it reads nothing.

        Raises:
            RanksDisagree: Some ranks read what others do not.
        """
        if outer := self._hook:
            self._hook = name
            try:
                yield
            finally:
                self._hook = outer
            return
        self._hook, self._is_complete, self._elements = name, is_complete, 0
        try:
            checked = self._agreement.checked_hook(name, is_on_all_ranks=is_on_all_ranks)
            with checked, self, interceptable_tolist(), pickles_by(self._pickled):
                yield
        finally:
            self._hook = None
            self._buffers.forget()
            self._has_gradient, self._stand_ins = {}, {}

    def known(self, value: Any) -> Any:
        """Replace tensors in ``value`` by their contents; collective over the pipeline if some are on other ranks."""
        with torch._C.DisableTorchFunction():
            leaves = flatten(value)[0]
            tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and self._ranks_of(leaf)}
            if not tensors:
                return value
            contents = dict(zip(tensors, self._fetch(list(tensors.values()), "log"), strict=True))
            return map_leaves(lambda leaf: contents.get(id(leaf), leaf), value)

    def track_copy(self, other: nn.Module) -> None:
        """Track the parameters of a copy of the module, which has the same shards on the same ranks."""
        for fqn, parameter in other.named_parameters():
            if fqn in self._holders:
                self._locations.set_parameter_ranks(parameter, self._holders[fqn], fqn)

    @torch.no_grad()
    def complete(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast tensors that hooks have made and kept to every rank; collective over the pipeline.

        They have any shape, and some may be on other ranks. Nothing is done where ranks keep different ones.
        """
        with torch._C.DisableTorchFunction():
            placed = [(tensor, self._locations.ranks_of(tensor)) for tensor in tensors]
            limited = [(tensor, ranks) for tensor, ranks in placed if ranks is not None]
            kinds = self.gather_objects([(tuple(tensor.shape), tensor.dtype, ranks) for tensor, ranks in limited])
            for tensor, ranks in limited if all(kind == kinds[0] for kind in kinds) else ():
                here = not is_absent(tensor)
                content = tensor.detach() if here else torch.empty(tensor.shape, dtype=tensor.dtype)
                content = content.to(self._device).contiguous()
                dist.broadcast(as_sendable(content), group=self._group, group_src=ranks[0])
                if not here:
                    made = content.to(tensor.device)
                    made = nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made
                    fill(tensor, made.requires_grad_(tensor.requires_grad))

    def is_on_all_ranks(self, tensor: Tensor) -> bool | None:
        """Whether a tensor of any shape is on all ranks; None if it is absent here, and its ranks are unrecorded."""
        if not self._locations.is_recorded(tensor) and is_absent(tensor):
            return None
        return self._locations.ranks_of(tensor) is None

    def gather_objects(self, mine: Any) -> list[Any]:
        """Gather an object from each rank of the pipeline; collective."""
        return self._agreement.gather_objects(mine)

    def contents_for_file(self, tensors: Sequence[Tensor], *, keep: bool) -> list[Tensor]:
        """The contents of tensors of any shapes, as ``RemoteValues.contents_for_file`` returns them."""
        assert self._hook is not None
        return self._remote.contents_for_file(self._hook, tensors, self._most_elements, keep=keep)

    def record_full_tensor(self, full_tensor: Tensor, fqn: str) -> None:
        """Record that a tensor of the parameter's full shape, gathered from tensor ranks, is on its pipeline ranks."""
        self._locations.record(full_tensor, self._holders[fqn], [self._parameters[fqn]])

    def track_state(self, state: Mapping[Any, Any]) -> None:
        """Record that an optimizer's states are on the ranks of their parameters; numbers among them are on all ranks.

        Args:
            state: By parameter, as in optimizers. Tensors for parameters of other ranks become stand-ins.
        """
        for parameter, entries in state.items():
            fqn = self._fqns.get(id(parameter))
            if fqn is None or not isinstance(entries, dict):
                continue
            for name, value in entries.items():
                if isinstance(value, Tensor) and value.dim():
                    if self._rank not in self._holders[fqn] and not is_absent(value):
                        value = entries[name] = make_absent(value, requires_grad=False)
                    self._locations.record(value, self._holders[fqn], [parameter])

    # -- operations ---------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Dispatch one torch function call of a hook."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            member = func.__self__.__name__
            if member == "grad" and id(args[0]) in self._fqns:
                return self._gradient(name, func, args)
            if name == "__set__" and member == "data":
                return self._operation("set_data_", func, args, kwargs)
            if name != "__get__" or member not in VIEW_PROPERTIES:
                return func(*args, **kwargs)
        elif name in _METADATA and name not in _MEMORY:
            return func(*args, **kwargs)
        assert self._hook is not None
        self._buffers.refresh(self._hook, args[:1] if name == "__deepcopy__" else (args, kwargs))
        if name.startswith("_foreach_"):
            return self._each(name, func, args, kwargs)
        if name in _MEMORY:
            return func(*args, **kwargs)
        if name == "__reduce_ex__":
            return self._pickled(args[0])
        if name == "equal":
            return self._equal(*args)
        if name == "__deepcopy__":  # its memo has all that was copied before
            args[1][id(FAKE_MODE)] = FAKE_MODE  # the copy of an absent tensor is absent in the same mode
            made = self._run(name, func, args, kwargs, [args[0]], self._ranks_of(args[0]))
            for attribute in user_attributes(args[0]) if isinstance(args[0], nn.Parameter) else ():
                made.__dict__.pop(attribute, None)  # torch does not copy a parameter's attributes
            return made
        return self._operation(name, func, args, kwargs)

    def _pickled(self, tensor: Tensor) -> Any:
        """Reduce a tensor for a pickle: its content, without the attributes that are recorded on it."""
        content = tensor if self._ranks_of(tensor) is None else self._fetch([tensor], "a pickle")[0]
        return reduce_for_pickle(tensor, content)

    def _equal(self, first: Tensor, second: Tensor) -> bool:
        """Run ``torch.equal``, of which one answer is sent instead of two contents."""
        if self._ranks_of(first) is None and self._ranks_of(second) is None:
            return torch.equal(first, second)
        if first is second or first.shape != second.shape:
            return first is second
        same = self._operation("all", torch.all, (self._operation("eq", torch.eq, (first, second), {}),), {})
        return self._operation("__bool__", Tensor.__bool__, (same,), {})

    def _each(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on lists member by member, since members may be on different ranks."""
        members = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if all(self._ranks_of(member) is None for member in members):
            return func(*args, **kwargs)
        count = len(args[0])
        results: list[Any] = []
        for index in range(count):

            def member(value: Any, index: int = index) -> Any:
                return [value[index]] if isinstance(value, list | tuple) and len(value) == count else value

            of_member = {key: member(arg) for key, arg in kwargs.items()}
            results.extend(self._operation(name, func, tuple(member(arg) for arg in args), of_member) or ())
        return results or None

    def _operation(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        leaves, plain = flatten_call(args, kwargs)
        ranks = [self._ranks_of(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        if all(one is None for one in ranks):
            if name in _AUTOGRAD:
                self._has_gradient, self._stand_ins = {}, {}
            return func(*args, **kwargs)
        if name in _AUTOGRAD:
            raise GlobalReadError(
                f"{self._hook}: {name}() starts from values that are on some pipeline ranks only; add the term to the"
                " loss in training_step",
                entry="hook-backward",
            )
        leaves = list(leaves)
        if name in effects.LIKE_FIRST and ranks[0] is not None:
            leaves[0], ranks[0] = torch.empty(0, dtype=leaves[0].dtype, device=self._device), None
        if name in effects.LIKE_SECOND and ranks[1] is not None and ranks[0] is not None:
            like = torch.empty((), dtype=leaves[1].dtype, device=self._device).expand(leaves[1].shape)
            leaves[1], ranks[1] = like, None
        written = effects.written_of(name, leaves, kwargs)
        if effects.needs_content(name, leaves, args):
            target: Ranks = None
        elif written is not None:
            target = ranks[written]
        else:
            target = effects.common_ranks(leaves, ranks)
        missing = [i for i, one in enumerate(ranks) if i != written and not covers(one, target)]
        for index, content in zip(missing, self._fetch([leaves[i] for i in missing], name), strict=True):
            leaves[index] = content
        args, kwargs = rebuild_call(leaves, args, kwargs, plain)
        return self._run(name, func, args, kwargs, leaves, target)

    def _run(self, name: str, func: Any, args: Any, kwargs: Any, leaves: list[Any], target: Ranks) -> Any:
        """Run an operation on the ranks of its inputs; elsewhere on stand-ins, with the same random draws."""
        if target is None:
            return func(*args, **kwargs)
        if self._rank in target:
            result = func(*args, **kwargs)
        elif name == "set_data_":
            return None
        else:
            if draws(name, args, kwargs):
                func(*map_leaves(effects.real, args), **map_leaves(effects.real, kwargs))
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:
                raise GlobalReadError(
                    f"{self._hook}: {name} cannot run on a pipeline rank that has no content for it ({error}); compute"
                    " it from norms or sums",
                    entry="hook-operation",
                ) from error
        for made in flatten(result)[0]:
            if isinstance(made, Tensor) and not any(made is leaf for leaf in leaves):
                inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
                self._locations.record(made, target, inputs)
        return result

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _gradient(self, name: str, func: Any, args: Any) -> Any:
        """Read, set or delete ``parameter.grad``."""
        parameter = args[0]
        fqn = self._fqns[id(parameter)]
        holders = self._holders[fqn]
        if name != "__get__":
            value = args[1] if name == "__set__" else None
            if value is not None and not covers(self._ranks_of(value), self._locations.ranks_of(parameter)):
                [value] = self._fetch([value], "setting .grad")
            if not is_absent(parameter):
                return func(parameter, *([value] if name == "__set__" else []))
            self._set_stand_in(parameter, _kind_of(value))
            return None
        if len(holders) > 1 and not self._is_complete:
            raise GlobalReadError(
                f"{self._hook}: the gradient of {fqn!r}, which pipeline ranks {list(holders)} share, is summed over"
                " them with the last batch of an accumulation, and this is an earlier one; read gradients in"
                " on_before_optimizer_step, or set accumulate_grad_batches=1",
                entry="hook-shared-gradient",
            )
        if len(set(holders)) < self._group.size() and not self._has_gradient:
            self._exchange_has_gradient()
        if not is_absent(parameter):
            gradient = func(parameter)
            if gradient is not None:
                self._locations.record(gradient, holders, [parameter], only_tensor=True)
            return gradient
        if fqn not in self._stand_ins:
            self._set_stand_in(parameter, self._has_gradient[fqn])
        return self._stand_ins[fqn]

    def _set_stand_in(self, parameter: Tensor, kind: int) -> None:
        """Set the stand-in for the gradient of an absent parameter, of a kind as from ``_kind_of``."""
        fqn, gradient = self._fqns[id(parameter)], None
        if kind:
            is_dense = kind == 1
            gradient = (
                make_absent(parameter, requires_grad=False) if is_dense else make_absent_rows(parameter, kind - 1)
            )
            self._locations.record(gradient, self._holders[fqn], [parameter])
        self._stand_ins[fqn] = gradient

    def _exchange_has_gradient(self) -> None:
        """Exchange which parameters of other ranks have a gradient; collective over the pipeline."""
        assert self._hook is not None
        self._agreement.agree_on(self._hook, "reads .grad")
        mine = [
            _kind_of(parameter.grad) * (self._holders[fqn][0] == self._rank)
            for fqn, parameter in self._parameters.items()
        ]
        flags = torch.tensor(mine, dtype=torch.int32, device=self._device)
        dist.all_reduce(flags, group=self._group)
        self._has_gradient = dict(zip(self._parameters, flags.tolist(), strict=True))

    # -- contents -----------------------------------------------------------------------------------------------------

    def _ranks_of(self, tensor: Tensor) -> Ranks:
        """The ranks that have the content of ``tensor``; None for all."""
        if self._locations.is_recorded(tensor) or not is_absent(tensor):
            return self._locations.ranks_of(tensor)
        raise GlobalReadError(
            f"{self._hook}: a tensor of shape {tuple(tensor.shape)} has no content on pipeline rank {self._rank}, and"
            " it was not made in a hook, so the rank that has its content is unknown; make it in on_fit_start or a"
            " later hook",
            entry="hook-content",
        )

    def _fetch(self, tensors: Sequence[Tensor], why: str) -> list[Tensor]:
        """The contents of tensors that some ranks lack; collective over the pipeline if there are any."""
        if not tensors:
            return []
        assert self._hook is not None
        count = sum(tensor.numel() for tensor in tensors)
        self._elements += count
        if self._elements > self._most_elements and self._hook != SAVING:
            raise GlobalReadError(
                f"{self._hook}: {why} needs {count} elements of other pipeline ranks, {self._elements} in this hook"
                f" with those before, and at most {self._most_elements} are sent; reduce each gradient first"
                " (p.grad.norm(), p.grad.abs().max()), or use torch.nn.utils.get_total_norm or clip_grad_norm_",
                entry="hook-elements",
            )
        return self._remote.fetch(self._hook, why, tensors)


def _kind_of(gradient: Tensor | None) -> int:
    """0 for no gradient, 1 for a dense one, and 1 more than the number of its sparse dims for a sparse one."""
    return 0 if gradient is None else 1 + gradient.sparse_dim() * gradient.is_sparse
