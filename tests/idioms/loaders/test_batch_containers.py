"""Batches of every container that collate functions make: split where provably right, else unsplit or refused."""

import dataclasses
from typing import NamedTuple

import numpy
import torch
from torch.nn import functional as F

from harness.layouts import each_under, under
from harness.verification import LAYOUTS, TENSOR, check
from models.batch_regression import BY_LAYOUT, Loaders, Regression, columns
from models.regression import FEATURES

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
    """Two views of each sample, as contrastive learners' transforms return them."""

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
    """As pandas' Index: names of columns, possibly as many as the samples of a batch."""

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
    """Stores words, and a scale as a tensor of one number."""

    def __init__(self):
        self.words = {str(number): number for number in range(10)}
        self.scale = torch.tensor([0.5], dtype=torch.float64)


class OnPassengers(Regression):
    """Objects that belong to the full batch beside lists, arrays and tables with a row per sample."""

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
    """As torchvision's: a tensor with attributes, which hardly any operation propagates."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            return picture(out, args[0].scale) if func.__name__ in ("clone", "to", "detach") else out


class Labelled(torch.Tensor):
    """As monai's: each sample has a name, and selected rows keep theirs."""

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
    """Operations without fake kernels for the class, and writes into their results (monai's DiceLoss)."""

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


class StoresLabelled(Regression):
    """Stores tensors with attributes that `detach` drops, in a step that cannot be cut (pina's solvers)."""

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


SPLIT = [
    (OnNamedTuples, as_named),
    (OnDataclasses, as_dataclass),
    (OnTuplesWithNone, as_tuple_with_none),
    (OnNestedDicts, as_nested_dict),
    (OnLists, as_views),
    (OnListsOfNumbers, as_list_of_numbers),
    (OnPictures, as_pictures),
    (OnLabelled, as_labelled),
    (StoresLabelled, as_pair),
    (WeighsPictures, as_named_targets),
    (OnPassengers, as_passengers),
]


@each_under("module,collate", SPLIT, BY_LAYOUT, slow=[TENSOR])
def test_containers_are_split(worlds, module, collate, layout):
    report = check(worlds, module, layout, make_data=Loaders(collate))
    assert report.outcome == "same", str(report)
    is_sharded = any("sharded instead of" in note for note in report.notes)
    assert is_sharded == (module is StoresLabelled and "pp" in layout.name), report.notes


@under(LAYOUTS)
def test_step_that_writes_into_its_batch(worlds, layout):
    report = check(worlds, WritesIntoIts, layout, make_data=Loaders(as_pair))
    assert report.outcome == "same", str(report)
