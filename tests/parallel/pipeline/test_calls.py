"""Several calls of the model in a step: what stages send, what code between the calls sees, and
what is refused."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.errors import PlanError
from lightning_3d.layout import Layout
from lightning_3d.models.parallel_plan import read_plan
from lightning_3d.parallel.pipeline import (
    PipelineState,
    StageBoundary,
    Unknown,
    assign_stages,
    keep_owned,
)
from lightning_3d.parallel.pipeline.unknown import first_unknown
from lightning_3d.parallel.random_streams import RandomState

WIDTH, VOCABULARY = 4, 11
IDS = torch.arange(12).reshape(2, 6) % VOCABULARY


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Owner(nn.Module):
    """A model, and a trained and a frozen module outside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.proj, self.other = Net(), nn.Linear(VOCABULARY, 3), Net()
        self.double()


class Stages:
    """All stages of a pipeline in one process, as the engine runs them; each is a copy with the
    parameters of its own stage."""

    def __init__(self, random: Any = None) -> None:
        random = random or SimpleNamespace(
            enabled=False, layer=lambda index: None, after_call=lambda number: None
        )
        plan = read_plan(Net(), {"pp": dict.fromkeys(("embed", "blocks", "head"))})
        self.whole, self.owners, self.states, self.chunks = Owner(), [], [], []
        for rank in range(2):
            owner, state = Owner(), PipelineState(random)
            assignment = assign_stages(owner.model, plan, Layout(pp=2), "1F1B")
            self.chunks += keep_owned(owner, "model", plan, assignment, rank, state)
            self.owners.append(owner)
            self.states.append(state)

    def run(self, *steps: Callable[[Any], Tensor]) -> Tensor:
        """The loss of the last stage; each of the steps is that of one stage, or one is that of
        both."""
        first, last = steps if len(steps) == 2 else steps * 2
        sent = self._sent_by_first(first)
        self.states[1].calls, self.states[1].boundaries = (
            self.states[0].calls,
            list(self.states[0].boundaries),
        )
        with self.states[1].running(self.chunks[1], sent, forward=True):
            loss = last(self.owners[1])
            self.states[1].end_step()
            return loss

    def _sent_by_first(self, step: Callable[[Any], Tensor]) -> Tensor:
        state = self.states[0]
        state.calls, state.boundaries, state.counts_calls = None, [], True
        with state.running(self.chunks[0], None, forward=True):
            try:
                try:
                    step(self.owners[0])
                except Exception as error:
                    state.end_step(error)
                    raise
                state.end_step()
            except StageBoundary as end:
                return end.hidden
        raise AssertionError("the first stage ends in a boundary")


def contrast(owner: Any) -> Tensor:
    """Three calls of two shapes, one of them frozen; a frozen model before them, and a module
    outside them in between."""
    known = owner.other(IDS).detach().mean(1)
    first = owner.proj(owner.model(IDS).mean(1))
    with torch.no_grad():
        shift = owner.model(IDS[:, :3]).mean((0, 1))
    left, right = F.normalize(first, dim=-1).chunk(2)
    second = owner.proj(owner.model(IDS.flip(1)).mean(1) - shift + known)
    return F.cross_entropy(second @ torch.cat([left, right]).T, torch.arange(2))


def test_loss_and_gradients_of_several_calls_are_those_of_one_process() -> None:
    stages = Stages()
    expected = contrast(stages.whole)
    expected.backward()
    loss = stages.run(contrast)
    loss.backward()
    assert stages.states[0].calls is not None and len(stages.states[0].calls) == 3
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    wanted = {name: parameter.grad for name, parameter in stages.whole.named_parameters()}
    found = {
        name: parameter.grad
        for owner in stages.owners
        for name, parameter in owner.named_parameters()
        if parameter.numel()
    }
    assert set(found) == set(wanted)
    for name, gradient in found.items():
        if wanted[name] is not None:
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-12)


def test_what_is_drawn_between_calls_is_the_same_on_all_stages() -> None:
    random = RandomState(7)
    drawn: list[Tensor] = []

    def step(owner: Any) -> Tensor:
        random.begin(0, 0)
        owner.model(IDS)
        drawn.append(torch.rand(2))
        owner.model(IDS)
        drawn.append(torch.rand(2))
        return owner.model(IDS).sum()

    with random.isolated():
        Stages(random).run(step)
    first, second, first_of_last, second_of_last = drawn
    assert (
        torch.equal(first, first_of_last)
        and torch.equal(second, second_of_last)
        and not torch.equal(first, second)
    )


def test_a_step_that_fails_after_its_last_call_has_one_call() -> None:
    """Where outputs are unknown: the last stage runs the same code with their values."""

    def step(owner: Any) -> Tensor:
        loss = owner.model(IDS).square().mean()
        assert float(loss) > 0
        return loss

    stages = Stages()
    torch.testing.assert_close(stages.run(step), step(stages.whole), rtol=1e-12, atol=1e-12)
    assert stages.states[0].calls is not None and stages.states[0].calls.end.startswith(
        "PlanError: The step needs the value"
    )


def reads_a_value(owner: Any) -> Tensor:
    loss = owner.model(IDS).mean()
    return loss if float(loss) > 1e9 else loss + owner.model(IDS.flip(0)).mean()


def feeds_back(owner: Any) -> Tensor:
    return owner.model(owner.model(IDS).argmax(-1)).mean()


def writes_into_input(owner: Any) -> Tensor:
    ids = IDS.clone()
    ids[:, 1:] = owner.model(IDS)[:, :-1].argmax(-1)
    return owner.model(ids).mean()


def copies_into_input(owner: Any) -> Tensor:
    ids = IDS.clone()
    ids.copy_(owner.model(IDS).argmax(-1))
    return owner.model(ids).mean()


def uses_outside_before(owner: Any) -> Tensor:
    return owner.model(owner.other(IDS).argmax(-1)).mean()


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (
            reads_a_value,
            (
                "calls Net more often than the 1 time .* There it ended after that with PlanError:"
                " The step needs the value"
            ),
        ),
        (feeds_back, "computes an input of Net from the value of the output of Net"),
        (
            writes_into_input,
            (
                "There it ended after that with PlanError: The step writes the value of the output"
                " of Net into a tensor"
            ),
        ),
        (
            copies_into_input,
            (
                "There it ended after that with PlanError: The step writes the value of the output"
                " of Net into a tensor"
            ),
        ),
        (uses_outside_before, "computes an input of Net from the value of 'other'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_only_the_last_stage_knows_is_refused_where_an_earlier_one_needs_it(
    step: Callable[[Any], Tensor], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        Stages().run(step)


def test_another_number_of_calls_than_the_first_stage_has_seen_is_refused() -> None:
    def calls(count: int) -> Callable[[Any], Tensor]:
        return lambda owner: sum((owner.model(IDS).mean() for _ in range(count)), torch.zeros(()))

    with pytest.raises(PlanError, match="calls Net more often than the 2 times"):
        Stages().run(calls(2), calls(3))
    with pytest.raises(
        PlanError,
        match=(
            "On the last pipeline stage, the step calls the model 1 time, but on the first stage 2"
            " times"
        ),
    ):
        Stages().run(calls(2), calls(1))
    stages = Stages()
    stages.run(calls(2))
    state = stages.states[0]
    with state.running(stages.chunks[0], None, forward=True):
        calls(1)(stages.owners[0])
        with pytest.raises(PlanError, match="calls the model 1 time, but called it 2 times"):
            state.end_step()


def test_what_is_computed_from_an_unknown_value_is_unknown() -> None:
    value, known = Unknown("the output"), torch.ones(2)
    made = [
        value.logits[:, -1],
        value["logits"],
        value(1),
        value + known,
        known * value,
        2 / value,
        -value,
        value @ known,
        value > 0,
    ]
    made += [
        known.add(value),
        known.mul(value),
        round(value),
        round(value, 2),
        math.floor(value),
        math.ceil(value),
    ]
    made += [torch.cat([value, known]), torch.where(value > 0, known, 0.0), F.linear(value, known)]
    first, (second, third) = value.chunk(2), value
    assert all(isinstance(each, Unknown) for each in (*made, first, second, third))
    for read in (bool, float, int, len, list):
        with pytest.raises(PlanError, match="needs the value of the output in Python"):
            read(value)
    assert isinstance(copy.copy(value), Unknown)
    text = "<value of the output, which only the last stage knows>"
    assert f"{value:.3f} {value}" == format(value, ">9") + f" {value!s}" == f"{text} {text}"
    with value.profile() as inside:
        assert isinstance(inside, Unknown)
    with pytest.raises(KeyError), value:
        raise KeyError


@dataclass
class Pair:
    left: Any
    right: Any


def test_an_input_that_has_an_unknown_value_inside_is_refused() -> None:
    """In any nesting, dataclasses included."""
    value = Unknown("the output")
    for nested in (
        value,
        [value],
        {"a": (1, value)},
        Pair(IDS, value),
        [Pair(1, {"b": Pair(value, 2)})],
    ):
        (found,) = first_unknown(nested)
        assert found is value
    assert first_unknown([Pair(IDS, {"b": 2}), Pair]) == []
