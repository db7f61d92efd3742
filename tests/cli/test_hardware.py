"""The `hardware` command: presets as a table and as TOML without torch, and a measured description that reads back."""

import json
import subprocess
import sys

import pytest

from lightning_hybrid.cli import main
from lightning_hybrid.cli import measure as measurement
from lightning_hybrid.cli.hardware import hardware_to_toml
from lightning_hybrid.predict.hardware import BandwidthCurve, load_hardware, preset_names


def test_list_has_a_row_for_each_preset(capsys):
    assert main(["hardware", "list"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == preset_names()
    assert next(row for row in rows if row.startswith("h100")).split()[1:4] == ["84.9", "float8", "1403"]


def test_show_prints_the_file_with_its_sources(capsys):
    assert main(["hardware", "show", "V100-16"]) == 0
    shown = capsys.readouterr().out
    assert "memory = 16.94e9" in shown and "# Total that PyTorch gives" in shown


def test_json_has_the_keys_of_the_file(capsys):
    assert main(["hardware", "show", "a100-80", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["devices_per_node"] == 8 and table["within_node"][-1] == [17179869184, 235.1e9]
    assert main(["hardware", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["a100-80"] == table


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["show", "a100-81"], "no hardware 'a100-81': give one of a100-40"),
        (["show", "A100"], "or the path of a TOML file; did you mean a100-40 or a100-80?"),
        (["show", "/no/such/file.toml"], "there is no file '/no/such/file.toml'; presets are a100-40"),
        (["measure", "--output", "/no/such/folder/mine.toml"], "there is no folder /no/such/folder"),
        (["measure", "--like", "nothing"], "no hardware 'nothing'"),
        (["measure", "--ranks", "1"], "--ranks 1 must be at least 2"),
        (["measure", "--device", "cuda", "--ranks", "2"], "--device cuda: PyTorch finds no GPU"),
    ],
)
def test_invalid_arguments(arguments, text, capsys, monkeypatch):
    monkeypatch.setattr(measurement.torch.cuda, "is_available", lambda: False)
    assert main(["hardware", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("memory", "-4", "memory=-4; use a number above 0"),
        ("memory", "", "is no TOML file: "),
        ("efficiency", '"high"', "efficiency='high'; use a number above 0"),
        ("latency_within", "nan", "latency_within=nan; use a number of 0 or more"),
        ("product_flops", "{ float32 = 0 }", "product_flops.float32=0; use a number above 0"),
        ("product_flops", "1e12", "product_flops=1000000000000.0; use FLOP/s by number format"),
        ("within_node", "[[1e6, 1e9, 2]]", "within_node needs pairs of bytes and bytes per second above 0"),
        ("between_nodes", "[]", "between_nodes needs pairs"),
    ],
)
def test_impossible_descriptions(key, value, text, tmp_path, capsys):
    lines = hardware_to_toml(load_hardware("cpu"), []).splitlines()
    path = tmp_path / "mine.toml"
    changed = [f"{key} = {value}" if line.startswith(f"{key} =") else line for line in lines]
    assert changed != lines
    path.write_text("\n".join(changed))
    assert main(["hardware", "show", str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and text in error


def test_list_and_show_import_no_torch():
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'lightning', 'numpy')));"
        "from lightning_hybrid.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    for arguments in (["list"], ["show", "h100"]):
        subprocess.run([sys.executable, "-c", program, "hardware", *arguments], check=True, capture_output=True)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(measurement, "_BUDGET", 0.001)
    monkeypatch.setattr(measurement, "_PRODUCTS", {"cpu": (64,)})


def test_a_measured_description_reads_back(tmp_path, capsys, monkeypatch, quick):
    links = BandwidthCurve((4096.0, 1048576.0), (1e8, 2e9))
    monkeypatch.setattr(measurement, "_measure_links", lambda kind, ranks: (links, 3e8))
    path = tmp_path / "mine.toml"
    arguments = ["hardware", "measure", "--device", "cpu", "--output", str(path), "--json"]
    assert main([*arguments, "--like", "a100-80"]) == 0
    table, found, like = json.loads(capsys.readouterr().out), load_hardware(str(path)), load_hardware("a100-80")
    assert found.name == table["name"] == "mine"
    assert found.within_node == links and found.reserved == 3e8
    assert found.latency_within == pytest.approx(4096 / 1e8, rel=1e-3)
    assert found.devices_per_node == 8 and found.latency_between == like.latency_between
    assert found.between_nodes.bandwidths == pytest.approx(like.between_nodes.bandwidths, rel=1e-3)
    assert set(found.product_flops) == {"float32", "bfloat16", "float16"} and min(found.product_flops.values()) > 0
    assert min(found.memory_bandwidth, found.kernel_seconds, found.host_bandwidth, found.host_update_rate) > 0
    assert found.memory > 1e9
    assert "Links between nodes are those of a100-80" in path.read_text()


@pytest.mark.slow
def test_links_between_ranks_are_measured(quick, monkeypatch, capsys):
    assert main(["hardware", "measure", "--device", "cpu", "--ranks", "2", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    sizes, rates = zip(*table["within_node"], strict=True)
    assert list(sizes) == measurement._MESSAGES and min(rates) > 0
    assert table["within_node"] == table["between_nodes"]
    assert 1e8 < table["reserved"] < 4e9
