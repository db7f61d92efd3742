"""Names of layers in tables."""

import pytest

from lightning_hybrid.step.objects.modules import shortened


@pytest.mark.parametrize(
    ("fqn", "shown"),
    [
        ("model.layers.0", "model.layers.0"),
        (
            "base_model.model.model.layers.11.self_attn.q_proj.lora_A.default",
            "base_model...11.self_attn.q_proj.lora_A.default",
        ),
        ("a" * 30 + "." + "b" * 30, "a" * 30 + "..." + "b" * 30),
    ],
)
def test_long_names_are_shortened_in_the_middle(fqn, shown):
    assert shortened(fqn) == shown
