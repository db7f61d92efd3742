import math

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.collectives.agreement import NumberExchange, StepBroken, digest
from lightning_hybrid.errors import RanksDisagree

SAME = {"names": 1, "batch": 2, "trace": 3}


def exchange(numbers, **others):
    return NumberExchange(numbers, dist.group.WORLD, device=torch.device("cpu"), **{**SAME, **others})


@pytest.mark.world(2)
def test_each_number_is_that_of_the_first_rank_that_has_it():
    here = dist.get_rank()
    many = [float(number) if number % 2 == here else math.nan for number in range(300)]  # more than one message
    assert exchange(many).finish() == list(map(float, range(300)))
    assert exchange([7.0 + here]).finish() == [7.0]
    assert math.isnan(exchange([math.nan]).finish()[0])


@pytest.mark.world(2)
def test_ranks_that_differ_learn_in_what():
    here = dist.get_rank()
    for others, message in [
        ({"batch": here}, "the batch differs between the ranks of one replica"),
        ({"trace": here}, "the operations of the step differ"),
        ({"names": here}, "the set of logged keys differs"),
    ]:
        with pytest.raises(RanksDisagree, match=message):
            exchange([1.0], **others).finish()
    with pytest.raises(RanksDisagree, match="the number of logged values differs"):
        exchange([1.0] * (1 + here)).finish()
    with pytest.raises(StepBroken):
        exchange([1.0], is_broken=here == 1, batch=here).finish()


def test_a_digest_is_that_of_the_content():
    batch = torch.arange(12.0).view(3, 4)
    assert digest([batch, 1]) == digest([batch.clone(), 1])
    assert len({digest([b, 1]) for b in (batch, batch + 1, batch.view(4, 3))} | {digest([batch, 2])}) == 4
