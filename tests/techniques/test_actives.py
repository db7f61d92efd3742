"""Several techniques act as one: contexts nest, and what a technique does not do costs nothing."""

from contextlib import contextmanager, nullcontext

import pytest

from lightning_hybrid.techniques.actives import Actives
from lightning_hybrid.techniques.technique import Active, Messages


class Marks(Active):
    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    @contextmanager
    def running(self):
        self.seen.append(f"enter {self.name}")
        yield
        self.seen.append(f"leave {self.name}")

    def settle(self):
        self.seen.append(f"settle {self.name}")


class Averages(Active):
    reduces_gradients = keeps_compiled = True
    can_roll_back = guards_loaders = False


def test_the_innermost_is_entered_first():
    seen = []
    actives = Actives([Marks("outer", seen), Active(), Marks("inner", seen)])
    with actives.running():
        actives.settle()
    assert seen == [
        *("enter inner", "enter outer", "settle inner", "settle outer"),
        *("leave outer", "leave inner"),
    ]
    assert actives.replaces_layers


def test_what_none_does_is_nothing():
    actives = Actives([Active(), Averages()])
    assert isinstance(actives.running(), nullcontext) and not actives.replaces_layers
    assert isinstance(actives.step(3), nullcontext)


def test_facts_are_those_of_any_or_of_all():
    actives = Actives([Active(), Averages()])
    assert actives.reduces_gradients and not actives.can_roll_back and not actives.guards_loaders
    assert [type(each) for each in actives.until_backward.members] == [Averages]
    alone = Actives()
    assert alone.can_roll_back and alone.guards_loaders and not alone.reduces_gradients


@pytest.mark.parametrize(
    ("operation", "factor"),
    [("send", 1.0), ("all_gather", 3.0), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("all_reduce", 1.5)],
)
def test_bytes_sent_in_a_ring_of_four(operation, factor):
    assert Messages("data", "", operation, 4, 1, 1000).sent_bytes == factor * 1000
