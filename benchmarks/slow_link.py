"""Replicas over a slow link: bytes on the wire and final losses of compressed gradients and of local steps.

    python benchmarks/slow_link.py
    python benchmarks/slow_link.py --seeds 1 --only none powersgd diloco

The byte-level GPT of examples/gpt.py on two ranks over gloo. Bytes on the wire are those that a rank writes to its
sockets while it trains, as the kernel counts them (``/proc/self/io``); bytes counted are those that the callback logs.
The loss is that of validation after the last step, in bits per byte, and the mean over seeds is compared.

Must be reached: PowerSGD of rank 4 sends at most 1/10 of the bytes, and its final loss is at most 1.02 times that of
gradients as they are; DiLoCo with rounds of 20 steps at most 1/15, and 1.03 times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

RANKS = 2
LIMITS = {"powersgd": (10.0, 1.02), "diloco": (15.0, 1.03)}  # bytes, loss
CALLBACKS: dict[str, Any] = {
    "none": None,
    "powersgd": ("GradientCompression", {"method": "powersgd", "rank": 4}),
    "int8": ("GradientCompression", {"method": "int8"}),
    "1bit": ("GradientCompression", {"method": "1bit"}),
    "topk": ("GradientCompression", {"method": "topk", "ratio": 0.01}),
    "bf16": ("GradientCompression", {"method": "bf16"}),
    "fp16": ("GradientCompression", {"method": "fp16"}),
    "local": ("LocalSGD", {"every": 20}),
    "diloco": ("LocalSGD", {"every": 20, "outer_optimizer": "nesterov"}),
}


def written_bytes() -> int:
    """Bytes that this process has passed to `write` and `writev`, so also to sockets."""
    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar"))
    return int(line.split()[1])


def train(name: str, seed: int, steps: int, learning_rate: float, out: Path) -> None:
    """Train one variant on this rank; the first rank writes what it has found."""
    from gpt import GPT, SourceCode
    from lightning.pytorch import Callback, Trainer, seed_everything

    import lightning_hybrid.callbacks
    from lightning_hybrid import Hybrid3DStrategy

    warnings.filterwarnings("ignore")

    class Wire(Callback):
        begin = end = 0
        logged: float | None = None

        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            self.begin = self.begin or written_bytes()

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            self.end = written_bytes()
            for metric in ("gradient_bytes", "parameter_bytes"):
                if metric in trainer.callback_metrics:
                    self.logged = float(trainer.callback_metrics[metric])

    seed_everything(seed, verbose=False)
    wire, callbacks = Wire(), []
    if CALLBACKS[name] is not None:
        kind, arguments = CALLBACKS[name]
        callbacks.append(getattr(lightning_hybrid.callbacks, kind)(**arguments))
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=Hybrid3DStrategy(process_group_backend="gloo"),
        callbacks=[*callbacks, wire],
        max_steps=steps,
        gradient_clip_val=1.0,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        limit_val_batches=32,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = GPT(width=128, layers=2, length=64, learning_rate=learning_rate)
    trainer.fit(module, SourceCode(batch_size=8, length=64))
    if trainer.is_global_zero:
        loss = float(trainer.callback_metrics["val_bits_per_byte"])
        found = {"wire": (wire.end - wire.begin) / steps, "logged": wire.logged, "loss": loss}
        out.write_text(json.dumps(found))


def measure(name: str, seed: int, steps: int, learning_rate: float) -> dict[str, Any]:
    """Train one variant in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--train", name, "--seed", str(seed), "--steps", str(steps)]
        command += ["--learning-rate", str(learning_rate)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, "--out", str(out)], check=True, env=environment, cwd=folder, stdout=subprocess.DEVNULL
        )
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--only", nargs="+", choices=list(CALLBACKS), default=list(CALLBACKS))
    parser.add_argument("--train", choices=list(CALLBACKS), default=None, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train(args.train, args.seed, args.steps, args.learning_rate, args.out)
        return
    names = list(dict.fromkeys(["none", *args.only]))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(1, args.seeds + 1):
        for name in names:
            found[name].append(measure(name, seed, args.steps, args.learning_rate))
            print(f"seed {seed} {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    base = found["none"]
    wire, loss = (statistics.mean(one[key] for one in base) for key in ("wire", "loss"))
    print(f"{'variant':10} {'wire bytes/step':>16} {'logged':>12} {'fewer':>7} {'loss':>8} {'of none':>8}   by seed")
    for name, runs in found.items():
        own_wire, own_loss = (statistics.mean(one[key] for one in runs) for key in ("wire", "loss"))
        logged = "" if runs[0]["logged"] is None else f"{runs[0]['logged']:,.0f}"
        by_seed = " ".join(f"{one['loss'] / other['loss']:.4f}" for one, other in zip(runs, base, strict=True))
        row = f"{name:10} {own_wire:16,.0f} {logged:>12} {wire / own_wire:7.1f} {own_loss:8.4f} {own_loss / loss:8.4f}"
        verdict = ""
        if name in LIMITS:
            fewer, larger = LIMITS[name]
            is_reached = wire / own_wire >= fewer and own_loss / loss <= larger
            verdict = f"   {'reached' if is_reached else 'NOT REACHED'}: at least {fewer:g} fewer, at most {larger:g}"
        print(f"{row}   {by_seed}{verdict}")


if __name__ == "__main__":
    main()
