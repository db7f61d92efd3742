"""Owners of sharded parameters: balanced, equal on all ranks, and where an expert is."""

from types import SimpleNamespace

from lightning_hybrid.params.owners import assign_owners
from lightning_hybrid.params.placement import Shard


def axis(size, **placements):
    return SimpleNamespace(group=SimpleNamespace(size=lambda: size), placements=placements)


def test_owners_have_equal_shares_of_the_elements():
    names = {f"layer{n}": 100 for n in range(6)} | {"embedding": 300}
    placements = {name: Shard.evenly(0, 100, 2) for name in names}
    owners = assign_owners(names, [axis(1), axis(3, **{n: Shard.evenly(0, 99, 3) for n in names})])
    loads = [sum(names[name] for name, at in owners.items() if at[1] == rank) for rank in range(3)]
    assert loads == [300, 300, 300] and list(owners) == list(names)
    owners = assign_owners(names, [axis(2, **placements), axis(2, **placements)])
    loads = {(a, b): sum(names[n] for n, at in owners.items() if at == {0: a, 1: b}) for a in (0, 1) for b in (0, 1)}
    assert loads == {(0, 0): 300, (0, 1): 200, (1, 0): 200, (1, 1): 200}


def test_an_axis_that_does_not_shard_a_parameter_has_an_owner_in_each_rank():
    owners = assign_owners({"a": 5, "b": 5}, [axis(2, a=Shard.evenly(0, 4, 2), b=Shard.evenly(0, 4, 2)), axis(2)])
    assert owners == {"a": {0: 0}, "b": {0: 1}}


def test_a_parameter_of_one_expert_stays_where_it_is():
    assert assign_owners({"a": 9, "e": 3}, [axis(2, a=Shard.evenly(0, 4, 2), e=Shard.owned(3, 2, 0))]) == {
        "a": {0: 0},
        "e": {0: 0},
    }
