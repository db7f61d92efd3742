"""Optimizers of users: closures that run twice, states that are loaded, state made before the run."""

import pytest
import torch

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from models.optimizers import Lamb, ScaledByNorm, SharpnessAware
from models.tiny import Tiny, loader


class Sharp(Tiny):
    def configure_optimizers(self):
        return SharpnessAware(self.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


class Lbfgs(Tiny):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Trust(Tiny):
    def configure_optimizers(self):
        return Lamb(self.parameters(), max_grad_norm=0.05)


class StateInInit(ScaledByNorm):
    """Its momentum exists before the first step."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.state["run"] = {"steps": 0}

    def step(self, closure=None):
        self.state["run"]["steps"] += 1
        return super().step(closure)


class WithStateInInit(Tiny):
    def configure_optimizers(self):
        return StateInInit(self.parameters(), lr=0.1, momentum=0.9)


class OptimizerInInit(Tiny):
    def __init__(self):
        super().__init__()
        self.own = StateInInit(self.parameters(), lr=0.1, momentum=0.9)

    def configure_optimizers(self):
        return self.own


class Hooked(Tiny):
    """Torch's optimizer with a hook that reads it all."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        optimizer.register_step_post_hook(self.limit)
        return optimizer

    def limit(self, optimizer, args, kwargs):
        with torch.no_grad():
            total = sum(p.square().sum() for group in optimizer.param_groups for p in group["params"]).sqrt()
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.mul_(2.0 / total)


class OfTorch(Tiny):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


CASES = {case.__name__: case for case in (Sharp, Lbfgs, Trust, WithStateInInit, OptimizerInInit, Hooked)}


def run_fit(size, pp, tp, case, path=None, resumed=False):
    ignore_warnings()
    model = CASES[case]()
    strategy = {"num_microbatches": 2 if pp > 1 else 1, "tensor_parallel_size": tp} if size > 1 else {}
    one_replica = {"replicas": 1 if size == pp * tp else None}
    each = loader(8 * pp * tp // size, **one_replica)
    if resumed:
        first = trainer_of(size, pp, strategy_options=strategy, max_epochs=1)
        first.fit(model, each)
        first.save_checkpoint(path)
        first.strategy.barrier() if size > 1 else None
        saved = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
        assert {0, 1, 2, 3} <= saved.keys()
        model, each = CASES[case](), loader(8 * pp * tp // size, **one_replica)
    optimizer_step = type(model.own).step if case == "OptimizerInInit" else None
    trainer = trainer_of(size, pp, strategy_options=strategy, max_epochs=2)
    trainer.fit(model, each, ckpt_path=path if resumed else None)
    assert optimizer_step is None or "step" not in model.own.__dict__
    return weights_of(model)


def assert_parity(worlds, size, pp, tp, case, *args):
    [expected] = worlds.run(1, run_fit, 1, 1, 1, case)
    for result in worlds.run(size, run_fit, size, pp, tp, case, *args):
        assert_same(result, expected)


LAYOUTS = {"pp2": (2, 2, 1), "dp2xpp2": (4, 2, 1), "tp2": (2, 1, 2), "pp2xtp2": (4, 2, 2)}
# Each layout once by default; that of `WithStateInInit` is the test of saved states below.
BY_DEFAULT = {("Sharp", "dp2xpp2"), ("Trust", "pp2xtp2"), ("OptimizerInInit", "tp2"), ("Hooked", "pp2")}


def each_case():
    for case in [name for name in CASES if name != "Lbfgs"]:
        for name, sizes in LAYOUTS.items():
            marks = [] if (case, name) in BY_DEFAULT else [pytest.mark.slow]
            yield pytest.param(case, *sizes, id=f"{case}-{name}", marks=marks)


@pytest.mark.parametrize(("case", "size", "pp", "tp"), list(each_case()))
def test_user_optimizer_sees_the_full_model(worlds, size, pp, tp, case):
    assert_parity(worlds, size, pp, tp, case)


def test_lbfgs_runs_its_closure_repeatedly(worlds):
    assert_parity(worlds, 2, 1, 1, "Lbfgs")


@pytest.mark.parametrize(
    ("case", "pp", "tp"),
    [
        pytest.param("Trust", 1, 2, id="Trust-tp2"),
        pytest.param("WithStateInInit", 2, 1, id="WithStateInInit-pp2"),
        pytest.param("Trust", 2, 1, id="Trust-pp2", marks=pytest.mark.slow),
        pytest.param("WithStateInInit", 1, 2, id="WithStateInInit-tp2", marks=pytest.mark.slow),
    ],
)
def test_state_is_saved_and_loaded(worlds, tmp_path, case, pp, tp):
    assert_parity(worlds, 2, pp, tp, case, str(tmp_path / "model.ckpt"), True)


def run_counting_fused_steps(size, pp):
    kernel, counts = torch._fused_adamw_, []

    def counted(parameters, *args, **kwargs):
        counts.append(len(parameters))
        return kernel(parameters, *args, **kwargs)

    torch._fused_adamw_ = counted
    try:
        ignore_warnings()
        model = OfTorch()
        trainer_of(size, pp, strategy_options={"num_microbatches": 2} if pp > 1 else {}).fit(model, loader(4))
    finally:
        torch._fused_adamw_ = kernel
    return counts, weights_of(model)


def test_torch_adam_takes_fused_steps_on_the_host(worlds):
    [(alone, expected)] = worlds.run(1, run_counting_fused_steps, 1, 1)
    assert not alone  # under Lightning's strategy
    for counts, weights in worlds.run(2, run_counting_fused_steps, 2, 2):
        assert len(counts) == 3 and 0 < counts[0] < 10  # those of its stage, after the step that makes the states
        assert_same(weights, expected)
