"""Batches of ever new sizes: a run caches the traces of recent sizes, and its memory is bounded."""

import contextlib
import gc
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.one_process_pipeline import OneRank, keyed
from lightning_hybrid.pipeline.stages import traces as choice
from lightning_hybrid.pipeline.stages.plan import StagePlan
from lightning_hybrid.step.objects.cache import BoundedLRUDict
from lightning_hybrid.step.standins import tensors as absent
from models.cases import batch_of, make
from models.hand_written import WIDTH, Layers


def test_least_recently_used_entry_is_evicted():
    recent = BoundedLRUDict(2)
    recent["a"], recent["b"] = 1, 2
    assert recent["a"] == 1
    recent["c"] = 3
    assert dict(recent) == {"a": 1, "c": 3}
    recent["a"] = 4
    recent["d"] = 5
    assert dict(recent) == {"a": 4, "d": 5}


def choosing(module, most, monkeypatch):
    """A cache for the traces of a module's step, of so many signatures: called with a batch it gives the trace."""
    monkeypatch.setattr(choice, "_MAX_SIGNATURES", most)
    plan = StagePlan(module, OneRank(), keyed(), stages_per_rank=2)
    forms = choice.TraceCache(plan)
    call = choice.Call("training_step", module.loss, None, (), contextlib.nullcontext, modes=plan.modes())
    return lambda *batches: forms.choose(call, batches)


def test_evicted_sizes_are_recorded_again(monkeypatch):
    module = make(Layers)
    choose = choosing(module, 3, monkeypatch)
    batches = [batch_of(module.kind, range(size)) for size in range(2, 8)]
    forms = [weakref.ref(choose(batch)[0]) for batch in batches]
    gc.collect()
    # The trace of the first batch determined the cut, and lives as long as the plan.
    assert [form() is not None for form in forms] == [True, False, False, True, True, True]
    assert choose(batches[4])[0] is forms[4](), "a form that is known is not recorded again"
    again = choose(batches[1])[0]
    sizes = {again.assignment.graph.values[node.outputs[0]].shape[0] for node in again.assignment.graph.nodes[:1]}
    assert sizes == {3}


def test_one_batch_may_exceed_the_cache_size(monkeypatch):
    module = make(Layers)
    choose = choosing(module, 2, monkeypatch)
    batches = [batch_of(module.kind, range(size)) for size in (2, 3, 4, 5, 2)]
    forms = choose(*batches)
    assert len(set(forms)) == 4 and forms[0] is forms[4]
    assert [form.assignment.graph.values[0].shape[0] for form in forms] == [2, 3, 4, 5, 2]


def test_torch_kernel_cache_is_bounded(monkeypatch):
    module = make(Layers)
    choose = choosing(module, 3, monkeypatch)
    FakeTensorMode.cache_clear()
    known = []
    for most in (1 << 14, 0):
        monkeypatch.setattr(absent, "_MOST_KERNELS", most)
        for size in range(20, 24):
            choose({"x": torch.randn(size + bool(most), WIDTH), "label": torch.zeros(size + bool(most)).long()})
        known.append(len(FakeTensorMode.cache))
    assert 0 < known[1] < known[0] / 2
