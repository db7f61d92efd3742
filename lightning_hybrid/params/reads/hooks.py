"""Reads in hooks of the user, and in optimizer steps that need more than a shard: they see the full model.

``clip_grad_norm_``, ``get_total_norm`` and loops over ``p.grad`` are global, under whatever name they were imported,
and a parameter that several ranks hold counts once: it is one parameter.

All ranks must do the same in a hook. They compare their next read before they send anything, and once more at the end
of the hook; so a read on some ranks only is an error on all, and neither a hang nor a mixture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_hybrid.collectives.tensors import digest_of_bits
from lightning_hybrid.errors import GlobalReadError
from lightning_hybrid.params.pickles import pickles_by, reduce_for_pickle
from lightning_hybrid.params.reads.agreement import HookAgreement
from lightning_hybrid.params.reads.buffers import HookBuffers
from lightning_hybrid.params.reads.gather import GatherOnRead, OneStage, Stages, _FullTensor, by_rows
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.step.objects.pytree import flatten, map_leaves
from lightning_hybrid.step.objects.tensors import gradient_dtype, storage_id
from lightning_hybrid.step.standins.numbers import interceptable_tolist
from lightning_hybrid.step.standins.tensors import is_absent, make_absent, make_absent_rows

SAVING = "trainer.save_checkpoint"
# Replicas over which parameters are sharded may have different numbers of these.
_PER_EVALUATED_BATCH = tuple(
    f"on_{stage}_batch_{when}" for stage in ("validation", "test", "predict") for when in ("start", "end")
)


class HookReads(GatherOnRead):
    """Reads of the full model by hooks; active inside ``hook`` only.

    Args:
        parameters: Of the module, by FQN, in the same order on every rank.
        shards: Of these.
        stages: The pipeline ranks that hold them.
        shard_ranks: By which the ranks that hold shards find out that they do not read the same.
        stage_ranks: The same of pipeline ranks; None if there is one stage.
        buffers: Returns those that are right on one pipeline rank only, and that rank.
        over_replicas: Whether replicas hold shards of one copy.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        shards: LocalShards,
        shard_ranks: HookAgreement,
        stages: OneStage | None = None,
        stage_ranks: HookAgreement | None = None,
        buffers: Callable[[], Sequence[tuple[Tensor, int]]] = list,
        *,
        over_replicas: bool = False,
    ) -> None:
        super().__init__(parameters, shards, stages or OneStage())
        self._shard_ranks, self._stage_ranks, self._over_replicas = shard_ranks, stage_ranks, over_replicas
        if stage_ranks is not None:
            assert isinstance(stages, Stages)
            self._buffers = HookBuffers(buffers, stage_ranks, stages.group, stages.device)
        self._shared = {id(parameter) for name, parameter in parameters.items() if self._stages.is_shared(name)}
        self._gradients = WeakIdKeyDictionary()  # FQN by what this rank holds of a gradient
        self._hook, self._is_complete, self._compares_writes = "", True, True
        # In this hook: the parameters that have a gradient on their ranks, and stand-ins for gradients of other ranks.
        self._kinds: dict[str, int] = {}  # by FQN, as from `_kind_of`
        self._stand_ins: dict[str, Tensor | None] = {}

    @property
    def has_shards(self) -> bool:
        """Whether ranks hold shards of parameters."""
        return bool(self._shards.names)

    def within_stages(self) -> HookReads:
        """Reads of code that looks at one parameter at a time, whatever its stage."""
        return HookReads(self._parameters, self._shards, self._shard_ranks, over_replicas=self._over_replicas)

    @contextlib.contextmanager
    def hook(
        self, name: str, *, is_complete: bool = True, is_on_all_ranks: bool = True, compares_writes: bool = True
    ) -> Iterator[None]:
        """Run a hook inside, which reads the full model; nested hooks count as one. Collective.

        ``is_complete`` says whether gradients of shared parameters are summed over their ranks, ``is_on_all_ranks``
        whether all ranks run this hook also if it reads nothing, ``compares_writes`` whether it may write what is
        computed from the batch of one replica.

        Raises:
            RanksDisagree: Some ranks read what others do not, or replicas write other values to what they shard.
        """
        outer, self._hook = self._hook, name
        try:
            if outer:
                yield
                return
            self._is_complete, self._compares_writes = is_complete, compares_writes and self._over_replicas
            with contextlib.ExitStack() as stack:
                if self._stage_ranks is not None:
                    stack.enter_context(self._stage_ranks.checked_hook(name, is_on_all_ranks=is_on_all_ranks))
                if self._shards.names and not (self._over_replicas and name.endswith(_PER_EVALUATED_BATCH)):
                    stack.enter_context(self._shard_ranks.checked_hook(name, is_on_all_ranks=is_on_all_ranks))
                stack.enter_context(self)
                stack.enter_context(interceptable_tolist())
                stack.enter_context(pickles_by(self._pickled))
                yield
        finally:
            self._hook = outer
            if not outer and self._stage_ranks is not None:
                self._buffers.forget()

    def forget(self) -> None:
        """Drop full tensors: what ranks hold may change."""
        super().forget()
        self._kinds, self._stand_ins = {}, {}

    def known(self, value: Any) -> Any:
        """A pytree with the full tensors of the parameters and gradients in it."""
        with torch._C.DisableTorchFunction():
            return map_leaves(lambda leaf: self.full(leaf).detach() if self._name_of(leaf) else leaf, value)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def unshard_state(self, state: Mapping[Any, Any]) -> None:
        """Gather the states, by parameter, of an optimizer whose steps use full parameters; collective."""
        for parameter, entries in state.items():
            is_sharded = self._names.get(id(parameter)) in self._shards.names and not is_absent(parameter)
            if is_sharded and isinstance(entries, dict):
                for name, value in entries.items():
                    if isinstance(value, Tensor):
                        entries[name] = self._shards.full_state_of(parameter, value)

    @contextlib.contextmanager
    def tracking(self, states: Iterable[Mapping[Any, Any]], copies: Iterable[nn.Module]) -> Iterator[None]:
        """Inside, treat optimizer states, by parameter, and parameters of copies of the module as sharded ones too."""
        before = self._names
        self._names = dict(before)
        alive: list[Tensor] = []  # keeps the tensors alive whose ids are recorded
        for name, parameter in (named for other in copies for named in other.named_parameters()):
            if name in self._positions:
                self._names[id(parameter)] = name
        for parameter, entries in (entry for state in states for entry in state.items()):
            if id(parameter) in before and not is_absent(parameter) and isinstance(entries, dict):
                with torch._C.DisableTorchFunction():
                    shaped = [v for v in entries.values() if isinstance(v, Tensor) and v.shape == parameter.shape]
                alive += shaped
                self._names |= {id(tensor): before[id(parameter)] for tensor in shaped}
        try:
            yield
        finally:
            self.forget()
            self._names = before
            alive.clear()

    def is_on_all_ranks(self, tensor: Tensor) -> bool | None:
        """Whether all ranks have a tensor in its full shape; None if it is not here, and its parameter not known."""
        if self._name_of(tensor) is not None:
            return False
        if is_absent(tensor):
            return None
        memories = {storage_id(p) for p in self._parameters.values() if id(p) in self._names and not is_absent(p)}
        return None if storage_id(tensor) in memories else True

    def gather_objects(self, mine: Any) -> list[Any]:
        """Gather an object from each rank that has a shard of this copy of the module; collective."""
        rows = self._shard_ranks.gather_objects(mine) if self._shards.names else [mine]
        if self._stage_ranks is None:
            return rows
        return [each for stage in self._stage_ranks.gather_objects(rows) for each in stage]

    def contents_for_file(self, tensors: Sequence[Tensor], *, keep: bool) -> list[Tensor]:
        """The full tensors on a rank that keeps them, in host memory if it lacks some; else tensors of shape (0,)."""
        contents = []
        for tensor in tensors:
            full = self.full(tensor).detach()
            own = full if storage_id(full) == storage_id(tensor) or not keep else full.to("cpu", copy=True)
            contents.append(own if keep else torch.empty(0, dtype=tensor.dtype))
        return contents

    # -- operations ----------------------------------------------------------------------------------------------------

    def _name_of(self, leaf: Any) -> str | None:
        found = self._names.get(id(leaf))
        return self._gradients.get(leaf) if found is None and isinstance(leaf, Tensor) else found

    def _agree(self, what: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
        if self._stage_ranks is not None and any(self._stages.is_partial(name) for name, _ in tensors):
            self._stage_ranks.agree_on(self._hook, what)
        if any(name in self._shards.names and not is_absent(tensor) for name, tensor in tensors):
            self._shard_ranks.agree_on(self._hook, what)

    def _write(self, name: str, full: Tensor, tensor: Tensor) -> None:
        if self._compares_writes and name in self._shards.names and not is_absent(tensor):
            self._shard_ranks.has_written(name, digest_of_bits(full.coalesce().values() if full.is_sparse else full))
        super()._write(name, full, tensor)

    def _runs_here(self, name: str, first: Tensor, others: Sequence[Any]) -> bool:
        """Whether an operation writes element by element; its numbers are compared, since the result is not here."""
        runs = super()._runs_here(name, first, others)
        fqn = self._name_of(first) or ""
        if runs and self._compares_writes and fqn in self._shards.names and not is_absent(first):
            with torch._C.DisableTorchFunction():
                for number in others:
                    if isinstance(number, Tensor | int | float | complex):
                        self._shard_ranks.has_written(fqn, digest_of_bits(torch.as_tensor(number)))
        return runs

    def _refuse(self, operation: str, tensor: Tensor) -> None:
        if self._stage_ranks is None:  # of another stage, and left alone
            return
        raise GlobalReadError(
            f"{self._hook}: a tensor of shape {tuple(tensor.shape)} has no content on this pipeline rank, and it was"
            f" not made in a hook, so the rank that has its content for {operation} is unknown; make it in on_fit_start"
            " or a later hook",
            entry="hook-content",
        )

    def _before(self, name: str, args: Any, kwargs: Any) -> None:
        if self._stage_ranks is not None:
            # The memo of a deep copy has all that was copied before.
            self._buffers.refresh(self._hook, args[:1] if name == "__deepcopy__" else (args, kwargs))
        if name in ("backward", "grad"):
            self._kinds, self._stand_ins = {}, {}
            is_constant = name == "backward" and isinstance(args[0], Tensor) and not args[0].requires_grad
            if is_constant or any(self._name_of(leaf) is not None for leaf in flatten((args, kwargs))[0]):
                raise _no_backward(self._hook, name)

    def _operand(self, gathered: _FullTensor) -> Tensor:
        """Let a backward fail that reaches a full parameter, whose gradient would be lost."""
        is_differentiable = isinstance(gathered.tensor, nn.Parameter) and gathered.tensor.requires_grad
        if not is_differentiable or not torch.is_grad_enabled():
            return gathered.full
        with torch._C.DisableTorchFunction():
            operand: Tensor = _ReadInHook.apply(torch.zeros((), requires_grad=True), gathered.full, self._hook)
        return operand

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on full tensors; parameters are pickled in full."""
        name = getattr(func, "__name__", "")
        if name == "__reduce_ex__" and self._name_of(args[0]) is not None:
            return self._pickled(args[0])
        if name == "__get__" and func.__self__.__name__ == "grad":
            self._check_complete(args[0])
        return super().__torch_function__(func, types, args, kwargs)

    def _pickled(self, tensor: Tensor) -> Any:
        """Reduce a tensor for a pickle: its content, without the attributes that are recorded on it."""
        return reduce_for_pickle(tensor, self.full(tensor))

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _gradient(self, access: str, func: Any, args: Any) -> Any:
        parameter = args[0]
        name = self._names.get(id(parameter))
        if name is None or parameter is not self._parameters[name]:
            return func(*args)  # of a gradient, or of a copy
        if access != "__get__":
            return self._set_gradient(name, parameter, args[1] if access == "__set__" else None)
        return self._following(name, is_gradient=True)

    def _check_complete(self, parameter: Tensor) -> None:
        if not self._is_complete and id(parameter) in self._shared:
            name = next(name for name, other in self._parameters.items() if other is parameter)
            raise GlobalReadError(
                f"{self._hook}: the gradient of {name!r}, which several pipeline ranks share, is summed over them with"
                " the last batch of an accumulation, and this is an earlier one; read gradients in"
                " on_before_optimizer_step, or set accumulate_grad_batches=1",
                entry="hook-shared-gradient",
            )

    def _following(self, name: str, *, is_gradient: bool) -> Tensor | None:
        """What this rank has of a parameter, or of its gradient; None for none on any rank."""
        parameter = self._parameters[name]
        if not is_gradient:
            return parameter
        if not self._is_complete and id(parameter) in self._shared:
            return None
        with torch._C.DisableTorchFunction():
            if self._stages.is_partial(name) and not self._kinds:
                self._exchange_kinds()
            if not is_absent(parameter):
                gradient = parameter.grad
            else:
                if name not in self._stand_ins:
                    self._stand_ins[name] = _stand_in(parameter, self._kinds[name])
                gradient = self._stand_ins[name]
        if gradient is not None:
            self._gradients[gradient] = name
        return gradient

    def _set_gradient(self, name: str, parameter: Tensor, value: Tensor | None) -> None:
        full = None if value is None else self.full(value)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if is_absent(parameter):
                if value is None or value is not self._stand_ins.get(name):
                    self._stand_ins[name] = _stand_in(parameter, _kind_of(full))
                    self._keep_set(name, self._stand_ins[name], value, full)
                return
            before = parameter.grad
            if full is None or value is before:
                parameter.grad = value
                return
            if before is not None and before.shape != parameter.shape:  # not averaged yet, so that it is no shard
                before.detach().copy_(by_rows(full.detach(), lambda one: self._shards.shard_of(name, before, one)))
            else:
                parameter.grad = by_rows(full.detach(), lambda one: self._shards.shard(name, one).contiguous())
            self._keep_set(name, parameter.grad, value, full)

    def _keep_set(self, name: str, gradient: Tensor | None, value: Tensor | None, full: Tensor | None) -> None:
        """Keep a tensor that code has set as a gradient, and may write into later; on all ranks alike."""
        if gradient is not None and full is not None and full is value and name in self._shards.names:
            self._keep(name, gradient, full)

    def _exchange_kinds(self) -> None:
        """Exchange which parameters of other ranks have a gradient; collective over the pipeline."""
        assert isinstance(self._stages, Stages) and self._stage_ranks is not None
        self._stage_ranks.agree_on(self._hook, "reads .grad")
        rank, holders = self._stages.group.rank(), self._stages.holders
        mine = [_kind_of(p.grad) * (holders(name)[0] == rank) for name, p in self._parameters.items()]
        flags = torch.tensor(mine, dtype=torch.int32, device=self._stages.device)
        dist.all_reduce(flags, group=self._stages.group)
        self._kinds = dict(zip(self._parameters, flags.tolist(), strict=True))


class _ReadInHook(torch.autograd.Function):
    """The same full parameter, through which no backward goes."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, full: Tensor, hook: str) -> Tensor:
        ctx.hook = hook
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> NoReturn:
        raise _no_backward(ctx.hook, "backward")


def _no_backward(hook: str, function: str) -> GlobalReadError:
    return GlobalReadError(
        f"{hook}: {function}() starts from a value that was computed from parameters in a hook, where nothing is"
        " recorded for a backward; add the term to the loss in training_step, and take derivatives by other tensors"
        " with torch.autograd.grad",
        entry="hook-backward",
    )


def _stand_in(parameter: Tensor, kind: int) -> Tensor | None:
    """The stand-in for the gradient of an absent parameter, of a kind as from ``_kind_of``."""
    dtype = gradient_dtype(parameter)
    if kind > 1:
        return make_absent_rows(parameter, kind - 1, dtype)
    return make_absent(parameter, requires_grad=False, dtype=dtype) if kind else None


def _kind_of(gradient: Tensor | None) -> int:
    """0 for no gradient, 1 for a dense one, and 1 more than the number of its sparse dims for a sparse one."""
    return 0 if gradient is None else 1 + gradient.sparse_dim() * gradient.is_sparse
