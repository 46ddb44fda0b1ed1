"""Gradients that are sent while the last backward of a stage still runs."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
from counting import Call, arriving_at_once, recording, when_a_gradient_arrives
from handmade_gradients import MODES
from parity import Cell
from ranks import run_ranks
from reference import reference
from sweeps import by_default
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import replicated
from lightning_3d.parallel.zero import make_backend, trained
from lightning_3d.parallel.zero.gradients import ReplicaSums
from lightning_3d.parallel.zero.trained import Wave, find_waves

COMMON = ("0", "1", "1 scattered", "2", "2 scattered")
WIDTH, LAYERS = 8, 6
BUCKET = 2 * 4 * (WIDTH * WIDTH + WIDTH)  # two layers


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def numbered(
    waves: list[Wave], named: list[nn.Parameter]
) -> list[tuple[int | None, bool, list[int]]]:
    places = {id(parameter): place for place, parameter in enumerate(named)}
    return [
        (wave.stage, wave.is_early, [places[id(parameter)] for parameter in wave.parameters])
        for wave in waves
    ]


def test_early_waves_come_from_the_end_of_the_model_and_fit_in_a_bucket() -> None:
    one = parameters(10, 4, 4, 4, 20, 3, 3)
    waves = find_waves(
        [one], one, late=lambda parameter: False, early=lambda parameter: True, early_bytes=4 * 8
    )
    assert numbered(waves, one) == [
        (0, True, [6, 5]),
        (0, True, [4]),  # larger than a bucket
        (0, True, [3, 2]),
        (0, True, [1]),
        (0, False, [0]),  # the last run is complete when the backward is over
        (None, False, []),
    ]


def test_what_is_used_twice_or_elsewhere_or_may_not_be_early_waits() -> None:
    one = parameters(8, 8, 8, 8, 8, 8)
    # the first is tied across the stages, the fourth within one
    stages = [one[:3], [*one[3:], one[0], one[3]]]
    waves = find_waves(
        stages, one[:5], late=lambda p: p is one[1], early=lambda p: p is not one[4], early_bytes=1
    )
    assert numbered(waves, one) == [(1, False, [3, 4]), (0, False, [0, 2]), (None, False, [1])]
    everything = [place for _, _, places in numbered(waves, one) for place in places]
    assert sorted(everything) == [0, 1, 2, 3, 4]
    without = find_waves(stages, one, late=lambda p: False, early=lambda p: True, early_bytes=None)
    assert not any(wave.is_early for wave in without) and len(without) == 3


def test_types_have_buckets_of_their_own() -> None:
    one = parameters(8, 8) + parameters(8, 8, dtype=torch.float64)
    mixed = [one[0], one[2], one[1], one[3]]
    waves = find_waves([mixed], mixed, late=lambda p: False, early=lambda p: True, early_bytes=8)
    assert numbered(waves, one) == [
        (0, True, [3]),
        (0, True, [1]),
        (0, False, [0, 2]),
        (None, False, []),
    ]


class Layers(nn.Module):
    """Layers one after the other; with `shared`, the first is used again at the end, each use in a
    reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, *, shared: bool = False) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if shared:
            for layer in (self.layers[-1], self.layers[-1]):
                x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=True)
        return x


def model() -> Layers:
    torch.manual_seed(3)
    return Layers()


def batch(step: int, rank: int, micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro_batch)
    return torch.randn(4, WIDTH, generator=generator)


IN_ONE_TENSOR = ("1", "2")
"""Modes whose gradients are reduced in one tensor, which is not made before the backward is
over."""


def train_layers(
    mode: str,
    *,
    overlap: bool = True,
    first_overlaps: bool = True,
    shared_from: int | None = None,
    steps: int = 3,
    shard: int | None = None,
    bucket: int = BUCKET,
) -> dict[str, Any]:
    """Train over all ranks; returns the weights, and how many reductions (and how many of them over
    replicas) were under way when the first layer's backward ended.

    Args:
        first_overlaps: False as with tp, where the gradients of the first step are compared.
        shared_from: step from which on a parameter is used in several segments of a checkpoint.
        shard: ranks of a shard group.
        bucket: bytes of a bucket.
    """
    ranks = dist.get_world_size()
    mesh = Mesh(Layout(dp=ranks))
    mesh.shard_data(shard)
    replicas = tuple(dist.get_process_group_ranks(mesh.replica_group)) if mesh.replica_group else ()
    module = model()
    specs = {name: replicated(name, tuple(p.shape), 1) for name, p in module.named_parameters()}
    backend = make_backend(MODES[mode], mesh, specs, bucket_bytes=bucket)
    optimizer = backend.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    assert isinstance(optimizer, torch.optim.Optimizer)
    sent: list[int] = []
    across: list[int] = []

    def note(calls: list[Call]) -> None:
        sent.append(_reductions(calls))
        across.append(sum(call.ranks == replicas for call in calls))

    for step in range(steps):
        shared = shared_from is not None and step >= shared_from
        with recording() as recorder:
            first = module.layers[0].weight
            hook = when_a_gradient_arrives(first, partial(note, recorder.calls))
            with backend.gradient_scope(overlap=overlap and (first_overlaps or step > 0)):
                for micro_batch in range(2):
                    loss = (
                        module(
                            batch(step, dist.get_rank(), micro_batch).requires_grad_(),
                            shared=shared,
                        )
                        .square()
                        .mean()
                    )
                    if micro_batch == 1:
                        backend.before_last_backward(0)
                    loss.backward()
                    backend.after_backward(module.parameters(), stage=0, last=micro_batch == 1)
                backend.reduce(1.0 / (2 * ranks))
            hook.remove()
            backend.step()
    backend.make_whole()
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    backend.teardown()
    mesh.destroy()
    return {"weights": weights, "sent": sent, "across": across}


def _reductions(calls: Any) -> int:
    counted = Counter(call.name for call in calls)
    return counted["all_reduce"] + counted["reduce"]


def one_process(ranks: int, *, shared_from: int | None = None, steps: int = 3) -> dict[str, Tensor]:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        shared = shared_from is not None and step >= shared_from
        for rank in range(ranks):
            for micro_batch in range(2):
                loss = (
                    module(batch(step, rank, micro_batch).requires_grad_(), shared=shared)
                    .square()
                    .mean()
                )
                (loss / (2 * ranks)).backward()
        optimizer.step()
    return dict(module.named_parameters())


def worst(result: dict[str, Any], expected: dict[str, Tensor]) -> float:
    return max(
        (result["weights"][name] - value).abs().max().item() for name, value in expected.items()
    )


@pytest.mark.parametrize("ranks", by_default([2, 4], 1))
@pytest.mark.parametrize("mode", COMMON)
def test_ranks_train_as_one_process_and_send_inside_the_backward(mode: str, ranks: int) -> None:
    expected = one_process(ranks)
    first_overlaps = mode != "0"
    early, late = (
        run_ranks(train_layers, ranks, mode, overlap=overlap, first_overlaps=first_overlaps)
        for overlap in (True, False)
    )
    for result, other in zip(early, late, strict=True):
        assert worst(result, expected) < 2e-6
        assert worst(result, other["weights"]) == 0.0, "the time of sending changes no bit"
        # In each step two backwards reach the first layer. The first step finds out whether
        # gradients arrive once.
        assert result["sent"][:2] == [0, 0] and result["sent"][2] == 0
        if mode in IN_ONE_TENSOR:
            assert not any(result["sent"])
        else:
            assert result["sent"][3] >= 2, (
                "of three buckets two were sent before the backward was over"
            )
        assert all(count == 0 for count in other["sent"])


def train_in_groups(mode: str, **options: Any) -> dict[str, Any]:
    with arriving_at_once():
        return train_layers(mode, shard=2, bucket=BUCKET // 2, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "ranks"),
    by_default([(mode, n) for n in (4, 6) for mode in ("1 scattered", "2 eager")], 0, 1),
)
def test_a_shard_is_summed_over_its_replicas_inside_the_last_backward(
    mode: str, ranks: int
) -> None:
    """With three replicas, a bit of a sum depends on the place of its element in the message."""
    expected = one_process(ranks)
    early, late = (
        run_ranks(train_in_groups, ranks, mode, overlap=overlap) for overlap in (True, False)
    )
    for result, other in zip(early, late, strict=True):
        assert worst(result, expected) < 2e-6
        assert worst(result, other["weights"]) == 0.0, "the time of sending changes no bit"
        assert result["across"][0::2] == [0, 0, 0], "of each step, only the last backward"
        assert all(count >= 1 for count in result["across"][3::2])
        assert not any(other["across"])


@pytest.mark.parametrize("mode", ["1 scattered", "2 eager"])
def test_late_gradients_are_summed_over_the_replicas_too(mode: str) -> None:
    """A second gradient in a backward comes after the bucket was sent."""
    expected = one_process(4, shared_from=0)
    for result in run_ranks(train_in_groups, 4, mode, shared_from=0):
        assert worst(result, expected) < 2e-6


class Message:
    """A message of the shard group that arrives when it is told to."""

    def __init__(self) -> None:
        self.arrived = False

    def is_completed(self) -> bool:
        return self.arrived

    def wait(self) -> None:
        self.arrived = True


def sums_in_order() -> list[list[float]]:
    """Three sums whose messages arrive in another order: after each call, the tensors so far."""
    own = dist.get_rank() + 1.0
    sums = ReplicaSums(dist.group.WORLD, torch.device("cpu"))
    messages, parts, seen = (
        [Message(), Message(), Message()],
        [torch.tensor([own * 10**place]) for place in range(3)],
        [],
    )
    with arriving_at_once():
        messages[1].arrived = True
        for message, part in zip(messages[:2], parts[:2], strict=True):
            sums.start_after([message], [part])
        seen.append([part.item() / own for part in parts])
        messages[0].arrived = True
        sums.start_after([messages[2]], [parts[2]])
        seen.append([part.item() / own for part in parts])
        sums.finish()
        seen.append([part.item() for part in parts])
    assert all(message.arrived for message in messages)
    return seen


def test_sums_over_replicas_start_in_the_order_of_their_messages() -> None:
    """None starts before the one given before it, or before its message has arrived; none keeps the
    host waiting."""
    for rank, (first, second, last) in enumerate(run_ranks(sums_in_order, 2)):
        assert first == [1, 10, 100]
        assert second == pytest.approx([3 / (rank + 1), 30 / (rank + 1), 100])
        assert last == [3, 30, 300]


@pytest.mark.parametrize("first_overlaps", [True, False])
@pytest.mark.parametrize("mode", by_default(["0", "1", "1 scattered"], 0))
def test_parameters_that_get_two_gradients_in_a_backward_are_sent_when_it_is_over(
    mode: str, first_overlaps: bool
) -> None:
    """Segments of a reentrant checkpoint each give one."""
    expected = one_process(2, shared_from=0)
    for result in run_ranks(train_layers, 2, mode, first_overlaps=first_overlaps, shared_from=0):
        assert worst(result, expected) < 2e-6
        assert all(count == 0 for count in result["sent"])


def refuses_later() -> str:
    with pytest.raises(RuntimeError) as error:
        train_layers("0", shared_from=2)
    return str(error.value)


def test_a_second_gradient_that_comes_only_later_is_an_error() -> None:
    for message in run_ranks(refuses_later, 2):
        assert "got a second gradient in one backward after its gradient was sent" in message
        assert "use_reentrant=False" in message


def other_order() -> str:
    mesh = Mesh(Layout(dp=2))
    module = nn.Module()
    for name in ("a", "b") if dist.get_rank() == 0 else ("b", "a"):
        module.register_parameter(name, nn.Parameter(torch.zeros(3)))
    specs = {name: replicated(name, (3,), 1) for name in ("a", "b")}
    backend = make_backend(MODES["0"], mesh, specs)
    with pytest.raises(ConfigError) as error:
        backend.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    mesh.destroy()
    return str(error.value)


def test_another_order_of_parameters_on_another_rank_is_refused() -> None:
    for message in run_ranks(other_order, 2):
        assert (
            "another order on other data-parallel ranks" in message
            and "from a list, for example, not from a set" in message
        )


CELLS = [
    Cell(dp=2),
    Cell(tp=2, dp=2),
    Cell(tp=2, dp=2, options=(("sequence_parallel", False),)),
    Cell(tp=2, pp=2, dp=2),
    Cell(pp=2, dp=2, schedule="Interleaved1F1B"),
    Cell(pp=2, dp=2, schedule="ZBVZeroBubble"),
    Cell(dp=2, cp=2),
    # The ranks that sum gradients are those of ring attention, or share the experts.
    Cell(cp=2),
    Cell(cp=2, zero=2, options=(("zero_reduce", "step"), ("zero_reduce_scatter", True))),
    Cell(model="mixtral", dp=2, ep=2),
    Cell(
        model="mixtral",
        dp=4,
        ep=2,
        zero=1,
        options=(("zero_reduce_scatter", True), ("zero_shard_size", 2)),
    ),
    Cell(dp=4, zero=1, options=(("zero_reduce_scatter", True),)),
    Cell(dp=4, zero=1, options=(("zero_reduce_scatter", True), ("zero_shard_size", 2))),
    Cell(pp=2, dp=2, zero=1, options=(("zero_reduce_scatter", True),)),
    Cell(tp=2, dp=2, zero=2, options=(("zero_reduce", "step"), ("zero_reduce_scatter", True))),
    Cell(model="mixtral", dp=4, ep=2),
    Cell(model="gemma3", pp=2, dp=2),
    # The replicas of a shard are the ranks that have the same experts.
    Cell(
        "qwen3_moe",
        tp=2,
        dp=4,
        ep=4,
        zero=2,
        options=(("zero_reduce", "step"), ("zero_reduce_scatter", True), ("zero_shard_size", 2)),
    ),
]


def train_with_small_buckets(*args: Any, **options: Any) -> tuple[parity.Part, int]:
    """Train as the strategy does, with buckets of a few layers' gradients. Returns also the number
    of early waves of this rank."""
    defaults = make_backend.__kwdefaults__
    waves: list[Wave] = []

    def found(*arguments: Any, **keywords: Any) -> list[Wave]:
        waves[:] = find_waves(*arguments, **keywords)
        return list(waves)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(defaults, "bucket_bytes", 4096)
        patch.setattr(trained, "find_waves", found)
        return parity.train_on_rank(*args, **options), sum(wave.is_early for wave in waves)


@pytest.mark.slow
@pytest.mark.parametrize("cell", by_default(CELLS, 1, 3, 9, 13), ids=lambda cell: cell.name)
def test_layouts_train_as_one_process_does(cell: Cell) -> None:
    expected, noise = reference(cell.recipe)
    results = run_ranks(
        train_with_small_buckets,
        cell.world_size,
        cell.recipe,
        **parity.strategy_arguments(cell),
        timeout=180,
    )
    error, drift = parity.differences([part for part, _ in results], expected)
    assert drift == 0.0 and error.within(parity.limits(cell.dtype, noise)), (drift, error)
    assert all(early >= 2 for _, early in results)


@pytest.mark.slow
def test_one_tensor_of_all_gradients_waits_for_the_end_of_the_backward() -> None:
    cell = Cell(dp=4, zero=1)
    results = run_ranks(
        train_with_small_buckets,
        cell.world_size,
        cell.recipe,
        **parity.strategy_arguments(cell),
        timeout=180,
    )
    assert all(early == 0 for _, early in results)


class SumOfRanks(torch.autograd.Function):
    """The mean over a group, forward and backward: messages inside blocks, as those of experts and
    of ring attention."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return mean_over(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return mean_over(gradient, ctx.group), None


def mean_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x / dist.get_world_size(group)


class TalkingLayers(Layers):
    """Layers whose ranks send messages between them. In odd steps, rank 1 does not use the biases
    of the last layers."""

    def forward(self, x: Tensor, group: dist.ProcessGroup, step: int, rank: int) -> Tensor:
        for place, layer in enumerate(self.layers):
            bias = layer.bias if rank == 0 or step % 2 == 0 or place < LAYERS // 2 else None
            x = SumOfRanks.apply(torch.tanh(nn.functional.linear(x, layer.weight, bias)), group)
        return x


def train_talking_layers(layout: str, mode: str, steps: int) -> dict[str, Tensor]:
    mesh = Mesh(Layout.parse(layout))
    torch.manual_seed(3)
    module = TalkingLayers()
    specs = {name: replicated(name, tuple(p.shape), 1) for name, p in module.named_parameters()}
    backend = make_backend(MODES[mode], mesh, specs, bucket_bytes=BUCKET)
    optimizer = backend.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    assert isinstance(optimizer, torch.optim.Optimizer)
    group = mesh.expert_group if mesh.layout.ep > 1 else mesh.group("cp")
    sent = []
    for step in range(steps):
        with recording() as recorder, backend.gradient_scope():
            loss = (
                module(batch(step, 0, 0).requires_grad_(), group, step, mesh.rank).square().mean()
            )
            first = module.layers[0].weight
            hook = when_a_gradient_arrives(
                first, lambda calls=recorder.calls: sent.append(_reductions(calls))
            )
            backend.before_last_backward(0)
            loss.backward()
            backend.after_backward(module.parameters(), stage=0, last=True)
            backend.reduce(1.0 / 2)
        hook.remove()
        backend.step()
    backend.make_whole()
    assert sent[-1] > 2 * LAYERS, "buckets were sent inside the backward"
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    backend.teardown()
    mesh.destroy()
    return weights


def talking_layers_in_one_process(steps: int) -> dict[str, Tensor]:
    """Both ranks' layers in one autograd graph, without messages."""
    torch.manual_seed(3)
    module = TalkingLayers()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        states = [batch(step, 0, 0), batch(step, 0, 0)]
        for place, layer in enumerate(module.layers):
            biases = [layer.bias, layer.bias if step % 2 == 0 or place < LAYERS // 2 else None]
            mean = (
                sum(
                    torch.tanh(nn.functional.linear(x, layer.weight, bias))
                    for x, bias in zip(states, biases, strict=True)
                )
                / 2
            )
            states = [mean, mean]
        (sum(x.square().mean() for x in states) / 2).backward()
        optimizer.step()
    return dict(module.named_parameters())


@pytest.mark.parametrize("mode", ["0", "1 scattered", "2 eager"])
@pytest.mark.parametrize("layout", ["dp2_ep2", "cp2"])
def test_a_rank_that_lacks_gradients_disturbs_no_messages_inside_blocks(
    layout: str, mode: str
) -> None:
    expected = talking_layers_in_one_process(5)
    for weights in run_ranks(train_talking_layers, 2, layout, mode, 5):
        assert (
            max((weights[name] - value).abs().max().item() for name, value in expected.items())
            < 2e-6
        )
