"""Schedules and portals that several tests use."""

from lightning_hybrid.schedule import Portals, chain
from lightning_hybrid.schedule.generators import forward_only, gpipe, interleaved_1f1b

GENERATORS = (gpipe, interleaved_1f1b, forward_only)  # interleaved_1f1b is 1F1B where a rank has one stage


def portals_of(kind, num_stages):
    links = chain(num_stages).forward
    if kind == "chain":
        return Portals(links, links)
    if kind == "skips":  # a U-Net, whose middle skips carry no gradient
        skips = {(stage, num_stages - 1 - stage) for stage in range(num_stages // 2)}
        return Portals(links | skips, links | {pair for pair in skips if pair[0] % 2 == 0})
    everything = frozenset((src, dst) for dst in range(num_stages) for src in range(dst))
    return Portals(everything, everything)


GPIPE = {"schedule": "gpipe"}


ONE_F_ONE_B = {"schedule": "1f1b"}


EAGER = {"schedule": "eager_1f1b"}


INTERLEAVED = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}
