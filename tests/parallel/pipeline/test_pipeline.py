"""The pipeline engine by itself: any schedule gives the gradients of one process."""

import copy

import pytest
import torch
from ranks import run_ranks
from tiny_pipelines import LENGTH, NO_DROPOUT, ROWS, VOCABULARY, CountedStep, Owner, loss_of, tiny
from torch import nn

from lightning_3d.errors import PlanError
from lightning_3d.layout import Layout
from lightning_3d.layout.schedules import SCHEDULES
from lightning_3d.models.parallel_plan import read_plan
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.pipeline import PipelineEngine, PipelineState, assign_stages, keep_owned
from lightning_3d.parallel.pipeline.schedule import Kind, forward_order, training_order


def run_schedule(
    family: str, schedule: str, vp: int, micro_batches: int, layers: int
) -> tuple[float, list[float], int]:
    """Largest gradient error on this rank, the losses (last stage), and how often the user's step
    was called."""
    world = torch.distributed.get_world_size()
    layout = Layout(pp=world, vp=vp)
    mesh = Mesh(layout)
    mesh.warm_up()
    full = tiny(family, layers)
    user = Owner(copy.deepcopy(full))
    plan = read_plan(user.model)
    assignment = assign_stages(user.model, plan, layout, schedule)
    state = PipelineState(NO_DROPOUT)
    chunks = keep_owned(user, "model", plan, assignment, mesh.index("pp"), state)
    parameters = {chunk.stage: list(user.parameters()) for chunk in chunks}
    engine = PipelineEngine(
        mesh,
        assignment,
        parameters,
        schedule=schedule,
        vp=vp,
        state=state,
        device=torch.device("cpu"),
        after_backward=lambda parameters, stage, last: None,
    )
    errors, losses, calls = [], [], 0
    for rows in (ROWS, ROWS + 1):  # batches whose shape differs from step to step
        user.zero_grad()
        full.zero_grad()
        tokens = torch.randint(
            VOCABULARY, (micro_batches, rows, LENGTH), generator=torch.Generator().manual_seed(rows)
        )

        step = CountedStep(user, tokens)
        engine.train(micro_batches, rows, step)
        losses, calls = step.losses, calls + step.calls
        for micro_batch in tokens:
            loss_of(full(input_ids=micro_batch).logits, micro_batch).backward()
        expected = dict(full.named_parameters())
        errors += [
            (p.grad - expected[name].grad).abs().max().item()
            for name, p in user.model.named_parameters()
        ]
    return max(errors), losses, calls


CASES = [(s.name, 2, s.default_vp, 4) for s in SCHEDULES.values()] + [
    ("1F1B", 4, 1, 5),
    ("ZBVZeroBubble", 4, 2, 8),
    ("Interleaved1F1B", 4, 2, 8),
]


@pytest.mark.parametrize(("schedule", "pp", "vp", "micro_batches"), CASES)
def test_gradients_equal_one_process(schedule: str, pp: int, vp: int, micro_batches: int) -> None:
    layers = pp * vp + 1
    for error, _, calls in run_ranks(
        run_schedule, pp, "llama", schedule, vp, micro_batches, layers
    ):
        assert error < 1e-13
        assert calls == 2 * vp * micro_batches, (
            "the user's step runs exactly once per micro-batch and stage"
        )


@pytest.mark.parametrize("family", ["gemma3", "gpt_neox"])
def test_families_that_a_shortened_list_gets_wrong(family: str) -> None:
    assert (
        max(error for error, _, _ in run_ranks(run_schedule, 2, family, "ZBVZeroBubble", 2, 4, 5))
        < 1e-13
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_micro_batch_runs_once_forward_and_once_backward(name: str) -> None:
    info = SCHEDULES[name]
    order = training_order(name, 2, info.default_vp, 4)
    stages = range(2 * info.default_vp)
    done = {
        kind: {(a.stage, a.micro_batch) for actions in order for a in actions if a.kind is kind}
        for kind in Kind
    }
    everything = {(stage, i) for stage in stages for i in range(4)}
    assert done[Kind.FORWARD] == everything
    assert done[Kind.BACKWARD] | done[Kind.BACKWARD_INPUT] == everything
    assert done[Kind.BACKWARD_INPUT] == done[Kind.BACKWARD_WEIGHT]
    assert sum(len(actions) for actions in order) == sum(len(found) for found in done.values())
    assert {
        (a.stage, a.micro_batch)
        for actions in forward_order(name, 2, info.default_vp, 4)
        for a in actions
    } == everything


def call_outside_a_step() -> str:
    mesh = Mesh(Layout(pp=2))
    user = Owner(tiny("llama", 2))
    plan = read_plan(user.model)
    assignment = assign_stages(user.model, plan, mesh.layout, "1F1B")
    keep_owned(user, "model", plan, assignment, mesh.index("pp"), PipelineState(NO_DROPOUT))
    with pytest.raises(PlanError) as refused:
        user.step(torch.zeros(1, 4, dtype=torch.long))
    return str(refused.value)


def test_a_call_outside_a_step_is_refused() -> None:
    assert all("outside a step" in message for message in run_ranks(call_outside_a_step, 2))


def test_a_stub_answers_for_the_plain_attributes_of_its_block() -> None:
    """Some models ask each block for its attention kind before they call it."""
    from lightning_3d.parallel.pipeline.gates import AbsentLayer

    block = nn.Linear(2, 2)
    block.attention_type, block.layer_idx, block.hidden_cache = (
        "sliding_attention",
        3,
        torch.ones(2),
    )
    stub = AbsentLayer("layers.3", block, 3, PipelineState(NO_DROPOUT))
    assert (stub.attention_type, stub.layer_idx, stub.training) == ("sliding_attention", 3, True)
    assert not hasattr(stub, "hidden_cache") and list(stub.parameters()) == []
