"""Average of sparse gradients: gathers the rows of all ranks, since a dense sum would send the full table."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def average_sparse(gradient: Tensor | None, parameter: Tensor, group: ProcessGroup) -> Tensor | None:
    """Averages gradients that are sparse in their first dim over all ranks; collective.

    Args:
        gradient: The gradient of this rank, of the shape (rows, ...) of the parameter, sparse or dense; or None.
        parameter: Its parameter; gives shape, dtype and device to ranks without a gradient.
        group: The ranks to average over. A rank without a gradient counts as zeros.

    Returns:
        A coalesced sparse tensor of the parameter's shape, the same on all ranks; None if no rank has a gradient.
    """
    size = group.size()
    rows = None if gradient is None else _rows(gradient)
    num_rows = torch.tensor([-1 if rows is None else rows._nnz()], device=parameter.device)
    all_num_rows = [torch.empty_like(num_rows) for _ in range(size)]
    dist.all_gather(all_num_rows, num_rows, group=group)
    counts = [int(count) for count in torch.cat(all_num_rows).tolist()]
    if max(counts) < 0:
        return None

    # Messages of one collective have one length; the rows after a rank's count are padding.
    indices = torch.zeros(max(counts), dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros(max(counts), *parameter.shape[1:])
    if rows is not None:
        indices[: rows._nnz()] = rows.indices()[0]
        values[: rows._nnz()] = rows.values() / size
    all_indices = [torch.empty_like(indices) for _ in range(size)]
    all_values = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(all_indices, indices, group=group)
    dist.all_gather(all_values, values, group=group)
    unpadded = [slice(max(count, 0)) for count in counts]
    return torch.sparse_coo_tensor(
        torch.cat([padded[rows] for padded, rows in zip(all_indices, unpadded, strict=True)])[None],
        torch.cat([padded[rows] for padded, rows in zip(all_values, unpadded, strict=True)]),
        parameter.shape,
        check_invariants=False,
    ).coalesce()


def _rows(gradient: Tensor) -> Tensor:
    if gradient.is_sparse and gradient.sparse_dim() == 1:
        return gradient.coalesce()
    return gradient.to_dense().to_sparse(1)
