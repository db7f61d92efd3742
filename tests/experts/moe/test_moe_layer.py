"""The MoE layer against an oracle that loops over tokens and experts."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.experts import ExpertChoiceRouter, GroupedExperts, MoE, TopKRouter
from lightning_hybrid.memory.recompute.layers import Recomputation

DIM, HIDDEN, EXPERTS, TOKENS = 6, 10, 5, 17
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def layer(**options):
    torch.manual_seed(1)
    options = {"num_experts": EXPERTS, "z_loss": 0.1, "balance_loss": 0.1} | options
    return MoE(DIM, HIDDEN, **options).double()


def tokens_of(*shape, seed=2):
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expert_on(experts, number, row):
    """One expert on one row."""
    bias = experts.up_bias is not None
    hidden = F.linear(row, experts.up[number], experts.up_bias[number] if bias else None)
    activation = ACTIVATIONS[experts.activation]
    if experts.gated:
        hidden = activation(hidden[: experts.hidden_dim]) * hidden[experts.hidden_dim :]
    else:
        hidden = activation(hidden)
    return F.linear(hidden, experts.down[number], experts.down_bias[number] if bias else None)


def chosen(moe, scores):
    """[(token, expert)] in the order in which they take places, and the weight of each."""
    router = moe.router
    if isinstance(router, ExpertChoiceRouter):
        places = min(len(scores), math.ceil(len(scores) * router.top_k / EXPERTS * router.capacity_factor))
        return {
            (token, expert): scores[token, expert]
            for expert in range(EXPERTS)
            for token in sorted(range(len(scores)), key=lambda t, e=expert: -scores[t, e].item())[:places]
        }
    bias = 0 if router.bias is None else router.bias
    ranked = [sorted(range(EXPERTS), key=lambda e, s=s: -s[e].item()) for s in scores.detach() + bias]
    pairs = {}
    for choice in range(router.top_k):
        for token, order in enumerate(ranked):
            own_experts = order[: router.top_k]
            total = sum(scores[token, e] for e in own_experts) if router.normalize and router.top_k > 1 else 1
            pairs[token, order[choice]] = scores[token, order[choice]] / total
    return pairs


def oracle(moe, x):
    """Results, auxiliary loss, load and dropped pairs."""
    tokens = x.reshape(-1, DIM)
    router = moe.router
    logits = F.linear(tokens, router.weight)
    scores = logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()
    pairs = chosen(moe, scores)
    load = [sum(expert == e for _, expert in pairs) for e in range(EXPERTS)]
    kept = dict(pairs)
    if moe.capacity_factor is not None and isinstance(router, TopKRouter):
        room = [math.ceil(len(tokens) * router.top_k / EXPERTS * moe.capacity_factor)] * EXPERTS
        order = sorted(pairs, key=lambda p: -pairs[p].item()) if moe.drop_by == "weight" else list(pairs)
        for pair in order:
            room[pair[1]] -= 1
            if room[pair[1]] < 0:
                del kept[pair]
    y = []
    for token, row in enumerate(tokens):
        parts = [weight * expert_on(moe.experts, e, row) for (t, e), weight in kept.items() if t == token]
        parts += [moe.shared(row)] if moe.shared is not None else []
        y.append(sum(parts, torch.zeros_like(row)))
    loss = router.z_loss * torch.stack([row.exp().sum().log() ** 2 for row in logits]).mean()
    if isinstance(router, TopKRouter):
        probabilities = scores / scores.sum(-1, keepdim=True)
        shares = torch.tensor(load, dtype=x.dtype) / sum(load)
        loss = loss + router.balance_loss * EXPERTS * (shares * probabilities.mean(0)).sum()
    return torch.stack(y).view(x.shape), loss, load, len(pairs) - len(kept)


def value_of(y):
    return (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum()


def gradients(module, x, y, loss):
    leaves = {"x": x, **dict(module.named_parameters())}
    value = value_of(y) + loss
    return dict(zip(leaves, torch.autograd.grad(value, leaves.values(), materialize_grads=True), strict=True))


def agree(actual, reference):
    for name, gradient in reference.items():
        torch.testing.assert_close(
            actual[name], gradient, rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )


CASES = {
    "top 2": {},
    "switch": {"top_k": 1},
    "top 3, not normalized": {"top_k": 3, "normalize": False},
    "plain experts with biases": {"gated": False, "activation": "gelu", "bias": True},
    "gated with biases": {"bias": True, "activation": "gelu_tanh"},
    "relu": {"gated": False, "activation": "relu"},
    "sigmoid with a bias": {"score": "sigmoid", "bias_update_rate": 0.01, "balance_loss": 0.0},
    "shared": {"shared_experts": 2},
    "drop by position": {"capacity_factor": 0.8},
    "drop by weight": {"capacity_factor": 0.8, "drop_by": "weight"},
    "pad": {"capacity_factor": 0.8, "overflow": "pad", "bias": True},
    "pad by weight": {"capacity_factor": 0.6, "overflow": "pad", "drop_by": "weight", "score": "sigmoid"},
    "pad with room for all": {"capacity_factor": 4.0, "overflow": "pad"},
    "experts choose": {"router": "expert_choice"},
    "experts choose more": {"router": "expert_choice", "capacity_factor": 1.3, "score": "sigmoid", "shared_experts": 1},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_matches_the_oracle(options):
    moe = layer(**options)
    if options.get("bias_update_rate"):
        moe.router.bias.copy_(torch.linspace(-0.3, 0.3, EXPERTS))
    x = tokens_of(1, TOKENS).requires_grad_()
    y, report = moe(x)
    expected, loss, load, dropped = oracle(moe, x)
    assert report.load.tolist() == load
    assert report.dropped.item() == dropped
    assert bool(dropped) == (moe.capacity_factor is not None and moe.capacity_factor < 1)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(report.loss, loss, rtol=1e-10, atol=1e-12)
    agree(gradients(moe, x, y, report.loss), gradients(moe, x, expected, loss))


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("options", [{}, CASES["pad"], CASES["drop by weight"], CASES["experts choose"]], ids=str)
def test_few_tokens(options, num_tokens):
    moe = layer(**options)
    x = tokens_of(num_tokens).requires_grad_()
    y, report = moe(x)
    assert y.shape == x.shape and all(value.isfinite().all() for value in report)
    grads = gradients(moe, x, y, report.loss)
    assert all(gradient.isfinite().all() for gradient in grads.values())
    if num_tokens:
        agree(grads, gradients(moe, x, *oracle(moe, x)[:2]))


@pytest.mark.parametrize(
    "options", [{}, {"capacity_factor": 1.0}, {"capacity_factor": 1.0, "overflow": "pad"}], ids=str
)
def test_all_tokens_to_one_expert(options):
    moe = layer(top_k=1, **options)
    with torch.no_grad():
        moe.router.weight.zero_()[3, 0] = 1.0
    x = tokens_of(TOKENS).abs().requires_grad_()
    y, report = moe(x)
    assert report.load.tolist() == [0, 0, 0, TOKENS, 0]
    room = TOKENS if not options else math.ceil(TOKENS / EXPERTS)
    assert report.dropped.item() == TOKENS - room
    assert [bool(row.any()) for row in y] == [token < room for token in range(TOKENS)]
    grads = gradients(moe, x, y, report.loss)
    agree(grads, gradients(moe, x, *oracle(moe, x)[:2]))
    assert not grads["experts.up"][0].any() and grads["experts.up"][3].any()


def test_uneven_and_empty_experts():
    torch.manual_seed(0)
    experts = GroupedExperts(4, DIM, HIDDEN, bias=True).double()
    counts = torch.tensor([0, 7, 0, 2])
    rows = tokens_of(9).requires_grad_()
    expected = torch.stack([expert_on(experts, e, r) for e, r in zip([1] * 7 + [3] * 2, rows, strict=True)])
    y = experts(rows, counts)
    torch.testing.assert_close(y, expected)
    agree(gradients(experts, rows, y, 0), gradients(experts, rows, expected, 0))
    with torch.no_grad():
        assert torch.equal(experts(rows, counts), y)


def test_partly_frozen_experts():
    experts = GroupedExperts(3, DIM, HIDDEN, bias=True).double()
    rows, counts = tokens_of(9), torch.tensor([4, 0, 5])
    full_gradients = gradients(experts, rows.clone().requires_grad_(), experts(rows, counts), 0)
    for trained in ("up", "down", "up_bias", "down_bias"):
        for name, parameter in experts.named_parameters():
            parameter.requires_grad_(name == trained)
        (gradient,) = torch.autograd.grad(value_of(experts(rows, counts)), [getattr(experts, trained)])
        assert torch.equal(gradient, full_gradients[trained])


@pytest.mark.parametrize("options", [{}, {"gated": False, "activation": "gelu", "bias": True}], ids=str)
def test_double_backward(options):
    moe = layer(**options)
    x = tokens_of(4).requires_grad_()

    def run(x, *parameters):
        names = dict(moe.named_parameters())
        y, report = torch.func.functional_call(moe, dict(zip(names, parameters, strict=True)), (x,))
        return y, report.loss

    assert torch.autograd.gradgradcheck(run, (x, *moe.parameters()), fast_mode=True)


@pytest.mark.parametrize("by_option", [True, False], ids=["recompute=", "torch.utils.checkpoint"])
def test_recomputation_is_bitwise_equal_and_counts_once(by_option):
    moe = layer(bias_update_rate=0.1, jitter=0.1, shared_experts=1)
    x = tokens_of(TOKENS).requires_grad_()

    def run(recomputed):
        torch.manual_seed(3)
        moe.router.load.zero_()
        if not recomputed:
            y, report = moe(x)
        elif by_option:
            with Recomputation({"moe": moe}, {"moe": "full"}).running():
                y, report = moe(x)
        else:
            y, report = checkpoint(moe, x, use_reentrant=False)
        return gradients(moe, x, y, report.loss), moe.router.load.clone(), report

    kept, load, report = run(recomputed=False)
    again, load_again, report_again = run(recomputed=True)
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    assert torch.equal(load, load_again) and load.sum() == 2 * TOKENS
    assert all(torch.equal(a, b) for a, b in zip(report, report_again, strict=True))


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_selective_recomputation_is_bitwise_equal(share):
    moe = layer()
    x = tokens_of(TOKENS).requires_grad_()
    kept = gradients(moe, x, *first_two(moe(x)))
    with Recomputation({"moe": moe}, {"moe": share}).running():
        y, report = moe(x)
    again = gradients(moe, x, y, report.loss)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def first_two(result):
    y, report = result
    return y, report.loss


def test_bias_balances_load_without_changing_gates():
    moe = layer(top_k=1, score="sigmoid", normalize=False, bias_update_rate=0.004, balance_loss=0.0, z_loss=0.0)
    with torch.no_grad():
        moe.router.weight[0] += 1.0  # one expert that all like
    x = tokens_of(200).abs()

    def imbalance():
        return moe(x)[1].load.max().item() / (200 / EXPERTS)

    before = imbalance()
    moe.router.load.zero_()
    for _ in range(200):
        moe(x[:80]), moe(x[80:])  # two microbatches
        assert moe.router.load.sum() == 200
        moe.update_bias()
        assert not moe.router.load.any()
    assert before > 3 and imbalance() < 1.5
    scores = F.linear(x, moe.router.weight).sigmoid()
    routing = moe.router(x)
    assert torch.equal(routing.weights, scores.gather(1, routing.experts))
    assert {"router.bias", "router.load"} <= set(moe.state_dict())


def test_evaluation_counts_nothing():
    moe = layer(bias_update_rate=0.1, jitter=0.5).eval()
    x = tokens_of(TOKENS)
    assert torch.equal(moe(x)[0], moe(x)[0]) and not moe.router.load.any()


def test_balance_loss_balances_load():
    moe = layer(balance_loss=1.0, z_loss=0.0)
    with torch.no_grad():
        moe.router.weight[0] += 1.0
    x = tokens_of(100).abs()
    optimizer = torch.optim.SGD(moe.router.parameters(), lr=0.5)
    loads = []
    for _ in range(40):
        _, report = moe(x)
        loads.append(report.load.max().item())
        optimizer.zero_grad()
        report.loss.backward()
        optimizer.step()
    assert loads[0] == 100 and loads[-1] < 60


def test_entropy_of_uniform_probabilities():
    moe = layer()
    nn.init.zeros_(moe.router.weight)
    assert moe(tokens_of(3))[1].entropy.item() == pytest.approx(math.log(EXPERTS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_router_computes_in_float32(dtype):
    moe = layer().float()
    x = tokens_of(TOKENS).float()
    with torch.autocast("cpu", dtype):
        y, report = moe(x)
    assert y.dtype == dtype and report.loss.dtype == report.load.dtype == torch.float32
    expected, exact = moe(x)
    assert torch.equal(report.load, exact.load)
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.02)
    y.float().sum().backward()
    assert moe.experts.up.grad.dtype == torch.float32
    true, _ = layer().to(dtype)(x.to(dtype))
    assert true.dtype == dtype


def test_fake_tensor_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for options in ({}, CASES["pad"], CASES["experts choose"]):
        moe = layer(**options)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            x = mode.from_tensor(tokens_of(2, 8)).requires_grad_()
            y, report = moe(x)
            (y.sum() + report.loss).backward()
        assert y.shape == x.shape == x.grad.shape and report.load.shape == (EXPERTS,)


def test_non_finite_logits_name_the_layer():
    moe = layer()
    moe.name = "blocks.3.moe"
    x = tokens_of(4)
    x[2, 1] = math.nan
    with pytest.raises(ValueError, match=r"blocks\.3\.moe: the router's logits are not finite"):
        moe(x)


WRONG = {
    "top_k=6; it must be at least 1 and at most num_experts=5": {"top_k": 6},
    "num_experts=0; it must be at least 1": {"num_experts": 0},
    "activation='swish'; use one of 'silu'": {"activation": "swish"},
    "score='tanh'; use one of 'softmax', 'sigmoid'": {"score": "tanh"},
    "router='hash'; use one of 'token_choice', 'expert_choice'": {"router": "hash"},
    "overflow='pad' needs a capacity": {"overflow": "pad"},
    "capacity_factor=-1": {"capacity_factor": -1},
    "jitter=1.5": {"jitter": 1.5},
    "router='expert_choice' is even": {"router": "expert_choice", "bias_update_rate": 0.1},
    "shared_experts=-1": {"shared_experts": -1},
    "drop_by='luck'; use one of 'position', 'weight'": {"drop_by": "luck"},
}


@pytest.mark.parametrize(("message", "options"), WRONG.items())
def test_refusals(message, options):
    with pytest.raises(ValueError) as refusal:
        layer(**options)
    assert message in str(refusal.value)


def test_counts_that_do_not_sum_to_the_rows():
    with pytest.raises(ValueError, match="counts of rows sum to 8, but there are 9 rows"):
        GroupedExperts(2, DIM, HIDDEN)(torch.ones(9, DIM), torch.tensor([4, 4]))


@pytest.mark.parametrize("options", [CASES["plain experts with biases"], CASES["relu"], {"bias": True}], ids=str)
def test_activations_saved_in_chunks(options, monkeypatch):
    """Rows of one expert are in several tensors, and rows of several experts in one."""
    monkeypatch.setattr("lightning_hybrid.experts.moe.grouped._SAVED_CHUNK_BYTES", 3 * 8 * 2 * HIDDEN)
    moe = layer(**options)
    x = tokens_of(TOKENS).requires_grad_()
    y, report = moe(x)
    expected, loss, *_ = oracle(moe, x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    agree(gradients(moe, x, y, report.loss), gradients(moe, x, expected, loss))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # what Dynamo does inside
@pytest.mark.parametrize("options", [{}, CASES["pad"], CASES["experts choose"]], ids=str)
def test_compiled_as_one_graph(options):
    moe = layer(**options)
    x = tokens_of(TOKENS).requires_grad_()
    expected = gradients(moe, x, *first_two(moe(x)))
    agree(gradients(moe, x, *first_two(torch.compile(moe, backend="aot_eager", fullgraph=True)(x))), expected)
