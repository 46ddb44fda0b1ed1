"""Selective recomputation of blocks with code that the dispatcher does not see: kernels, compiled
functions, higher-order operators."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_3d.parallel.blocks.kept_results import KeptResults, _Shape
from lightning_3d.parallel.blocks.recompute import Recompute, expensive


class Kernel(torch.autograd.Function):
    """Doubles by numpy into memory of torch, as a Triton kernel would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype)
        y.numpy()[:] = x.detach().numpy() * 2
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Foreign(torch.autograd.Function):
    """Doubles by numpy in memory that torch did not allocate, as a library or a compiled function
    would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def compiled(backend: str) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: x.sin() * 2, backend=backend)


def values() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    return weight.requires_grad_(), x.requires_grad_()


def read_by_nothing_else(kernel: Any, x: Tensor, weight: Tensor) -> Tensor:
    return linear(kernel(linear(x, weight)).tanh(), weight).exp()


def read_by_a_seen_operator_too(kernel: Any, x: Tensor, weight: Tensor) -> Tensor:
    y = linear(x, weight)
    return linear(kernel(y).tanh(), weight).exp() + y


def gradients(forward: Callable[..., Tensor], kernel: Any, *, recompute: bool) -> list[Tensor]:
    weight, x = values()
    run = (
        Recompute(expensive())(forward, (kernel, x, weight), {})
        if recompute
        else forward(kernel, x, weight)
    )
    torch.empty(3, 8, dtype=torch.float64).fill_(7.0)  # memory that was freed has other numbers
    return list(torch.autograd.grad(run.sum(), (x, weight)))


KERNELS = {"kernel": lambda: Kernel.apply, "foreign": lambda: Foreign.apply}
KERNELS |= {
    backend: lambda backend=backend: compiled(backend) for backend in ("aot_eager", "inductor")
}


@pytest.mark.parametrize("forward", [read_by_nothing_else, read_by_a_seen_operator_too])
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_unseen_code_reads_is_kept(forward: Callable[..., Tensor], kernel: str) -> None:
    function = KERNELS[kernel]()
    expected, found = (gradients(forward, function, recompute=again) for again in (False, True))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_functions_stay_compiled() -> None:
    """A compiler sees the function once, and its graph runs in the forward and in the
    recomputation."""
    ran: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append("graph")
            return graph(*args)

        ran.append("compiled")
        return run

    weight, x = values()
    function = torch.compile(lambda x: x.sin() * 2, backend=backend)
    Recompute(expensive())(
        lambda x: linear(function(x).tanh(), weight).exp(), (x,), {}
    ).sum().backward()
    assert ran == ["compiled", "graph", "graph"]


class Seen(TorchDispatchMode):
    """Names operators that run."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.ran.append(str(operator))
        return operator(*args, **(kwargs or {}))


def test_results_of_a_higher_order_operator_are_kept() -> None:
    """FlexAttention, whose operator has a backward on the CPU, though its function refuses it
    there."""
    mask = create_block_mask(
        lambda batch, head, q, k: q >= k, None, None, 128, 128, device="cpu"
    ).as_tuple()

    def block(x: Tensor, weight: Tensor) -> Tensor:
        heads = linear(x.tanh(), weight)[:, None]
        found = torch.ops.higher_order.flex_attention(
            heads, heads, heads, lambda score, *place: score, mask, 0.25, {}
        )[0]
        return linear(found[:, 0].tanh(), weight).exp()

    gradients, counts = [], []
    for recompute in (False, True):
        torch.manual_seed(0)
        weight, x = (
            torch.randn(16, 16, dtype=torch.float64),
            torch.randn(2, 128, 16, dtype=torch.float64),
        )
        weight, x = (weight / 4).requires_grad_(), x.requires_grad_()
        result = Recompute(expensive())(block, (x, weight), {}) if recompute else block(x, weight)
        with Seen() as seen:
            gradients.append(torch.autograd.grad(result.sum(), (x, weight)))
        counts.append(
            [
                seen.ran.count(name)
                for name in ("flex_attention", "flex_attention_backward", "aten.mm.default")
            ]
        )
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)
    assert counts == [[0, 1, 4], [0, 1, 4]]


def test_nothing_is_freed_where_unseen_code_runs() -> None:
    """Both kinds of foreign memory are noticed, and a block without unseen code frees its last
    product."""
    freed = {}
    for name, kernel in {
        "none": torch.sin,
        "kernel": Kernel.apply,
        "foreign": Foreign.apply,
    }.items():
        weight, x = values()
        kept = KeptResults(lambda operator, args, kwargs: operator in expensive())
        forward = kept.noting(
            lambda x, kernel=kernel, weight=weight: x + linear(kernel(x * 2).exp(), weight)
        )
        checkpoint(forward, x, use_reentrant=False, context_fn=kept.contexts)
        freed[name] = [result is not None and result.stand_in for result in kept.results]
    assert freed == {"none": [True], "kernel": [False], "foreign": [False]}


def test_memory_that_operators_write_is_no_trace() -> None:
    """Allocation and then `copy_`, `out=`, or a view of either."""

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        room = torch.empty_like(x)
        room[:2].copy_(x[:2])
        room[2:].zero_()
        return x + linear(room.exp(), weight) + torch.empty(x.shape, dtype=x.dtype).normal_()

    weight, x = values()
    kept = KeptResults(lambda operator, args, kwargs: operator in expensive())
    checkpoint(kept.noting(forward), x, weight, use_reentrant=False, context_fn=kept.contexts)
    assert [result is not None and result.stand_in for result in kept.results] == [True]


def test_a_freed_result_is_not_a_number() -> None:
    weight, x = values()
    kept = KeptResults(lambda operator, args, kwargs: operator in expensive())
    checkpoint(
        kept.noting(lambda x: x + linear(x.exp(), weight)),
        x,
        use_reentrant=False,
        context_fn=kept.contexts,
    )
    [result] = kept.results
    assert (
        result is not None
        and isinstance(result.value, _Shape)
        and result.value.filled().isnan().all()
    )


def test_results_in_memory_that_was_given_are_not_kept() -> None:
    """A recomputation that took such a result would not write it."""

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return Product.apply(x, weight).exp().tanh()

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            room = torch.empty(x.shape, dtype=x.dtype)
            torch.mm(x, weight, out=room)
            return room

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x, weight = ctx.saved_tensors
            return gradient @ weight.T, x.T @ gradient

    weight, x = values()
    found = torch.autograd.grad(Recompute(expensive())(forward, (x, weight), {}).sum(), (x, weight))
    torch.testing.assert_close(
        found,
        torch.autograd.grad((x @ weight).exp().tanh().sum(), (x, weight)),
        rtol=1e-12,
        atol=1e-12,
    )
