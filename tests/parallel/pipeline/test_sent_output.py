"""A stage does not hold the outputs that it has sent, except those whose values something else
needs; gradients stay exact."""

import copy
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.layout import Layout
from lightning_3d.models.parallel_plan import read_plan
from lightning_3d.parallel import host_channel
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.pipeline import PipelineEngine, PipelineState, assign_stages, keep_owned
from lightning_3d.parallel.pipeline.sent_output import graph_only
from lightning_3d.tracing.recorder import Recorder
from lightning_3d.tracing.trace import BACKWARD, INPUT_GRADIENT

ROWS, LENGTH, VOCABULARY, WIDTH, BLOCKS, MICRO_BATCHES = 2, 6, 32, 8, 5, 8
OUTPUT_BYTES = ROWS * LENGTH * WIDTH * 8
KINDS = (
    "plain",
    "saved",
    "kept",
    "part",
    "passes on",
    "recomputed",
    "recomputed and saved",
    "frozen",
)


class Block(nn.Module):
    """Ends in an operation that does with the output what `kind` says."""

    def __init__(self, kind: str, index: int) -> None:
        super().__init__()
        self.kind, self.index = kind, index
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(kind != "frozen" or index > 1)
        self.kept: list[tuple[Tensor, Tensor]] = []

    def forward(self, hidden: Tensor) -> Tensor:
        if self.kind.startswith("recomputed"):
            return checkpoint(self.compute, hidden, use_reentrant=False)
        return self.compute(hidden)

    def compute(self, hidden: Tensor) -> Tensor:
        mixed = hidden + torch.tanh(self.layer(hidden))
        if self.kind.endswith("saved"):
            return torch.tanh(mixed)  # whose backward needs its output
        if self.kind == "kept":
            self.kept.append((mixed, mixed.detach().clone()))
        if self.kind == "part":
            return torch.cat([mixed, mixed]).narrow(0, 0, len(mixed))
        if self.kind == "passes on" and self.index % 2:
            return hidden.view_as(hidden)
        return mixed


class Toy(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(kind != "frozen")
        self.blocks = nn.ModuleList(Block(kind, index) for index in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Step:
    """Plays the user's training step and what the strategy gives the engine."""

    def __init__(self, model: nn.Module, tokens: Tensor) -> None:
        self.model, self.tokens = model, tokens

    def enter(self, micro_batch: int) -> None:
        """Nothing random here."""

    def __call__(self, micro_batch: int) -> Tensor:
        rows = self.tokens[micro_batch]
        return nn.functional.cross_entropy(self.model(rows).flatten(0, 1), rows.flatten())


class Watch(Recorder):
    """Counts, at the start of every backward, the bytes of all outputs of blocks that are still
    alive."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.held: list[int] = []
        self._outputs: list[weakref.ref[torch.UntypedStorage]] = []
        for block in blocks:
            block.register_forward_hook(self._returned)

    def _returned(self, block: nn.Module, args: Any, output: Tensor) -> None:
        self._outputs.append(weakref.ref(output.untyped_storage()))

    def span(self, kind: str, stage: int | None = None, micro_batch: int | None = None) -> Any:
        if kind in (BACKWARD, INPUT_GRADIENT):
            alive = {
                id(storage): storage.nbytes()
                for output in self._outputs
                if (storage := output()) is not None
            }
            self.held.append(sum(alive.values()))
        return super().span(kind, stage, micro_batch)


def built(kind: str, vp: int, schedule: str) -> tuple[nn.Module, nn.Module, PipelineEngine, Watch]:
    """(whole model, this rank's part of a copy of it, its engine, what watches it)"""
    mesh = Mesh(Layout(pp=torch.distributed.get_world_size(), vp=vp))
    mesh.warm_up()
    torch.manual_seed(0)
    full = Toy(kind).double()
    owner = nn.Module()
    owner.model = copy.deepcopy(full)
    plan = read_plan(owner.model, {"pp": dict.fromkeys(("embed", "blocks", "head"))})
    assignment = assign_stages(owner.model, plan, mesh.layout, schedule)
    state = PipelineState(SimpleNamespace(enabled=False, layer=lambda index: None))  # type: ignore[arg-type]
    chunks = keep_owned(owner, "model", plan, assignment, mesh.index("pp"), state)
    watch = Watch(
        nn.ModuleList(owner.model.blocks[chunk.layers[-1]] for chunk in chunks if not chunk.is_last)
    )
    engine = PipelineEngine(
        mesh,
        assignment,
        {chunk.stage: [p for p in owner.parameters() if p.requires_grad] for chunk in chunks},
        schedule=schedule,
        vp=vp,
        state=state,
        device=torch.device("cpu"),
        after_backward=lambda parameters, stage, last: None,
        recorder=watch,
    )
    return full, owner.model, engine, watch


def trained(schedule: str, vp: int) -> dict[str, float]:
    """Largest error of a gradient, by kind of block."""
    found = {}
    tokens = torch.randint(
        VOCABULARY, (MICRO_BATCHES, ROWS, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    for kind in KINDS:
        full, mine, engine, _ = built(kind, vp, schedule)
        engine.train(MICRO_BATCHES, 0, Step(mine, tokens))
        for micro_batch in range(MICRO_BATCHES):
            Step(full, tokens)(micro_batch).backward()
        expected = dict(full.named_parameters())
        pairs = [(p.grad, expected[name].grad) for name, p in mine.named_parameters()]
        assert all((got is None) == (wanted is None) for got, wanted in pairs), kind
        found[kind] = max(
            (got - wanted).abs().max().item() for got, wanted in pairs if got is not None
        )
        kept = [pair for block in mine.blocks for pair in vars(block).get("kept", ())]
        assert all(torch.equal(*pair) for pair in kept) and bool(kept) == (kind == "kept")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "vp"), [("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)]
)
def test_gradients_are_exact_whatever_else_needs_the_output(schedule: str, vp: int) -> None:
    for found in run_ranks(trained, 2, schedule, vp):
        assert all(error < 1e-13 for error in found.values()), found


def held(kind: str, shared_memory: bool = False) -> int:
    """Most outputs alive at the start of a backward."""
    connect = (
        nullcontext() if shared_memory else patch.object(host_channel, "connect", return_value=None)
    )
    with connect:
        return _held(kind)


def _held(kind: str) -> int:
    _, mine, engine, watch = built(kind, 1, "1F1B")
    tokens = torch.randint(
        VOCABULARY, (MICRO_BATCHES, ROWS, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    engine.train(MICRO_BATCHES, 0, Step(mine, tokens))
    assert len(watch.held) == MICRO_BATCHES
    assert all(size % OUTPUT_BYTES == 0 for size in watch.held)
    return max(watch.held) // OUTPUT_BYTES


def test_only_messages_that_may_be_under_way_are_held() -> None:
    """In 1F1B, stage s of p has p - s micro-batches in flight when a backward starts, and has just
    sent the last of them."""
    assert run_ranks(held, 4, "plain") == [1, 1, 1, 0]
    assert run_ranks(held, 4, "recomputed") == [1, 1, 1, 0]


def test_nothing_is_held_that_was_written_to_shared_memory() -> None:
    assert run_ranks(held, 4, "plain", shared_memory=True) == [0, 0, 0, 0]


def test_outputs_that_a_backward_needs_are_held() -> None:
    assert run_ranks(held, 4, "saved") == [4, 3, 2, 0]


def test_the_place_in_the_graph_has_shape_and_gradient_but_no_values() -> None:
    source = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    output = source * 2
    place, storage = graph_only(output), weakref.ref(output.untyped_storage())
    del output
    assert storage() is None
    assert (
        place.shape == (3, 4)
        and place.dtype == torch.float64
        and place.untyped_storage().nbytes() == 8
    )
    gradient = torch.randn(3, 4, dtype=torch.float64)
    torch.autograd.backward(place, gradient)
    assert source.grad is not None and torch.equal(source.grad, 2 * gradient)
