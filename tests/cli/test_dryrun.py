"""``lightning-hybrid dryrun``: any rank of any world, in one process."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_hybrid.cli import main
from lightning_hybrid.cli.dryrun import chosen_ranks
from lightning_hybrid.layout import ParallelLayout

CLASSES = "models.command_line_classes"
WIDE_GPT = str(Path(__file__).parents[1] / "models" / "wide_gpt.py")


def dry_run(capsys, *arguments):
    status = main(["dryrun", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture
def most_elements(monkeypatch):
    """The largest parameter that is built with storage."""
    found, register = [0], torch.nn.Module.register_parameter

    def counted(module, name, parameter):
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            found[0] = max(found[0], parameter.numel())

    monkeypatch.setattr(torch.nn.Module, "register_parameter", counted)
    return found


def test_ranks_of_a_large_world(capsys, most_elements):
    layout = "dp=64,tp=4,pp=2,m=4"
    status, content = dry_run(
        capsys, f"{CLASSES}:Stack", "--layout", layout, "--num-nodes", "64", "--rank", "0,509-511"
    )
    assert status == 0 and content["refused"] is None and most_elements == [0]
    assert (content["ranks"], content["nodes"], content["num_microbatches"], content["samples"]) == (512, 64, 4, 8)
    assert [rank["rank"] for rank in content["rank"]] == [0, 509, 510, 511]
    last = content["rank"][-1]
    assert last["node"] == 63 and last["stages"] == [1]
    assert last["coordinates"] == {"pp": 1, "dp_replicate": 63, "dp_shard": 0, "cp": 0, "tp": 3}
    assert last["groups"]["tp"] == [508, 509, 510, 511] and last["groups"]["pp"] == [255, 511]
    assert last["nodes_of_groups"] == {**last["nodes_of_groups"], "tp": 1, "data": 32, "pp": 2}
    assert last["bytes"]["total"] == sum(size for kind, size in last["bytes"].items() if kind != "total")
    axes = {each["axis"] for each in last["messages"]}
    assert axes == {"pipeline", "data", "tensor"} == last["sent_bytes"].keys()


def test_each_rank_of_two_stages_has_its_share(capsys):
    status, content = dry_run(capsys, f"{CLASSES}:Stack", "--layout", "tp=2,pp=2", "--rank", "all", "-v")
    assert status == 0 and len(content["rank"]) == 4
    assert content["tensor_plans"]["layers.0"][0] == "0 -> 2 (split by output features)"
    numels = {}
    for rank in content["rank"]:
        for name, shape in rank["shapes"].items():
            numels.setdefault(name, []).append(torch.Size(shape["local"]).numel())
        assert rank["parameters"] == sum(torch.Size(shape["local"]).numel() for shape in rank["shapes"].values())
    from models.command_line_classes import Stack

    full = {name: parameter.numel() for name, parameter in Stack().named_parameters()}
    assert numels.keys() == full.keys()
    assert all(sum(shards) in (full[name], 2 * full[name]) for name, shards in numels.items())  # or replicated
    assert any(sum(shards) == full[name] for name, shards in numels.items())


def test_interleaved_stages(capsys):
    _, content = dry_run(capsys, f"{CLASSES}:Stack", "--layout", "pp=2,stages=2,m=4")
    first, last = content["rank"]
    assert first["stages"] == [0, 2] and last["stages"] == [1, 3]
    counts = {(each["content"], each["count"]) for each in first["messages"]}
    assert counts == {("values to stage 1", 4), ("values to stage 3", 4), ("gradients to stage 1", 4)}


def test_limit_of_microbatches_in_flight(capsys):
    layout = "pp=2,m=4,schedule=zero_bubble_searched,max_microbatches_in_flight="
    bytes_of = [dry_run(capsys, f"{CLASSES}:Stack", "--layout", f"{layout}{n}")[1]["rank"][0]["bytes"] for n in (1, 2)]
    assert bytes_of[1]["activations"] == 2 * bytes_of[0]["activations"] > 0


@pytest.mark.parametrize("layout", ["pp=2,stages=2,m=4", "pp=2,dp=2,m=2"])
def test_memory_of_a_dry_run_is_that_of_explain(capsys, layout):
    """The stages of a rank hold most at different times; messages between stages are counted once."""
    _, content = dry_run(capsys, f"{CLASSES}:Stack", "--layout", layout)
    assert main(["explain", f"{CLASSES}:Stack", "--layout", layout, "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)["memory"]
    for rank, row in zip(content["rank"], explained, strict=True):
        assert rank["bytes"] == row and min(row["activations"], row["working"], row["messages"]) > 0


def test_zero_shards_and_gathers(capsys):
    name = f"{CLASSES}:Stack"
    plain = dry_run(capsys, name, "--layout", "dp=4", "--rank", "1")[1]["rank"][0]
    layout = "dp=4,zero=3,reshard_after_forward=true"
    zero = dry_run(capsys, name, "--layout", layout, "--rank", "1")[1]["rank"][0]
    assert zero["bytes"]["parameters"] == pytest.approx(plain["bytes"]["parameters"] / 4, rel=0.1)
    operations = {each["operation"]: each for each in zero["messages"]}
    assert operations.keys() == {"all_gather", "reduce_scatter"}
    assert [each["operation"] for each in plain["messages"]] == ["all_reduce"]
    # Gathered for the forward and the backward, reduced once: half as much again as an all-reduce.
    assert zero["sent_bytes"]["data"] == pytest.approx(1.5 * plain["sent_bytes"]["data"], rel=0.1)


def test_the_total_is_that_of_the_device(capsys):
    arguments = [f"{CLASSES}:Stack", "--layout", "dp=2,zero=2,offload=cpu"]
    [rank] = dry_run(capsys, *arguments)[1]["rank"]
    sizes = rank["bytes"]
    assert sizes["host_total"] == sizes["gradients"] + sizes["optimizer_states"] > 0
    kept = ("parameters", "activations", "gathered", "working", "messages")
    assert sizes["total"] == sum(sizes[kind] for kind in kept) > 0
    assert main(["dryrun", *arguments]) == 0
    places, title, row, *_ = capsys.readouterr().out.partition("bytes of a rank, estimated")[2].splitlines()
    assert "grads on cpu" in places and "optimizer on cpu" in places and title.split()[-2:] == ["total", "host"]
    assert row.split()[-2:] == [f"{sizes['total']:,}", f"{sizes['host_total']:,}"]


def test_a_batch_stands_for_all_microbatches(capsys):
    _, content = dry_run(capsys, f"{CLASSES}:Stack", "--layout", "pp=2,m=8")
    assert content["num_microbatches"] == 8 and content["rank"][0]["messages"][0]["count"] == 8


def test_default_is_the_first_rank_of_each_stage():
    layout = ParallelLayout(pipeline_parallel_size=4, tensor_parallel_size=2, data_replicate_size=3)
    assert chosen_ranks(["stages"], layout) == [0, 6, 12, 18]
    assert chosen_ranks(["0,3-5", "stages"], layout) == [0, 3, 4, 5, 6, 12, 18]
    assert chosen_ranks(["all"], layout) == list(range(24))


def test_text(capsys):
    arguments = ["dryrun", f"{CLASSES}:Stack", "--layout", "tp=2,pp=2", "--num-nodes", "2", "--rank", "3", "-v"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("tp=2,pp=2: 4 ranks on 2 nodes; ")
    assert "rank 3 on node 1: pp 1, dp_replicate 0, dp_shard 0, cp 0, tp 1" in captured.out
    assert (
        "  pipeline: 2 ranks 1, 3 on 2 nodes\n" in captured.out and "  tensor: 2 ranks 2, 3 on 1 node\n" in captured.out
    )
    assert "gradients to stage 0" in captured.out and "layers.3.2.weight" in captured.out
    names = [line.partition("dryrun: ")[2].partition(" (after")[0] for line in captured.err.splitlines()]
    assert "building the module without storage" in names and "recording the step on one batch" in names


def test_text_of_many_ranks_is_a_table(capsys):
    assert main(["dryrun", f"{CLASSES}:Stack", "--layout", "dp=2,pp=4"]) == 0
    assert main(["dryrun", f"{CLASSES}:Stack", "--layout", "dp=8", "--rank", "all"]) == 0
    text = capsys.readouterr().out
    assert "8 ranks; --rank R shows" in text and "; 1 microbatch of a replica's batch" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "tp=2,pp=2", "--num-nodes", "3"], "4 ranks, which 3 nodes do not divide"),
        (["--layout", "tp=2,pp=3", "--num-nodes", "2", "--devices", "8"], "16 ranks, which is no multiple of the 6"),
        (["--layout", "dp=2,pp=2", "--devices", "8"], "has 4 ranks, and 1 nodes x 8 devices are 8"),
        (["--layout", "dp=2", "--rank", "2"], "rank 2 is not in a world of 2 ranks"),
        (["--layout", "dp=2", "--rank", "x"], "'x' is no number, no range"),
        (["--layout", "dp=2", "--rank", "1-0"], "1-0 has no ranks; write the smaller one first"),
        (["--layout", "dp=1024", "--rank", "all"], "1024 ranks are more than 512"),
        (["--layout", "dp=2", "--num-nodes", "0"], "--num-nodes 0; use 1 or more"),
    ],
)
def test_impossible_worlds(capsys, arguments, message):
    assert main(["dryrun", f"{CLASSES}:Stack", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_sizes_that_fill_a_world(capsys):
    arguments = ["--layout", "tp=2,pp=2", "--num-nodes", "2", "--devices", "8", "--rank", "15"]
    status, content = dry_run(capsys, f"{CLASSES}:Stack", *arguments)
    assert status == 0 and content["layout"] == "dp=4,tp=2,pp=2" and content["ranks"] == 16


def test_nodes_of_a_config(capsys, tmp_path):
    options = "class_path: lightning_hybrid.Hybrid3DStrategy, init_args: {pipeline_parallel_size: 2}"
    (tmp_path / "run.yaml").write_text(f"trainer: {{devices: 2, num_nodes: 2, strategy: {{{options}}}}}")
    arguments = [f"{CLASSES}:Stack", "--config", str(tmp_path / "run.yaml")]
    _, content = dry_run(capsys, *arguments)
    assert (content["ranks"], content["nodes"]) == (4, 2) and [r["node"] for r in content["rank"]] == [0, 1]
    assert dry_run(capsys, *arguments, "--num-nodes", "4")[1]["nodes"] == 4
    assert dry_run(capsys, *arguments, "--layout", "pp=2")[1]["nodes"] == 1


@pytest.mark.parametrize(
    ("name", "layout", "reason"),
    [
        ("Stack", "pp=30", "UnfitError: pipeline_parallel_size=30 makes 30 stages"),
        ("Stack", "tp=3", "shards no layer of the module"),
        ("Stack", "pp=2,m=9", "num_microbatches=9 but the batch has only 8 samples"),
    ],
)
def test_refusals(capsys, name, layout, reason):
    status, content = dry_run(capsys, f"{CLASSES}:{name}", "--layout", layout)
    assert status == 3 and reason in content["refused"]


@pytest.mark.filterwarnings("ignore:sharded instead of pipelined")
def test_step_that_cannot_be_traced(capsys):
    assert main(["dryrun", f"{CLASSES}:BrokenStep"]) == 3
    captured = capsys.readouterr()
    assert "no such column" in captured.out
    assert "command_line_classes.py" in captured.err and "Traceback" in captured.err
    status, content = dry_run(capsys, f"{CLASSES}:Manual")
    assert status == 3 and "manual optimization" in content["refused"]


def test_module_that_reads_its_parameters(capsys):
    assert main(["dryrun", f"{CLASSES}:ReadsParameters"]) == 2
    assert "--with-storage" in capsys.readouterr().err
    assert dry_run(capsys, f"{CLASSES}:ReadsParameters", "--with-storage")[0] == 0


def test_module_that_reads_its_parameters_in_setup(capsys):
    assert main(["dryrun", f"{CLASSES}:ReadsParametersAtStart"]) == 2
    assert "--with-storage" in capsys.readouterr().err


def test_averages_of_weights_are_not_made(capsys):
    status, content = dry_run(capsys, f"{CLASSES}:AveragesWeights")
    assert status == 0 and content == {**dry_run(capsys, f"{CLASSES}:Stack")[1]}


@pytest.mark.parametrize("arguments", [["--layout", "px=2"], ["--layout", "pp=2", "--rank", "9"]])
def test_arguments_are_checked_before_the_module_is_made(capsys, arguments):
    assert main(["dryrun", f"{CLASSES}:BrokenConstructor", *arguments]) == 2
    assert arguments[-1] in capsys.readouterr().err


_LIMITED = """
import resource, sys
from lightning_hybrid.cli import main
status = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.slow
def test_gpt_3_on_3072_ranks():
    """175 billion parameters: under a minute of CPU time, and 8 GB."""
    pytest.importorskip("transformers")
    layout = ["--layout", "dp=6,tp=8,pp=64,m=256", "--num-nodes", "384", "--rank", "0,1777,3071", "--json"]
    command = [sys.executable, "-c", _LIMITED, "dryrun", f"{WIDE_GPT}:WideGPT", *layout]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0, run.stderr
    content = json.loads(run.stdout)
    assert [rank["coordinates"]["pp"] for rank in content["rank"]] == [0, 37, 63]
    assert not content["notes"]
    lines = content["tensor_plans"]["model.transformer.h.0.attn"]
    assert lines[0] == "c_attn -> c_proj (attention split by heads over 8 ranks)"
    # 96 layers on 64 stages: 8 units of a block and a half.
    assert content["rank"][1]["parameters"] == pytest.approx(1.5 * 12 * 12288**2 / 8, rel=0.25)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    assert int(run.stderr.split()[-1]) < 8 * 2**20  # KB
