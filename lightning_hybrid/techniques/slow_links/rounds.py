"""Rounds of local steps: replicas step by themselves, then average parameters, or take an outer step (DiLoCo)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_hybrid.callbacks.slow_links import Gather, LocalSGD
from lightning_hybrid.collectives.tensors import on_group_device
from lightning_hybrid.patching import around
from lightning_hybrid.slow_links.method import all_reduce_bytes
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.strategies.world.callbacks import RunCallback
from lightning_hybrid.techniques.slow_links.states import (
    ParameterStates,
    local_states,
    save_states,
)

_MESSAGE_BYTES = 25 << 20


class LocalRounds(RunCallback):
    """Counts the steps of a run, and ends rounds.

    It comes before the callbacks of the user, so these find averaged parameters at the end of a round.

    Attributes:
        outer: The outer optimizer, of this rank's shards; None if parameters are averaged.
    """

    def __init__(self, callback: LocalSGD, run: Any, optimization: Any) -> None:
        """Take the user's callback, and the run whose replicas step by themselves."""
        self._callback, self._run, self._optimization = callback, run, optimization
        self._trainer: Any = run.setting.trainer
        self._group = run.mesh.group("dp_replicate")
        self._named = dict(run.setting.module.named_parameters())
        self._trained: set[str] = set()  # names of parameters, also of other ranks, that are or have been trained
        self._stepped: set[str] = set()  # those that have a state of the outer optimizer
        self._parameters: dict[str, nn.Parameter] = {}  # those of them that are here
        self._begin: dict[str, Tensor] = {}  # parameters at the begin of the round, if there is an outer optimizer
        self.outer = callback.make_outer_optimizer(list(run.setting.module.parameters()))
        self._steps = 0  # of this round
        self._was_local = False  # in the latest step; `is_local` is of the next one
        self._counted = self._trainer.global_step
        self._total_steps = 0
        self._sent = 0.0
        self._warned = False

    def connect(self) -> None:
        """Begin to run rounds, until the run ends."""
        undo = self._run.until_end
        undo.callback(self.enter(self._trainer))
        undo.callback(around(self._trainer, "save_checkpoint", self._save, reason="a checkpoint ends a round"))
        self._callback.connect(self)
        self._set_mode()

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            self.end_early("a checkpoint")
        return original(*args, **kwargs)

    # -- hooks of Lightning -------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count from the step that a checkpoint was saved at."""
        self._counted = trainer.global_step
        self._set_mode()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Find parameters that a callback has unfrozen; they are equal on all replicas until their first step."""
        self._find_trained()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step of the batch, and end the round after its last one."""
        if trainer.global_step == self._counted:
            return  # gradients are being accumulated
        self._counted = trainer.global_step
        self._total_steps += 1
        if not self._was_local:
            self._sent += self._synchronous_bytes
        else:
            self._steps += 1
            if self._steps == self._callback.every:
                self.end()
        self._set_mode()
        if self._sent:
            pl_module.log("parameter_bytes", self._sent / self._total_steps, on_step=True, on_epoch=False)
            ratio = self._synchronous_bytes * self._total_steps / self._sent
            pl_module.log("synchronous_bytes_ratio", ratio, on_step=True, on_epoch=False)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the round: replicas validate one model."""
        self.end_early("a validation")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the last round."""
        self.end_early("")

    # -- rounds -------------------------------------------------------------------------------------------------------

    @property
    def is_local(self) -> bool:
        """Whether the next step is local."""
        return self._callback.is_local(self._trainer.global_step)

    @property
    def _synchronous_bytes(self) -> float:
        num_bytes = sum(parameter.nbytes for parameter in self._parameters.values())
        return all_reduce_bytes(num_bytes, self._group.size())

    def _set_mode(self) -> None:
        """Average gradients in the next step over all replicas, or inside this one."""
        self._find_trained()
        is_local = self._was_local = self.is_local
        for reducer in self._optimization.reducers.every:
            reducer.step_alone(is_local)
        for group in self._run.active.groups:
            group.messages.stay_local(is_local)
        if self._optimization.buffers is not None:
            self._optimization.buffers.step_alone(is_local)
        if is_local and self.outer is not None:
            for name in self._parameters.keys() - self._begin.keys():
                self._begin[name] = self._parameters[name].detach().clone()

    def _find_trained(self) -> None:
        for name, parameter in self._named.items():
            if not parameter.requires_grad or name in self._trained:
                continue
            self._trained.add(name)
            if not is_absent(parameter):
                self._parameters[name] = parameter
                if self.outer is not None and self.is_local:
                    self._begin[name] = parameter.detach().clone()

    def end_early(self, reason: str) -> None:
        """End a round that has begun, before ``reason``; collective over replicas."""
        if not self._steps or self._run.setting.world.is_disconnected:
            return
        if reason and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"LocalSGD(every={self._callback.every}): a round has ended after {self._steps} steps, before {reason};"
                f" set its interval to a multiple of {self._callback.every} steps for rounds of equal length"
            )
        self.end()

    @torch.no_grad()
    def end(self) -> None:
        """Average the parameters over replicas, or take the outer step; collective over replicas."""
        self._steps = 0
        means = self._means()
        if self.outer is None:
            for name, mean in means.items():
                self._parameters[name].data.copy_(mean)
        else:
            self._outer_step(means)
        if self._optimization.buffers is not None:
            self._optimization.buffers.average()

    def _outer_step(self, means: dict[str, Tensor]) -> None:
        assert self.outer is not None
        gradients = {name: parameter.grad for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self._begin[name])
            parameter.grad = self._begin[name] - means[name]
        self.outer.step()
        self._stepped |= self._trained
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name]
            self._begin[name].copy_(parameter.data)

    def _means(self) -> dict[str, Tensor]:
        """The mean of each parameter over replicas, of the local shape."""
        means: dict[str, Tensor] = {}
        for names in self._messages():
            local = [self._parameters[name].data for name in names]
            message = on_group_device(torch.cat([each.reshape(-1) for each in local]), self._group)
            self._sent += all_reduce_bytes(message.nbytes, self._group.size())
            dist.all_reduce(message.div_(self._group.size()), group=self._group)
            pieces = message.split([each.numel() for each in local])
            for name, piece, each in zip(names, pieces, local, strict=True):
                means[name] = piece.view(each.shape).to(each.device)
        return means

    def _messages(self) -> list[list[str]]:
        """Names of parameters that are sent together.

        Ranks that hold copies of a parameter must send it beside the same others: the order in which ranks are added up
        depends on the position in a message, and so do the last bits of a sum.
        """
        plan, sharded = self._run.plan, self._run.names_over("tp")
        messages: dict[Hashable, list[list[str]]] = {}
        for name, parameter in self._parameters.items():
            ranks = () if plan is None else tuple(plan.ranks_of(name))
            lists = messages.setdefault((parameter.dtype, parameter.device, ranks, name in sharded), [[]])
            if lists[-1] and sum(self._parameters[other].nbytes for other in lists[-1]) > _MESSAGE_BYTES:
                lists.append([])
            lists[-1].append(name)
        return [names for lists in messages.values() for names in lists]

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, gather: Gather | None = None) -> dict[str, Any]:
        """Return the states of the outer optimizer as a checkpoint has them; for another layout, the round too."""
        with torch._C.DisableTorchFunction():
            if gather is not None:
                return self._save_outer(gather) | self._save_round(gather)
            self.end_early("a checkpoint")  # which has ended the round before, unless it is not the Trainer's
            return self._save_outer(self._run.setting.trainer.strategy.optimizer_state)

    def _save_outer(self, gather: Gather) -> dict[str, Any]:
        if self.outer is None or not self._run.setting.world.decide(bool(self.outer.state), all_ranks=False):
            return {}
        return {"outer": save_states(self.outer, self._run.setting.module, self._stepped, gather)}

    def _save_round(self, gather: Gather) -> dict[str, Any]:
        """The round that has begun: its steps, counts, and the parameters of its begin, which all replicas share."""
        counts = self._steps, self._total_steps, self._sent
        begin = ParameterStates(
            {name: self._named[name] for name in self._trained},
            {name: {"begin": value} for name, value in self._begin.items()},
        )
        saved = save_states(begin, self._run.setting.module, self._trained, gather) if self.outer is not None else {}
        return {"round": {"counts": counts, "trained": self._trained, "begin": saved}}

    def load(self, state: dict[str, Any]) -> None:
        """Take over the state of a checkpoint, or of another layout with its round."""
        self._load_outer(state.get("outer", {}))
        if (begun := state.get("round")) is None:
            return
        self._steps, self._total_steps, self._sent = begun["counts"]
        self._trained = set(begun["trained"])
        self._parameters = {
            name: parameter
            for name, parameter in self._named.items()
            if name in self._trained and not is_absent(parameter)
        }
        for name, entry in local_states(begun["begin"], self._run.setting.module, self._run.parts).items():
            self._begin[name] = entry["begin"].to(self._named[name].device).clone()

    def _load_outer(self, states: dict[str, Any]) -> None:
        if self.outer is None:
            return
        self._stepped = set(states)
        for name, entry in local_states(states, self._run.setting.module, self._run.parts).items():
            parameter = self._named[name]
            self.outer.state[parameter] = {
                key: value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
                for key, value in entry.items()
            }
