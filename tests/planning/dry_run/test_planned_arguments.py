"""The Trainer that a plan prints, given word for word to the strategy, has the layout of the plan."""

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from lightning_hybrid.planning.dry_run.messages import program_of
from lightning_hybrid.planning.dry_run.ranks import dry_run
from lightning_hybrid.planning.plan import PlanRequest, make_plan
from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import FORMATS, fixed_fields
from lightning_hybrid.predict.report import PlannedRun
from lightning_hybrid.predict.search import search_layouts
from models.cases import Samples, make
from models.hand_written import Layers
from models.moe_layers import Experts
from models.plain_gpt import PlainGPT

HARDWARE = load_hardware("a100-80")
DENSE = transformer_costs(TransformerShape(8, 1024, 4096, 8, 32000, 4096), "dense")
MIXTURE = transformer_costs(TransformerShape(8, 1024, 4096, 8, 32000, 1024, experts=4, experts_per_token=2), "mixture")


class Eight(Layers):
    def __init__(self):
        super().__init__(8)


# What the plan keeps, the devices of a node, the nodes, and the module that is laid out.
PLANS = {
    "replicas": ({"pipeline_parallel_size": 1, "tensor_parallel_size": 1, "context_parallel_size": 1}, 4, 1, Eight),
    "replicas_in_microbatches": ({"data_parallel_size": 2, "num_microbatches": 4}, 2, 1, Eight),
    "zero_1": ({"data_parallel_size": 4, "zero_stage": 1}, 4, 1, Eight),
    "zero_3_shard_size": ({"data_parallel_size": 8, "zero_stage": 3, "shard_size": 4}, 4, 2, Eight),
    "zero_3_kept": ({"data_parallel_size": 4, "zero_stage": 3, "reshard_after_forward": False}, 4, 1, Eight),
    "tensor_pipeline": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "schedule": "1f1b"}, 8, 1, PlainGPT),
    "sequence": ({"tensor_parallel_size": 2, "sequence_parallel": True, "data_parallel_size": 2}, 4, 1, PlainGPT),
    "interleaved": ({"pipeline_parallel_size": 2, "stages_per_rank": 2, "schedule": "1f1b"}, 4, 1, Eight),
    "zero_bubble": ({"pipeline_parallel_size": 4, "schedule": "zero_bubble"}, 4, 2, Eight),
    "zero_bubble_v": ({"pipeline_parallel_size": 2, "schedule": "zero_bubble_v"}, 4, 1, Eight),
    "experts": ({"expert_parallel_size": 2, "data_parallel_size": 4}, 4, 1, Experts),
    "context": ({"context_parallel_size": 2, "data_parallel_size": 2}, 4, 1, PlainGPT),
    "recompute": ({"data_parallel_size": 2, "recompute": "full"}, 2, 1, Eight),
    "offload": ({"data_parallel_size": 2, "offload": {"optimizer_states": "cpu"}}, 2, 1, Eight),
}  # fmt: skip


def planned(kept, devices, num_nodes, kind):
    """Return the plan, and what its text makes of a Trainer and its strategy."""
    costs = MIXTURE if kind is Experts else DENSE
    number_format = FORMATS["32-true"]
    result = search_layouts(costs, number_format, HARDWARE, devices, num_nodes, batch=32, fixed=fixed_fields(kept))
    run = PlannedRun(result, costs, number_format, HARDWARE, devices, num_nodes, "32-true")
    text = run.trainer_arguments(result.best)
    names = {"Trainer": dict, "Hybrid3DStrategy": dict}
    trainer = eval(text.partition("#")[0], names)
    batch = int(text.partition("# batch_size=")[2].split()[0])
    return result.best.layout, trainer, batch


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLANS)
def test_printed_trainer_has_the_layout_of_the_plan(name):
    layout, trainer, batch = planned(*PLANS[name])
    kind, ranks = PLANS[name][-1], trainer["devices"] * trainer["num_nodes"]
    loader = DataLoader(Samples(kind.kind, 4 * batch), batch_size=batch)
    plan = make_plan(
        pl,
        make(kind),
        {"train_dataloaders": loader},
        ranks,
        trainer["strategy"],
        trainer["precision"],
        PlanRequest(trainer["num_nodes"], has_storage=False, first_microbatch=True),
    )
    run, batches = plan.run, plan.batch
    made, options = run.setting.layout, run.setting.options
    assert run.fallback is None and made.world_size == ranks == layout.ranks
    assert made.pipeline_parallel_size == layout.pipeline
    assert (made.data_replicate_size, made.data_shard_size) == (layout.replicate, layout.shard)
    assert made.tensor_parallel_size == layout.tensor
    assert made.context_parallel_size == layout.context
    assert made.expert_parallel_size == layout.expert
    assert batch * layout.data == layout.batch
    assert batches.num_microbatches == layout.num_microbatches
    assert -(-batch // batches.num_microbatches) == layout.microbatch
    program = program_of(run, batches.num_microbatches)
    if layout.pipeline > 1:
        assert program.schedule.num_stages == layout.num_stages
        assert program.schedule.num_microbatches == layout.num_microbatches
        assert options.schedule == layout.schedule
    assert options.zero_stage == layout.zero_stage
    assert options.sequence_parallel == layout.sequence_parallel
    assert (options.recompute or "none") == layout.recompute
    if layout.zero_stage == 3:
        assert options.reshard_after_forward == layout.reshard_after_forward
    assert set(options.offload or ()) == layout.offload


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule", ["zero_bubble_v", "dualpipe_v"])
def test_number_of_microbatches_in_v_placement_is_that_of_a_run(schedule):
    """Two stages per rank without being named: four stages, so up to 16 microbatches."""
    loader = DataLoader(Samples(Eight.kind, 64), batch_size=32)
    options = {"pipeline_parallel_size": 2, "schedule": schedule}
    plans = [
        make_plan(pl, make(Eight), {"train_dataloaders": loader}, 2, options, "32-true", request)
        for request in (PlanRequest(has_storage=False, first_microbatch=True), PlanRequest())
    ]
    assert [plan.run.batch.num_microbatches for plan in plans] == [16, 16]


@pytest.mark.filterwarnings("ignore")
def test_gathers_of_each_microbatch_without_stages():
    """ZeRO-3 that reshards gathers for the forward and the backward of each microbatch."""
    loader = {"train_dataloaders": DataLoader(Samples(Eight.kind, 32), batch_size=8)}

    def bytes_in(num_microbatches):
        options = {"zero_stage": 3, "reshard_after_forward": True, "num_microbatches": num_microbatches}
        content = dry_run(pl, make(Eight), loader, 2, options, "32-true", lambda layout: [0])
        assert (content["samples"], content["num_microbatches"]) == (8, num_microbatches)
        return content["rank"][0]["sent_bytes"]["data"]

    assert bytes_in(4) == pytest.approx(4 * bytes_in(1), rel=0.01)
