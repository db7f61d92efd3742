"""Descriptions of hardware: every preset is complete and plausible, and a written one reads back."""

import pytest

from lightning_hybrid.cli.hardware import hardware_to_table, hardware_to_toml
from lightning_hybrid.predict.hardware import hardware_from_table, load_hardware, preset_names, tomllib


@pytest.mark.parametrize("name", preset_names())
def test_a_written_preset_reads_back(name, tmp_path):
    hardware = load_hardware(name)
    path = tmp_path / f"{name}.toml"
    path.write_text(hardware_to_toml(hardware, ["A note."]))
    assert path.read_text().startswith("# A note.\nname = ")
    found = load_hardware(str(path))
    for key, value in hardware_to_table(hardware).items():
        read = hardware_to_table(found)[key]
        if isinstance(value, list):
            assert [size for size, _ in read] == [size for size, _ in value]
            value, read = [rate for _, rate in value], [rate for _, rate in read]
        assert read == (pytest.approx(value, rel=1e-3) if not isinstance(value, str) else value), key


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_plausible(name):
    hardware = load_hardware(name)
    assert 0 < hardware.reserved < 0.2 * hardware.memory
    for curve in (hardware.within_node, hardware.between_nodes):
        assert list(curve.sizes) == sorted(curve.sizes) and min(curve.bandwidths) > 0
    # Of a device; those between nodes are of all devices of a node together, which may be a rack of 72.
    between = max(hardware.between_nodes.bandwidths)
    assert max(hardware.within_node.bandwidths) >= between / max(1, hardware.devices_per_node / 8)


def test_missing_and_unknown_keys_are_named(tmp_path):
    table = tomllib.loads(hardware_to_toml(load_hardware("h100")))
    del table["memory"]
    with pytest.raises(ValueError, match=r"missing keys \['memory'\], unknown keys \['memroy'\]"):
        hardware_from_table({**table, "memroy": 1.0}, tmp_path / "mine.toml")
