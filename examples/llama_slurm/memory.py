"""Draw the memory of each rank that a dry run describes.

lightning-hybrid dryrun train.py --config llama.yaml --rank all --json | python memory.py memory.png
"""

import json
import sys

from matplotlib.figure import Figure

KINDS = ("parameters", "gradients", "optimizer_states", "activations", "gathered", "messages", "working")

world = json.load(sys.stdin)
ranks = world["rank"]
figure = Figure(figsize=(8, 3.6), layout="constrained")
axes = figure.subplots()
left = [0.0] * len(ranks)
for kind in KINDS:
    sizes = [rank["bytes"][kind] / 1e9 for rank in ranks]
    axes.barh(range(len(ranks)), sizes, left=left, label=kind.replace("_", " "))
    left = [start + size for start, size in zip(left, sizes, strict=True)]
names = [f"rank {rank['rank']}, stage {rank['stages'][0]}" for rank in ranks]
axes.set(yticks=range(len(ranks)), yticklabels=names, xlabel="GB, estimated")
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)
figure.legend(loc="outside upper center", ncols=4, frameon=False)
figure.savefig(sys.argv[1], dpi=110)
