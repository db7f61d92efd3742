"""Slow links as a technique: a callback of the user in a run, and what it does not go with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch.optim import Optimizer

from lightning_hybrid.callbacks.adascale import GradientNoise
from lightning_hybrid.callbacks.slow_links import Gather, GradientCompression, LocalSGD, SlowLinkCallback
from lightning_hybrid.errors import LayoutError
from lightning_hybrid.optimizers.trial import (
    INDEPENDENT,
    can_step_shards,
    combines_parameters,
)
from lightning_hybrid.precision.message_dtypes import message_dtypes
from lightning_hybrid.techniques.slow_links.compression import connect_gradient_compression
from lightning_hybrid.techniques.slow_links.rounds import LocalRounds
from lightning_hybrid.techniques.technique import Technique

if TYPE_CHECKING:
    from lightning_hybrid.slow_links.average import CompressedAverage


class SlowLinks(Technique):
    """What a callback of the user sends between replicas in place of gradients: less, or seldom."""

    def __init__(self, callback: SlowLinkCallback) -> None:
        self._callback = callback
        self._average: CompressedAverage | None = None  # of gradients, if that is what it sends

    @classmethod
    def of(cls, callbacks: Sequence[SlowLinkCallback]) -> SlowLinks:
        """Make it for the callbacks of a trainer.

        Raises:
            LayoutError: There are two.
        """
        if len(callbacks) > 1:
            names = " and ".join(type(callback).__name__ for callback in callbacks)
            raise LayoutError(
                f"{names} are both in Trainer(callbacks=...); keep one of the two: LocalSGD sends no gradients, and"
                " GradientCompression sends them in every step",
                entry="slow-links",
            )
        return cls(callbacks[0])

    def connect(self, run: Any, optimization: Any) -> None:
        """Connect the callback to the reducers and optimizers of a run."""
        callback = self._callback
        if isinstance(callback, GradientCompression):
            check_gradient_compression(callback, run)
            self._average = connect_gradient_compression(callback, run, optimization.reducers)
        elif isinstance(callback, LocalSGD):
            check_local_sgd(callback, run)
            rounds = LocalRounds(callback, run, optimization)
            check_outer_optimizer(rounds.outer, run)
            rounds.connect()

    def kept(self) -> Callable[[], None]:
        """Return a function that restores the feedback as it is now."""
        return super().kept() if self._average is None else self._average.feedback_kept()

    def steps_alone(self, run: Any) -> bool:
        """Return whether the next step of each replica is its own."""
        return self._callback.is_local(run.setting.trainer.global_step)

    def carry(self, run: Any, gather: Gather) -> None:
        """Keep the state of the callback while the layout of a run changes."""
        self._callback.carry(gather, run.setting.world.broadcast)

    def lines(self, run: Any) -> list[str]:
        """Return its line of the start table."""
        return [self._callback.description]


def check_gradient_compression(callback: GradientCompression, run: Any) -> None:
    """Refuse layouts and options for which compressed averages are not defined."""
    setting = run.setting
    name, sharded = f"GradientCompression({callback.method!r})", _sharded_by(run)
    _refuse_joined_and_observed_replicas(name, run)
    if (dtype := message_dtypes(setting.precision)["reduce_dtype"]) is not None:
        raise LayoutError(
            f"{name} decides in which form gradients are sent, and so does reduce_dtype={dtype}; leave out one of them",
            entry="slow-links",
        )
    if setting.is_manual and sharded:
        raise LayoutError(
            f"{name} with {sharded} and manual optimization: replicas have full gradients inside"
            " the step and shards after it; set zero_stage=0, or automatic_optimization=True in the module",
            entry="slow-links",
        )
    if setting.options.verify_first_step and callback.start_step == 0:
        raise LayoutError(
            f"verify_first_step compares the gradients of step 0 with exact ones, and {name} compresses them; set"
            " start_step=1, or leave verify_first_step out",
            entry="slow-links",
        )


def check_local_sgd(callback: LocalSGD, run: Any) -> None:
    """Refuse layouts and options with which replicas cannot step by themselves."""
    setting = run.setting
    layout, name, sharded = setting.layout, f"LocalSGD(every={callback.every})", _sharded_by(run)
    _refuse_joined_and_observed_replicas(name, run)
    if sharded and layout.data_parallel_size > 1 and run.mesh.size("dp_replicate") == 1:
        size = layout.data_parallel_size
        raise LayoutError(
            f"{name} lets copies of the model step by themselves, and {sharded} shards one copy over"
            f" all data_parallel_size={size} replicas; set shard_size={max(1, size // 2)}, or zero_stage=0",
            entry="slow-links",
        )
    if setting.is_manual and sharded:
        raise LayoutError(
            f"{name} with {sharded} and manual optimization: gradients are averaged over shards and"
            " copies at once; set zero_stage=0, or automatic_optimization=True in the module",
            entry="slow-links",
        )
    if setting.sizes_of_states.get("copies"):
        raise LayoutError(
            f"{name} averages parameters, and master_weights=True keeps float32 copies of them that would differ"
            " between replicas; leave master_weights out, or use stochastic_rounding=True",
            entry="slow-links",
        )
    together = {
        "microbatch_weight": setting.options.microbatch_weight is not None,
        "verify_first_step": setting.options.verify_first_step and callback.warmup_steps == 0,
        "Trainer(sync_batchnorm=True)": setting.norms is not None,
    }
    for option in (option for option, is_set in together.items() if is_set):
        raise LayoutError(
            f"{name} lets replicas step by themselves, and {option} computes over all of them in each step; leave"
            f" {option} out{', or set warmup_steps=1' if option == 'verify_first_step' else ''}",
            entry="slow-links",
        )
    for other in setting.trainer.callbacks:
        if isinstance(other, StochasticWeightAveraging | WeightAveraging):
            raise LayoutError(
                f"{name} and {type(other).__name__}: replicas would average parameters that differ; remove one of the"
                " two callbacks",
                entry="slow-links",
            )


def check_outer_optimizer(outer: Optimizer | None, run: Any) -> None:
    """Refuse an outer optimizer that reads more than a rank of a replica holds."""
    is_sharded = bool(run.parts)
    if outer is None or not (is_sharded or run.is_pipelined):
        return
    combines = combines_parameters(outer)
    if not combines and (not is_sharded or can_step_shards(outer)):
        return
    name, attribute = type(outer).__name__, f"{INDEPENDENT} = True"
    declare = f", or, if its step of a parameter reads no other one, give its class the attribute {attribute}"
    raise LayoutError(
        f"LocalSGD(outer_optimizer=...): the step of {name} {'may read several parameters' if combines else 'reads'}"
        f"{'' if combines else ' all elements of a parameter'}, of which a rank of a replica holds"
        f" {'shards' if is_sharded else 'those of its stage'}; use an elementwise optimizer of torch, such as SGD or"
        f" Adam{declare if combines else ''}",
        entry="slow-links",
    )


def _sharded_by(run: Any) -> str:
    """Return the option by which replicas hold shards; "" if they do not."""
    return next((technique.option for technique in run.techniques if technique.shardings), "")


def _refuse_joined_and_observed_replicas(name: str, run: Any) -> None:
    layout = run.setting.layout
    if layout.joins_replicas:
        raise LayoutError(
            f"{name} is for replicas that each have all experts, and {layout.option('ep')} of them share them;"
            " set expert_parallel_size=1, or remove the callback",
            entry="slow-links",
        )
    for other in run.setting.trainer.callbacks:
        if isinstance(other, GradientNoise):
            observer = type(other).__name__
            raise LayoutError(
                f"{name} and {observer}: {observer} compares gradients before and after an exact average, which is not"
                " made; remove one of the two callbacks",
                entry="slow-links",
            )
