"""Tables 1 and 2 of Narayanan et al., SC'21 (arXiv 2104.04473), as `PublishedRun`s.

The paper gives TFLOP/s per device by its own count of operations, recomputation included: ``96 B s l h^2 (1 + s / (6 h)
+ V / (16 l h))``. The seconds of a step follow from it. Where the paper gives no microbatch (table 2) it is 1 with
pipeline stages, and the batch over the devices with ZeRO-3.
"""

from __future__ import annotations

import csv
import dataclasses

from published_runs import DEEPSPEED_2021, HERE, PublishedRun, scaled_links

from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import FORMATS, PlanLayout

VOCABULARY, POSITIONS = 51200, 2048


def published_sc21() -> list[PublishedRun]:
    """Return the 22 runs of both tables."""
    preset = load_hardware("a100-80")
    efficiency = dict.fromkeys(preset.efficiency, 0.86)
    selene = dataclasses.replace(preset, name="a100-80, Selene", efficiency=efficiency)
    slow = dataclasses.replace(selene, between_nodes=scaled_links(selene.between_nodes, DEEPSPEED_2021))
    runs = []
    with (HERE / "sc21_tables.csv").open() as file:
        for index, row in enumerate(csv.DictReader(file)):
            size = {key: int(value) for key, value in row.items()}
            layers, hidden, batch = size["layers"], size["hidden"], size["batch"]
            data = size["devices"] // (size["tensor"] * size["pipeline"])
            is_zero = size["zero_stage"] == 3
            shape = TransformerShape(
                *(layers, hidden, 4 * hidden, size["heads"], VOCABULARY, POSITIONS),
                has_learned_positions=True,
                has_dropout=True,
                fused_attention=False,
            )
            layout = PlanLayout(
                pipeline=size["pipeline"],
                replicate=1 if is_zero else data,
                shard=data if is_zero else 1,
                tensor=size["tensor"],
                schedule="interleaved_1f1b" if size["stages_per_rank"] > 1 else "1f1b",
                stages_per_rank=size["stages_per_rank"],
                microbatch=size["microbatch"],
                batch=batch,
                zero_stage=size["zero_stage"],
                recompute="full",
                fused_attention=False,
            )
            head = VOCABULARY / (16 * layers * hidden)
            flops = 96 * batch * POSITIONS * layers * hidden**2 * (1 + POSITIONS / (6 * hidden) + head)
            method = " ZeRO-3" if is_zero else ""
            runs.append(
                PublishedRun(
                    row=index,
                    file="sc21_tables.csv",
                    source="SC'21",
                    group=f"SC'21 table {size['table']}",
                    model=f"GPT {layers}x{hidden}{method}",
                    costs=transformer_costs(shape, f"GPT {layers}x{hidden}"),
                    layout=layout,
                    number_format=FORMATS["16-true, float32 master weights"],
                    hardware=slow if is_zero else selene,
                    seconds=flops / (size["tflops"] * 1e12 * size["devices"]),
                    memory=None,
                    ran_out=False,
                    derived=("microbatch",) if size["table"] == 2 else (),
                    contradictory=False,
                    note="",
                )
            )
    return runs
