"""Names of layers in tables."""

import pytest

from lightning_hybrid.step.objects.modules import shortened, spanned_modules


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


def test_spans_of_long_names_fit_a_table():
    prefix = "model.base_model.model.model"
    assert spanned_modules(["layers.0", "layers.1"]) == "layers.0 .. layers.1 (2)"
    text = spanned_modules([f"{prefix}.{name}" for name in ("embed_tokens", "layers.0", "layers.1")])
    assert text == "model...embed_tokens .. model...layers.1 (3)"
