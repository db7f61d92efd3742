"""Train a byte-level GPT on the source code of Python's standard library, over replicas, stages and tensor ranks.

The model, its data and its `training_step` know nothing of parallelism; `main` names the layout, and nothing else does.

    python examples/gpt.py                                        2 replicas x 2 stages x 2 tensor ranks: 8 processes
    python examples/gpt.py --tensor 1 --data 1                    2 stages: 2 processes
    python examples/gpt.py --tensor 2 --sequence-parallel         positions sharded between tensor-parallel layers
    python examples/gpt.py --tensor 1 --context 2                 positions sharded in all of a layer
    python examples/gpt.py --tensor 2 --context 2 --data 1        the same, with layers sharded over tensor ranks
    python examples/gpt.py --pipeline 1 --tensor 1 --data 1       one process
    python examples/gpt.py --layers 8 --width 256 --steps 1000
"""

import argparse
import math
import statistics
import sysconfig
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import PipelineTimeline

# --- the data: text that every machine has ---------------------------------------------------------------------------

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "lib2to3"}


def read_standard_library(max_bytes: int) -> tuple[bytes, bytes]:
    """The source of the standard library in a fixed order, for training and (every 20th file) for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))
    texts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for number, path in enumerate(paths):
        text = path.read_bytes()
        texts[number % 20 == 19].append(text)
        size += len(text)
        if size > max_bytes:
            break
    return b"".join(texts[0]), b"".join(texts[1])


class Windows(Dataset):
    """All windows of `length` bytes that begin at a multiple of `length`, and the same shifted by one byte."""

    def __init__(self, text: bytes, length: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.length : (index + 1) * self.length + 1].long()
        return window[:-1], window[1:]


class SourceCode(LightningDataModule):
    def __init__(self, batch_size: int = 16, length: int = 128, max_bytes: int = 4_000_000) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        train, val = read_standard_library(self.hparams.max_bytes)
        self.train, self.val = Windows(train, self.hparams.length), Windows(val, self.hparams.length)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.hparams.batch_size, drop_last=True)


# --- the model -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(LightningModule):
    """A GPT over bytes; its output head is tied to the embedding."""

    def __init__(
        self,
        width: int = 128,
        layers: int = 6,
        heads: int = 4,
        length: int = 128,
        dropout: float = 0.0,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 40,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if into_residual else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        text, following = batch
        return F.cross_entropy(self(text).flatten(0, 1), following.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_bits_per_byte", self.loss(batch) / math.log(2), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict:
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.hparams.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, betas=(0.9, 0.95))
        total, warmup = self.trainer.estimated_stepping_batches, self.hparams.warmup_steps

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def write(self, beginning: str, num_bytes: int, temperature: float = 0.7) -> str:
        """Go on with a text."""
        text = torch.tensor([list(beginning.encode())], device=self.device)
        for _ in range(num_bytes):
            logits = self(text[:, -self.hparams.length :])[:, -1] / temperature
            text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1)], 1)
        return bytes(text[0].tolist()).decode(errors="replace")


# --- what is measured ------------------------------------------------------------------------------------------------


class Curve(Callback):
    """Notes the losses and the seconds of each step, and draws them."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.validated: list[tuple[int, float]] = []
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self.begin)
        self.losses.append(float(trainer.callback_metrics["loss"]))

    def on_validation_end(self, trainer: Trainer, *_: object) -> None:
        if not trainer.sanity_checking:
            self.validated.append((trainer.global_step, float(trainer.callback_metrics["val_bits_per_byte"])))

    def step_seconds(self) -> float:
        return statistics.median(self.seconds[3:] or self.seconds)

    def draw(self, path: Path, title: str) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        bits = [loss / math.log(2) for loss in self.losses]
        axes.plot(range(1, len(bits) + 1), bits, color="#4c78a8", linewidth=1, alpha=0.8, label="training")
        axes.plot(*zip(*self.validated, strict=True), "o-", color="#e45756", label="validation")
        axes.set(title=title, xlabel="step", ylabel="bits per byte", ylim=(0, None), xlim=(0, len(bits)))
        axes.grid(color="#e4e4e0", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=150)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline stages")
    parser.add_argument("--data", type=int, default=2, help="replicas that see different batches")
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share each layer")
    parser.add_argument("--context", type=int, default=1, help="ranks that share the positions of each window")
    parser.add_argument("--sequence-parallel", action="store_true", help="tensor ranks share positions too")
    parser.add_argument("--microbatches", type=int, default=4, help="parts of each replica's batch")
    parser.add_argument("--schedule", default="1f1b", help="1f1b, gpipe, interleaved_1f1b, zero_bubble_v, ...")
    parser.add_argument("--accelerator", default="cpu", help="as in Lightning's Trainer")
    parser.add_argument("--precision", default="32-true", help="as in Lightning's Trainer")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="windows per replica and step")
    parser.add_argument("--length", type=int, default=128, help="bytes per window")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("lightning_logs/gpt"), help="folder for the pictures")
    return parser.parse_args()


def main() -> None:
    args = parse()
    begin = time.perf_counter()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 under torch 2.13
    seed_everything(1, verbose=False)
    curve = Curve()
    every = max(1, args.steps // 8)
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.pipeline * args.data * args.tensor * args.context,
        strategy=Hybrid3DStrategy(
            pipeline_parallel_size=args.pipeline,
            data_parallel_size=args.data,
            tensor_parallel_size=args.tensor,
            context_parallel_size=args.context,
            sequence_parallel=args.sequence_parallel,
            num_microbatches=args.microbatches,
            schedule=args.schedule,
        ),
        precision=args.precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        limit_val_batches=8,
        enable_model_summary=False,
        callbacks=[curve, PipelineTimeline(args.out / "timeline.png", step=min(20, args.steps))],
    )
    module = GPT(width=args.width, layers=args.layers, length=args.length)
    trainer.fit(module, SourceCode(batch_size=args.batch, length=args.length))

    if trainer.is_global_zero:  # the module is whole again, on every rank
        args.out.mkdir(parents=True, exist_ok=True)
        layout = f"pipeline {args.pipeline} x data {args.data} x tensor {args.tensor}"
        layout += f" x context {args.context}" if args.context > 1 else ""
        curve.draw(args.out / "loss.png", f"GPT on Python's standard library, {layout}")
        seconds, tokens = curve.step_seconds(), args.batch * args.length * args.data
        first, last = curve.losses[0] / math.log(2), statistics.mean(curve.losses[-20:]) / math.log(2)
        print(f"\n{module.write('def ', 400)}\n")
        print(f"layout          {layout}, {args.microbatches} microbatches, schedule {args.schedule}")
        print(f"parameters      {sum(p.numel() for p in module.parameters()):,}")
        print(f"training loss   {first:.3f} -> {last:.3f} bits per byte")
        print(f"validation loss {curve.validated[0][1]:.3f} -> {curve.validated[-1][1]:.3f} bits per byte")
        print(f"speed           {tokens / seconds:,.0f} tokens/s ({1000 * seconds:.0f} ms per step, median)")
        print(f"all in all      {time.perf_counter() - begin:.0f} s; pictures in {args.out}/")


if __name__ == "__main__":
    main()
