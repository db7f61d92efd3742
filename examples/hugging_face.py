"""Fine-tune a causal language model of `transformers`: it reads the `def` line of a function and writes its docstring.

The model is built from a configuration and its tokens are bytes, so nothing is downloaded; the functions are those of
Python's standard library. The loss counts the docstrings only (labels of -100 elsewhere), and validation generates one.
Training writes TensorBoard logs and distributed checkpoints, and goes on from them under any other layout.

    python examples/hugging_face.py                                      2 stages, bf16-mixed: 2 processes
    python examples/hugging_face.py --resume --steps 400 --pipeline 1 --zero 3    goes on with 2 replicas and ZeRO-3
    python examples/hugging_face.py --devices 8 --tensor 2               2 replicas x 2 stages x 2 tensor ranks
    python examples/hugging_face.py --width 512 --layers 12 --heads 8 --precision bf16-true
    python examples/hugging_face.py --pretrained FOLDER_OR_NAME          a saved model and its tokenizer
"""

import argparse
import re
import sysconfig
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightning_hybrid import Hybrid3DStrategy

# --- the data --------------------------------------------------------------------------------------------------------

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "lib2to3"}
_DOCUMENTED = re.compile(r'^ *(def \w+\([^\n]*\):)\n +"""([^\n"]{10,72}?)(?:"""|\n)', re.MULTILINE)


def functions_of_the_standard_library() -> list[tuple[str, str]]:
    """Pairs of a `def` line and the first line of its docstring, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))
    found = (_DOCUMENTED.findall(path.read_text(encoding="utf-8", errors="replace")) for path in paths)
    return [(line, text.strip()) for pairs in found for line, text in pairs if len(line) < 80]


class Docstrings(LightningDataModule):
    """Batches of input_ids, attention_mask and labels, padded to their longest sample."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, batch_size: int = 16) -> None:
        super().__init__()
        self.tokenizer, self.batch_size = tokenizer, batch_size

    def setup(self, stage: str) -> None:
        pairs = functions_of_the_standard_library()
        self.val, self.train = pairs[::20], [pair for number, pair in enumerate(pairs) if number % 20]

    def collate(self, pairs: list[tuple[str, str]]) -> dict[str, Tensor]:
        eos = self.tokenizer.eos_token_id
        prompts = [self.tokenizer(line + "\n", add_special_tokens=False).input_ids for line, _ in pairs]
        answers = [[*self.tokenizer(text, add_special_tokens=False).input_ids, eos] for _, text in pairs]
        length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
        batch = {
            "input_ids": torch.full((len(pairs), length), eos),
            "attention_mask": torch.zeros(len(pairs), length, dtype=torch.long),
            "labels": torch.full((len(pairs), length), -100),
        }
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            end = len(prompt) + len(answer)
            batch["input_ids"][row, :end] = torch.tensor(prompt + answer)
            batch["attention_mask"][row, :end] = 1
            batch["labels"][row, len(prompt) : end] = torch.tensor(answer)
        return batch

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True, collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size, collate_fn=self.collate)


# --- the model -------------------------------------------------------------------------------------------------------


def build(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A saved model and its tokenizer, or a new Llama over bytes."""
    if args.pretrained is not None:
        model = AutoModelForCausalLM.from_pretrained(args.pretrained, use_cache=False)  # no cache in training
        return model.train(), AutoTokenizer.from_pretrained(args.pretrained)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config), tokenizer


class CausalLM(LightningModule):
    """A model of transformers that returns its loss."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.model, self.tokenizer, self.learning_rate = model, tokenizer, learning_rate

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, prog_bar=True, sync_dist=True)
        if batch_idx == 0:
            prompt_length = int((batch["labels"][0] != -100).nonzero()[0])
            prompt = batch["input_ids"][:1, :prompt_length]
            self.logger.experiment.add_text("docstring", self.write(prompt), self.global_step)

    def write(self, prompt: Tensor) -> str:
        """The prompt and what the model generates after it."""
        mask = torch.ones_like(prompt)
        text = self.model.generate(prompt, attention_mask=mask, max_new_tokens=72, do_sample=False, use_cache=True)
        return self.tokenizer.decode(text[0], skip_special_tokens=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=self.learning_rate)


# --- the run ---------------------------------------------------------------------------------------------------------


def parser_of(description: str, out: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="processes in all")
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline stages")
    parser.add_argument("--tensor", type=int, default=1, help="tensor ranks")
    parser.add_argument("--zero", type=int, default=0, help="ZeRO stage over the replicas")
    parser.add_argument("--microbatches", type=int, default=4, help="parts of each batch")
    parser.add_argument("--accelerator", default="cpu", help="as in Lightning's Trainer")
    parser.add_argument("--precision", default="bf16-mixed", help="as in Lightning's Trainer")
    parser.add_argument("--pretrained", help="folder or name of a model; without it a new one of the sizes below")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="functions per replica and step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--val-batches", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for logs, checkpoints and the model")
    return parser


def trainer_of(args: argparse.Namespace) -> Trainer:
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 under torch 2.13
    return Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=Hybrid3DStrategy(
            pipeline_parallel_size=args.pipeline,
            tensor_parallel_size=args.tensor,
            zero_stage=args.zero,
            num_microbatches=args.microbatches,
            save_distributed_checkpoint=True,
        ),
        precision=args.precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        val_check_interval=max(1, args.steps // 2),
        check_val_every_n_epoch=None,
        limit_val_batches=args.val_batches,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        logger=TensorBoardLogger(args.out, name="logs"),
        callbacks=[LearningRateMonitor(), ModelCheckpoint(args.out / "checkpoints", save_last=True)],
        enable_model_summary=False,
    )


def main() -> None:
    parser = parser_of(__doc__, "lightning_logs/hugging_face")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, to --steps in all")
    args = parser.parse_args()
    seed_everything(1, verbose=False)
    trainer = trainer_of(args)
    module = CausalLM(*build(args))
    data = Docstrings(module.tokenizer, args.batch)
    trainer.fit(module, data, ckpt_path=args.out / "checkpoints" / "last.ckpt" if args.resume else None)
    if trainer.is_global_zero:  # the module is full again, on every rank
        module.model.save_pretrained(args.out / "model")
        module.tokenizer.save_pretrained(args.out / "model")
        loss, val_loss = trainer.callback_metrics["loss"], trainer.callback_metrics["val_loss"]
        prompt = torch.tensor([module.tokenizer("def read_file(path):\n", add_special_tokens=False).input_ids])
        print(f"\n{module.eval().write(prompt)}\n")
        print(f"loss {loss:.3f}, validation loss {val_loss:.3f} after {trainer.global_step} steps; all in {args.out}/")


if __name__ == "__main__":
    main()
