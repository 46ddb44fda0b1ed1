"""Bytes that the optimizer's step and the loss move by the planner's constants, counted operator by
operator where the engine runs them."""

import pytest
import torch
import torch.distributed as dist
from moved_bytes import MovedBytes
from ranks import run_ranks
from torch import nn

from lightning_3d.app.planner.block_costs import _LOSS_FORWARD, _SHARDED_LOSS_FORWARD
from lightning_3d.app.planner.constants import EAGER, OURS
from lightning_3d.layout import Layout
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import replicated
from lightning_3d.parallel.tensor.loss import token_losses, vocab_parallel_cross_entropy
from lightning_3d.parallel.zero import make_backend
from lightning_3d.parallel.zero.gradients import sum_dtype

WIDTH = 256


@pytest.mark.parametrize(
    ("options", "of_adamw"),
    [({"foreach": True}, 80), ({"fused": True}, 28)],
    ids=["foreach", "fused"],
)
def test_bytes_of_adamw(options: dict[str, bool], of_adamw: int) -> None:
    weights = nn.Parameter(torch.randn(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW([weights], lr=0.1, weight_decay=0.1, **options)  # type: ignore[arg-type]
    for _ in range(2):  # the first step makes the state
        weights.grad = torch.randn_like(weights)
        with MovedBytes(least=1024) as counted, torch.no_grad():
            optimizer.step()
    assert counted.moved.total() == of_adamw * weights.numel()
    norm_and_clipping, copy = 12, 6
    zeroing, buckets = (4, 16) if options.get("foreach") else (0, 0)
    stack = EAGER if options.get("foreach") else OURS
    assert stack.traffic.parameter == of_adamw + norm_and_clipping + zeroing + buckets + copy


def step_of_the_engine(zero: int) -> float:
    """Bytes for each parameter that this rank steps, from its reduced gradient to its new bf16
    weights."""
    module = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
    ).to(torch.bfloat16)
    specs = {
        name: replicated(name, tuple(parameter.shape), 1)
        for name, parameter in module.named_parameters()
    }
    backend = make_backend(
        ZeroOptions(zero, "step"), Mesh(Layout(dp=dist.get_world_size())), specs, precision="bf16"
    )
    backend.shard(module, [list(module)], torch.device("cpu"), lambda block: True)
    backend.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.1, fused=True))
    for _ in range(2):
        with backend.gradient_scope():
            module(torch.randn(4, WIDTH, dtype=torch.bfloat16)).sum().backward()
            backend.after_backward(module.parameters())
            backend.reduce(0.5)
        with MovedBytes(least=1024) as counted:
            backend.clip(max_norm=1e-3)
            backend.step()
    backend.teardown()
    stepped = 2 * WIDTH**2 // (dist.get_world_size() if zero else 1)
    return counted.moved.total() / stepped


@pytest.mark.parametrize(("zero", "ranks"), [(0, 1), pytest.param(1, 2, marks=pytest.mark.full)])
def test_bytes_of_the_engines_step(zero: int, ranks: int) -> None:
    assert run_ranks(step_of_the_engine, ranks, zero) == [OURS.traffic.parameter] * ranks


def test_bytes_of_the_loss() -> None:
    logits = torch.randn(64, 4096, dtype=torch.bfloat16, requires_grad=True)
    with MovedBytes(least=16 * 1024) as forward:
        loss = token_losses(logits, torch.randint(0, 4096, (64,))).sum()
    with MovedBytes(least=16 * 1024) as backward:
        loss.backward()
    # nll_loss and its backward are given the log-softmax, but read one number of each row
    passes = [counted.moved.total() - 4 * logits.numel() for counted in (forward, backward)]
    assert sum(passes) == OURS.traffic.logit * logits.numel() and passes[0] / sum(
        passes
    ) == pytest.approx(_LOSS_FORWARD)


def bytes_of_the_sharded_loss() -> list[float]:
    """Bytes for each logit of this rank (forward, backward)."""
    logits = torch.randn(64, 4096, dtype=torch.bfloat16, requires_grad=True)
    group, size = dist.group.WORLD, logits.numel()
    assert group is not None
    targets = torch.randint(
        0, 4096 * dist.get_world_size(), (64,), generator=torch.Generator().manual_seed(0)
    )
    with MovedBytes(least=16 * 1024) as forward:
        losses = vocab_parallel_cross_entropy(logits, targets, 4096 * dist.get_rank(), group)
    with MovedBytes(least=16 * 1024) as backward:
        losses.backward(torch.rand(64))
    # gather and scatter_add_ are given float32 scores, but touch one number of each row
    assert forward.moved["gather"] == 4 * size and backward.moved["scatter_add_"] == 8 * size
    return [(forward.moved.total() - 4 * size) / size, (backward.moved.total() - 8 * size) / size]


def test_bytes_of_the_loss_that_is_sharded_by_vocabulary() -> None:
    for passes in run_ranks(bytes_of_the_sharded_loss, 2):
        assert sum(passes) == OURS.traffic.sharded_logit and passes[0] / sum(
            passes
        ) == pytest.approx(_SHARDED_LOSS_FORWARD)


def test_gradients_are_summed_and_sent_in_float32() -> None:
    width = sum_dtype(nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))).itemsize
    assert width == OURS.footprint.gradient == OURS.footprint.kept_gradient == OURS.reduced_bytes
