"""Copies of modules without the bytes of their tensors."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.data import DataLoader, TensorDataset

from harness.fits import trainer_of
from lightning_hybrid.planning.costs import record_costs
from lightning_hybrid.step.module_state.copies import copy_on_meta
from lightning_hybrid.step.standins.tensors import drop
from models.cases import Samples, make


class Marked(nn.Parameter):
    """A parameter of the user's class."""


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.embed.weight.no_decay = True
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.marked = Marked(torch.ones(2))
        self.norm, self.rnn = nn.BatchNorm1d(4), nn.LSTM(4, 4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.table = {"rows": [torch.arange(4.0)], "again": self.marked}

    def training_step(self, batch, index):
        return self.head(self.embed(batch[0])).logsumexp(-1).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_parameters_are_tied_and_of_their_class_and_on_meta():
    module = Model()
    found = copy_on_meta(module)
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    assert [name for name, _ in found.named_parameters(remove_duplicate=False)] == names
    for name, parameter in module.named_parameters():
        other = found.get_parameter(name)
        assert other.is_meta
        assert (type(other), other.shape, other.requires_grad) == (
            type(parameter),
            parameter.shape,
            parameter.requires_grad,
        )
        assert not parameter.is_meta
    assert found.head.weight is found.embed.weight
    assert found.embed.weight.no_decay
    assert found.table["again"] is found.marked
    assert found.rnn._flat_weights[0] is found.rnn.weight_ih_l0
    assert found.norm.running_mean.is_meta
    assert found.table["rows"][0].is_meta
    assert found.normed.weight.is_meta


def test_other_tensors_keep_their_values_where_only_parameters_are_on_meta():
    module = Model()
    found = copy_on_meta(module, only_parameters=True)
    assert all(parameter.is_meta for parameter in found.parameters())
    assert torch.equal(found.table["rows"][0], module.table["rows"][0])
    assert torch.equal(found.norm.running_var, module.norm.running_var)
    found.norm.running_var.zero_()
    assert module.norm.running_var.all()


class RealOps(TorchDispatchMode):
    """Records the operations that make a tensor with storage."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta and not func.is_view:
            self.names.append(func.name())
        return result


def test_no_bytes_are_copied(monkeypatch):
    def refused(*_):
        raise AssertionError("a storage is copied")

    monkeypatch.setattr(torch.storage.UntypedStorage, "__deepcopy__", refused)
    monkeypatch.setattr(torch.storage.TypedStorage, "_deepcopy", refused)
    module = Model()
    with RealOps() as real:
        copy_on_meta(module)
    assert not real.names
    with RealOps() as real:
        copy.deepcopy(module.frozen)
    assert real.names == ["aten::clone"]
    with pytest.raises(AssertionError, match="a storage is copied"):
        copy.deepcopy(torch.ones(2))


def test_lazy_modules_stay_lazy():
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))
    found = copy_on_meta(module)
    lazy = [is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())]
    assert [is_lazy(tensor) for tensor in (*found.parameters(), *found.buffers())] == lazy
    assert found[2].weight.is_meta


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_weights_computed_by_a_hook():
    """Plain deep copies refuse the result of an operation."""
    module = nn.utils.weight_norm(nn.Linear(3, 3))
    module(torch.ones(1, 3))
    for only_parameters in (True, False):
        assert copy_on_meta(module, only_parameters=only_parameters).weight.is_meta


def test_parameters_that_are_absent_or_on_meta():
    module = nn.Linear(3, 4)
    drop(module.weight)
    module.bias = nn.Parameter(torch.empty(4, device="meta"))
    found = copy_on_meta(module)
    assert type(found.weight) is type(found.bias) is nn.Parameter
    assert found.weight.is_meta
    assert found.weight.shape == (4, 3)


class Scaled(torch.Tensor):
    """A tensor that holds another one, as quantized weights do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, shape, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].inner))
        raise NotImplementedError(func)


def test_tensors_that_hold_others():
    module = nn.Module()
    module.weight = nn.Parameter(Scaled(torch.ones(3, 2, dtype=torch.int8)), requires_grad=False)
    found = copy_on_meta(module)
    assert type(found.weight) is Scaled
    assert isinstance(found.weight, nn.Parameter)
    assert found.weight.inner.is_meta
    assert found.weight.inner.dtype is torch.int8


class Kept(Exception):
    pass


def test_module_in_a_trainer(monkeypatch):
    """Data sets that stand for themselves, a module without its Trainer, and objects that refer to both."""
    module, data = Model(), TensorDataset(torch.zeros(4, 2, dtype=torch.int64))
    module.data = data
    found = []

    def on_fit_start():
        copied, loader = copy_on_meta((module, module.loader), only_parameters=True, memo={id(data): data})
        found.extend([copied, loader])
        raise Kept

    module.loader, module.on_fit_start = DataLoader(data, batch_size=2), on_fit_start
    with pytest.raises(Kept):
        trainer_of(1, "auto", []).fit(module, module.loader)
    copied, loader = found
    assert copied._trainer is None
    assert module._trainer is not None
    assert copied.data is loader.dataset is data
    assert copied.loader is loader is not module.loader
    assert copied.head.weight.is_meta


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["Llama", "BatchNorms", "Masks", "Tied"])
def test_costs_of_a_step_are_those_of_the_module(case):
    module = make(case)
    copied = copy_on_meta(module, only_parameters=True)
    arguments = {"train_dataloaders": DataLoader(Samples(module.kind, 8), batch_size=4)}
    found, expected = (record_costs(pl, each, arguments, "64-true") for each in (copied, module))
    assert not any("traced" in note for note in found.costs.notes)
    assert found == expected
