"""What offload and compression of saved activations save and cost, and what compression does to a loss curve.

    python benchmarks/activations.py              bytes, and seconds of training steps
    python benchmarks/activations.py --sizes      the threshold of the offload
    python benchmarks/activations.py --curves     loss curves: 3 seeds with 8 bits, 3 without

Bytes are those of all storages that the forward has made and that live when the backward begins, without weights.
Seconds are those of whole training steps through a Trainer, optimizer included; the variants take turns in one process.
The offload is to a file, since the device is a CPU.

Must be reached: offload at most 0.3 of the bytes, at no more than 1.25 x the wall time; 8 bits at least 3.5 x fewer
bytes; the mean of the last losses with 8 bits no farther from that without than the standard deviation of the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from recompute import Made
from side_by_side import Turn, Variant, compare, fit, print_table, ratios, verdict
from small_gpt import SmallGPT, batch_of, loss_of

from lightning_hybrid.memory.saved_activations.layer_activations import LayerActivations, Moving
from lightning_hybrid.memory.saved_activations.places import ActivationFile
from lightning_hybrid.memory.saved_activations.requests import Compression
from lightning_hybrid.step.objects.modules import find_layers

CPU = torch.device("cpu")
TECHNIQUES: dict[str, dict[str, Any]] = {
    "none": {},
    "offload": {"min_bytes": 65536},
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
    "2 bits": {"bits": 2},
    "1 bit": {"bits": 1},
    "8 bits, offload": {"bits": 8, "min_bytes": 65536},
}


def saved_bytes(technique: dict[str, Any], width: int, layers: int, length: int, size: int) -> int:
    """Of one forward."""
    model = SmallGPT(width, layers, heads=width // 64, length=length)
    text, following = batch_of(size, length)
    found = find_layers(dict(model.named_children()))
    with tempfile.TemporaryDirectory() as folder:
        file = ActivationFile(folder)
        activations = LayerActivations(
            found,
            CPU,
            compression=Compression(technique["bits"], 4096) if "bits" in technique else None,
            moving=Moving(file, technique["min_bytes"], dict.fromkeys(found, 1.0))
            if "min_bytes" in technique
            else None,
            microbatch_key=lambda: (0, 1),
        )
        with Made() as made, activations.running():
            loss = loss_of(model(text), following)
        file.drain()
        for parameter in model.parameters():
            made.storages.pop(parameter.untyped_storage()._cdata, None)
        saved = sum(nbytes for reference, nbytes in made.storages.values() if not reference.expired())
        loss.backward()
        file.close()
    return saved


def trainer(turn: Turn, technique: dict[str, Any], width: int, layers: int, length: int, size: int) -> None:
    from lightning_hybrid import Hybrid3DStrategy
    from lightning_hybrid.callbacks import ActivationCompression, ActivationOffload

    model = SmallGPT(width, layers, heads=width // 64, length=length)
    callbacks: list[Any] = []
    if "bits" in technique:
        callbacks.append(ActivationCompression(technique["bits"], every_n_steps=0))
    if "min_bytes" in technique:
        folder = tempfile.mkdtemp(prefix="activations_")
        callbacks.append(ActivationOffload(technique["min_bytes"], to=f"disk:{folder}"))
    fit(turn, model, batch_of(size, length), strategy=Hybrid3DStrategy(), devices=1, callbacks=callbacks)


def compare_techniques(shape: dict[str, int], rounds: int) -> None:
    bytes_of = {name: saved_bytes(technique, **shape) for name, technique in TECHNIQUES.items()}
    for name, nbytes in bytes_of.items():
        print(f"  {name:16} {nbytes / 2**20:8.2f} MiB saved, x{nbytes / bytes_of['none']:.3f}", flush=True)
    chosen = ["none", "offload", "8 bits", "8 bits, offload"]
    variants = [Variant(name, partial(trainer, technique=TECHNIQUES[name], **shape)) for name in chosen]
    results = compare(variants, ranks=1, rounds=rounds, steps=1)
    print_table(str(shape), results)
    none, offload, *_ = results
    share, factor = bytes_of["offload"] / bytes_of["none"], bytes_of["none"] / bytes_of["8 bits"]
    verdict("bytes, offload / none", (share, share, share), at_most=0.3)
    verdict("wall, offload / none", ratios(offload.wall, none.wall), at_most=1.25)
    low, middle, high = ratios(offload.cpu, none.cpu)
    print(f"        CPU, offload / none: {middle:.3f} [{low:.3f} {high:.3f}]")
    verdict("bytes, none / 8 bits", (factor, factor, factor), at_least=3.5)


def compare_sizes(shape: dict[str, int], rounds: int) -> None:
    sizes = [0, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22]
    techniques = [{}, *({"min_bytes": size} for size in sizes)]
    names = ["none", *(str(size) for size in sizes)]
    variants = [Variant(n, partial(trainer, technique=t, **shape)) for n, t in zip(names, techniques, strict=True)]
    for name, technique in zip(names, techniques, strict=True):
        print(f"  min_bytes {name:8} {saved_bytes(technique, **shape) / 2**20:8.2f} MiB saved", flush=True)
    print_table(f"min_bytes, {shape}", compare(variants, ranks=1, rounds=rounds, steps=1))


def last_loss(seed: int, bits: int | None, steps: int) -> float:
    """The mean training loss of the last fifth of a run of the byte-level GPT of the examples, in nats."""

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import gpt
    from lightning.pytorch import Callback, Trainer, seed_everything

    from lightning_hybrid import Hybrid3DStrategy
    from lightning_hybrid.callbacks import ActivationCompression

    class Losses(Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            self.losses.append(float(outputs["loss"]))

    seed_everything(seed, verbose=False)
    recorder = Losses()
    callbacks = [recorder] if bits is None else [recorder, ActivationCompression(bits, every_n_steps=0)]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    one = Trainer(
        strategy=Hybrid3DStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        limit_val_batches=0,
        callbacks=callbacks,
        **quiet,
    )
    one.fit(gpt.GPT(width=64, layers=4, length=64), gpt.SourceCode(batch_size=16, length=64, max_bytes=1_500_000))
    return statistics.mean(recorder.losses[-(steps // 5) :])


def compare_curves(steps: int, bits: int) -> None:
    without, compressed = [], []
    for seed in range(3):
        without.append(last_loss(seed, None, steps))
        compressed.append(last_loss(seed, bits, steps))
        print(f"  seed {seed}: {without[-1]:.4f} without, {compressed[-1]:.4f} with {bits} bits", flush=True)
    spread = statistics.stdev(without)
    distance = abs(statistics.mean(compressed) - statistics.mean(without))
    print(
        f"  mean {statistics.mean(without):.4f} and {statistics.mean(compressed):.4f}, deviation of seeds {spread:.4f}"
    )
    verdict("distance of the means / deviation of the seeds", (distance / spread,) * 3, at_most=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--bits", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = dict(width=args.width, layers=args.layers, length=args.length, size=args.batch)
    if args.curves:
        compare_curves(args.steps, args.bits)
    elif args.sizes:
        compare_sizes(shape, args.rounds)
    else:
        compare_techniques(shape, args.rounds)


if __name__ == "__main__":
    main()
