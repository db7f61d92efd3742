"""Diffusion with draws in the step, averages of weights in a callback; adversarial networks optimized by hand."""

import copy

import torch
from conformance.case import Case, tensor_loaders, waves
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional as F

SIDE, CLASSES, NOISE = 8, 3, 6


class TimeBlock(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(width, 2 * channels)

    def forward(self, x, embedded):
        scale, shift = self.time(F.silu(embedded))[:, :, None, None].chunk(2, 1)
        return x + self.conv(F.silu(self.norm(x) * (1 + scale) + shift))


class Denoiser(nn.Module):
    def __init__(self, channels=4, width=8, num_classes=0):
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(num_classes + 1, width) if num_classes else None
        self.inputs, self.out = nn.Conv2d(1, channels, 3, padding=1), nn.Conv2d(channels, 1, 3, padding=1)
        self.down, self.up = nn.Conv2d(channels, channels, 3, 2, 1), nn.ConvTranspose2d(channels, channels, 2, 2)
        self.blocks = nn.ModuleList(TimeBlock(channels, width) for _ in range(4))

    def forward(self, x, t, label=None):
        frequencies = torch.exp(-torch.arange(self.width // 2, device=x.device) * 1.0)
        angles = t[:, None].to(x) * frequencies.to(x)
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        if label is not None:
            embedded = embedded + self.label(label)
        first = self.blocks[0](self.inputs(x), embedded)
        middle = self.blocks[2](self.blocks[1](self.down(first), embedded), embedded)
        return self.out(self.blocks[3](self.up(middle) + first, embedded))


class DDPM(LightningModule):
    """A timestep and noise are drawn for each sample, in the step."""

    def __init__(self, timesteps=20, lr=1e-3, num_classes=0, loss_type="l2"):
        super().__init__()
        self.save_hyperparameters()
        self.model = Denoiser(num_classes=num_classes)
        alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.2, timesteps), 0)
        self.register_buffer("sqrt_alphas_cumprod", alphas.sqrt())
        self.register_buffer("sqrt_one_minus_alphas_cumprod", (1 - alphas).sqrt())

    def q_sample(self, x, t, noise):
        shape = (-1, 1, 1, 1)
        return self.sqrt_alphas_cumprod[t].view(shape) * x + self.sqrt_one_minus_alphas_cumprod[t].view(shape) * noise

    def p_losses(self, x, t, **condition):
        noise = torch.randn_like(x)
        predicted = self.model(self.q_sample(x, t, noise), t, **condition)
        losses = (predicted - noise).abs() if self.hparams.loss_type == "l1" else (predicted - noise) ** 2
        return losses.mean()

    def training_step(self, batch, batch_idx):
        x = batch[0]
        t = torch.randint(0, self.hparams.timesteps, (len(x),), device=self.device).long()
        loss = self.p_losses(x, t)
        self.log_dict({"train/loss": loss}, prog_bar=True, on_step=True, on_epoch=True)
        self.log("global_step", float(self.global_step), on_step=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x = batch[0]
        t = torch.arange(len(x), device=self.device) % self.hparams.timesteps
        self.log("val/loss", self.p_losses(x, t))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=self.hparams.lr)


class EMA(Callback):
    """Keeps a deep copy of the module whose weights are moving averages; validation runs with them."""

    def __init__(self, decay=0.9):
        self.decay, self.ema, self.backup = decay, None, None

    def on_fit_start(self, trainer, pl_module):
        if self.ema is None:
            self.ema = copy.deepcopy(pl_module.model).eval().requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for average, parameter in zip(self.ema.parameters(), pl_module.model.parameters(), strict=True):
            average.lerp_(parameter.to(average), 1 - self.decay)

    def on_validation_start(self, trainer, pl_module):
        self.backup = copy.deepcopy(pl_module.model.state_dict())
        pl_module.model.load_state_dict(self.ema.state_dict())

    def on_validation_end(self, trainer, pl_module):
        pl_module.model.load_state_dict(self.backup)

    def state_dict(self):
        return {"ema": self.ema.state_dict()}


class AveragedDiffusion(DDPM):
    def __init__(self):
        super().__init__(loss_type="l1")

    def configure_callbacks(self):
        return [EMA()]


class GuidedDiffusion(DDPM):
    """For one batch in some, drawn, the labels are dropped."""

    def __init__(self, p_uncond=0.4):
        super().__init__(num_classes=CLASSES)
        self.p_uncond = p_uncond

    def training_step(self, batch, batch_idx):
        x, label = batch
        t = torch.randint(0, self.hparams.timesteps, (len(x),), device=self.device)
        if torch.rand(1) < self.p_uncond:
            label = torch.full_like(label, CLASSES)
        loss = self.p_losses(x, t, label=label)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, label = batch
        t = torch.full((len(x),), self.hparams.timesteps // 2, device=self.device)
        conditional, unconditional = self.model(x, t, label), self.model(x, t, torch.full_like(label, CLASSES))
        self.log("val_guidance", (conditional + 2.0 * (conditional - unconditional)).abs().mean())


def images():
    return tensor_loaders(waves(1, SIDE, SIDE), torch.arange(48) % CLASSES)


# --- adversarial networks -------------------------------------------------------------------------------------------


def weights_init(module):
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.1)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


class Generator(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.model = nn.Sequential(
            nn.ConvTranspose2d(NOISE, channels, 4, 1, 0, bias=False), nn.BatchNorm2d(channels), nn.ReLU(True),
            nn.ConvTranspose2d(channels, 1, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, z):
        return self.model(z[:, :, None, None])


class Critic(nn.Module):
    def __init__(self, channels=8, norm=True):
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(1, channels, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            *([nn.BatchNorm2d(channels)] if norm else []),
            nn.LeakyReLU(0.2),
            nn.Conv2d(channels, 1, 4, 1, 0, bias=False),
        )

    def forward(self, x):
        return self.model(x).flatten()


class DCGAN(LightningModule):
    """Two optimizers by hand, each toggled while it is its turn."""

    def __init__(self, lr=2e-3, b1=0.5, b2=0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.discriminator = Generator(), Critic()
        self.apply(weights_init)
        self.validation_z = torch.randn(4, NOISE)

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, predicted, real):
        return F.binary_cross_entropy_with_logits(predicted, torch.full_like(predicted, float(real)))

    def training_step(self, batch, batch_idx):
        images = batch[0]
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(len(images), NOISE).type_as(images)
        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), True)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(images), True)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), False)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def on_train_epoch_end(self):
        z = self.validation_z.type_as(self.generator.model[0].weight)
        with torch.no_grad():
            self.log("sample_spread", self(z).std())
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in (opt_g, opt_d)]
        return [opt_g, opt_d], schedulers


class WGANGP(LightningModule):
    """The critic is trained more often, with a penalty on its gradient by mixed samples."""

    def __init__(self, n_critic=2, lambda_gp=10.0, clip_value=None, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.critic = Generator(), Critic(norm=False)

    def compute_gradient_penalty(self, real, fake):
        alpha = torch.rand(len(real), 1, 1, 1).to(real)
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        scores = self.critic(mixed)
        [gradients] = torch.autograd.grad(
            outputs=scores, inputs=mixed, grad_outputs=torch.ones_like(scores), create_graph=True, retain_graph=True
        )
        return ((gradients.flatten(1).norm(2, dim=1) - 1) ** 2).mean()

    def training_step(self, batch, batch_idx):
        real = batch[0]
        opt_g, opt_c = self.optimizers()
        for _ in range(self.hparams.n_critic):
            fake = self.generator(torch.randn(len(real), NOISE).type_as(real)).detach()
            c_loss = self.critic(fake).mean() - self.critic(real).mean()
            if self.hparams.clip_value is None:
                c_loss = c_loss + self.hparams.lambda_gp * self.compute_gradient_penalty(real.data, fake.data)
            opt_c.zero_grad()
            self.manual_backward(c_loss)
            opt_c.step()
            if self.hparams.clip_value is not None:
                for parameter in self.critic.parameters():
                    parameter.data.clamp_(-self.hparams.clip_value, self.hparams.clip_value)
        g_loss = -self.critic(self.generator(torch.randn(len(real), NOISE).type_as(real))).mean()
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(opt_g, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        opt_g.step()
        self.log_dict({"c_loss": c_loss, "g_loss": g_loss})

    def configure_optimizers(self):
        if self.hparams.clip_value is not None:
            return [torch.optim.RMSprop(net.parameters(), lr=5e-4) for net in (self.generator, self.critic)]
        return [
            torch.optim.Adam(net.parameters(), lr=self.hparams.lr, betas=(0.0, 0.9))
            for net in (self.generator, self.critic)
        ]


class ClampedWGAN(WGANGP):
    def __init__(self):
        super().__init__(clip_value=0.05)


class AlternatingLSGAN(LightningModule):
    """Which optimizer steps is a matter of the batch's index."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = Generator(), Critic(norm=False)

    def training_step(self, batch, batch_idx):
        real = batch[0]
        generator_optimizer, critic_optimizer = self.optimizers()
        fake = self.generator(torch.randn(len(real), NOISE, device=self.device, dtype=real.dtype))
        if batch_idx % 2 == 0:
            optimizer = critic_optimizer
            loss = 0.5 * ((self.critic(real) - 1).square().mean() + self.critic(fake.detach()).square().mean())
            self.log("critic_loss", loss)
        else:
            optimizer = generator_optimizer
            loss = 0.5 * (self.critic(fake) - 1).square().mean()
            self.log("generator_loss", loss)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def configure_optimizers(self):
        return (
            torch.optim.AdamW(self.generator.parameters(), lr=1e-3),
            torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.5),
        )


CASES = [
    Case(DDPM, images, draws=True, layouts=("sp2",)),
    Case(AveragedDiffusion, images, draws=True, layouts=("sp2",)),
    Case(GuidedDiffusion, images, draws=True, layouts=("sp2",)),
    Case(DCGAN, images, draws=True, layouts=("sp2",)),
    Case(WGANGP, images, draws=True, layouts=("sp2",)),
    Case(ClampedWGAN, images, draws=True, layouts=("sp2",)),
    Case(AlternatingLSGAN, images, draws=True, layouts=("sp2",)),
]
