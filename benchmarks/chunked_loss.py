"""What a cross entropy in chunks saves and costs: peak bytes and CPU-seconds of a GPT's step, in one process.

    OMP_NUM_THREADS=1 python benchmarks/chunked_loss.py
    OMP_NUM_THREADS=1 python benchmarks/chunked_loss.py --vocabulary 32000 --width 512 --layers 4 --batch 2 --chunks 2 8

Bytes are those of the storages that kernels have made and that live at a time, parameters without. CPU-seconds are of
forward and backward; the variants take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import weakref
from typing import Any

import torch
from small_gpt import Block
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_hybrid.logits.heads import ChunkedLoss, find_output_heads


class GPT(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the storages that kernels make and that live."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if type(value) is Tensor and not value.is_meta:
                storage = value.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._free, storage._cdata)
        return out

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def step(model: GPT, losses: ChunkedLoss | None, ids: Tensor, target: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    with contextlib.ExitStack() as stack:
        for context in () if losses is None else (losses.running(), losses.step()):
            stack.enter_context(context)
        loss = model(ids, target)
    loss.backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"vocabulary": 50304, "width": 384, "layers": 6, "batch": 4, "length": 512, "rounds": 5}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="numbers of chunks beside the default")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = GPT(arguments.vocabulary, arguments.width, arguments.layers)
    ids, target = torch.randint(arguments.vocabulary, (2, arguments.batch, arguments.length))

    def chunked(count: int | None) -> ChunkedLoss:
        heads = find_output_heads(model, sharded=(), is_compiled=False, any_size=True)
        return ChunkedLoss(heads, count, around=lambda _: contextlib.nullcontext(), inform=print, warn=print)

    variants: dict[str, ChunkedLoss | None] = {"full": None, "chunked_loss=True": chunked(None)}
    variants |= {f"chunked_loss={count}": chunked(count) for count in arguments.chunks}
    peaks, seconds = {}, {name: list[float]() for name in variants}
    for name, losses in variants.items():
        step(model, losses, ids, target)
        with PeakBytes() as counted:
            step(model, losses, ids, target)
        peaks[name] = counted.peak
    for _ in range(arguments.rounds):
        for name, losses in variants.items():
            start = time.process_time()
            step(model, losses, ids, target)
            seconds[name].append(time.process_time() - start)
    usual = statistics.median(seconds["full"])
    for name, found in seconds.items():
        median = statistics.median(found)
        print(
            f"{name:20} peak {peaks[name] / 2**20:7.1f} MiB ({peaks[name] / peaks['full'] - 1:+.1%}),"
            f" CPU {median:.3f} s [{min(found):.3f}, {max(found):.3f}] ({median / usual - 1:+.1%})"
        )


if __name__ == "__main__":
    main()
