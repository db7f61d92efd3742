"""Distributed samplers that users build by hand deal to replicas, not to ranks."""

import warnings

from layouts import each
from lightning_runs import Samples, Tiny, trainer_of
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler


class Sees(Tiny):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["index"].tolist())
        return self.loss(batch)


class CountsItself(DistributedSampler):
    """Deals twice as many samples as torch's."""

    def __init__(self, dataset):
        super().__init__(dataset, shuffle=False)
        self.num_samples *= 2


def loader_with(kind, num):
    samples = Samples(num)
    if kind == "own count":
        return DataLoader(samples, batch_size=2, sampler=CountsItself(samples))
    drop_last = kind == "drop last"
    sampler = DistributedSampler(samples, shuffle=kind == "shuffled", drop_last=drop_last)
    if kind == "other":
        sampler = DistributedSampler(samples, num_replicas=1, rank=0, shuffle=False)
    if kind == "in a batch sampler":
        return DataLoader(samples, batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    return DataLoader(samples, batch_size=2, sampler=sampler)


def run(size, pp, kind, num, options):
    loader = loader_with(kind, num)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Sees()
        try:
            trainer_of(size, pp, max_epochs=2, **options).fit(model, loader)
        except ValueError as error:
            return str(error)
    return model.seen, [str(warning.message) for warning in caught if "replicas" in str(warning.message)]


KINDS = [("in order", 12), ("shuffled", 12), ("drop last", 11), ("in a batch sampler", 12), ("other", 12)]


@each("kind,num", KINDS, covered_by={KINDS[0]: KINDS[1], KINDS[2]: KINDS[1]})
def test_ranks_of_one_replica_see_the_same_samples(worlds, kind, num):
    # Lightning itself changes the sampler inside a batch sampler, with replicas; this is about what it leaves alone.
    options = {"use_distributed_sampler": False}
    results = worlds.run(4, run, 4, 2, kind, num, options)
    seen = [result[0] for result in results]
    assert seen[0] == seen[2] and seen[1] == seen[3]
    dealt = sorted(index for replica in seen[:2] for batch in replica[: len(replica) // 2] for index in batch)
    if kind == "other":
        assert seen[0] == seen[1], "a sampler that deals to others than the ranks means something of its own"
        assert not results[0][1]
        return
    assert dealt == sorted(set(dealt)) and len(dealt) == num // 2 * 2
    [warning] = results[0][1]
    assert "DistributedSampler deals to num_replicas=4 ranks, but the 4 ranks are 2 replicas" in warning
    assert "num_replicas=2, rank=0" in warning


def test_with_one_replica_all_samples_are_seen_in_order(worlds):
    for seen, _ in worlds.run(2, run, 2, 2, "in order", 8, {}):
        assert [index for batch in seen for index in batch] == list(range(8)) * 2


def test_without_stages_a_sampler_stays(worlds):
    for rank, (seen, warned) in enumerate(worlds.run(2, run, 2, 1, "in order", 8, {})):
        assert seen == [[rank, 2 + rank], [4 + rank, 6 + rank]] * 2
        assert not warned


def test_a_sampler_with_a_count_of_its_own_is_refused(worlds):
    for message in worlds.run(2, run, 2, 2, "own count", 8, {}):
        assert "CountsItself deals to num_replicas=2 ranks" in message
        assert "build it with num_replicas=1, rank=0 on this rank" in message
