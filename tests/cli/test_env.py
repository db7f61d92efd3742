"""The `env` command: what a bug report needs, and no secrets."""

import json

from lightning_hybrid.cli import main
from lightning_hybrid.cli.env import environment_variables
from lightning_hybrid.version import __version__


def test_report(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TORCH_API_KEY", "hidden")
    assert main(["env", "--json"]) == 0
    out = capsys.readouterr().out
    report = json.loads(out)
    assert report["lightning-hybrid"] == __version__ and report["packages"]["torch"] and report["cpu"]["cores"] >= 1
    assert report["environment variables"]["NCCL_DEBUG"] == "INFO" and "hidden" not in out
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert f"lightning-hybrid: {__version__}" in text and "\n  NCCL_DEBUG=INFO" in text and "hidden" not in text


def test_variables_that_are_shown():
    shown = {"OMP_NUM_THREADS": "2", "RANK": "0", "NCCL_SOCKET_IFNAME": "eth0"}
    hidden = {"HOME": "/home", "MASTER_ADDR": "10.0.0.1", "TORCH_TOKEN": "x", "NCCL_PROXY": "http://user:word@host"}
    assert environment_variables({**shown, **hidden}) == shown
