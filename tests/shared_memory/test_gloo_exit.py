"""gloo's threads release tensors before the interpreter exits."""

import weakref

import torch
import torch.distributed as dist

from lightning_hybrid.shared_memory.gloo_exit import wait_for_gloo


def live_tensors():
    live = 0
    for _ in range(60):
        tensor = torch.ones(4)
        reference = weakref.ref(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        del tensor, work  # in one of four cases, a thread of gloo has the last reference now
        wait_for_gloo()
        live += reference() is not None
    return live


def test_gloo_releases_tensors_after_wait(worlds):
    assert worlds.run(2, live_tensors) == [0, 0]
