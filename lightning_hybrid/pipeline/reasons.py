"""Warnings about batches that are not split, since no weights of their parts are right."""

from __future__ import annotations

from lightning_hybrid.text import contrasted


def describe_mixing(found: tuple[float, float]) -> str:
    """The warning about an objective that mixes samples: ``found`` is its loss, and the mean of its parts' losses."""
    full, mean = contrasted(*found)
    return (
        f"the objective mixes samples: the loss of a batch is {full}, the mean of the losses of its"
        f" microbatches or shares is {mean}. So batches are not split. To train the mean over microbatches, as"
        " gradient accumulation does, pass microbatch_weight=function(microbatch) -> its weight, such as a count of"
        " tokens or samples (lightning-hybrid explain-error loss-mixes)"
    )


def describe_difference(norms: tuple[float, float]) -> str:
    """The warning about gradients that no weights of microbatches give; ``norms`` as in ``LossWeighting``."""
    full, made = contrasted(*norms)
    return (
        "the backward of training_step runs an autograd function or a hook of yours that is not linear: the norm of the"
        f" gradients of a batch is {full}, that of its microbatches or shares {made}, and no weights of"
        " these give the former. So batches are not split (lightning-hybrid explain-error backward-nonlinear)"
    )


def describe_lost(lost: str) -> str:
    """The warning about a value that microbatches do not give."""
    return (
        f"training_step {lost}: microbatches do not give it. So batches are not split"
        " (lightning-hybrid explain-error value-lost)"
    )


def describe_scaled(line: str) -> str:
    """The warning about an embedding, called at a line, whose gradients are no sums over microbatches."""
    return (
        f"{line}: an embedding divides the gradient of each index by its count in the batch (scale_grad_by_freq=True),"
        " and microbatches have counts of their own. So batches are not split (lightning-hybrid explain-error"
        " embedding-scaled)"
    )
