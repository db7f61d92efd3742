"""Valid values of `compile=`, and what it needs on the machine."""

import pytest
import torch

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.strategies.options.options import compile_options
from lightning_hybrid.techniques.compile import check_compiler


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, None),
        ("units", {}),
        ({"backend": "aot_eager", "mode": None}, {"backend": "aot_eager"}),
        (
            {"mode": "max-autotune-no-cudagraphs", "dynamic": False},
            {"mode": "max-autotune-no-cudagraphs", "dynamic": False},
        ),
        ({"backend": len}, {"backend": len}),
    ],
    ids=str,
)
def test_valid_values(given, meant):
    assert compile_options(given) == meant


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("layers", r"compile='layers'; use None, 'units', or a mapping .*backend, mode, dynamic, fullgraph, options"),
        (1, "compile=1; use None, 'units'"),
        ({"back_end": "inductor"}, "has back_end; allowed are backend, mode"),
        ({"backend": "inducter"}, "{'backend': 'inducter'} is unknown; allowed are .*inductor"),
        ({"mode": "fastest"}, "{'mode': 'fastest'} is unknown; allowed are default, .*max-autotune"),
        ({"dynamic": "yes"}, "{'dynamic': 'yes'} is unknown; allowed are True, False"),
        ({"mode": "default", "options": {}}, "has both a mode and options"),
    ],
    ids=str,
)
def test_invalid_values(given, message):
    with pytest.raises(ValueError, match=message):
        Hybrid3DStrategy(compile=given)


def test_missing_compiler(monkeypatch):
    import torch._inductor.config as config

    check_compiler(torch.device("cpu"))
    with (
        config.patch({"cpp.cxx": "no-such-compiler"}),
        pytest.raises(ValueError, match=r"install one \(such as g\+\+\).*aot_eager"),
    ):
        check_compiler(torch.device("cpu"))


@pytest.mark.parametrize("given", ["units", {"backend": "aot_eager", "dynamic": False}], ids=str)
def test_yaml_form(given):
    import yaml
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_class_arguments(Hybrid3DStrategy, "strategy")
    parsed = parser.parse_string(yaml.safe_dump({"strategy": {"compile": given}}))
    assert parsed.strategy.compile == given
