"""Loaders and batches of users: every rank of a replica sees what one process sees."""

import dataclasses
import itertools
import warnings
from collections import namedtuple

import pytest
import torch
from lightning.pytorch import LightningDataModule, seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from transformers import BatchEncoding

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from models.tiny import Samples, Tiny, loader

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    note: str | None = None


def as_dict(samples):
    return {"x": torch.stack([s["x"] for s in samples]), "y": torch.stack([s["y"] for s in samples])}


def collate_tuple(samples):
    return tuple(as_dict(samples).values())


def collate_named(samples):
    return Pair(*as_dict(samples).values())


def collate_dataclass(samples):
    return Sample(**as_dict(samples), note="a batch")


def collate_encoding(samples):
    return BatchEncoding(as_dict(samples))


def collate_strings(samples):
    names = [f"sample {s['index']}" for s in samples]
    return {**as_dict(samples), "names": names, "nothing": None, "scale": 2.0, "nested": {"names": tuple(names)}}


def collate_zero_dim(samples):
    return {**as_dict(samples), "temperature": torch.tensor(0.5, dtype=torch.float64), "flag": True}


def as_lists(batch):
    if isinstance(batch, (tuple, list)):
        return batch[0], batch[1]
    if isinstance(batch, Sample):
        return batch.x, batch.y
    return batch["x"], batch["y"]


class AnyBatch(Tiny):
    def __init__(self):
        super().__init__()
        self.names = []

    def training_step(self, batch, batch_idx):
        x, y = as_lists(batch)
        if isinstance(batch, dict) and "names" in batch:
            assert len(batch["names"]) == len(x) == len(batch["nested"]["names"]) and batch["nothing"] is None
            self.names.extend(batch["names"])
        if isinstance(batch, dict) and "temperature" in batch:
            x = x * batch["temperature"]
        loss = torch.nn.functional.mse_loss(self(x), y)
        self.log("loss", loss)
        return loss


COLLATES = [
    collate_tuple,
    collate_named,
    collate_dataclass,
    collate_encoding,
    collate_strings,
    collate_zero_dim,
]


def run_collate(size, pp, options, collate):
    model = AnyBatch()
    trainer = trainer_of(size, pp, strategy_options=options)
    trainer.fit(model, loader(8, collate_fn=collate))
    return weights_of(model), float(trainer.callback_metrics["loss"]), model.names


@pytest.mark.parametrize("collate", COLLATES, ids=lambda function: function.__name__)
def test_batches_of_every_container_are_split(worlds, collate):
    [(weights, loss, names)] = worlds.run(1, run_collate, 1, 1, {}, collate)
    for actual, our_loss, our_names in worlds.run(2, run_collate, 2, 2, {"num_microbatches": 4}, collate):
        assert_same(actual, weights)
        assert our_loss == pytest.approx(loss, rel=1e-10)
        assert our_names == names


class Stream(IterableDataset):
    def __init__(self, num=16):
        self.num = num

    def __iter__(self):
        yield from (Samples()[index] for index in range(self.num))


class Batches(torch.utils.data.Dataset):
    """Returns full batches; its loader has batch_size=None."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return as_dict([Samples()[index * 4 + i] for i in range(4)])


class TakesLists(Samples):
    def __getitem__(self, indices):
        return as_dict([Samples()[index] for index in indices])


class ListOfBatches:
    """An iterable that is no DataLoader."""

    def __len__(self):
        return 4

    def __iter__(self):
        return (Batches()[index] for index in range(4))


def endless():
    """Endless different batches, drawn from the global generator."""
    for index in itertools.count():
        yield {"x": torch.rand(4, 4, dtype=torch.float64) + index, "y": torch.rand(4, 1, dtype=torch.float64)}


class Slices:
    """Each time it is read, some more of one stream."""

    def __init__(self, items, count):
        self.items, self.count = items, count

    def __iter__(self):
        yield from itertools.islice(self.items, self.count)


class StreamOfSamples(IterableDataset):
    def __init__(self):
        self.items = (Samples()[index % 16] | {"x": torch.rand(4, dtype=torch.float64)} for index in itertools.count())

    def __iter__(self):
        return itertools.islice(self.items, 10)


class Zipped(DataLoader):
    """An opaque loader; its dataset cannot be indexed."""

    def __init__(self, *loaders):
        super().__init__(Slices(loaders, 0), batch_size=1, sampler=range(len(loaders[0])))
        self.loaders = loaders

    def __iter__(self):
        return iter([{"a": a, "b": b} for a, b in zip(*self.loaders, strict=False)])


class Combined(Tiny):
    def training_step(self, batch, batch_idx):
        return self.loss(batch["a"]) + 2 * self.loss(batch["b"])


class ModuleLoaders(Tiny):
    def train_dataloader(self):
        return loader(4)

    def val_dataloader(self):
        return loader(8)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))


class Data(LightningDataModule):
    def setup(self, stage):
        self.samples = Samples()

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=4)


def fit_kind(kind, size, pp):
    ignore_warnings()
    model = Tiny()
    train = None
    options = {}
    if kind == "workers":
        train = loader(4, num_workers=2)
    elif kind == "iterable":
        train = DataLoader(Stream(), batch_size=4)
    elif kind == "iterable_limited":
        train, options = DataLoader(Stream(), batch_size=4), {"limit_train_batches": 3}
    elif kind == "batch_sampler":
        train = DataLoader(Samples(), batch_sampler=BatchSampler(SequentialSampler(range(16)), 4, drop_last=False))
    elif kind == "sampler_of_batches":
        sampler = BatchSampler(SequentialSampler(range(16)), 4, drop_last=False)
        train = DataLoader(TakesLists(), sampler=sampler, batch_size=None)
    elif kind == "no_batch_size":
        train = DataLoader(Batches(), batch_size=None)
    elif kind == "custom_iterable":
        train = ListOfBatches()
    elif kind == "stream":
        train, options = Slices(endless(), 3), {"max_epochs": 2}
    elif kind == "streams":
        model = Combined()
        train, options = {"a": Slices(endless(), 3), "b": Slices(endless(), 3)}, {"max_epochs": 2}
    elif kind == "bare_stream":
        train, options = endless(), {"limit_train_batches": 3, "max_epochs": 2}
    elif kind == "stream_of_samples":
        train, options = DataLoader(StreamOfSamples(), batch_size=4), {"max_epochs": 2}
    elif kind == "zipped":
        model = Combined()
        train = Zipped(loader(4, shuffle=True, generator=torch.Generator().manual_seed(5)), loader(4, num_workers=1))
    elif kind == "short_last":
        train = loader(6)
    elif kind == "combined":
        model = Combined()
        train = CombinedLoader({"a": loader(4), "b": loader(4, 8)}, "max_size_cycle")
    elif kind == "dict_of_loaders":
        model = Combined()
        train = {"a": loader(4), "b": loader(4, 8)}
    elif kind == "own":
        model = ModuleLoaders()
    elif kind == "datamodule":
        trainer_of(size, pp).fit(model, datamodule=Data())
        return weights_of(model)
    elif kind == "overfit":
        train, options = loader(4, shuffle=True), {"overfit_batches": 2, "max_epochs": 2}
    elif kind == "shuffle_seeded":
        seed_everything(3, verbose=False)
        train = loader(4, shuffle=True)
    elif kind == "own_generator":
        train = loader(4, sampler=RandomSampler(Samples(), generator=torch.Generator().manual_seed(5)))
    trainer_of(size, pp, **options).fit(model, train)
    return weights_of(model)


KINDS = [
    "workers",
    "iterable",
    "iterable_limited",
    "batch_sampler",
    "sampler_of_batches",
    "no_batch_size",
    "custom_iterable",
    "stream",
    "streams",
    "bare_stream",
    "stream_of_samples",
    "zipped",
    "short_last",
    "combined",
    "dict_of_loaders",
    "own",
    "datamodule",
    "overfit",
    "shuffle_seeded",
    "own_generator",
]


@pytest.mark.parametrize("kind", KINDS)
def test_loaders_of_every_kind_match_one_process(worlds, kind):
    [expected] = worlds.run(1, fit_kind, kind, 1, 1)
    for actual in worlds.run(2, fit_kind, kind, 2, 2):
        assert_same(actual, expected)


# -- batches that cannot be split -------------------------------------------------------------------------------------


class Graph:
    """Two concatenated graphs: the first dimension of `nodes` is no batch."""

    def __init__(self, nodes, owner):
        self.nodes, self.owner = nodes, owner

    def to(self, device):
        return Graph(self.nodes.to(device), self.owner.to(device))


def two_graphs():
    nodes = torch.stack([Samples()[i]["x"] for i in range(5)])
    return Graph(nodes, torch.tensor([0, 0, 0, 1, 1]))


class OnGraphs(Tiny):
    def training_step(self, batch, batch_idx):
        pooled = torch.zeros(int(batch.owner.max()) + 1, 4, dtype=torch.float64).index_add(0, batch.owner, batch.nodes)
        return self(pooled).square().mean()


def split_graph(graph, count):
    assert count == 2
    return [Graph(graph.nodes[:3], graph.owner[:3]), Graph(graph.nodes[3:], graph.owner[3:] - 1)]


def run_graphs(size, pp, options):
    model = OnGraphs()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graphs = DataLoader([two_graphs(), two_graphs()], batch_size=None)
        trainer_of(size, pp, strategy_options=options).fit(model, graphs)
    return weights_of(model), [str(warning.message) for warning in caught if "cannot be split" in str(warning.message)]


def test_unsplittable_batch_runs_as_one_microbatch_with_a_warning(worlds):
    [(expected, _)] = worlds.run(1, run_graphs, 1, 1, {})
    results = worlds.run(2, run_graphs, 2, 2, {})
    for weights, _ in results:
        assert_same(weights, expected)
    [message] = results[0][1]
    assert "Graph" in message and "batch_splitter" in message


def test_batch_splitter_of_the_user(worlds):
    [(expected, _)] = worlds.run(1, run_graphs, 1, 1, {})
    for weights, warned in worlds.run(2, run_graphs, 2, 2, {"batch_splitter": split_graph, "num_microbatches": 2}):
        assert_same(weights, expected)
        assert not warned


# -- samples by rank --------------------------------------------------------------------------------------------------
