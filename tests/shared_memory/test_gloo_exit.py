"""Before the interpreter ends, gloo's threads have let go of tensors."""

import weakref

import torch
import torch.distributed as dist

from lightning_hybrid.shared_memory.gloo_exit import wait_for_gloo


def tensors_still_held():
    held = 0
    for _ in range(60):
        tensor = torch.ones(4)
        reference = weakref.ref(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        del tensor, work  # in one of four cases, a thread of gloo is the last to hold it now
        wait_for_gloo()
        held += reference() is not None
    return held


def test_gloo_releases_tensors_after_wait(worlds):
    assert worlds.run(2, tensors_still_held) == [0, 0]
