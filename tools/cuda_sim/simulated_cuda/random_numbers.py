"""Random numbers of simulated devices: they depend on the state of the device's generator, which
goes on. They are not a GPU's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DRAWING = (
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "native_dropout",
    "exponential_",
    "geometric_",
    "multinomial",
    "randperm",
    "log_normal_",
    "cauchy_",
)
"""Operators that draw without being given a generator."""


def twin(generator: torch.Generator) -> torch.Generator:
    """A generator of the host for the next draw of one of a device."""
    made = torch.Generator()
    made.manual_seed((generator.initial_seed() * 1000003 + generator.get_offset()) % 2**63)
    generator.set_offset(generator.get_offset() + 4)
    return made


def drawing(op: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    """``plain`` with the numbers of the device's default generator where no generator is given."""
    takes_generator = any(argument.name == "generator" for argument in op._schema.arguments)

    def run(*args: Any, **kwargs: Any) -> Any:
        on_device = [
            value.device.index
            for value in args
            if isinstance(value, torch.Tensor) and value.is_cuda
        ]
        index = on_device[0] if on_device else torch.cuda.current_device()
        generator = kwargs.get("generator") or torch.cuda.default_generators[index]
        if takes_generator:
            return plain(*args, **{**kwargs, "generator": generator})
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(twin(generator).initial_seed())
        try:
            return plain(*args, **kwargs)
        finally:
            torch.set_rng_state(state)

    return run
