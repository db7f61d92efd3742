"""Fine-tune a Qwen2 that is built from its configuration, with LoRA: base and adapter are files of safetensors.

Nothing is downloaded: the base is written to a folder first, with random weights. Name a folder or a model of the hub
in its place with --base. The adapter is saved in peft's format, read back, and compared with the trained model.

    python examples/lora_safetensors.py                                      2 stages: 2 processes
    python examples/lora_safetensors.py --pipeline 1 --tensor 2              2 tensor ranks
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen2Config

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import RunPlot

SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIG = Qwen2Config(vocab_size=256, num_key_value_heads=2, use_cache=False, tie_word_embeddings=False, **SIZES)
LORA = LoraConfig(
    r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM"
)  # the head of a base of random weights is trained in full


class Tuned(LightningModule):
    def __init__(self, base: Path) -> None:
        super().__init__()
        self.model = get_peft_model(AutoModelForCausalLM.from_pretrained(base).train(), LORA)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=5e-3)

    def train_dataloader(self) -> DataLoader:
        """Texts that count on from a number; the loss is that of the second half."""
        first = torch.randint(256, (3200, 1), generator=torch.Generator().manual_seed(1))  # the same on every rank
        tokens = (first + torch.arange(32)) % 256
        texts = [{"input_ids": text, "labels": text.masked_fill(torch.arange(32) < 16, -100)} for text in tokens]
        return DataLoader(texts, batch_size=32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="folder or name of a saved model; without it one is written")
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline stages")
    parser.add_argument("--tensor", type=int, default=1, help="tensor ranks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("lightning_logs/lora_safetensors"))
    args = parser.parse_args()
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=args.pipeline * args.tensor,
        strategy=Hybrid3DStrategy(pipeline_parallel_size=args.pipeline, tensor_parallel_size=args.tensor),
        max_steps=args.steps,
        callbacks=[RunPlot(args.out / "run.png")],
        default_root_dir=args.out,
        enable_model_summary=False,
    )
    base = args.base or args.out / "base"
    if args.base is None and trainer.is_global_zero:
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(base)  # config.json, model.safetensors
    module = Tuned(base)
    trainer.fit(module)
    if trainer.is_global_zero:  # the module is full again, on every rank
        module.model.save_pretrained(args.out / "adapter")
        file = args.out / "adapter" / "adapter_model.safetensors"
        with safe_open(file, "pt") as stored:
            print(f"{file}: {len(stored.keys())} tensors, {file.stat().st_size:,} bytes")
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), args.out / "adapter").eval()
        tokens = torch.arange(40, 56)[None]
        with torch.no_grad():
            logits, expected = loaded(tokens).logits, module.model.eval()(tokens).logits
        trained, total = module.model.get_nb_trainable_parameters()
        print(f"loss {trainer.callback_metrics['loss']:.3f}; {trained:,} of {total:,} parameters trained")
        print(f"after 40 .. 55 comes {int(logits[0, -1].argmax())}; read back: {(logits - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
