"""A module built without storage gets, bit for bit, the values of an ordinary constructor."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_hybrid.errors import InitialValueError
from lightning_hybrid.step.deferred_init.parameters import InitialValues, reset
from lightning_hybrid.step.standins.tensors import drop, fill


def set_by(initialise):
    def build():
        layer = nn.Linear(6, 5)
        initialise(layer.weight)
        return layer

    return build


class Idioms(nn.Module):
    """Operations of constructors on initialised parameters."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4, padding_idx=2)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.token = nn.Parameter(torch.randn(1, 4) * 0.02)
        self.legacy = nn.Parameter(torch.Tensor(3, 4))
        nn.init.orthogonal_(self.legacy)
        self.apply(self.init)
        for name, parameter in self.named_parameters():
            if name.endswith("2.weight"):
                nn.init.normal_(parameter, std=0.02 / 2**0.5)
        self.layers[0].bias.data[1].fill_(7.0)
        self.layers[1].weight.data = torch.eye(4)
        self.teacher = copy.deepcopy(self.layers)
        self.student = nn.Linear(4, 4)
        self.student.load_state_dict(self.layers[1].state_dict())
        with torch.no_grad():
            self.layers[1].weight.mul_(2)  # after it was copied
        self.register_buffer("norm", self.student.weight.detach().norm())
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu_(1), persistent=False)
        self.scale = float(self.head.weight.detach().abs().max())
        self.double()

    def init(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


BUILDERS = {
    "idioms": Idioms,
    "embedding": lambda: nn.Embedding(10, 4, padding_idx=2),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "lstm": lambda: nn.LSTM(4, 4),
    "conv": lambda: nn.Conv2d(4, 6, 3),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "orthogonal": set_by(nn.init.orthogonal_),
    "truncated": set_by(nn.init.trunc_normal_),
    "truncated in the tail": set_by(lambda w: nn.init.trunc_normal_(w, a=1.5, b=3.0)),
    "sparse": set_by(lambda w: nn.init.sparse_(w, 0.3)),
    "generator": set_by(lambda w: nn.init.normal_(w, generator=torch.Generator().manual_seed(4))),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
}


def build_empty(build, seed=0):
    torch.manual_seed(seed)
    values = InitialValues(torch.device("cpu"))
    with values.building():
        module = build()
    return values, module


def content(values, name, tensor):
    if not tensor.is_meta:
        return tensor
    values.check(name, tensor)
    return values.value(values.view_of(tensor)).to(tensor.dtype)


@pytest.mark.parametrize("case", BUILDERS)
def test_values_equal_those_of_an_ordinary_constructor(case):
    torch.manual_seed(0)
    expected = BUILDERS[case]()
    generator = torch.get_rng_state()
    values, module = build_empty(BUILDERS[case])
    assert torch.equal(torch.get_rng_state(), generator), "the generator went on otherwise"
    assert any(parameter.is_meta for parameter in module.parameters())
    assert getattr(module, "scale", None) == getattr(expected, "scale", None)
    for named in ("named_parameters", "named_buffers"):
        pairs = zip(getattr(module, named)(), getattr(expected, named)(), strict=True)
        for (name, tensor), (expected_name, value) in pairs:
            assert name == expected_name and tensor.dtype == value.dtype
            assert torch.equal(content(values, name, tensor), value), name
    assert torch.equal(torch.get_rng_state(), generator)


def test_parameters_made_from_values_and_buffers_stay_real():
    _, module = build_empty(Idioms)
    assert [name for name, p in module.named_parameters() if not p.is_meta] == [
        "token",
        "layers.1.weight",
        "teacher.1.weight",
    ]
    assert not module.mask.is_meta


def test_loaded_values_replace_drawn_ones():
    values, module = build_empty(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    state = {name: torch.rand_like(value) for name, value in nn.Sequential(nn.Linear(3, 3)).state_dict().items()}
    module.load_state_dict(state, strict=False)
    module.double()  # outside of the recording
    for name, value in state.items():
        assert torch.equal(content(values, name, module.get_parameter(name)), value.double())
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict({"0.weight": torch.ones(2, 2)}, strict=False)


def test_write_from_outside_is_refused():
    values, module = build_empty(lambda: nn.Linear(3, 3))
    nn.init.zeros_(module.bias)
    with pytest.raises(InitialValueError, match="bias was written while it had no storage"):
        values.check("bias", module.bias)


def test_changed_source_is_refused():
    values, module = build_empty(lambda: nn.Linear(3, 3))
    state = {"weight": torch.ones(3, 3)}
    module.load_state_dict(state, strict=False)
    state["weight"].zero_()
    with pytest.raises(InitialValueError, match="has been changed since"):
        content(values, "weight", module.weight)


def test_nothing_stays_in_memory():
    values, module = build_empty(lambda: nn.Linear(3, 3))
    assert not values.close()
    for parameter in module.parameters():
        fill(parameter, nn.Parameter(values.value(values.take(parameter, torch.device("cpu")))))
    assert values.close() and not module._load_state_dict_pre_hooks
    del values
    gc.collect()
    assert not any(type(thing) is InitialValues for thing in gc.get_objects())


class Attention(nn.MultiheadAttention):
    """Resets its children's biases after they have reset themselves."""


class Applied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.attention, self.inner = nn.Linear(3, 3), Attention(4, 2), Inner()
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 3.0)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self._init_weights()

    def _init_weights(self):
        nn.init.constant_(self.linear.weight, 4.0)


def test_reset_follows_constructor_order():
    module = Applied()
    nn.init.ones_(module.attention.out_proj.bias)
    reset(module, set(module.modules()))
    assert float(module.attention.out_proj.bias.detach().abs().max()) == 0
    assert bool((module.first.weight == 3).all()) and bool((module.inner.linear.weight == 4).all())


def test_parameter_attributes_survive_absence():
    parameter = nn.Parameter(torch.ones(3))
    parameter.no_decay = True
    drop(parameter)
    assert parameter.no_decay
    parameter.group = 2
    fill(parameter, nn.Parameter(torch.ones(3)))
    assert parameter.__dict__ == {"no_decay": True, "group": 2}
