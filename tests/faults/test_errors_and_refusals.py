"""Inputs that ended in an error or a refusal, and variants of them, equal the plain Trainer under every layout."""

from dataclasses import replace

from faults import attention_modules as a
from faults import changing_modules as c
from faults import small_modules as s
from faults.layouts import LAYOUTS, Case, check, each

PLAIN, VALIDATED = s.of_numbers((3, 8)), s.of_numbers((3, 8), (2, 8))
LIMITED = {"limit_val_batches": 2, "val_check_interval": 2}


def cases(letter, modules, loaders, *, trainer=None, label="", **further):
    """Of modules that have the same batches, by the letter of their fault and their names."""
    options = {"use_distributed_sampler": False, **(trainer or {})}  # loaders have a replica's rows
    return {
        f"{letter} {module.__name__}{label}": Case(module, trainer=options, loaders=loaders, **{"epochs": 2, **further})
        for module in modules
    }


MASKED = [s.MasksInInit, s.MasksInSetup, s.MasksAtFitStart, s.MasksAtTrainStart, s.MasksAtEpochStart]
MASKED += [s.MasksInOptimizers, s.MasksAccumulated, s.MasksByName]
COMPILED = [s.CompiledInPlace, s.CompiledLayers, s.CompiledInner, s.CompiledStep, s.compiled_module]
TRANSFORMERS = [a.GPT2, a.Bert, a.T5, a.Llama, a.LlamaOneKeyHead]
BRANCHES = [a.BranchInside, a.BranchGated, a.BranchPlaced]  # whose parameters the first batches do not use
FURTHER_BRANCHES = [a.BranchMasked, a.BranchSummed, a.BranchAveraged, a.BranchAttendsTwice]
CASES = {
    **cases("N", COMPILED, VALIDATED),
    **cases("N", [s.compiled_fullgraph], PLAIN),
    **cases("O", [s.Packed, s.PackedSorted, s.PackedByList, s.PackedState], s.sequences),
    **cases("P", MASKED, PLAIN),
    **cases("T", [s.Odd, s.OddInOptimizer, s.OddBytes, s.OddNumber, s.BoolBuffer], VALIDATED),
    **cases("T", [s.Adapters], VALIDATED, saves=True),
    **cases("U", [c.Loaders, c.NamedHeads, c.OneHead], s.of_numbers((4, 8), (3, 8), (2, 4)), trainer=LIMITED),
    **cases("U", [c.ThreeLoaders], s.of_numbers((4, 8), (1, 12), (3, 4), (2, 8)), trainer=LIMITED),
    **cases("V", [c.Distils, c.DistilsInEval, c.DistilsBranching, c.Momentum, c.MomentumAfter], VALIDATED),
    **cases("W", [c.Initialises, c.InitialisesByData, c.InitialisesCentred, c.InitialisesWithGradients], VALIDATED),
    **cases("X", TRANSFORMERS, a.texts, epochs=1),
    **cases("X", [*TRANSFORMERS, *BRANCHES], a.texts_with_late_masks, epochs=1, label=", late masks"),
    **cases("AC", [a.Grouped, a.OneKeyHead, a.TwoOfTwo], a.texts, epochs=1),
    **cases("AH", [c.Counts, c.CountsOptimizerSteps], PLAIN),
    **cases("Z", [a.Mixture], a.texts_with_late_masks, epochs=1),
}
DEFAULT = {
    "O PackedState": ("pp2",),
    "P MasksInOptimizers": ("tp2",),
    "T Adapters": ("zero3",),
    "U ThreeLoaders": ("pp2",),
    "V DistilsBranching": ("pp2",),
    "V Momentum": ("pp2, 4 microbatches",),
    "W InitialisesByData": ("zero3",),
    "X Bert, late masks": ("tp2",),
}


@each(CASES, DEFAULT)
def test_equals_one_process(worlds, tmp_path, case, layout):
    check(worlds, case, layout, tmp_path, timeout=120)


EXPERTS = {
    f"Z Mixture, shared{''.join(f', {name}' for name in options)}": replace(
        CASES["Z Mixture"], strategy={"expert_parallel_size": 2, **options}
    )
    for options in ({}, {"recompute": "full"}, {"zero_stage": 3})
}


@each(EXPERTS, {}, ["tp2 x dp2", *(name for name, (_, replicas, _) in LAYOUTS.items() if replicas > 1)])
def test_shared_experts(worlds, tmp_path, case, layout):
    check(worlds, case, layout, tmp_path, timeout=120)


ATTENTION = {
    **cases("AC", [a.Grouped, a.OneKeyHead, a.TwoOfTwo], a.texts, epochs=1),
    **cases("X", BRANCHES, a.texts_with_late_masks, epochs=1, label=", late masks"),
}


@each(ATTENTION, {"X BranchInside, late masks": ("tp2 x dp2",)}, ["tp2 x cp2", "tp2 x dp2", "tp2 x pp2 x dp2"])
def test_further_layouts(worlds, tmp_path, case, layout):
    check(worlds, case, layout, tmp_path, timeout=120)


LATE = {"epochs": 1, "strategy": {"sequence_parallel": True}, "label": ", late masks"}
SEQUENCE = {
    **cases("AD", [a.ThreeHeads, a.Grouped], a.texts, epochs=1, strategy=LATE["strategy"]),
    **cases("AD", [*TRANSFORMERS, *BRANCHES, *FURTHER_BRANCHES], a.texts_with_late_masks, **LATE),
}


@each(SEQUENCE, {"AD BranchInside, late masks": ("tp2",)}, ["tp2", "tp2 x pp2", "tp2 x dp2"])
def test_sequence_parallel(worlds, tmp_path, case, layout):
    check(worlds, case, layout, tmp_path, timeout=120)


DRAWS = cases("AE", [c.Windows, c.Shuffled], PLAIN)


@each(DRAWS, {}, ["one device", "pp2", "pp2, 4 microbatches", "tp2", "tp2 x pp2"])
def test_draws_from_the_full_batch(worlds, tmp_path, case, layout):
    """Without replicas: each of these draws from its own batch, as under DDP."""
    check(worlds, case, layout, tmp_path, timeout=120)
