"""Users' distributed samplers and datasets shard samples over replicas, not over ranks."""

import copy
import pickle
import warnings

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from harness.layouts import each
from harness.trainer_runs import ignore_warnings, trainer_of
from models.tiny import Samples, Tiny


class RecordsSamples(Tiny):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["index"].tolist())
        return self.loss(batch)


class CountsItself(DistributedSampler):
    """Gives twice as many samples as torch's."""

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
        model = RecordsSamples()
        try:
            trainer_of(size, pp, max_epochs=2, **options).fit(model, loader)
        except ValueError as error:
            return str(error)
    return model.seen, [str(warning.message) for warning in caught if "replicas" in str(warning.message)]


KINDS = [("in order", 12), ("shuffled", 12), ("drop last", 11), ("in a batch sampler", 12), ("other", 12)]


@each("kind,num", KINDS, covered_by={KINDS[0]: KINDS[1], KINDS[2]: KINDS[1]})
def test_ranks_of_one_replica_see_the_same_samples(worlds, kind, num):
    # Lightning itself changes the sampler inside a batch sampler, with replicas; this is about the others.
    options = {"use_distributed_sampler": False}
    results = worlds.run(4, run, 4, 2, kind, num, options)
    seen = [result[0] for result in results]
    assert seen[0] == seen[2] and seen[1] == seen[3]
    sharded = sorted(index for replica in seen[:2] for batch in replica[: len(replica) // 2] for index in batch)
    if kind == "other":
        assert seen[0] == seen[1], "a sampler that deals to others than the ranks means something of its own"
        assert not results[0][1]
        return
    assert sharded == sorted(set(sharded)) and len(sharded) == num // 2 * 2
    [warning] = results[0][1]
    assert "DistributedSampler splits over num_replicas=4 ranks, but the 4 ranks are 2 replicas" in warning
    assert "num_replicas=2, rank=0" in warning


def test_one_replica_sees_all_samples_in_order(worlds):
    for seen, _ in worlds.run(2, run, 2, 2, "in order", 8, {}):
        assert [index for batch in seen for index in batch] == list(range(8)) * 2


def test_sampler_is_kept_without_stages(worlds):
    for rank, (seen, warned) in enumerate(worlds.run(2, run, 2, 1, "in order", 8, {})):
        assert seen == [[rank, 2 + rank], [4 + rank, 6 + rank]] * 2
        assert not warned


def test_sampler_with_its_own_count_is_refused(worlds):
    for message in worlds.run(2, run, 2, 2, "own count", 8, {}):
        assert "CountsItself splits over num_replicas=2 ranks" in message
        assert "build it with num_replicas=1, rank=0 on this rank" in message


# -- datasets sharded by torch.distributed ----------------------------------------------------------------------------


def share_of(num):
    """The share of this process of so many samples."""
    return range(dist.get_rank(), num, dist.get_world_size())


class ShardsItself(Sampler):
    def __init__(self, num):
        self.num = num

    def __iter__(self):
        return iter(share_of(self.num))

    def __len__(self):
        return len(share_of(self.num))


class ShardsBatches(ShardsItself):
    def __iter__(self):
        share = list(share_of(self.num))
        return (share[start : start + 2] for start in range(0, len(share), 2))

    def __len__(self):
        return -(-len(share_of(self.num)) // 2)


class Share(Samples):
    def __len__(self):
        return len(share_of(self.num))

    def __getitem__(self, index):
        return super().__getitem__(share_of(self.num)[index])


class Stream(IterableDataset):
    def __init__(self, num):
        self.num = num

    def __iter__(self):
        return (Samples(self.num)[index] for index in share_of(self.num))

    def __len__(self):
        return len(share_of(self.num))


class Counts(DataLoader):
    """Has a `__len__`."""

    def __len__(self):
        return -(-len(share_of(self.dataset.num)) // 2)


def sharded_loader(kind, num, **options):
    if kind == "batch sampler":
        return DataLoader(Samples(num), batch_sampler=ShardsBatches(num), **options)
    if kind in ("dataset", "stream"):
        return DataLoader(Share(num) if kind == "dataset" else Stream(num), batch_size=2, **options)
    loader_class = Counts if kind == "loader" else DataLoader
    return loader_class(Samples(num), batch_size=2, sampler=ShardsItself(num), **options)


class RecordsAllSamples(RecordsSamples):
    def configure_optimizers(self):
        self.expected = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()

    def validation_step(self, batch, batch_idx):
        self.seen.append(batch["index"].tolist())
        self.log("loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return batch["index"], self(batch["x"])


def run_sharded(size, pp, kind, limit, workers):
    ignore_warnings()
    options = {"num_workers": 1, "persistent_workers": True} if workers else {}
    given = {"use_distributed_sampler": False, "limit_train_batches": limit, "num_sanity_val_steps": 0}
    one_by_one = {"num_microbatches": 1} if size > 1 else {}
    trainer = trainer_of(size, pp, strategy_options=one_by_one, max_epochs=2, **given)
    model, loaders = RecordsAllSamples(), [sharded_loader(kind, num, **options) for num in (16, 12, 8, 20)]
    lengths = [[len(loader) for loader in loaders]]
    trainer.fit(model, *loaders[:2])
    trainer.validate(model, loaders[1], verbose=False)
    trainer.test(model, loaders[2], verbose=False)
    predicted = [index.tolist() for index, _ in trainer.predict(model, loaders[3])]
    batches = trainer.num_training_batches, trainer.num_val_batches, trainer.num_test_batches
    counts = (*batches, trainer.num_predict_batches, model.expected, trainer.global_step)
    lengths.append([len(loader) for loader in [*loaders, *copy.deepcopy(loaders)]])
    assert lengths[1] == lengths[0] * 2, "outside a run the world is the launcher's"
    assert all(type(loader) in (DataLoader, Counts) for loader in loaders)
    return model.seen, predicted, counts


SHARDED = [
    ("sampler", None, False),
    ("batch sampler", 0.5, False),
    ("dataset", None, False),
    ("stream", None, False),
    ("loader", None, True),
]


EQUAL = {("batch sampler", 0.5, False): ("sampler", None, False), ("dataset", None, False): ("stream", None, False)}


@each("kind, limit, workers", SHARDED, covered_by=EQUAL)
def test_dataset_that_shards_itself_has_the_shard_length(worlds, kind, limit, workers):
    [expected] = worlds.run(1, run_sharded, 1, 1, kind, limit, workers)
    assert expected[2] == ((4, [6], [4], [10], 8, 8) if limit else (8, [6], [4], [10], 16, 16))
    for result in worlds.run(2, run_sharded, 2, 2, kind, limit, workers):
        assert result == expected


def test_self_sharding_replicas_cover_all_samples(worlds):
    results = worlds.run(4, run_sharded, 4, 2, "sampler", None, False)
    assert results[0] == results[2] and results[1] == results[3]
    assert [result[2] for result in results] == [(4, [3], [2], [5], 8, 8)] * 4
    trained = [index for seen, *_ in results[:2] for batch in seen[:4] for index in batch]
    assert sorted(trained) == list(range(16))


def run_copied():
    """In a user hook, a copy of a loader has the user's class."""
    ignore_warnings()

    class Copies(RecordsSamples):
        def on_train_start(self):
            loader = self.trainer.train_dataloader
            copies = [copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
            self.found = [(type(one), len(one)) for one in copies], isinstance(loader, Counts), type(loader).__name__

    model = Copies()
    trainer_of(2, 2, use_distributed_sampler=False).fit(model, sharded_loader("loader", 8))
    return model.found


def test_loader_can_be_copied_and_pickled_during_a_run(worlds):
    for found in worlds.run(2, run_copied):
        assert found == ([(Counts, 4)] * 2, True, "Counts")
