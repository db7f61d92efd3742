"""Warnings that each rank would print, of which users can change nothing."""

import warnings

import pytest

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
