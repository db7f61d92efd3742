"""Fine-tune a causal language model with LoRA, by `peft`: the base is frozen, adapters alone are trained and saved.

The data, the LightningModule and the layouts are those of `hugging_face.py`; `peft` wraps the model before training. At
the end the adapters are written in peft's format and loaded onto the base again, and both models are compared.

    python examples/lora.py                                                   2 stages: 2 processes
    python examples/lora.py --pretrained lightning_logs/hugging_face/model    adapts what hugging_face.py has trained
    python examples/lora.py --pipeline 1 --zero 3                             2 replicas; ZeRO-3 shards the base, too
    python examples/lora.py --pipeline 1 --tensor 2 --precision bf16-true     2 tensor ranks
"""

import copy

import torch
from hugging_face import CausalLM, Docstrings, build, parser_of, trainer_of
from lightning.pytorch import seed_everything
from peft import LoraConfig, PeftModel, get_peft_model


def main() -> None:
    parser = parser_of(__doc__, "lightning_logs/lora")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.set_defaults(steps=60)
    args = parser.parse_args()
    seed_everything(1, verbose=False)
    trainer = trainer_of(args)
    base, tokenizer = build(args)
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    module = CausalLM(get_peft_model(copy.deepcopy(base), config), tokenizer, learning_rate=5e-3)
    data = Docstrings(tokenizer, args.batch)
    trainer.fit(module, data)
    if trainer.is_global_zero:  # the module is full again, on every rank
        module.model.save_pretrained(args.out / "adapter")
        loaded = PeftModel.from_pretrained(base, args.out / "adapter").eval()
        tokens = torch.tensor([tokenizer("def read_file(path):\n", add_special_tokens=False).input_ids])
        with torch.no_grad():
            difference = (loaded(tokens).logits - module.model.eval()(tokens).logits).abs().max()
        trained, total = module.model.get_nb_trainable_parameters()
        loss, val_loss = trainer.callback_metrics["loss"], trainer.callback_metrics["val_loss"]
        written = sum(path.stat().st_size for path in (args.out / "adapter").glob("*.safetensors"))
        print(f"\nloss {loss:.3f}, validation loss {val_loss:.3f} after {trainer.global_step} steps")
        print(f"{trained:,} of {total:,} parameters trained; adapter of {written:,} bytes in {args.out}/adapter")
        print(f"largest difference of logits between the trained and the loaded model: {difference:.1e}")


if __name__ == "__main__":
    main()
