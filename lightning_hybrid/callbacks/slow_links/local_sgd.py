"""LocalSGD: replicas step by themselves, and average parameters once per round of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import nn
from torch.optim import SGD, Optimizer

from lightning_hybrid.callbacks.slow_links.callback_with_state_of_run import SlowLinkCallback

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]  # of Lightning's command line


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
            raise ValueError(f"LocalSGD(every={every}): a round has at least 1 step")
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
