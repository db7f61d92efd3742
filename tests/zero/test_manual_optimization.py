"""Manual optimization under ZeRO: replicas shard the optimizer steps, and match one process."""

import copy

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from harness.fits import trainer_of
from lightning_hybrid import Hybrid3DStrategy

BY_LAYER = {"zero_stage": 3, "reshard_after_forward": True}
WIDTH = 7  # shards of three ranks have different sizes


class Gan(LightningModule):
    """Two alternating optimizers, each of which sees the other's steps."""

    optimizer = torch.optim.AdamW

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)).double()
        self.critic = nn.Sequential(nn.Linear(WIDTH, 6), nn.LeakyReLU(0.2), nn.Linear(6, 1)).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.losses = []

    def training_step(self, batch, batch_idx):
        [real] = batch
        for_generator, for_critic = self.optimizers()
        ones, zeros = (torch.full((len(real), 1), value, dtype=real.dtype) for value in (1.0, 0.0))
        self.toggle_optimizer(for_generator)
        loss = F.binary_cross_entropy_with_logits(self.critic(self.generator(real.flip(1)) * self.scale), ones)
        self.manual_backward(loss)
        self.clip_gradients(for_generator, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)
        fake = self.generator(real.flip(1)).detach()
        loss = F.binary_cross_entropy_with_logits(self.critic(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(self.critic(fake * self.scale.detach()), zeros)
        self.manual_backward(loss / 2)
        if batch_idx % 2:  # manual accumulation over two batches
            assert self.critic[0].weight.grad.shape == self.critic[0].weight.shape
            for_critic.step()
            for_critic.zero_grad()
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self):
        generator = self.optimizer([*self.generator.parameters(), self.scale], lr=0.02)
        return [generator, torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)]


class Closures(Gan):
    """Backwards in closures, and gradients that are not averaged until the last one."""

    optimizer = torch.optim.Adagrad

    def training_step(self, batch, batch_idx):
        [real] = batch
        generator, critic = self.optimizers()
        for optimizer, sign in ((generator, 1.0), (critic, -1.0)):
            halves = real.chunk(2)
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(sign * self.critic(self.generator(halves[0]) * self.scale).sigmoid().mean())

            def closure(half=halves[1], sign=sign):
                self.manual_backward(sign * self.critic(self.generator(half) * self.scale).sigmoid().mean())

            with optimizer.toggle_model(sync_grad=True):
                optimizer.step(closure)
            self.zero_grad()
        self.log("loss", real.mean(), sync_dist=True)


class Accumulates(Gan):
    """Gradients of every third batch alone are averaged; until then each replica has its own."""

    clips = False

    def training_step(self, batch, batch_idx):
        [real] = batch
        is_last = batch_idx % 3 == 2
        for optimizer, sign in zip(self.optimizers(), (1.0, -1.0), strict=True):
            with optimizer.toggle_model(sync_grad=is_last):
                self.manual_backward(sign * self.critic(self.generator(real) * self.scale).sigmoid().mean())
                if self.clips:
                    self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()
        self.log("loss", real.mean(), sync_dist=True)


class ReadsBetween(Accumulates):
    """What it does to the gradients of one replica is not what one process does to their average."""

    clips = True

    def on_train_batch_end(self, outputs, batch, batch_idx):
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.losses.append([(gradient.shape, float(gradient.norm())) for gradient in gradients])
        for gradient in gradients:
            gradient.mul_(0.5)
        if gradients:
            self.critic[0].weight.grad = self.critic[0].weight.grad.clamp(max=1e-3)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 4:
            self.zero_grad(set_to_none=False)


class Counts(Callback):
    def on_train_end(self, trainer, pl_module):
        self.sizes = [
            sum(v.numel() for p, entry in optimizer.state.items() if p.numel() > 1 for v in entry.values() if v.dim())
            for optimizer in trainer.optimizers
        ]


class Masks(Gan):
    """Copies a part, and masks gradients, before the first step."""

    def on_fit_start(self):
        self.copies = [copy.deepcopy(self.generator)]
        weight = self.critic[0].weight
        mask = (weight > 0).double()
        weight.register_hook(lambda grad: grad * mask)


class SavesHalfway(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if self.path is not None and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def train(case, size, options, epochs=1, save=None, resume=None, **kwargs):
    module = case()
    data = torch.rand(8 * 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    strategy = None if options is None else Hybrid3DStrategy(**options)
    counts = Counts()
    trainer = trainer_of(size, strategy, [counts, SavesHalfway(save)], max_epochs=epochs, **kwargs)
    sampler, tensor_ranks = None, (options or {}).get("tensor_parallel_size", 1)
    replicas = size // tensor_ranks
    if size > 1:
        replica = trainer.strategy.cluster_environment.global_rank() // tensor_ranks
        sampler = DistributedSampler(range(len(data)), replicas, replica, shuffle=False)
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=12 // replicas, sampler=sampler), ckpt_path=resume)
    return {name: value.clone() for name, value in module.state_dict().items()}, counts.sizes


def read_between(options):
    ends = []
    module = ReadsBetween
    state, _ = train(lambda: ends.append(module()) or ends[0], 2, options, epochs=2)
    return state, ends[0].losses


def assert_close(got, expected):
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("case", "size", "options"),
    [
        pytest.param(Gan, 2, {"zero_stage": 1}, id="gan"),
        pytest.param(Gan, 3, {"zero_stage": 2}, id="gan, uneven shards", marks=pytest.mark.slow),
        pytest.param(Gan, 4, {"zero_stage": 1, "shard_size": 2}, id="gan, two copies", marks=pytest.mark.slow),
        pytest.param(Closures, 2, {"zero_stage": 2}, id="closures"),
        pytest.param(Gan, 2, {"zero_stage": 2, "recompute": "full"}, id="gan recomputed", marks=pytest.mark.slow),
        pytest.param(Masks, 2, {"zero_stage": 1, "num_microbatches": 2}, id="mask in microbatches"),
        pytest.param(Gan, 2, BY_LAYER, id="gan by layer"),
        pytest.param(Closures, 3, BY_LAYER, id="closures by layer", marks=pytest.mark.slow),
        pytest.param(Accumulates, 2, {"zero_stage": 1}, id="accumulated", marks=pytest.mark.slow),
        pytest.param(Accumulates, 3, {"zero_stage": 3}, id="accumulated, uneven shards", marks=pytest.mark.slow),
        pytest.param(Accumulates, 2, BY_LAYER, id="accumulated by layer"),
    ],
)
def test_parity(worlds, case, size, options):
    """Each replica also has only its share of the states."""
    [(expected, full_sizes)] = worlds.run(1, train, case, 1, None)
    ranks = worlds.run(size, train, case, size, options)
    for state, _ in ranks:
        assert_close(state, expected)
    copies = size // options.get("shard_size", size)
    for optimizer, numel in enumerate(full_sizes):
        assert sum(sizes[optimizer] for _, sizes in ranks) == copies * numel


class Toggles(Gan):
    """Its second optimizer begins when the first has stepped; a recording of the step ends in the first toggle."""

    def training_step(self, batch, batch_idx):
        [real] = batch
        for optimizer, sign in zip(self.optimizers(), (1.0, -1.0), strict=True):
            with optimizer.toggle_model():
                self.manual_backward(sign * self.critic(self.generator(real) * self.scale).sigmoid().mean())
                self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        self.log("loss", real.mean(), sync_dist=True)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Toggles, {"zero_stage": 3}),
        pytest.param(Toggles, {}, marks=pytest.mark.slow),
        pytest.param(Gan, {"zero_stage": 1}, marks=pytest.mark.slow),
        pytest.param(Accumulates, BY_LAYER, marks=pytest.mark.slow),
    ],
)
def test_parity_over_tensor_ranks(worlds, case, options):
    """Averages over replicas, and norms, are of each rank's shards, although the step reads full parameters."""
    [(expected, _)] = worlds.run(1, train, case, 1, None)
    for state, _ in worlds.run(4, train, case, 4, {"tensor_parallel_size": 2, **options}):
        assert_close(state, expected)


@pytest.mark.parametrize(
    "options", [{"zero_stage": 3}, pytest.param({"zero_stage": 1}, marks=pytest.mark.slow)], ids=str
)
def test_gradients_that_are_not_averaged_yet_are_those_of_plain_replicas(worlds, options):
    """Each replica reads, clips and changes its own, in full."""
    for (expected, reads), (state, same) in zip(
        worlds.run(2, read_between, {}), worlds.run(2, read_between, options), strict=True
    ):
        assert_close(state, expected)
        assert sum(map(len, reads)) > 20
        assert [[size for size, _ in each] for each in same] == [[size for size, _ in each] for each in reads]
        torch.testing.assert_close([[n for _, n in each] for each in same], [[n for _, n in each] for each in reads])


@pytest.mark.parametrize("case", [Gan, pytest.param(Closures, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["disk", pytest.param("cpu", marks=pytest.mark.slow)])
def test_states_of_shards_are_offloaded(worlds, tmp_path, case, where):
    """The same bits, also of a run that is resumed."""
    path, place = str(tmp_path / "half.ckpt"), f"disk:{tmp_path}/states" if where == "disk" else "cpu"
    options = {"zero_stage": 1, "offload": {"optimizer_states": place}}
    plain = worlds.run(2, train, case, 2, {"zero_stage": 1}, 2)
    worlds.run(2, train, case, 2, options, 1, path)
    stored = worlds.run(2, train, case, 2, options, 2)
    resumed = worlds.run(2, train, case, 2, options, 2, None, path)
    for (state, sizes), *others in zip(plain, stored, resumed, strict=True):
        for other, other_sizes in others:
            assert all(torch.equal(other[name], value) for name, value in state.items())
            assert other_sizes == sizes


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param((2, {"zero_stage": 1}), (1, None), id="shared, then one process"),
        pytest.param((1, None), (2, {"zero_stage": 2}), id="one process, then shared"),
        pytest.param((2, {"zero_stage": 1}), (2, {"zero_stage": 1}), id="shared twice", marks=pytest.mark.slow),
    ],
)
def test_resumed(worlds, tmp_path, first, then):
    [(expected, _)] = worlds.run(1, train, Gan, 1, None, 2)
    path = str(tmp_path / "half.ckpt")
    worlds.run(first[0], train, Gan, *first, 1, path)
    for state, _ in worlds.run(then[0], train, Gan, *then, 2, None, path):
        assert_close(state, expected)


class Adafactored(Gan):
    optimizer = torch.optim.Adafactor


def test_steps_of_full_parameters_are_not_sharded(worlds):
    [(expected, sizes)] = worlds.run(1, train, Adafactored, 1, None)
    for state, own_sizes in worlds.run(2, train, Adafactored, 2, {"zero_stage": 1}):
        assert_close(state, expected)
        assert own_sizes[0] == sizes[0]
