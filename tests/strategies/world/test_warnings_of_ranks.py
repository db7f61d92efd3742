"""Warnings that each rank would print, of which users can change nothing."""

import warnings
from pathlib import Path

import pytest

import lightning_hybrid
from harness.trainer_runs import trainer_of
from models.tiny import Tiny, loader


def warnings_of_fit(options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(strategy_options=options, max_steps=1).fit(Tiny(), loader(4))
    return [str(each.message) for each in caught]


@pytest.mark.world(1)
def test_deprecated_tree_specs_of_lightning_are_not_reported():
    if not any("LeafSpec" in text for text in warnings_of_fit({})):
        pytest.skip("this version of torch does not warn")
    assert not any("LeafSpec" in text for text in warnings_of_fit({"timeout": None}))


def test_own_warnings_have_lines_of_100_characters_and_no_place_in_the_package():
    path = str(Path(lightning_hybrid.__file__).parent / "run/runner.py")
    text = warnings.formatwarning("a layer runs unsharded " * 20, UserWarning, path, 103)
    assert text.startswith("hybrid3d warning: a layer") and max(map(len, text.splitlines())) <= 100, text
    other = warnings.formatwarning("a layer", UserWarning, "train.py", 103)
    assert "train.py:103: UserWarning: a layer" in other
