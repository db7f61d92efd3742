"""Callbacks for slow links between replicas: compressed gradients, and steps without communication.

Both change what replicas send, and have a state of the run and its layout.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_hybrid.text import meant

if TYPE_CHECKING:
    from lightning_hybrid.slow_links.method import Method


Gather = Callable[[Optimizer], dict[str, Any]]
MethodName = Literal["powersgd", "fp16", "bf16", "int8", "topk", "1bit"]
_METHODS = "powersgd", "fp16", "bf16", "int8", "topk", "1bit"
OptimizerCallable = Callable[[Iterable[Any]], Optimizer]  # of Lightning's command line


class ConnectedState(Protocol):
    """State of a run that checkpoints have: tensors of parameters by FQN, and other values."""

    def save(self, gather: Gather | None = None) -> dict[str, Any]:
        """Return the state as a checkpoint has it, or in full for another layout of the same run; collective.

        ``gather`` returns the state dict of an optimizer in full, for another layout; None for a checkpoint.
        """

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `save` has returned, under any layout."""


class SlowLinkCallback(Callback):
    """A callback that the strategy connects to the state of a run, which checkpoints have.

    Attributes:
        purpose: What it does, a sentence that begins with its name.
        loaded: The state of a checkpoint, for the next run.
    """

    purpose: str

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self._state: ConnectedState | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without the run."""
        return {**self.__dict__, "_state": None}

    @property
    @abstractmethod
    def description(self) -> str:
        """The line of the start table."""

    def is_local(self, global_step: int) -> bool:
        """Whether replicas step by themselves at a step of the run."""
        return False

    def connect(self, state: ConnectedState) -> None:
        """Load this state, and save it in checkpoints from now on; the strategy calls it."""
        state.load(self.loaded)
        self._state, self.loaded = state, {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that a strategy has connected it."""
        if self._state is None and trainer.world_size > 1:
            raise ValueError(
                f'{self.purpose}, which {type(trainer.strategy).__qualname__} does not; use strategy="hybrid3d"'
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a checkpoint has it."""
        return self.loaded if self._state is None else self._state.save()

    def carry(self, gather: Gather, broadcast: Callable[[Any], Any]) -> None:
        """Keep the state for another layout of the same run; collective."""
        if self._state is not None:
            self.loaded = broadcast(self._state.save(gather))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a checkpoint, which the next run uses."""
        self.loaded = state_dict


class GradientCompression(SlowLinkCallback):
    """Sends gradients over the data-parallel axes in compressed form.

    What a message leaves out is added to the next one (error feedback), except for "fp16" and "bf16". Vectors, such as
    biases, are sent as they are; "fp16" and "bf16" send all in that dtype. Logs "gradient_bytes", the bytes that the
    first rank sends in a step to average gradients, and "gradient_compression", how many times more the gradients take.

    Args:
        method: "powersgd", factors of low rank (Vogels et al., arXiv 1905.13727); "fp16" and "bf16", half precision;
            "int8", 8 bits per element; "topk", the largest elements (Stich et al., arXiv 1809.07599); "1bit", signs and
            their mean magnitude (Seide et al. 2014; Tang et al., arXiv 2102.02888).
        rank: Of the factors of "powersgd".
        ratio: Share of the elements that "topk" sends.
        start_step: The first optimizer step, counted from 0, whose gradients are compressed.
        min_compression_rate: "powersgd" sends a matrix as it is unless factors make it smaller by more than that.
        warm_start: Whether "powersgd" begins with the factors of the last step.

    Raises:
        ValueError: An unknown method, or a number outside of its range.
    """

    purpose = "GradientCompression sends gradients in compressed form"

    def __init__(
        self,
        method: MethodName = "powersgd",
        rank: int = 4,
        ratio: float = 0.01,
        start_step: int = 0,
        min_compression_rate: float = 2.0,
        warm_start: bool = True,
    ) -> None:
        super().__init__()
        if method not in _METHODS:
            names = f"{', '.join(_METHODS)}{meant(str(method), _METHODS)}"
            raise ValueError(f"GradientCompression({method!r}): the method must be one of {names}")
        if rank < 1:
            raise ValueError(f"GradientCompression(rank={rank}): the factors have at least rank 1")
        if not 0 < ratio <= 1:
            raise ValueError(f"GradientCompression(ratio={ratio}): the share of elements is above 0 and at most 1")
        if start_step < 0:
            raise ValueError(f"GradientCompression(start_step={start_step}): steps are counted from 0")
        self.method, self.rank, self.ratio, self.start_step = method, rank, ratio, start_step
        self.min_compression_rate, self.warm_start = min_compression_rate, warm_start
        from lightning_hybrid.slow_links.method import Traffic  # late, as below

        self.traffic = Traffic()
        self._before = 0.0, 0.0

    def make_method(self) -> Method:
        """Make the method that this callback names."""
        # Late: a run that compresses nothing loads none of these.
        from lightning_hybrid.slow_links.power_sgd import PowerSGD
        from lightning_hybrid.slow_links.quantized import Int8, LowPrecision, OneBit, TopK

        if self.method == "powersgd":
            rate, warm = self.min_compression_rate, self.warm_start
            return PowerSGD(self.traffic, self.rank, min_compression_rate=rate, warm_start=warm)
        if self.method == "topk":
            return TopK(self.traffic, self.ratio)
        if self.method in ("fp16", "bf16"):
            return LowPrecision(self.traffic, torch.float16 if self.method == "fp16" else torch.bfloat16)
        return Int8(self.traffic) if self.method == "int8" else OneBit(self.traffic)

    @property
    def description(self) -> str:
        """The line of the start table."""
        details = {"powersgd": f" of rank {self.rank}", "topk": f", {self.ratio:g} of the elements"}
        since = f", from step {self.start_step} on" if self.start_step else ""
        return f"gradients compressed over replicas: {self.method}{details.get(self.method, '')}{since}"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the bytes of the step, if it has averaged gradients."""
        now = self.traffic.sent, self.traffic.uncompressed
        sent, uncompressed = now[0] - self._before[0], now[1] - self._before[1]
        self._before = now
        if sent:
            pl_module.log("gradient_bytes", sent, on_step=True, on_epoch=False)
            pl_module.log("gradient_compression", uncompressed / sent, on_step=True, on_epoch=False)


class LocalSGD(SlowLinkCallback):
    """Lets replicas step by themselves for ``every`` steps, then averages their parameters (local SGD, DiLoCo).

    A replica is what holds one copy of the model: its stages, tensor ranks, context ranks and ZeRO shards work in every
    step as they do otherwise. A round ends early before a validation, before a checkpoint is saved and at the end of
    training, so these have the averaged parameters. Buffers are averaged with them (BatchNorm's statistics); states of
    optimizers are not, and checkpoints have those of the first replica.

    Without ``outer_optimizer`` the parameters become their average (Stich, "Local SGD Converges Fast and Communicates
    Little", arXiv 1805.09767). With one, it steps the parameters of the round's begin, and their gradient is what the
    replicas have moved away from them, averaged with its sign changed (Douillard et al., "DiLoCo", arXiv 2311.08105).

    Logs "parameter_bytes", the bytes that the first rank has sent between replicas per step so far, and
    "synchronous_bytes_ratio", how many times more an average of gradients in each step takes.

    Args:
        every: Steps of a round, H.
        outer_optimizer: None; "nesterov", DiLoCo's: SGD of learning rate 0.7 and Nesterov momentum 0.9; or a function
            of the parameters that makes an optimizer, whose step is elementwise where parameters are sharded.
        warmup_steps: Optimizer steps at the beginning that average gradients.

    Raises:
        ValueError: A number outside of its range, or an unknown outer optimizer.
    """

    purpose = "LocalSGD averages parameters over replicas"

    def __init__(
        self,
        every: int,
        outer_optimizer: Literal["nesterov"] | OptimizerCallable | None = None,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__()
        if every < 1:
            raise ValueError(f"LocalSGD(every={every}): a round has at least 1 step; use 1 or more, such as 16")
        if warmup_steps < 0:
            raise ValueError(f"LocalSGD(warmup_steps={warmup_steps}): the number of steps is 0 or more")
        if isinstance(outer_optimizer, str) and outer_optimizer != "nesterov":
            raise ValueError(
                f"LocalSGD(outer_optimizer={outer_optimizer!r}): it must be 'nesterov', a function of the parameters"
                " that returns an optimizer, or None"
            )
        self.every, self.outer_optimizer, self.warmup_steps = every, outer_optimizer, warmup_steps

    def make_outer_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer | None:
        """Make the outer optimizer; None if parameters are averaged."""
        if self.outer_optimizer is None:
            return None
        if isinstance(self.outer_optimizer, str):
            return SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
        return self.outer_optimizer(parameters)

    def is_local(self, global_step: int) -> bool:
        """Whether replicas take this step by themselves; optimizer steps are counted from 0."""
        return global_step >= self.warmup_steps

    @property
    def description(self) -> str:
        """The line of the start table."""
        outer = self.outer_optimizer
        name = (
            outer if outer is None or isinstance(outer, str) else getattr(outer, "__qualname__", type(outer).__name__)
        )
        how = "parameters averaged" if name is None else f"outer optimizer {name}"
        since = f", after {self.warmup_steps} synchronous steps" if self.warmup_steps else ""
        return f"replicas step by themselves: every {self.every} steps {how}{since}"
