"""Snapshots of random generators, to be restored later: of the process, as plain values, or of one generator.

``GeneratorStates`` is for one run. Checkpoints have plain values, as user code may draw between steps; random numbers
in steps under stages and microbatches are keyed by seed and step (``keyed_draws``) and need none.

The functions of torch that draw random numbers, and which calls of them do.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

from lightning_hybrid.step.objects.names import names


def mix(*numbers: int) -> int:
    """Return a seed of 63 bits: the BLAKE2b digest of the numbers modulo 2**64, equal on every machine and version."""
    content = struct.pack(f"<{len(numbers)}Q", *(number & 0xFFFFFFFFFFFFFFFF for number in numbers))
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


class GeneratorStates:
    """The states of the global generators of this process: of Python, numpy, torch and one accelerator."""

    def __init__(self, device: torch.device) -> None:
        """Take ``device`` (an accelerator whose generator is included)."""
        self._python = random.getstate()
        self._numpy = numpy.random.get_state()
        self._torch = torch.default_generator.get_state()
        self._device = device
        accelerator = accelerator_generator(device)
        self._accelerator = None if accelerator is None else accelerator.get_state()

    def on(self, device: torch.device) -> GeneratorStates:
        """Use the generator of another device, such as the receiving process has."""
        self._device = device
        return self

    def are_unchanged(self) -> bool:
        """Whether no generator has been used since."""
        kind, keys, *position = self._numpy
        kind_now, keys_now, *position_now = numpy.random.get_state()
        accelerator, state = accelerator_generator(self._device), self._accelerator
        return (
            random.getstate() == self._python
            and (kind, position) == (kind_now, position_now)
            and numpy.array_equal(keys, keys_now)
            and torch.equal(torch.default_generator.get_state(), self._torch)
            and (accelerator is None or state is None or torch.equal(accelerator.get_state(), state))
        )

    def restore(self) -> None:
        """Restore the generators."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)
        accelerator = accelerator_generator(self._device)
        if accelerator is not None and self._accelerator is not None:
            accelerator.set_state(self._accelerator)


def accelerator_generator(device: torch.device) -> torch.Generator | None:
    """The generator of a CUDA device; None for another device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return None


def plain_generator_states(device: torch.device) -> dict[str, Any]:
    """The states as plain values, for a checkpoint."""
    version, numbers, gauss = random.getstate()
    name, keys, *others = numpy.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, [int(key) for key in keys], *others],
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_plain_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to the states that ``plain_generator_states`` returned."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *others = states["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *others))
    torch.set_rng_state(states["torch"])
    if states["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["device"], device)


def is_generator(value: Any) -> bool:
    """Whether ``value`` is a random number generator of Python, numpy or torch."""
    return isinstance(value, random.Random | numpy.random.Generator | numpy.random.RandomState | torch.Generator)


def generator_state(generator: Any) -> Any:
    """The state of such a generator, hashable; equal states draw the same."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return _hashable(_bit_generator(generator).state)


def set_generator_state(generator: Any, state: Any) -> None:
    """The inverse of ``generator_state``."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    else:
        _bit_generator(generator).state = _unhashable(state)


def _bit_generator(generator: Any) -> Any:
    return generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator._bit_generator


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in value.items())
    return ("array", value.dtype.str, value.tobytes()) if isinstance(value, numpy.ndarray) else value


def _unhashable(value: Any) -> Any:
    if isinstance(value, tuple) and value[:1] == ("array",):
        return numpy.frombuffer(value[2], dtype=value[1]).copy()
    return {key: _unhashable(item) for key, item in value} if isinstance(value, tuple) else value


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
