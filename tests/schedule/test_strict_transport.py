"""Runs programs in threads, one per rank, over a channel as strict as NCCL's.

`check_program` proves the same without values and with its own model of the channel; here the channel is written a
second time, threads race, and the values that arrive are compared with those of one process.
"""

import dataclasses
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.schedules import GENERATORS, portals_of
from lightning_hybrid.schedule import Compute, Kind, Send, chain, lower, peer_of
from lightning_hybrid.schedule.actions import made_by, needed_by
from lightning_hybrid.schedule.generators import eager_1f1b, one_f_one_b, zero_bubble


class Channel:
    """One queue for both directions of a pair of ranks: the k-th transfer of one side meets the k-th of the other."""

    def __init__(self, timeout):
        self.changed = threading.Condition()
        self.timeout = timeout
        self.sides = ([], [])
        self.num_met = 0
        self.values = {}

    def issue(self, side, transfer, value=None):
        with self.changed:
            self.sides[side].append((transfer, value))
            for one, other in list(zip(*self.sides, strict=False))[self.num_met :]:
                if type(one[0]) is type(other[0]) or one[0].message != other[0].message:
                    break  # both wait for ever
                self.num_met += 1
                self.values[one[0].message] = one[1] if isinstance(one[0], Send) else other[1]
            self.changed.notify_all()
            return len(self.sides[side])

    def wait_until(self, condition):
        with self.changed:
            if not self.changed.wait_for(condition, self.timeout):
                raise TimeoutError("deadlock")


def run(program, pool, seed=0, timeout=5.0):
    """Run a program on one thread per rank; the value of every action, here a hash of all it was made from."""
    schedule, portals = program.schedule, program.portals
    pairs = [(low, high) for high in range(schedule.num_ranks) for low in range(high)]
    channels = {pair: Channel(timeout) for pair in pairs}
    results = {}

    def run_rank(rank):
        delays = random.Random(seed * 31 + rank)
        local = {}
        for instruction in program.instructions[rank]:
            for _ in range(delays.randrange(3)):
                time.sleep(0)  # let another thread run first
            if isinstance(instruction, Compute):
                inputs = []
                for message in needed_by(instruction.action, portals):
                    source_rank = schedule.source_of(message)
                    if source_rank != rank:
                        channel = channels[min(rank, source_rank), max(rank, source_rank)]
                        channel.wait_until(lambda c=channel, m=message: m in c.values)
                        inputs.append(channel.values[message])
                    else:
                        inputs.append(local[message])
                value = results[instruction.action] = compute(instruction.action, inputs)
                local.update(dict.fromkeys(made_by(instruction.action, portals), value))
            else:
                peer = peer_of(instruction, schedule)
                channel = channels[min(rank, peer), max(rank, peer)]
                turn = channel.issue(int(rank > peer), instruction, local.get(instruction.message))
                if isinstance(instruction, Send):
                    channel.wait_until(lambda c=channel, t=turn: c.num_met >= t)

    for future in [pool.submit(run_rank, rank) for rank in range(schedule.num_ranks)]:
        future.result()
    return results


def compute(action, inputs):
    return hash((action.kind is Kind.F, action.stage, action.microbatch, *inputs))


def run_in_one_process(schedule, portals):
    """The same values from one process without a schedule: all forwards by stage, then all backwards."""
    values, messages = {}, {}
    turns = {Kind.F: 0, Kind.B: 1, Kind.I: 1, Kind.W: 2, Kind.REDUCE: 3}
    everything = {action for row in schedule.actions for action in row}
    for action in sorted(everything, key=lambda a: (turns[a.kind], a.stage if a.kind is Kind.F else -a.stage)):
        values[action] = compute(action, [messages[message] for message in needed_by(action, portals)])
        messages.update(dict.fromkeys(made_by(action, portals), values[action]))
    return values


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.mark.parametrize("kind", ["chain", "skips", "all pairs"])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_every_program_runs_on_racing_threads(kind, p, pool):
    for v in (1, 2):
        portals = portals_of(kind, p * v)
        for m in (2, 5):
            schedules = [generate(p, m, v) for generate in GENERATORS]
            if v == 1:
                schedules += [eager_1f1b(p, m), zero_bubble(p, m)]
            for seed, schedule in enumerate(schedules):
                assert run(lower(schedule, portals), pool, seed) == run_in_one_process(schedule, portals)


def test_split_backward_sends_input_gradients_first(pool):
    schedule = zero_bubble(3, 5)
    kinds = {action.kind for row in schedule.actions for action in row}
    assert {Kind.I, Kind.W} <= kinds, "nothing is split otherwise"
    assert not any(made_by(action, chain(3)) for row in schedule.actions for action in row if action.kind is Kind.W)
    assert run(lower(schedule, chain(3)), pool, 1) == run_in_one_process(schedule, chain(3))


def test_channel_is_strict(pool):
    program = lower(one_f_one_b(2, 2), chain(2))
    first, second = program.instructions
    late = (second[0], *second[2:5], second[1], *second[5:])  # the second receive is posted after a send
    with pytest.raises(TimeoutError):
        run(dataclasses.replace(program, instructions=(first, late)), pool, timeout=0.05)
