"""The `plan` command: plans of a module and of a configuration, reasons, one layout in detail, reports, refusals."""

import json
import logging
import re

import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_module

from lightning_hybrid.cli import main
from lightning_hybrid.cli.hardware import hardware_to_toml
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.schedule.measured.lost_time import TimeByCause
from lightning_hybrid.schedule.measured.seconds import MeasuredCosts, save_measured_costs
from lightning_hybrid.text import sized

CLASSES = "tests/models/command_line_classes.py"

CONFIG = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "model_type": "a decoder",
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return ["--config-json", str(path), "--sequence", "1024", "--hardware", "a100-80", "--devices", "4"]


def planned(capsys, *arguments):
    status = main(["plan", *arguments])
    return status, capsys.readouterr().out


def test_plans_of_a_configuration(capsys, config):
    status, text = planned(capsys, *config, "--batch", "64")
    assert status == 0
    assert re.match(r"a decoder: 13\d\.\d million parameters, 10 units, on 4 a100-80 \(one node\), bf16-mixed", text)
    assert re.search(r"1 +dp=4\S* +[\d.]+ ms ± \d+% +[\d.]+ GB ± \d+% +[\d,]+ +\d+% +\d+\n +chosen: ", text)
    assert re.search(r"expert ranks +the model has no experts", text)
    assert "strategy=Hybrid3DStrategy(" in text and "batch_size=16 of the loader, for each of 4 replicas" in text


def test_json_has_numbers_and_the_options_of_the_strategy(capsys, config):
    status, text = planned(capsys, *config, "--batch", "64", "--fix", "tp=2,zero=1", "--json", "--plans", "2")
    content = json.loads(text)
    assert status == 0 and len(content["plans"]) == 2
    for plan in content["plans"]:
        assert plan["options"]["tensor_parallel_size"] == 2
        assert sum(plan["terms"].values()) == pytest.approx(plan["seconds"])
        assert plan["memory"] <= plan["capacity"]
    assert content["plans"][0]["options"]["zero_stage"] == 1
    assert content["model"]["is_traced"] and {r["family"] for r in content["rejected"]} >= {"zero 0", "no tensor ranks"}


def test_why_compares_one_layout_with_the_chosen(capsys, config):
    status, text = planned(capsys, *config, "--batch", "64", "--why", "tp=4 pp=1")
    assert status == 0
    assert "dp=1,tp=4" in text and "against the chosen dp=4" in text
    assert re.search(r"tensor ranks +[\d.]+ m?s +0 ms", text)
    assert re.search(r"memory of each rank +this layout +chosen, at its peak", text)


def test_html_report_loads_nothing(capsys, config, tmp_path):
    path = tmp_path / "plan.html"
    status, _ = planned(capsys, *config, "--batch", "64", "--fix", "pp=2", "--html", str(path))
    page = path.read_text()
    assert status == 0
    assert page.count("<svg") == 1 and "pipeline rank 1" in page and "Hybrid3DStrategy" in page
    assert not re.search(r'(src|href)="', page.replace('xmlns="http://www.w3.org/2000/svg"', ""))


def test_plan_of_a_module(capsys):
    module = "tests/models/command_line_classes.py:Stack"
    status, text = planned(capsys, module, "--hardware", "cpu", "--devices", "2", "--json")
    content = json.loads(text)
    assert content["trainer"].startswith('Trainer(\n    accelerator="cpu",\n    devices=')
    assert status == 0 and content["model"]["name"] == "Stack" and content["model"]["is_traced"]
    assert not any("offload" in plan["options"] for plan in content["plans"])  # to the host that the devices are
    # The loader's batch is that of each replica.
    fields = content["plans"][0]["fields"]
    assert fields["batch"] == 8 * fields["replicate"] * fields["shard"]


def test_manual_optimization_has_no_pipeline_plans(capsys):
    options = ["--hardware", "cpu", "--devices", "4", "--batch", "8", "--json"]
    content = json.loads(planned(capsys, f"{CLASSES}:Manual", *options)[1])
    fields = [plan["fields"] for plan in content["plans"]]
    assert {each["pipeline"] for each in fields} == {1}
    assert all(each["microbatch"] * each["replicate"] * each["shard"] == 8 for each in fields)
    reasons = {each["family"]: each["reason"] for each in content["rejected"]}
    assert reasons["pipeline ranks"].startswith("the module uses manual optimization")
    assert any("no plan has pipeline ranks or microbatches" in note for note in content["model"]["notes"])


def test_nothing_is_said_of_a_run_that_does_not_take_place(capsys, caplog, monkeypatch):
    """The namespace of Lightning that was imported last gives the logger of all."""
    log = logging.getLogger("another namespace")
    monkeypatch.setattr(rank_zero_module, "log", log)
    with caplog.at_level(logging.INFO, logger=log.name):
        assert planned(capsys, f"{CLASSES}:Stack", "--hardware", "cpu", "--devices", "2")[0] == 0
    assert not [record for record in caplog.records if record.name == log.name]


def test_averages_of_weights_are_not_made(capsys):
    status, text = planned(capsys, f"{CLASSES}:AveragesWeights", "--hardware", "cpu", "--json")
    stack = json.loads(planned(capsys, f"{CLASSES}:Stack", "--hardware", "cpu", "--json")[1])
    assert status == 0 and json.loads(text)["plans"] == stack["plans"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fix", "zero=7"], "zero=7; use 0, 1, 2 or 3"),
        (["--why", "tp"], "'tp' is not name=value"),
        (["--max-memory", "much"], "use a number of bytes"),
        (["--html", "no_such_folder/plan.html"], "there is no folder no_such_folder"),
    ],
)
def test_arguments_are_checked_before_the_classes_are_imported(capsys, arguments, words):
    assert main(["plan", "no.such:Module", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_clusters_are_checked_before_the_classes_are_imported(capsys):
    assert main(["plan", "no.such:Module", "--devices", "12"]) == 3
    assert "a node of a100-80 has 8 devices" in capsys.readouterr().out


def test_devices_may_be_a_part_of_a_node(capsys, config):
    status, text = planned(capsys, *config, "--batch", "42", "--devices", "7", "--json")
    assert status == 0 and json.loads(text)["plans"][0]["layout"].startswith("dp=7")


def test_plan_of_a_mixture_has_expert_ranks(capsys):
    arguments = f"{CLASSES}:Mixture", "--hardware", "a100-80", "--devices", "8", "--batch", "64"
    status, text = planned(capsys, *arguments, "--json")
    content = json.loads(text)
    assert status == 0
    experts = [plan["fields"]["expert"] for plan in content["plans"]]
    [reason] = [r["reason"] for r in content["rejected"] if r["family"] == "expert ranks"] or [""]
    assert max(experts) > 1 or re.match(r"dp=8,ep=\d", reason), content
    assert any("which experts ranks can share is proved" in note for note in content["model"]["notes"])
    status, text = planned(capsys, *arguments, "--why", "ep=4")
    assert status == 0 and re.search(r"expert ranks +[\d.]+ (m|u|µ)?s", text)


def test_module_is_made_without_storage_unless_its_values_are_read(capsys, monkeypatch):
    made, register = [], torch.nn.Module.register_parameter

    def counted(module, name, parameter):
        register(module, name, parameter)
        made.append(parameter is None or parameter.is_meta)

    monkeypatch.setattr(torch.nn.Module, "register_parameter", counted)
    contents = []
    for name in ("Stack", "ReadsParameters"):
        status, text = planned(capsys, f"{CLASSES}:{name}", "--hardware", "cpu", "--devices", "2", "--json")
        contents.append(json.loads(text))
        assert status == 0 and all(made) == (name == "Stack")
    without, in_full = contents
    assert without["model"]["forward_flops_per_sample"] == in_full["model"]["forward_flops_per_sample"]
    assert without["plans"] == in_full["plans"]


def test_measured_costs_correct_all_plans(capsys, config, tmp_path):
    step = TimeByCause(work=3.0, communication=0.1, optimizer=0.2)
    measured = MeasuredCosts(
        hardware={"device": "NVIDIA A100", "device_type": "cuda", "num_hosts": 1},
        software={"precision": "bf16-mixed"},
        layout={"pp": 1, "dp_replicate": 4, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1},
        schedule="",
        num_microbatches=1,
        microbatch_size=16,
        steps=(10,),
        step=step,
        batch_size=16,
        step_times=(step,),
    )
    save_measured_costs(measured, tmp_path / "measured_costs.json")
    arguments = [*config, "--batch", "64", "--measured", str(tmp_path)]
    status, text = planned(capsys, *arguments, "--why", "dp=4,m=1")
    note = f"note: predictions are corrected by the measured costs of {tmp_path}: 3.3 s of a step (median of 1 step)"
    assert status == 0 and note in " ".join(text.split()) and re.search(r"in all +3.3 s", text)
    status, text = planned(capsys, *arguments)
    assert status == 0 and note in " ".join(text.split()) and re.search(r"1 +dp=4\S* +[23]\.\d+ s ± ", text)


@pytest.mark.parametrize("content", [None, "{}"], ids=["no file", "another file"])
def test_what_is_no_file_of_measured_costs(capsys, config, tmp_path, content):
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content)
    assert main(["plan", *config, "--batch", "64", "--measured", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_nothing_fits(capsys, config):
    status, text = planned(capsys, *config, "--batch", "64", "--max-memory", "1GB")
    assert status == 3 and re.search(r"refused: no layout of a decoder fits 4 devices of 1 GB: the nearest", text)
    assert max(map(len, text.splitlines())) <= 100


def test_what_may_not_fit_is_said_of_the_chosen_and_of_the_explained(capsys, config, tmp_path):
    fixed = [
        "--batch",
        "64",
        "--fix",
        "pp=1,tp=1,cp=1,zero=0,recompute=none,m=4,offload={},chunked_loss=false",
        "--json",
    ]
    needed = json.loads(planned(capsys, *config, *fixed)[1])["plans"][0]["memory"]
    path = tmp_path / "short.toml"
    path.write_text(re.sub(r"\nmemory = .*", f"\nmemory = {needed / 1.04}", hardware_to_toml(load_hardware("a100-80"))))
    short = [*config, "--hardware", str(path)]
    status, text = planned(capsys, *short, *fixed[:-1])
    assert status == 0 and "chosen, but may not fit" in text and "note: the chosen plan may not fit" in text
    content = json.loads(planned(capsys, *short, *fixed)[1])["plans"][0]
    assert (content["fits"], content["may_fit"]) == (False, True)
    status, text = planned(capsys, *short, "--batch", "64", "--why", fixed[3])
    assert status == 0 and "is within the error of memory of 8%" in text.replace("\n", " ")


def test_explained_layouts_fill_the_devices(capsys, config):
    assert main(["plan", *config, "--batch", "64", "--why", "dp=2"]) == 2
    assert "--why dp=2: 2 ranks do not fill 4 devices" in capsys.readouterr().err


def test_explained_layouts_have_the_batch_of_their_replicas(capsys):
    module = [f"{CLASSES}:Stack", "--hardware", "cpu", "--devices", "4", "--json"]
    listed = json.loads(planned(capsys, *module, "--plans", "9")[1])["plans"]
    plan = next(each for each in listed if each["fields"]["pipeline"] == 2 and each["fields"]["tensor"] == 1)
    why = json.loads(planned(capsys, *module, "--why", plan["layout"].replace(": ", ":"))[1])["why"]
    assert why["fields"]["batch"] == plan["fields"]["batch"] == 16
    assert why["seconds"] == plan["seconds"]


def test_an_explained_layout_may_be_faster_than_what_is_fixed(capsys, config):
    _, text = planned(capsys, *config, "--batch", "64", "--fix", "tp=4", "--why", "dp=4")
    assert re.search(r"a sample takes \d+% less time: what is fixed, or the objective, rules the layout out", text)


@pytest.mark.parametrize("flag", ["--why", "--fix"])
def test_stages_are_those_that_a_schedule_has(capsys, config, flag):
    assert main(["plan", *config, flag, "dp=2,pp=2,schedule=dualpipe_v,stages=3,m=4"]) == 2
    assert "schedule='dualpipe_v' runs two stages per rank, not stages_per_rank=3" in capsys.readouterr().err


def test_widths_of_stages(capsys, config):
    status, text = planned(capsys, *config, "--batch", "64", "--fix", "stage_widths=3+1,m=16")
    assert status == 0 and "dp=1,pp=4,stage_widths=3+1,m=16" in text
    assert "stage_widths=[3, 1]," in text and "which hold copies of it and take" in " ".join(text.split())
    status, text = planned(capsys, *config, "--batch", "64", "--why", "pp=4,stage_widths=1+3,m=16")
    assert status == 0 and "pp=4,stage_widths=1+3,m=16 against" in text and "memory of pipeline rank 3" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("pp=3,stage_widths=3+1", "stage_widths=3+1 are 4 pipeline ranks, and pp=3"),
        ("stage_widths=3+1,stages=2", "stage_widths=3+1: ranks have one stage each; leave stages=2 out"),
        ("stage_widths=3+0", "stage_widths=3+0; use the ranks of each stage, such as 3+1"),
        ("stage_widths=wide", "stage_widths=wide; use the ranks of each stage, such as 3+1"),
        ("stage_widths=3+1,schedule=zero_bubble", "schedule='zero_bubble' has one rank for each stage"),
    ],
)
@pytest.mark.parametrize("flag", ["--why", "--fix"])
def test_widths_that_no_layout_has(capsys, config, flag, given, words):
    assert main(["plan", *config, "--batch", "64", flag, given]) == 2
    assert words in capsys.readouterr().err


def test_replicas_of_an_explained_layout_divide_the_batch(capsys, config):
    assert main(["plan", *config, "--batch", "2", "--why", "dp=4"]) == 2
    assert "--why dp=4: 4 replicas do not divide --batch 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a module"),
        (["--hardware", "abacus"], "no hardware 'abacus': give one of a100-40"),
        (["--sequence", "4"], "--sequence is for --config-json"),
        (["--config-json", "none.json"], "there is no file"),
        (
            ["some/config.json"],
            "some/config.json is no module; a transformer's configuration is given by --config-json",
        ),
        (["--config-json", "docs", "--batch", "4"], "docs/config.json"),
    ],
)
def test_usage(capsys, arguments, words):
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_folder_of_a_configuration(capsys, config):
    folder = ["--config-json", config[1].removesuffix("/config.json"), *config[2:]]
    plans = []
    for arguments in (config, folder):
        assert main(["plan", *arguments, "--batch", "8"]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--batch is needed"),
        (["--batch", "8", "--max-memory", "much"], "--max-memory much; use a number of bytes"),
        (["--batch", "8", "--why", "tp"], "--why 'tp': 'tp' is not name=value"),
        (["--batch", "8", "--why", "pp=3"], "--why pp=3: 3 ranks do not fill 4 devices"),
    ],
)
def test_usage_with_a_configuration(capsys, config, arguments, words):
    assert main(["plan", *config, *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fix", "foo=2"], "--fix foo=2: a plan has no foo; use chunked_loss, cp, dp"),
        (["--fix", "zero=7"], "--fix zero=7: zero=7; use 0, 1, 2 or 3"),
        (["--why", "tp=2,zero=9"], "--why tp=2,zero=9: zero=9; use 0, 1, 2 or 3"),
        (["--fix", "m=0"], "--fix m=0: m=0; use a whole number of 1 or more"),
        (["--fix", "pp=2,schedule=foo"], "--fix pp=2,schedule=foo: schedule=foo; use one of gpipe, 1f1b"),
        (["--plans", "0"], "--plans 0; use 1 or more"),
        (["--devices", "0"], "--devices 0; use 1 or more"),
    ],
)
def test_values_that_there_are_not(capsys, config, arguments, words):
    status = main(["plan", *config, "--batch", "64", *arguments])
    assert status == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--why", "dp=1,pp=2,tp=2,zero=1,sequence_parallel=true,m=16"]])
def test_lines_have_100_characters_at_most(capsys, config, more):
    fixed = ["--fix", "pp=2,tp=2,zero=1,sequence_parallel=true,offload={optimizer_states: cpu},recompute=selective"]
    status, text = planned(capsys, *config, "--batch", "64", *fixed, *more)
    assert status == 0 and "sequence_parallel=true" in text
    assert max(map(len, text.splitlines())) <= 100


def test_plans_of_several_batches_are_compared_for_the_same_samples(capsys, tmp_path):
    module = "examples/quickstart.py:Classifier"
    page = tmp_path / "plan.html"
    arguments = [module, "--hardware", "cpu", "--devices", "4"]
    status, text = planned(capsys, *arguments, "--html", str(page))
    assert status == 0 and re.search(r"layout +samples +step", text)
    content = json.loads(planned(capsys, *arguments, "--json")[1])
    best = content["plans"][0]
    batch = best["samples_per_second"] * best["seconds"]
    for plan in content["plans"]:
        time = batch / plan["samples_per_second"]
        shown = f"{time:,.2f} s" if time >= 1 else f"{1e3 * time:,.3g} ms"
        assert f"</div><span>{shown}</span>" in page.read_text()
    assert f"Time of {batch:,.0f} samples" in page.read_text()


def test_headings_name_the_samples_and_the_ranks(capsys, config, tmp_path):
    page = tmp_path / "plan.html"
    module = ["examples/quickstart.py:Classifier", "--hardware", "a100-80", "--devices", "4", "--html", str(page)]
    text = planned(capsys, *module)[1]
    assert (
        text.startswith("the step fits one device (2.51 GB of 85.1 GB): no layout is needed") and "why not" not in text
    )
    assert "note: --precision bf16-mixed would take " in text.replace("\n", " ") or "kernel starts" in text
    wide = ["examples/digits.py:ResNet", "--data", "examples/digits.py:Digits", "--module.channels", "1024"]
    assert re.search(r"why not, times of [\d,]+ samples\n", planned(capsys, *wide, *module[1:])[1])
    assert "<h2>Why not, times of 256 samples</h2>" in page.read_text() and "<code>each rank</code>" in page.read_text()
    assert "memory of each rank " in planned(capsys, *module, "--why", "dp=4")[1]
    text = planned(capsys, *config, "--batch", "64", "--why", "dp=2,pp=2")[1]
    assert "memory of pipeline rank 1 " in text and "each rank" not in text
    assert "why not\n" in planned(capsys, *config, "--batch", "64")[1]


def test_memory_of_the_page_is_that_of_the_table(capsys, config, tmp_path):
    page = tmp_path / "plan.html"
    plan = json.loads(planned(capsys, *config, "--batch", "64", "--json", "--html", str(page))[1])["plans"][0]
    assert f"and {sized(plan['memory'])} are needed" in page.read_text()
