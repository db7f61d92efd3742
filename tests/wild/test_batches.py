"""Batches of every shape that collate functions make: split where that provably is right, else whole or refused."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy
import pytest
import torch
from layouts import each_under, under
from lightning.pytorch import LightningModule
from lightning_runs import ignore_warnings, trainer_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from wild.suite import COMBINED, FEATURES, LAYOUTS, TENSOR, check

from lightning_hybrid.verify import Layout

BY_LAYOUT = [*LAYOUTS[2:], COMBINED]
by_layout = under(BY_LAYOUT, slow=[TENSOR])
WHOLE = {"num_microbatches": None}  # the strategy chooses: one microbatch where a batch cannot be split


class Samples(Dataset):
    """Sample i is a function of i."""

    def __init__(self, num=24):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        x = torch.cos(torch.arange(1, FEATURES + 1, dtype=torch.float64) * (index + 1) + index)
        return x, (x.sum(0, keepdim=True) / 2).tanh(), f"images/{index:04d}.png"


def columns(samples):
    x, y, names = zip(*samples, strict=True)
    return torch.stack(x), torch.stack(y), names


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def shared_step(self, batch):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        loss = self.shared_step(batch)
        self.log("train_loss", loss, on_epoch=True, batch_size=self.size_of(batch))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.shared_step(batch), batch_size=self.size_of(batch))

    def size_of(self, batch):
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


# --- containers whose leaves agree on the batch ----------------------------------------------------------------------


class Example(NamedTuple):
    x: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor | None
    paths: tuple


@dataclasses.dataclass
class Annotated:
    x: torch.Tensor
    y: torch.Tensor
    paths: list
    scale: float = 1.0
    mask: torch.Tensor | None = None


class OnNamedTuples(Regression):
    def shared_step(self, batch):
        assert batch.weight is None and len(batch.paths) == len(batch.x)
        return F.mse_loss(self(batch.x), batch.target)


class OnDataclasses(Regression):
    def shared_step(self, batch):
        assert batch.mask is None and len(batch.paths) == len(batch.x)
        return F.mse_loss(self(batch.x), batch.y) * batch.scale


class OnTuplesWithNone(Regression):
    def shared_step(self, batch):
        x, mask, (y, extra) = batch
        out = self(x)
        if mask is not None:
            out = out * mask
        return F.mse_loss(out, y) if extra is None else F.l1_loss(out, y)


class OnNestedDicts(Regression):
    """Vision and language: captions and paths beside tensors, weights that depend on the text."""

    def shared_step(self, batch):
        inputs, meta = batch["inputs"], batch["meta"]
        lengths = [len(path) + int(path[-5]) for path in meta["paths"]]
        weights = torch.tensor(lengths, dtype=torch.float64)
        error = (self(inputs["x"]) - batch["labels"]["y"]).square().squeeze(1)
        return (error * weights).mean() / 10 * meta["temperature"] + 0 * meta["epoch"]


class OnLists(Regression):
    """Two views of each sample, as contrastive learners' transforms give them."""

    def shared_step(self, batch):
        (first, second), y = batch
        a, b = self(first), self(second)
        return F.mse_loss(a, y) + (a - b).square().mean()


class OnListsOfNumbers(Regression):
    """One tensor without dimensions per sample."""

    def shared_step(self, batch):
        x, targets = batch
        return F.mse_loss(self(x).squeeze(1), torch.stack(targets))


def as_list_of_numbers(samples):
    x, y = columns(samples)[:2]
    return x, list(y.flatten().unbind())


class Names:
    """As pandas' Index: names of columns, which are as many as a batch may have samples."""

    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return self.names[index]


class Table:
    """As pandas' DataFrame: rows are taken by `iloc`."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    @property
    def iloc(self):
        return TableRows(self.rows)


class TableRows:
    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, index):
        return Table(self.rows[index])


class Tokenizer:
    """Knows words, and a scale as a tensor of one number."""

    def __init__(self):
        self.words = {str(number): number for number in range(10)}
        self.scale = torch.tensor([0.5], dtype=torch.float64)


class OnPassengers(Regression):
    """Objects that belong to the whole batch beside lists, arrays and tables with a row per sample."""

    def shared_step(self, batch):
        count = len(batch["x"])
        assert type(batch["columns"]) is Names and len(batch["columns"]) == 8
        assert set(batch["scales"]) == {"target", "input"} and batch["split"] == "train"
        rows = [batch["records"], batch["table"].rows, batch["array"], batch["paths"]]
        assert [len(row) for row in rows] == [count] * 4
        digits = [batch["tokenizer"].words[record["path"][-5]] for record in batch["records"]]
        assert digits == batch["array"].tolist() == batch["table"].rows == [int(path[-5]) for path in batch["paths"]]
        weights = torch.tensor(digits, dtype=torch.float64) * batch["tokenizer"].scale / batch["scales"]["target"][1]
        return ((self(batch["x"]) - batch["y"]).square().squeeze(1) * weights).mean()

    def size_of(self, batch):
        return len(batch["x"])


def as_passengers(samples):
    x, y, names = columns(samples)
    digits = [int(name[-5]) for name in names]
    return {
        "x": x, "y": y, "paths": names, "records": [{"path": name, "objects": Names([name])} for name in names],
        "array": numpy.array(digits), "table": Table(digits), "columns": Names([f"column {n}" for n in range(8)]),
        "tokenizer": Tokenizer(), "scales": {"target": [0.0, 2.0], "input": Names([])}, "split": "train",
    }  # fmt: skip


class Picture(torch.Tensor):
    """As torchvision's: a tensor that carries more than its numbers, which hardly any operation hands on."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            return picture(out, args[0].scale) if func.__name__ in ("clone", "to", "detach") else out


class Labelled(torch.Tensor):
    """As monai's: a name goes with each sample, and rows that are picked take theirs along."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        source = next((arg for arg in args if isinstance(arg, Labelled)), None)
        if isinstance(out, Labelled) and source is not None:
            out.names_of_rows = getattr(source, "names_of_rows", None)
            if func is torch.Tensor.__getitem__ and isinstance(args[1], slice):
                rows = range(*args[1].indices(len(source)))
                out.names_of_rows = [source.names_of_rows[row] for row in rows]
        return out


def picture(x, scale):
    x = x.as_subclass(Picture)
    x.scale = scale
    return x


class OnPictures(Regression):
    def shared_step(self, batch):
        x, y = batch
        assert type(x) is Picture
        return F.mse_loss(self(x * x.scale) + self(x), y)


class OnLabelled(Regression):
    """Its evaluation cannot be cut."""

    def shared_step(self, batch):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        if not self.training and loss.item() > 1e9:
            raise ValueError
        return loss


class WeighsPictures(Regression):
    """Operations that know no fake kernels for the class, and writes into what they gave (monai's DiceLoss)."""

    def shared_step(self, batch):
        x, y = batch
        out = self(x.as_subclass(torch.Tensor))
        hits = torch.sum(y * out, dim=[0])
        misses = torch.sum(out, dim=[0]) - hits
        wrong = torch.sum(y, dim=[0]) - hits
        wrong *= 0.5
        misses *= 0.5
        return (hits - misses * 0.1 + wrong).square().mean()


class Named(torch.Tensor):
    pass


def as_named_targets(samples):
    x, y, _ = columns(samples)
    return x.as_subclass(Named), y.as_subclass(Named)


class KeepsLabelled(Regression):
    """Keeps tensors that need what `detach` does not hand on, in a step that cannot be cut (pina's solvers)."""

    class Points(torch.Tensor):
        def to(self, *args, **kwargs):
            out = super().to(*args, **kwargs)
            out.labels = self.labels
            return out

        def clone(self, *args, **kwargs):
            out = super().clone(*args, **kwargs)
            out.labels = self.labels
            return out

    def __init__(self):
        super().__init__()
        self.points = torch.linspace(0, 1, FEATURES, dtype=torch.float64).as_subclass(self.Points)
        self.points.labels = "xyz"

    def shared_step(self, batch):
        x, y = batch
        loss = F.mse_loss(self(x + self.points.as_subclass(torch.Tensor)), y)
        if loss.item() > 1e9:
            raise ValueError
        return loss


class WritesIntoIts(Regression):
    """Changes its samples in place, as augmentations do; a layer saves the result for its backward."""

    def shared_step(self, batch):
        x, y = batch
        x.mul_(0.5)
        return F.mse_loss(self(x), y)


def as_pair(samples):
    return columns(samples)[:2]


def as_pictures(samples):
    x, y, _ = columns(samples)
    return picture(x, 0.5), y


def as_labelled(samples):
    x, y, names = columns(samples)
    x = x.as_subclass(Labelled)
    x.names_of_rows = names
    return x, y


def as_named(samples):
    x, y, names = columns(samples)
    return Example(x, y, None, names)


def as_dataclass(samples):
    x, y, names = columns(samples)
    return Annotated(x, y, list(names), scale=0.5)


def as_tuple_with_none(samples):
    x, y, _ = columns(samples)
    return x, None, (y, None)


def as_nested_dict(samples):
    x, y, names = columns(samples)
    meta = {"paths": list(names), "temperature": torch.tensor(0.5, dtype=torch.float64), "epoch": 3, "split": "train"}
    return {"inputs": {"x": x}, "labels": {"y": y}, "meta": meta}


def as_views(samples):
    x, y, _ = columns(samples)
    return [[x, x.flip(1)], y]


@dataclasses.dataclass(frozen=True)
class Loaders:
    """Makes the data of one collate function; other processes are sent it."""

    collate: Callable

    def __call__(self):
        train = DataLoader(Samples(), 8, shuffle=True, collate_fn=self.collate)
        return {"train_dataloaders": train, "val_dataloaders": DataLoader(Samples(14), 4, collate_fn=self.collate)}


SPLIT = [
    (OnNamedTuples, as_named),
    (OnDataclasses, as_dataclass),
    (OnTuplesWithNone, as_tuple_with_none),
    (OnNestedDicts, as_nested_dict),
    (OnLists, as_views),
    (OnListsOfNumbers, as_list_of_numbers),
    (OnPictures, as_pictures),
    (OnLabelled, as_labelled),
    (KeepsLabelled, as_pair),
    (WeighsPictures, as_named_targets),
    (OnPassengers, as_passengers),
]


@each_under("module,collate", SPLIT, BY_LAYOUT, slow=[TENSOR])
def test_containers_are_split(worlds, module, collate, layout):
    report = check(worlds, module, layout, make_data=Loaders(collate))
    assert report.outcome == "same", str(report)
    is_sharded = any("sharded instead of" in note for note in report.notes)
    assert is_sharded == (module is KeepsLabelled and "pp" in layout.name), report.notes


# --- batches that are no stack of samples ----------------------------------------------------------------------------


class Graph:
    """Concatenated graphs, as graph libraries batch them: the first dimension of each tensor is another one."""

    def __init__(self, nodes, edges, owner, target):
        self.nodes, self.edges, self.owner, self.target = nodes, edges, owner, target

    @property
    def num_graphs(self):
        return len(self.target)

    def to(self, device, non_blocking=False):
        return Graph(*(tensor.to(device) for tensor in (self.nodes, self.edges, self.owner, self.target)))


class Pair(NamedTuple):
    left: Graph
    right: Graph
    names: list


def as_graph(samples):
    nodes, edges, owner, targets = [], [], [], []
    for number, (x, y, name) in enumerate(samples):
        count = 2 + int(name[-5]) % 3
        first = sum(len(part) for part in nodes)
        nodes.append(torch.stack([x.roll(shift) for shift in range(count)]))
        edges += [(first + i, first + (i + 1) % count) for i in range(count)]
        owner += [number] * count
        targets.append(y)
    return Graph(torch.cat(nodes), torch.tensor(edges).T, torch.tensor(owner), torch.stack(targets))


def as_graphs(samples):
    return Pair(as_graph(samples), as_graph(samples[::-1]), [name for _, _, name in samples])


def as_graph_dict(samples):
    graph = as_graph(samples)
    return {"nodes": graph.nodes, "edges": graph.edges, "owner": graph.owner, "target": graph.target}


class OnGraphs(Regression):
    """Message passing, then the mean over each graph."""

    def embed(self, nodes, edges, owner, num_graphs):
        hidden = self.encoder(nodes)
        source, target = edges
        hidden = hidden + torch.zeros_like(hidden).index_add(0, target, hidden[source])
        counts = torch.bincount(owner, minlength=num_graphs).unsqueeze(1)
        pooled = hidden.new_zeros(num_graphs, hidden.shape[1]).index_add(0, owner, hidden) / counts
        return self.decoder(pooled)

    def shared_step(self, batch):
        return F.mse_loss(self.embed(batch.nodes, batch.edges, batch.owner, batch.num_graphs), batch.target)

    def size_of(self, batch):
        return batch.num_graphs


class OnPairsOfGraphs(OnGraphs):
    def shared_step(self, batch):
        left, right = (self.embed(g.nodes, g.edges, g.owner, g.num_graphs) for g in (batch.left, batch.right))
        return (left - right).square().mean() + F.mse_loss(left, batch.left.target)

    def size_of(self, batch):
        return len(batch.names)


class OnGraphDicts(OnGraphs):
    def shared_step(self, batch):
        out = self.embed(batch["nodes"], batch["edges"], batch["owner"], len(batch["target"]))
        return F.mse_loss(out, batch["target"])

    def size_of(self, batch):
        return len(batch["target"])


def as_sparse(samples):
    x, y, _ = columns(samples)
    return torch.where(x > 0, x, 0.0).to_sparse(), y


class OnSparse(Regression):
    """Bags of words: a sparse matrix times a dense weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, FEATURES * 8).reshape(FEATURES, 8))
        self.deeper = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def shared_step(self, batch):
        x, y = batch
        return F.mse_loss(self.decoder(self.deeper(torch.sparse.mm(x, self.table).tanh())), y)

    def size_of(self, batch):
        return len(batch[1])


def as_texts(samples):
    return [name for _, _, name in samples]


class OnTexts(Regression):
    """Only file names: the step reads the files itself."""

    def shared_step(self, batch):
        x, y, _ = columns([Samples()[int(name[-8:-4])] for name in batch])
        return F.mse_loss(self(x), y)

    def size_of(self, batch):
        return len(batch)


UNSPLIT = [
    (OnGraphs, as_graph),
    (OnPairsOfGraphs, as_graphs),
    (OnGraphDicts, as_graph_dict),
    (OnSparse, as_sparse),
    (OnTexts, as_texts),
]


@under(LAYOUTS)
def test_a_step_that_writes_into_its_batch(worlds, layout):
    report = check(worlds, WritesIntoIts, layout, make_data=Loaders(as_pair))
    assert report.outcome == "same", str(report)


@each_under("module,collate", UNSPLIT, BY_LAYOUT, slow=[TENSOR])
def test_batches_that_cannot_be_split_run_whole(worlds, module, collate, layout):
    report = check(worlds, module, layout, make_data=Loaders(collate), **WHOLE)
    assert report.outcome == "same", str(report)


@pytest.mark.parametrize(("module", "collate"), UNSPLIT, ids=lambda value: value.__name__)
def test_a_number_of_microbatches_for_them_is_one(worlds, module, collate):
    report = check(worlds, module, LAYOUTS[2], make_data=Loaders(collate))
    assert report.outcome == "same", str(report)


class Steps:
    def __init__(self, length):
        self.length = length


class PredictsOne(Regression):
    """A time series and where in time it lies, as forecasting packages predict it."""

    def shared_step(self, batch):
        return F.mse_loss(self(batch[0]), batch[1])

    def predict_step(self, batch, batch_idx):
        return self(batch[0]) * batch[2].length


def one_predicted(pp):
    ignore_warnings()
    torch.manual_seed(0)
    trainer = trainer_of(pp, pp, strategy_options={"num_microbatches": 2} if pp > 1 else {})
    samples = DataLoader(Samples(2), collate_fn=lambda one: (*columns(one)[:2], Steps(3)))
    return trainer.predict(PredictsOne().double(), samples)


def test_one_sample_needs_no_splitting(worlds):
    [expected] = worlds.run(1, one_predicted, 1)
    for predicted in worlds.run(2, one_predicted, 2):
        assert len(predicted) == 2 and all(map(torch.equal, predicted, expected))


class WithGuessedSizes(OnGraphDicts):
    """Leaves it to Lightning to guess the size of a batch: the number of nodes, another one on each replica."""

    def size_of(self, batch):
        return None


def epoch_loss(pp):
    ignore_warnings()
    torch.manual_seed(0)
    trainer = trainer_of(2 * pp, pp, strategy_options={"num_microbatches": 1})
    trainer.fit(WithGuessedSizes().double(), Loaders(as_graph_dict)()["train_dataloaders"])
    return float(trainer.callback_metrics["train_loss_epoch"])


@pytest.mark.parametrize("pp", [1, 2])
def test_means_over_an_epoch_are_the_same_on_all_ranks_whatever_sizes_they_guess(worlds, pp):
    assert len(set(worlds.run(2 * pp, epoch_loss, pp))) == 1


def split_graph(graph, count):
    """In runs of whole graphs."""
    pieces = []
    for ids in torch.arange(graph.num_graphs).tensor_split(count):
        keep = torch.isin(graph.owner, ids)
        start, of_edge = int(keep.nonzero()[0]), keep[graph.edges[0]]
        target = graph.target[ids]
        pieces.append(Graph(graph.nodes[keep], graph.edges[:, of_edge] - start, graph.owner[keep] - ids[0], target))
    return pieces


def test_a_splitter_of_the_users(worlds):
    layout = Layout("split", 4, {"pipeline_parallel_size": 2, "num_microbatches": 2, "batch_splitter": split_graph})
    report = check(worlds, OnGraphs, layout, make_data=Loaders(as_graph))
    assert report.outcome == "same", str(report)
