"""What ranks of one host exchange on CPUs: through shared memory against gloo.

    python benchmarks/same_host.py
    python benchmarks/same_host.py --ranks 4

Each of these with tensors of several sizes, in turns:

    sum    one all-reduce of the tensor ranks
    there  one tensor to the next rank and one back, as between two pipeline stages

Times are of a hundred. Nothing must be reached; it says why ranks of one host do not use gloo.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.distributed as dist
from side_by_side import Turn, Variant, compare, print_table

from lightning_hybrid.shared_memory.collectives import shared_memory
from lightning_hybrid.shared_memory.transfers import transfers_of

TIMES = 100  # exchanges in a step


def sum_by_gloo(turn: Turn, length: int) -> None:
    group, tensor = dist.new_group(), torch.zeros(length)
    while True:
        turn.border()
        for _ in range(TIMES):
            dist.all_reduce(tensor, group=group)


def sum_in_memory(turn: Turn, length: int) -> None:
    group, tensor = dist.new_group(), torch.zeros(length)
    memory = shared_memory(group)
    assert memory is not None, "the ranks cannot share memory here"
    while True:
        turn.border()
        for _ in range(TIMES):
            memory.all_reduce(tensor)


def there_by_gloo(turn: Turn, length: int) -> None:
    group, tensor = dist.new_group(), torch.zeros(length)
    peer = 1 - turn.rank
    while True:
        turn.border()
        for _ in range(TIMES):
            for sender in (0, 1):
                (dist.send if turn.rank == sender else dist.recv)(tensor, peer, group=group)


def there_in_memory(turn: Turn, length: int) -> None:
    group, tensor = dist.new_group(), torch.zeros(length)
    transfers, peer = transfers_of(group), 1 - turn.rank
    assert transfers is not None, "the ranks cannot share memory here"
    while True:
        turn.border()
        for _ in range(TIMES):
            for sender in (0, 1):
                if turn.rank == sender:
                    transfers.send(peer, 0, tensor)
                else:
                    tensor = transfers.receive(peer, 0, torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 2**14, 2**19], help="elements of 4 bytes")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    functions = [sum_by_gloo, sum_in_memory] + [there_by_gloo, there_in_memory] * (args.ranks == 2)
    for length in args.lengths:
        variants = [Variant(each.__name__.replace("_", " "), partial(each, length=length)) for each in functions]
        results = compare(variants, ranks=args.ranks, rounds=args.rounds, steps=1)
        print_table(f"{TIMES} times {4 * length / 1e6:.3g} MB, {args.ranks} ranks", results)


if __name__ == "__main__":
    main()
