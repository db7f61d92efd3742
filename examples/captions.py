"""Describe images in words: a vision encoder, whose stage has three ranks, before a small language model.

python examples/captions.py                            stages of 3 + 1 ranks: 4 processes
python examples/captions.py --widths 2 1               3 processes
python examples/captions.py --widths 1                 one process
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import PipelineTimeline

WORDS = ["<start>", "<end>", "a", "small", "large", "circle", "square", "above", "below", "the", "middle"]


def captioned(count: int, seed: int, size: int = 32) -> TensorDataset:
    """Noisy images of one shape, and captions such as "a small circle above the middle", as numbers of words."""
    random = torch.Generator().manual_seed(seed)  # the same on every rank
    images, captions = 0.3 * torch.randn(count, 1, size, size, generator=random), []
    for image in images:
        large, square, below = torch.randint(2, (3,), generator=random).tolist()
        radius = 8 if large else 4
        row, column = int(torch.randint(9, 14, (), generator=random)) + 9 * below, size // 2
        down, right = (torch.arange(size) - row)[:, None].abs(), (torch.arange(size) - column)[None].abs()
        image[0][torch.maximum(down, right) <= radius if square else down**2 + right**2 <= radius**2] += 1
        caption = f"<start> a {'large' if large else 'small'} {'square' if square else 'circle'}"
        caption += f" {'below' if below else 'above'} the middle <end>"
        captions.append([WORDS.index(word) for word in caption.split()])
    return TensorDataset(images, torch.tensor(captions))


class Captioner(LightningModule):
    def __init__(self, image_width: int = 32, text_width: int = 48) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, stride in ((1, 1), (image_width, 2), (image_width, 2), (image_width, 2)):
            layers += [nn.Conv2d(inputs, image_width, 3, stride, 1), nn.GroupNorm(4, image_width), nn.ReLU()]
        self.encoder = nn.Sequential(*layers, nn.Flatten())
        self.bridge = nn.Linear(16 * image_width, text_width)
        self.words = nn.Embedding(len(WORDS), text_width)
        self.decoder = nn.GRU(text_width, text_width, batch_first=True)
        self.head = nn.Linear(text_width, len(WORDS))

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        first = self.bridge(self.encoder(images))[:, None]
        return self.head(self.decoder(torch.cat([first, self.words(words)], 1))[0][:, 1:])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, words = batch
        loss = F.cross_entropy(self(images, words[:, :-1]).mT, words[:, 1:])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, words = batch
        right = self(images, words[:, :-1]).argmax(-1) == words[:, 1:]
        self.log("right_captions", right.all(1).float().mean(), prog_bar=True)

    @torch.no_grad()
    def describe(self, image: Tensor) -> str:
        words = [WORDS.index("<start>")]
        while WORDS[words[-1]] != "<end>" and len(words) < 10:
            words.append(int(self(image[None], torch.tensor([words]))[0, -1].argmax()))
        return " ".join(WORDS[word] for word in words[1:-1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[3, 1], help="ranks of each stage")
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("lightning_logs/captions"), help="folder of all files")
    args = parser.parse_args()
    seed_everything(1, verbose=False)
    stages = {"stage_widths": args.widths, "num_microbatches": 8} if len(args.widths) > 1 else {}
    if len(args.widths) == 2:
        stages["pipeline_cuts"] = ["bridge"]  # the encoder | the language model
    trainer = Trainer(
        accelerator="cpu",
        devices=sum(args.widths),
        strategy=Hybrid3DStrategy(**stages),
        max_epochs=args.epochs,
        callbacks=PipelineTimeline(args.out / "timeline.svg"),
        default_root_dir=args.out,
        enable_model_summary=False,
    )
    module, held_out = Captioner(), captioned(128, seed=2)
    training = DataLoader(captioned(args.images, seed=1), batch_size=32, shuffle=True)
    trainer.fit(module, training, DataLoader(held_out, batch_size=32))
    if trainer.is_global_zero:
        module.eval()
        image, words = held_out[0]
        print("caption:", " ".join(WORDS[word] for word in words[1:-1]))
        print("found:  ", module.describe(image))
        print(f"right captions {trainer.callback_metrics['right_captions']:.1%}")


if __name__ == "__main__":
    main()
