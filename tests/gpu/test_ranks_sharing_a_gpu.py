"""Two ranks on one GPU communicate over the host: operations on real streams, and what a run says of it."""

import pytest
import torch
import torch.distributed as dist

from harness.communication_cases import CASES
from harness.fits import Run, fit
from harness.gloo_via_host.group import BACKEND, register
from harness.one_gpu import on_one_gpu, prepare
from models.hand_written import Layers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 1 CUDA device(s)")]

GPU = torch.device("cuda", 0)
LONG = 200_000_000  # clock cycles of the device, about 0.1 s


def group_on_gpu():
    torch.cuda.set_device(GPU)
    register()
    return dist.new_group(backend=BACKEND)


def on_host(value):
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return [on_host(each) for each in value] if isinstance(value, list) else value


def find_all():
    """What each operation finds over gloo on the host, and over the host on the GPU."""
    group, cpu = group_on_gpu(), torch.device("cpu")
    skipped = ("all_to_all",)
    return {
        name: (run(dist.group.WORLD, cpu), on_host(run(group, GPU)))
        for name, run in CASES.items()
        if name not in skipped
    }


def test_operations_find_what_they_find_over_gloo(worlds):
    for found in worlds.run(2, find_all, timeout=120):
        for name, (expected, result) in found.items():
            torch.testing.assert_close(result, expected, rtol=0, atol=0, msg=name)


def order_streams():
    """Inputs that the device computes late, outputs that it reads at once, and memory that is freed under way."""
    group, here = group_on_gpu(), dist.get_rank()
    numel, found = 1 << 20, []
    for step in range(5):
        torch.cuda._sleep(LONG)
        tensor = torch.full((numel,), 10.0 * step + here, device=GPU)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        total = tensor + 1
        del tensor, work
        found.append(total)
    other = torch.cuda.Stream()
    for step in range(5):
        torch.cuda._sleep(LONG)
        tensor = torch.full((numel,), float(step), device=GPU)
        if here == 0:
            work = group.send([tensor], 1, 7)
            del tensor  # its memory is that of the next one, unless the copy still reads it
            torch.full((numel,), -1.0, device=GPU)
        else:
            tensor.fill_(-2.0)
            work = group.recv([tensor], 0, 7)
            with torch.cuda.stream(other):
                work.wait()
                found.append(tensor + 1)
            torch.cuda.current_stream().wait_stream(other)
        work.wait()
    torch.cuda.synchronize()
    return [each.unique().tolist() for each in found]


def test_streams_are_ordered(worlds):
    first, second = worlds.run(2, order_streams, timeout=120)
    sums = [[20.0 * step + 2] for step in range(5)]
    assert first == sums
    assert second == sums + [[step + 1.0] for step in range(5)]


def complete_late():
    """Whether a work is complete before and after the device has computed its input."""
    group = group_on_gpu()
    dist.all_reduce(torch.ones(1, device=GPU), group=group)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * LONG)
    tensor = torch.ones(1, device=GPU)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    early = work.is_completed()
    work.wait()
    torch.cuda.synchronize()
    return early, work.is_completed(), tensor.item()


def test_work_is_complete_after_its_inputs(worlds):
    assert worlds.run(2, complete_late, timeout=120) == [(False, True, 2.0)] * 2


def run_on_one_gpu():
    dist.barrier()  # the others may be connecting still
    dist.destroy_process_group()
    run = Run(
        Layers,
        pp=2,
        strategy=on_one_gpu(2),
        trainer={"accelerator": "gpu", "devices": 1},
        dtype=torch.float32,
    )
    prepare(run.strategy)
    fit(run)
    return dist.get_backend(), torch.cuda.get_per_process_memory_fraction(0), torch.cuda.current_device()


def test_trainer_runs_ranks_on_one_gpu(worlds):
    assert worlds.run(2, run_on_one_gpu, timeout=120) == [(BACKEND, 0.5, 0)] * 2
