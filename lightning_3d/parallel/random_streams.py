"""Dropout streams that depend on what is computed, not on where.

The random state of a device belongs to (seed, step, micro-batch, layer, region). On a replicated
tensor all tensor-parallel ranks draw the same numbers, so replicas stay equal bit by bit; inside a
region each rank draws its own for its own heads and columns. Nothing is saved: a recomputed block
sets the same states again.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.compat.torch_random import EagerRandomness, default_generator, state_bytes

_MASK = (1 << 64) - 1
_ALL_RANKS = 0


class Generators:
    """The states of the random number generators of torch (host and device), numpy and Python at
    the time of creation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        numpy = sys.modules.get("numpy")
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy = numpy.random.get_state() if numpy else None
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class RandomState:
    """Reseeds the default generator of a device during a forward; costs two integer hashes and one
    seeding each time.

    Args:
        seed: of the run.
        tp_rank: this rank's tensor-parallel coordinate.
        device: whose generator dropout draws from.
        enabled: False makes every call a no-op, for models without dropout.
        in_stages: whether several pipeline stages run the step. What it draws itself, from any
            generator, must be the same on all of them, also where the model draws nothing.

    Attributes:
        device: as given.
        deals_sequence: between its regions a block works on another part of the sequence on each
            tensor-parallel rank.
    """

    def __init__(
        self,
        seed: int,
        *,
        tp_rank: int = 0,
        device: torch.device | str = "cpu",
        enabled: bool = True,
        in_stages: bool = False,
    ) -> None:
        self.enabled = enabled
        self._in_stages = in_stages
        self._seed = seed
        self._tp_rank = tp_rank
        self.device = torch.device(device)
        self._key = 0
        self._key_of_graphs = _host_tensor(0)
        self._in_graphs = False
        self.deals_sequence = False

    @classmethod
    def for_model(
        cls,
        module: nn.Module,
        *,
        seed: int,
        tp_rank: int = 0,
        device: torch.device | str = "cpu",
        in_stages: bool = False,
    ) -> RandomState:
        """Streams for `module`, enabled unless it is known to use no dropout."""
        return cls(
            seed,
            tp_rank=tp_rank,
            device=device,
            enabled=may_use_dropout(module),
            in_stages=in_stages,
        )

    def begin(self, step: int, micro_batch: int) -> None:
        """Start one micro-batch: before its forward, and again before any backward that recomputes
        parts of it.

        Args:
            step: optimizer step.
            micro_batch: index in the global batch, so that data-parallel ranks differ.
        """
        if self.enabled or self._in_stages:
            self._key = _mix(_mix(_mix(0, self._seed), step), micro_batch)
            # a new one: the backward of the last micro-batch may still need its own
            self._key_of_graphs = _host_tensor(self._key)
            self._start_step("layer -1")

    def layer(self, index: int) -> None:
        """Start block `index`, or what comes before the blocks (-1): the same stream on all
        tensor-parallel ranks unless blocks split the sequence.
        """
        if self.enabled:
            self._set(
                f"layer {index}",
                self._tp_rank + 1 if self.deals_sequence and index >= 0 else _ALL_RANKS,
            )

    def after_call(self, number: int) -> None:
        """Start what the user's step computes after call `number` of the model: the same stream on
        all stages of a pipeline."""
        if self.enabled or self._in_stages:
            self._start_step(f"after call {number}")

    def inside(self, name: str) -> Stream:
        """The stream of the region after the column-parallel layer `name`: another one on each
        tensor-parallel rank."""
        return Stream(self, name, self._tp_rank + 1)

    def outside(self, name: str, *, alike: bool = True) -> Stream:
        """The stream after the row-parallel layer `name`: the same on all tensor-parallel ranks,
        where they are `alike`."""
        return Stream(self, name, _ALL_RANKS if alike else self._tp_rank + 1)

    def start(self, stream: Stream) -> None:
        """Draw from a stream of this object from here on."""
        if not self.enabled:
            return
        if self._in_graphs and torch.compiler.is_compiling():
            random_state(self._key_of_graphs, stream.place, self.device)
        else:
            default_generator(self.device).manual_seed(_seed(self._key, stream.number, stream.rank))

    def compile(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.compile` for code that starts streams: it draws what it draws uncompiled."""
        compiled = torch.compile(forward, backend=self._backend)

        def call(*args: Any, **kwargs: Any) -> Any:
            outside, self._in_graphs = self._in_graphs, True
            try:
                return compiled(*args, **kwargs)
            finally:
                self._in_graphs = outside

        # A user who compiles the whole model would otherwise get all of it in graphs of another
        # backend.
        return torch.compiler.disable(call, recursive=False)

    @cached_property
    def _backend(self) -> EagerRandomness:
        return EagerRandomness(self.device, torch.ops.lightning_3d.random_state.default)

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Restore the random state afterwards, so that a sampler's shuffle, for example, stays
        equal on all ranks."""
        if self._in_stages:
            states = Generators(self.device)
            try:
                yield
            finally:
                states.restore()
            return
        if not self.enabled:
            yield
            return
        generator = default_generator(self.device)
        before = generator.get_state()
        try:
            yield
        finally:
            generator.set_state(before)

    def _start_step(self, name: str) -> None:
        """Start what the user's step draws itself: the last stage draws more than the others, which
        must not shift what follows."""
        self._set(name, _ALL_RANKS)
        if self._in_stages:
            seed = _seed(self._key, _hash(name), _ALL_RANKS)
            random.seed(seed)
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(seed & 0xFFFFFFFF)
            if self.device.type != "cpu":
                torch.default_generator.manual_seed(seed)

    def _set(self, name: str, rank: int) -> None:
        default_generator(self.device).manual_seed(_seed(self._key, _hash(name), rank))


class ModelStreams(RandomState):
    """Streams of a model outside the pipelined one. They start in its training mode only, where it
    draws: elsewhere the generator stays as it is on stages that do not have this model.

    Args:
        random: streams of the pipelined model.
        module: the other model.
        name: its name, so that its layers draw other numbers than those of the same names in the
            pipelined model.
    """

    def __init__(self, random: RandomState, module: nn.Module, name: str) -> None:
        super().__init__(
            random._seed, tp_rank=random._tp_rank, device=random.device, enabled=random.enabled
        )
        self._random, self._module, self._name = random, module, name

    def inside(self, name: str) -> Stream:
        return super().inside(f"{self._name}.{name}")

    def outside(self, name: str, *, alike: bool = True) -> Stream:
        return super().outside(f"{self._name}.{name}", alike=alike)

    def start(self, stream: Stream) -> None:
        if self._module.training:
            self._random.start(stream)


class Stream:
    """Random numbers of a place in the model, in every micro-batch others.

    Attributes:
        number: of the place.
        rank: number of the tensor-parallel rank, from 1; 0 for a stream that is the same on all
            ranks.
        place: both as a tensor in host memory. As numbers they would be part of a compiled graph,
            and each layer would need its own.
    """

    def __init__(self, random: RandomState, name: str, rank: int) -> None:
        self._random = random
        self.number, self.rank = _hash(name), rank
        self.place = _host_tensor(self.number, rank)

    def start(self) -> None:
        """Draw from this stream from here on."""
        self._random.start(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Stream:
        """A copied layer draws what the layer draws."""
        return self


@torch.library.custom_op("lightning_3d::random_state", mutates_args=())
def random_state(key: Tensor, place: Tensor, device: torch.device) -> Tensor:
    """The state of a generator at the beginning of a stream in the micro-batch `key`; compiled
    graphs draw from it from there on."""
    generator = torch.Generator(device)
    generator.manual_seed(_seed(int(key.item()), *(int(number) for number in place.tolist())))
    return generator.get_state()


@random_state.register_fake
def _(key: Tensor, place: Tensor, device: torch.device) -> Tensor:
    return key.new_empty(state_bytes(device), dtype=torch.uint8)


def _host_tensor(*numbers: int) -> Tensor:
    """Numbers of 64 bits in host memory, modulo 2**64."""
    return torch.tensor(
        [number - (number >> 63 << 64) for number in numbers], dtype=torch.int64, device="cpu"
    )


def may_use_dropout(module: nn.Module) -> bool:
    """True if a forward of `module` may draw random numbers.

    This is decided from its dropout layers, from probabilities among its attributes and in a
    Transformers configuration, and from the names in the code of the user's own classes.
    """
    return any(
        _drops(child)
        or _has_probability(vars(child))
        or _has_probability(getattr(getattr(child, "config", None), "__dict__", {}))
        for child in module.modules()
    ) or any(_mentions_dropout(kind) for kind in {type(child) for child in module.modules()})


def draws_numbers(layer: nn.Module) -> bool:
    """True if the forward of a single layer may draw random numbers, as far as its class and
    attributes show; its configuration may be that of a whole model."""
    return _drops(layer) or _has_probability(vars(layer)) or _mentions_dropout(type(layer))


def _drops(layer: nn.Module) -> bool:
    return "Drop" in type(layer).__name__ and getattr(layer, "p", 0) > 0


def _has_probability(values: dict[str, Any]) -> bool:
    # Configurations of language models also hold the dropout of classification heads that are not
    # there.
    return any(
        "drop" in name.lower()
        and "classif" not in name.lower()
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and value > 0
        for name, value in values.items()
    )


def _mentions_dropout(kind: type[nn.Module]) -> bool:
    """True if the code of a forward mentions random numbers. PyTorch's, Transformers' and PEFT's
    modules are known by their attributes."""
    if kind.__module__.startswith(("torch.", "transformers.", "peft.", "lightning_3d.")):
        return False
    code = getattr(kind.forward, "__code__", None)
    if code is None:
        return True
    return any(
        "drop" in name or "bernoulli" in name or "rand" in name
        for name in (*code.co_names, *_strings(code.co_consts))
    )


def _strings(constants: tuple[Any, ...]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from _strings(constant)


@lru_cache(maxsize=65536)
def _hash(name: str) -> int:
    """Hash of a name that is the same in every process, unlike Python's."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _seed(key: int, number: int, rank: int) -> int:
    return _mix(_mix(key, number), rank)


def _mix(state: int, value: int) -> int:
    """One step of SplitMix64 (Steele, Lea and Flood 2014): near inputs give unrelated outputs, in
    the low bits too."""
    z = (state + (value & _MASK) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def global_seed() -> int:
    """The seed that `seed_everything` set; 0 if it was not called."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))
