"""What one process makes of a training step: the user's own method on a whole copy of the parameters, part after part.

Nothing of the pipeline takes part. What the step leaves behind (buffers, counters, metrics, lists) is undone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.mesh import where_sent
from lightning_hybrid.pipeline.stages.stage_plan import StagePlan
from lightning_hybrid.randomness.keyed_draws import GeneratorStates, KeyedRandomness
from lightning_hybrid.replicate.forbid_communication import refused_communication
from lightning_hybrid.step.batch.microbatch import BatchError, join_batches, split
from lightning_hybrid.step.instrument.instrument import drawing_as_stages
from lightning_hybrid.step.standins.absent_tensors import drop, fill, is_absent
from lightning_hybrid.verify.one_process.undo_step import perturbed, undone

# Seeds of the two runs that show whether a module draws random numbers.
_SEEDS = (-1, -2)
# Losses of the whole batch and of its parts that differ by more mix samples.
_MIXES = 1e-9


@dataclass(frozen=True)
class Given:
    """What a replica works on in a step.

    Attributes:
        batch: Its batch.
        count: In how many microbatches.
        generators: As they stand before the step.
    """

    batch: Any
    count: int
    generators: GeneratorStates


@dataclass(frozen=True)
class Call:
    """How the user's step is called.

    Attributes:
        step: The user's bound method.
        rest: Its arguments after the batch.
        number: Of the batch in the run.
        seed_factor: What backwards start from (loss scale / accumulated batches).
        context: Entered around each forward.
    """

    step: Callable[..., Any]
    rest: Sequence[Any]
    number: int
    seed_factor: float
    context: Callable[[], AbstractContextManager[Any]]


@dataclass
class Alone:
    """What came out, over all batches of one optimizer step.

    Attributes:
        losses: By batch, of each replica.
        noisy_losses: The same with perturbed weights.
        gradients: Averaged over the replicas, by FQN; on the CPU.
        noisy_gradients: The same with perturbed weights.
        mixes: Loss of the whole batch, mean over its parts and their number, of the first batch; None where the two
            cannot be compared.
        untried: Why they cannot.
        at_once: The same with each replica's batch as one part, where its loss is no mean over the parts.
    """

    losses: list[list[float]] = field(default_factory=list)
    noisy_losses: list[list[float]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    noisy_gradients: dict[str, Tensor] = field(default_factory=dict)
    mixes: tuple[float, float, int] | None = None
    untried: str = ""
    at_once: Alone | None = None


class StepAlone:
    """Runs steps of a module whose parameters are all here; the numbers of all replicas gather in ``result``."""

    def __init__(
        self,
        module: nn.Module,
        *,
        keyed: KeyedRandomness | None,
        device: torch.device,
        splitter: Callable[[Any, int], Sequence[Any]] | None,
        weight: Callable[[Any], float] | None,
        perturbation: float,
    ) -> None:
        """How to run it.

        Args:
            module: The user's.
            keyed: Draws as the pipeline does; None where each replica draws from its generators.
            device: Where the module is.
            splitter: The user's ``batch_splitter``.
            weight: The user's ``microbatch_weight``.
            perturbation: Relative change of the weights for the noise floor.
        """
        self.result = Alone()
        self._module, self._keyed, self._splitter, self._weight = module, keyed, splitter, weight
        self._randomness = keyed or KeyedRandomness(0, device)
        self._perturbation = perturbation

    def run(self, call: Call, given: Sequence[Given]) -> bool:
        """Run one batch of all replicas, and again with perturbed weights.

        Returns:
            False if the step gave no loss for some part, and nothing was noted.
        """
        losses = self._parts(call, given, self.result.gradients)
        if losses is None:
            return False
        if not self.result.losses:
            self._compare_whole(call, given, losses)
        self.result.losses.append(losses)
        with perturbed(self._module, self._perturbation):
            noisy = self._parts(call, given, self.result.noisy_gradients)
        self.result.noisy_losses.append(losses if noisy is None else noisy)
        at_once = self.result.at_once
        if at_once is not None:
            together = [replace(replica, count=1) for replica in given]
            found = self._parts(call, together, at_once.gradients) or losses
            at_once.losses.append(found)
            with perturbed(self._module, self._perturbation):
                noisy = self._parts(call, together, at_once.noisy_gradients)
            at_once.noisy_losses.append(found if noisy is None else noisy)
        return True

    def _parts(self, call: Call, given: Sequence[Given], into: dict[str, Tensor]) -> list[float] | None:
        """The loss of each replica; gradients are added to ``into``."""
        pieces = [split(replica.batch, replica.count, self._splitter) for replica in given]
        weights = [shares for _, shares in pieces]
        if self._weight is not None:
            counts = [[float(self._weight(part)) for part in parts] for parts, _ in pieces]
            total = sum(map(sum, counts))
            weights = [[count * len(given) / total for count in row] for row in counts]
        named = list(self._module.named_parameters())
        before = [parameter.grad for _, parameter in named]
        for _, parameter in named:
            parameter.grad = None
        losses: list[float] = []
        try:
            for replica, (parts, _) in enumerate(pieces):
                loss = self._of_replica(call, given[replica], replica, parts, weights[replica])
                if loss is None:
                    return None
                losses.append(loss)
            for name, parameter in named:
                if parameter.grad is not None:
                    gradient = (parameter.grad.detach() / len(given)).to("cpu")
                    gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
                    into[name] = into[name] + gradient if name in into else gradient
        finally:
            for (_, parameter), gradient_before in zip(named, before, strict=True):
                parameter.grad = gradient_before
        return losses

    def _of_replica(
        self, call: Call, given: Given, replica: int, parts: Sequence[Any], weights: Sequence[float]
    ) -> float | None:
        total = 0.0
        with undone(self._module), self._randomness.isolated(), torch.enable_grad():
            for index, (part, weight) in enumerate(zip(parts, weights, strict=True)):
                with self._draws(call.number, replica * given.count + index, given):
                    with call.context():
                        loss = _loss_of(call.step(part, *call.rest))
                    if loss is None:
                        return None
                    total += float(loss.detach()) * weight
                    if loss.requires_grad:
                        loss.backward(torch.full_like(loss, call.seed_factor * weight))
        return total

    def _compare_whole(self, call: Call, given: Sequence[Given], losses: Sequence[float]) -> None:
        """Note what the step makes of the replicas' batches concatenated."""
        count = sum(replica.count for replica in given)
        if count == 1:
            return
        try:
            whole = join_batches([replica.batch for replica in given])
            at_once = []
            for seed in _SEEDS:
                with undone(self._module), self._randomness.isolated(), torch.no_grad():
                    with self._randomness.microbatch(seed, call.number):
                        pass
                    with call.context():
                        at_once.append(float(_loss_of(call.step(whole, *call.rest)).detach()))
        except BatchError as error:
            self.result.untried = str(error)
            return
        except Exception as error:  # a step that does not take so large a batch is no fault
            self.result.untried = f"it raised {type(error).__name__}: {error}"
            return
        if at_once[0] != at_once[1]:
            self.result.untried = "the module draws random numbers, which depend on how samples are grouped"
            return
        mean = sum(losses) / len(losses)
        self.result.mixes = at_once[0], mean, count
        if not math.isclose(at_once[0], mean, rel_tol=_MIXES):
            self.result.at_once = Alone()

    @contextlib.contextmanager
    def _draws(self, number: int, microbatch: int, given: Given) -> Iterator[None]:
        if self._keyed is None:
            given.generators.restore()
            yield
            return
        with drawing_as_stages(self._module, self._keyed, number, microbatch):
            yield


def _loss_of(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else output


@contextlib.contextmanager
def whole_on_first(root: nn.Module, plan: StagePlan | None, group: dist.ProcessGroup) -> Iterator[None]:
    """Inside, the first rank of a pipeline has the content of all parameters; collective over its ranks.

    Args:
        root: The user's module.
        plan: Which rank holds what; None without stages.
        group: The ranks of the pipeline.
    """
    filled = []
    if plan is not None and plan.first is not None:
        for name, parameter in root.named_parameters():
            holder = plan.ranks_of(name)[0]
            if holder == 0:
                continue
            if plan.rank == holder:
                dist.send(where_sent(parameter.detach().contiguous(), group), group=group, group_dst=0)
            elif plan.rank == 0:
                content = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                dist.recv(content, group=group, group_src=holder)
                fill(parameter, nn.Parameter(content, requires_grad=parameter.requires_grad))
                filled.append(parameter)
    try:
        yield
    finally:
        for parameter in filled:
            assert not is_absent(parameter)
            drop(parameter)


def no_communication() -> AbstractContextManager[None]:
    """Refuse to talk to other ranks inside: they take no part, and would be waited for.

    Raises:
        RuntimeError: The step calls a collective over more than one rank.
    """
    return refused_communication(
        lambda name: RuntimeError(
            f"the step communicates with other ranks ({name}), so it is no step of one process; such a step can"
            " only be verified by a run of its own: leave verify_first_step out"
        )
    )
