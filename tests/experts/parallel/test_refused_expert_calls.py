"""A block that calls its experts otherwise than in its proof is named, with what to change."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from lightning_hybrid.errors import UnsupportedExpertCalls
from lightning_hybrid.experts.parallel.sharded import ShardedExperts


def refuse(*args):
    raise UnsupportedExpertCalls("the block calls none of its experts")


def test_block_and_option_are_named():
    experts = object.__new__(ShardedExperts)
    experts._full, experts._parameters, experts._exchanged = None, {"layers.1": {}}, refuse
    experts._outside = SimpleNamespace(inside=lambda parameters: nullcontext())
    experts.sharding = SimpleNamespace(group=SimpleNamespace(size=lambda: 2))
    message = r"^layers\.1: the block calls none of its experts, .* sharded over 2 ranks; set expert_parallel_size=1\n"
    with pytest.raises(UnsupportedExpertCalls, match=message):
        experts._run("layers.1", lambda: None)
