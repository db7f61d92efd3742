"""Architectures sampled from transformers match single-process training over two stages."""

import itertools

import pytest

from harness.sampled_parity import compare
from models.sampled.architectures import Unavailable, candidates, make, shrunk

SEED, FEW, SOME, MANY = 0, 1, 8, 40


@pytest.fixture(scope="module")
def trials():
    """The trials of the first architectures that run in one process, by name; made on first use."""
    order, made = candidates(SEED), {}

    def first(count):
        while len(made) < count:
            _, class_name = next(order)
            try:
                module, batch = make(class_name)
            except Unavailable:
                continue
            made[class_name] = compare(module, batch, 2)
        return dict(itertools.islice(made.items(), count))

    return first


def miss_trials(trials):
    return {name: f"{trial.outcome}: {trial.message}" for name, trial in trials.items() if trial.outcome != "parity"}


def test_few_architectures(trials):
    few = trials(FEW)
    assert len(few) == FEW and not miss_trials(few)
    assert all(all(trial.units) for trial in few.values()), "no stage is empty"


@pytest.mark.slow
def test_many_architectures(trials):
    assert not miss_trials(trials(SOME))
    many = trials(MANY)
    wrong = {name: text for name, text in miss_trials(many).items() if text.startswith("wrong")}
    assert not wrong
    assert len(miss_trials(many)) <= 2, miss_trials(many)


def test_shrunk_sizes_keep_ratios():
    config = {
        "model_type": "any", "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, "num_hidden_layers": 32,
        "intermediate_size": 11008, "vocab_size": 32000, "layer_types": ["a"] * 31 + ["b"], "dropout": 0.1,
        "part": {"model_type": "other", "hidden_size": 1024, "num_heads": 16, "projection_dim": 4096},
    }  # fmt: skip
    small = shrunk(config, head_dim=8, heads=4, width=16)
    assert small == {
        "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, "num_hidden_layers": 4, "intermediate_size": 86,
        "vocab_size": 128, "layer_types": ["a", "a", "a", "b"], "dropout": 0.0,
        "part": {"hidden_size": 32, "num_heads": 4, "projection_dim": 32},
    }  # fmt: skip
