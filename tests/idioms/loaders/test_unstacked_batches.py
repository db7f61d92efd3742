"""Batches that are no stack of samples: graphs, sparse tensors, texts."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from harness.layouts import each_under
from harness.trainer_runs import ignore_warnings, trainer_of
from harness.verification import LAYOUTS, TENSOR, check
from lightning_hybrid.verify import Layout
from models.batch_regression import BY_LAYOUT, UNSPLIT_BATCHES, Loaders, Regression, Samples, columns
from models.regression import FEATURES

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


@each_under("module,collate", UNSPLIT, BY_LAYOUT, slow=[TENSOR])
def test_unsplittable_batches_run_unsplit(worlds, module, collate, layout):
    report = check(worlds, module, layout, make_data=Loaders(collate), **UNSPLIT_BATCHES)
    assert report.outcome == "same", str(report)


@pytest.mark.parametrize(("module", "collate"), UNSPLIT, ids=lambda value: value.__name__)
def test_num_microbatches_is_1(worlds, module, collate):
    report = check(worlds, module, LAYOUTS[2], make_data=Loaders(collate))
    assert report.outcome == "same", str(report)


class Steps:
    def __init__(self, length):
        self.length = length


class PredictsOne(Regression):
    """A time series and its time index, as forecasting packages predict it."""

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


def test_single_samples(worlds):
    [expected] = worlds.run(1, one_predicted, 1)
    for predicted in worlds.run(2, one_predicted, 2):
        assert len(predicted) == 2 and all(map(torch.equal, predicted, expected))


class WithGuessedSizes(OnGraphDicts):
    """Lets Lightning infer the batch size: the number of nodes, another one on each replica."""

    def size_of(self, batch):
        return None


def epoch_loss(pp):
    ignore_warnings()
    torch.manual_seed(0)
    trainer = trainer_of(2 * pp, pp, strategy_options={"num_microbatches": 1})
    trainer.fit(WithGuessedSizes().double(), Loaders(as_graph_dict)()["train_dataloaders"])
    return float(trainer.callback_metrics["train_loss_epoch"])


@pytest.mark.parametrize("pp", [1, 2])
def test_epoch_means_are_equal_on_all_ranks(worlds, pp):
    assert len(set(worlds.run(2 * pp, epoch_loss, pp))) == 1


def split_graph(graph, count):
    """Into sequences of full graphs."""
    pieces = []
    for ids in torch.arange(graph.num_graphs).tensor_split(count):
        keep = torch.isin(graph.owner, ids)
        start, of_edge = int(keep.nonzero()[0]), keep[graph.edges[0]]
        target = graph.target[ids]
        pieces.append(Graph(graph.nodes[keep], graph.edges[:, of_edge] - start, graph.owner[keep] - ids[0], target))
    return pieces


def test_user_splitter(worlds):
    layout = Layout("split", 4, {"pipeline_parallel_size": 2, "num_microbatches": 2, "batch_splitter": split_graph})
    report = check(worlds, OnGraphs, layout, make_data=Loaders(as_graph))
    assert report.outcome == "same", str(report)
