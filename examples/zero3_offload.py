"""Measure the memory of ZeRO-3 with offload against that of plain replicas, on one machine.

A GPT is trained for the same steps under each of three layouts, each in new processes: replicas, as DDP has them;
ZeRO-3, which shards parameters, gradients and optimizer states; and ZeRO-3 with parameters and optimizer states in a
file. The table shows what a rank holds beyond what it held before the model was built, as Linux reports it.

    python examples/zero3_offload.py                            2 replicas: 2 processes
    python examples/zero3_offload.py --devices 4                4 replicas
    python examples/zero3_offload.py --width 1024 --layers 24   300 million parameters
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

from gpt import GPT, SourceCode
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_hybrid import Hybrid3DStrategy

LAYOUTS = ("replicas", "ZeRO-3", "ZeRO-3, offload")


def options(layout: str, folder: Path) -> dict:
    """The arguments of the strategy; where ranks have GPUs, "cpu" in place of "disk:PATH" is the host's memory."""
    if layout == "replicas":
        return {}
    disk = f"disk:{folder}"
    offload = {"parameters": disk, "gradients": "cpu", "optimizer_states": disk} if "offload" in layout else None
    return {"zero_stage": 3, "reshard_after_forward": True, "offload": offload}


def megabytes(field: str) -> float:
    """A number of this process in Linux's table, in MB: `VmRSS` is what it holds now, `VmHWM` the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


class Memory(Callback):
    """Notes what this rank holds between steps, and at most within them."""

    def __init__(self, path: Path) -> None:
        self.path, self.before = path, megabytes("VmRSS")
        self.between, self.most = 0.0, 0.0
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self.begin)
        if len(self.seconds) > 1:  # from the second step on: optimizer states are there
            self.between = max(self.between, megabytes("VmRSS") - self.before)
            self.most = max(self.most, megabytes("VmHWM") - self.before)

    def on_train_end(self, trainer: Trainer, *_: object) -> None:
        found = {"between": self.between, "most": self.most, "seconds": statistics.median(self.seconds[1:])}
        found["loss"] = float(trainer.callback_metrics["loss"])
        (self.path / f"memory_{trainer.global_rank}.json").write_text(json.dumps(found))


def train(args: argparse.Namespace, layout: str) -> None:
    out = args.out / layout
    out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 under torch 2.13
    seed_everything(1, verbose=False)
    memory = Memory(out)
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=Hybrid3DStrategy(save_distributed_checkpoint=True, **options(layout, args.offload_folder or out)),
        max_steps=args.steps,
        limit_val_batches=0,
        log_every_n_steps=1,
        logger=CSVLogger(args.out, name="logs", version=layout),
        callbacks=[memory, ModelCheckpoint(out, filename="last", enable_version_counter=False)],
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    module = GPT(width=args.width, layers=args.layers, length=args.length, warmup_steps=2)
    trainer.fit(module, SourceCode(batch_size=args.batch, length=args.length, max_bytes=1_000_000))


def show(args: argparse.Namespace) -> None:
    module = GPT(width=args.width, layers=args.layers, length=args.length)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    print(f"\n{parameters:,} parameters: {parameters / 2**18:,.0f} MB; the highest of {args.devices} ranks, in MB")
    print(f"{'':16}{'between steps':>15}{'most in a step':>16}{'s per step':>12}{'loss':>10}")
    for layout in LAYOUTS:
        ranks = [json.loads(path.read_text()) for path in sorted((args.out / layout).glob("memory_*.json"))]
        between, most = max(rank["between"] for rank in ranks), max(rank["most"] for rank in ranks)
        loss = sum(rank["loss"] for rank in ranks) / len(ranks)
        print(f"{layout:16}{between:15,.0f}{most:16,.0f}{ranks[0]['seconds']:12.2f}{loss:10.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="processes, each of which is a replica")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=32, help="bytes per window")
    parser.add_argument("--batch", type=int, default=2, help="windows per replica and step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layout", choices=LAYOUTS, help="train under this layout alone, and print no table")
    parser.add_argument("--offload-folder", type=Path, help="folder of offloaded states, on a local disk; or --out")
    parser.add_argument("--out", type=Path, default=Path("lightning_logs/zero3_offload"), help="folder for logs")
    args = parser.parse_args()
    if args.layout:
        train(args, args.layout)
        return
    # glibc keeps small blocks that were freed; with this it returns those of tensors to the system.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    for layout in LAYOUTS:
        subprocess.run([sys.executable, *sys.argv, "--layout", layout], check=True, env=environment)
    show(args)


if __name__ == "__main__":
    main()
