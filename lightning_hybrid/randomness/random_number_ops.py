"""The functions of torch that draw random numbers, and which calls of them do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hybrid.step.objects.op_names import names

_DRAWING_NAMES = names(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_ multinomial normal"
    " normal_ uniform_ random_ exponential_ log_normal_ cauchy_ geometric_ poisson binomial dropout dropout_"
    " dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_dropout_"
    " feature_alpha_dropout feature_alpha_dropout_ native_dropout rrelu rrelu_ gumbel_softmax"
    " scaled_dot_product_attention multi_head_attention_forward fractional_max_pool2d fractional_max_pool3d lstm"
    " gru rnn_tanh rnn_relu _standard_gamma _sample_dirichlet"
)


# Positions of the probability and "training" arguments of functions that may be switched off.
_SWITCHES: dict[str, tuple[tuple[int, str] | None, tuple[int, str] | None]] = {
    **dict.fromkeys((name for name in _DRAWING_NAMES if "dropout" in name), ((1, "p"), (2, "training"))),
    "scaled_dot_product_attention": ((4, "dropout_p"), None),
    "multi_head_attention_forward": ((10, "dropout_p"), (13, "training")),
    "rrelu": (None, (3, "training")),
    "rrelu_": (None, (3, "training")),
}


def draws(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of a torch function draws random numbers.

    It must return False if nothing is drawn, such as for dropout in eval mode: draws are counted, and the count must
    not depend on which calls are intercepted.
    """
    if name not in _DRAWING_NAMES:
        return False
    probability, training = _SWITCHES.get(name, (None, None))
    default = 0.0 if name == "scaled_dot_product_attention" else 0.5
    if probability is not None and _argument(probability, args, kwargs, default) == 0:
        return False
    return training is None or bool(_argument(training, args, kwargs, True))


def _argument(where: tuple[int, str], args: Sequence[Any], kwargs: Mapping[str, Any], default: Any) -> Any:
    position, name = where
    return args[position] if position < len(args) else kwargs.get(name, default)
