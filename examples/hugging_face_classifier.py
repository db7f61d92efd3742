"""Train a sequence classifier of `transformers`: is a line of Python's standard library code, or a comment?

The model is built from a configuration and its tokens are bytes, so nothing is downloaded. The output ends with
"accuracy 0.94 after 60 steps".

    python examples/hugging_face_classifier.py                 2 stages: 2 processes, about a minute on two cores
    python examples/hugging_face_classifier.py --devices 4     2 replicas of them
"""

import argparse
import random
import sysconfig
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryAccuracy
from transformers import AutoModelForSequenceClassification, BatchEncoding, ByT5Tokenizer, DistilBertConfig

from lightning_hybrid import Hybrid3DStrategy

TOKENIZER = ByT5Tokenizer(extra_ids=0)


def lines_of_the_standard_library() -> list[tuple[str, int]]:
    """Lines with label 1 for comments, which lose their number sign, and 0 for code; as many of both."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    lines = [line.strip() for path in paths for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    comments = [(line.strip("# "), 1) for line in lines if line.startswith("# ") and 20 < len(line) < 80]
    code = [(line, 0) for line in lines if line.endswith((")", ":", "]")) and 20 < len(line) < 80 and "#" not in line]
    rng = random.Random(1)
    pairs = [*comments, *rng.sample(code, len(comments))]
    rng.shuffle(pairs)
    return pairs


def collate(pairs: list[tuple[str, int]]) -> BatchEncoding:
    batch = TOKENIZER([line for line, _ in pairs], padding=True, return_tensors="pt")
    return BatchEncoding({**batch, "labels": torch.tensor([label for _, label in pairs])})


class Classifier(LightningModule):  # nothing in it knows of stages, replicas or microbatches
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        sizes = {"dim": width, "hidden_dim": 4 * width, "n_layers": layers, "n_heads": 4}
        config = DistilBertConfig(vocab_size=len(TOKENIZER), max_position_embeddings=128, num_labels=2, **sizes)
        self.model, self.accuracy = AutoModelForSequenceClassification.from_config(config), BinaryAccuracy()

    def training_step(self, batch: BatchEncoding, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: BatchEncoding, batch_idx: int) -> None:
        self.accuracy(self.model(**batch).logits.argmax(-1), batch["labels"])
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"devices": 2, "width": 64, "layers": 4, "steps": 60}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(%(default)s)")
    args = parser.parse_args()
    seed_everything(1, verbose=False)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    strategy = Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=4)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", devices=args.devices, strategy=strategy, max_epochs=1, **quiet)
    pairs = lines_of_the_standard_library()[: 256 + 32 * args.steps * args.devices // 2]
    train, val = (DataLoader(each, 32, collate_fn=collate) for each in (pairs[256:], pairs[:256]))
    trainer.fit(Classifier(args.width, args.layers), train, val)
    trainer.print(f"accuracy {trainer.callback_metrics['val_accuracy']:.2f} after {trainer.global_step} steps")
