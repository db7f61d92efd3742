"""What ``microbatch="auto"`` cannot be combined with: a step that runs again must be the same step."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hybrid.strategies.out_of_memory.search_batch_size_over_ranks import searches_batch_size
from lightning_hybrid.strategies.run.run_setting_dataclass import Setting
from lightning_hybrid.strategies.start.refuse_unsupported_callbacks import why_ranks_cannot_stop_together


def batch_norms_in_training(module: nn.Module) -> list[str]:
    """Return the FQNs of BatchNorm layers that take statistics of what they are given, a microbatch."""
    return [name for name, each in module.named_modules() if isinstance(each, _BatchNorm) and each.training]


def check_microbatch_option(setting: Setting) -> None:
    """Refuse options and modules with which a training step cannot run again in more microbatches.

    Raises:
        ValueError: There is one.
    """
    reason = _why_not(setting) or why_ranks_cannot_stop_together(setting.trainer, setting.world.mesh)
    if reason:
        raise ValueError(
            'microbatch="auto" runs a training step again in more microbatches if it does not fit into memory, and'
            f" {reason}; leave microbatch out, and set num_microbatches"
        )


def _why_not(setting: Setting) -> str:
    options, module = setting.options, setting.module
    norms = batch_norms_in_training(module)
    if setting.is_manual:
        return "with manual optimization training_step may have stepped an optimizer by then"
    if norms:
        return f"{norms[0]} and {len(norms) - 1} other BatchNorm layers take statistics of each microbatch"
    if options.batch_splitter is not None:
        return "batch_splitter makes microbatches whose sizes are not known"
    if options.optimizer_in_backward:
        return "optimizer_in_backward=True steps parameters in its backward"
    if options.verify_first_step:
        return "verify_first_step=True compares a first step of which the full batch fits"
    if searches_batch_size(setting.trainer):
        return "BatchSizeFinder tries batches that do not fit in one microbatch: use one of the two"
    return ""
