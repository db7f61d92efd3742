"""Data of the step graph."""

import torch

from lightning_hybrid.graph.step_graph import Value


def test_bytes_of_a_value_of_each_dtype():
    dtypes = {found for found in vars(torch).values() if isinstance(found, torch.dtype)}
    assert len(dtypes) > 20
    for dtype in dtypes:
        assert Value(0, (3, 5), str(dtype).removeprefix("torch."), (5, 1), False).nbytes == 15 * dtype.itemsize, dtype
