"""Selective recomputation of blocks with code that writes into kept results in place, seen by
autograd or not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_3d.models.parallel_plan import read_plan
from lightning_3d.options.blocks import BlockOptions
from lightning_3d.parallel.blocks import find_blocks, process_blocks
from lightning_3d.parallel.blocks.recompute import Recompute, expensive, operators


def rotate(x: Any, sign: float) -> None:
    """Rotate the halves of the last dimension of an array in place."""
    half = x.shape[-1] // 2
    one, other = x[..., :half].copy(), x[..., half:].copy()
    x[..., :half] = 0.6 * one - sign * 0.8 * other
    x[..., half:] = 0.6 * other + sign * 0.8 * one


class Rotary(torch.autograd.Function):
    """Rotates the memory of its argument, as rotary kernels of libraries do, and returns it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: bool) -> Tensor:
        rotate(x.detach().numpy(), 1.0)
        if mark:
            ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradient = gradient.clone()
        rotate(gradient.numpy(), -1.0)
        return gradient, None


class Data(torch.autograd.Function):
    """Triples its argument through `.data`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.data.mul_(3)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 3


class BothOfLiger(torch.autograd.Function):
    """Takes (batch, heads, tokens, size) of queries and keys and writes into the memory of the
    projections, in their own order."""

    @staticmethod
    def forward(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (x.transpose(1, 2).contiguous() for x in (q, k))
        rotate(q.numpy(), 1.0)
        rotate(k.numpy(), 1.0)
        return q.transpose(1, 2), k.transpose(1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        found = [gradient.clone(memory_format=torch.contiguous_format) for gradient in gradients]
        for gradient in found:
            rotate(gradient.numpy(), -1.0)
        return tuple(found)


@torch.library.custom_op("unseen_writes::rotate_", mutates_args=("x",))
def rotate_(x: Tensor) -> None:
    """Custom operator that declares its write."""
    rotate(x.numpy(), 1.0)


class Library(torch.autograd.Function):
    """Calls the custom operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rotate_(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return Rotary.backward(ctx, gradient)[0]


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "numpy": lambda x: Rotary.apply(x, False),
    "data": Data.apply,
    "mark_dirty": lambda x: Rotary.apply(x, True),
    "operator": lambda x: x.mul_(3),
    "library": Library.apply,
}
UNSEEN = ("numpy",)
"""Kernels whose write no operator does. Operators are seen to write through `.data`, which autograd
does not see."""


def whole(kernel: Any, x: Tensor, weight: Tensor) -> Tensor:
    return linear(kernel(linear(x, weight)).tanh(), weight).exp()


def view(kernel: Any, x: Tensor, weight: Tensor) -> Tensor:
    heads = kernel(linear(x, weight).view(3, 2, 4).transpose(0, 1))
    return linear(heads.transpose(0, 1).reshape(3, 8).tanh(), weight).exp()


def part(kernel: Any, x: Tensor, weight: Tensor) -> Tensor:
    fused = linear(x, weight)
    return linear(torch.cat([kernel(fused[:, :4]), fused[:, 4:]], -1).tanh(), weight).exp()


def read_before(kernel: Any, x: Tensor, weight: Tensor) -> Tensor:
    made = linear(x, weight)
    before = made.sin()
    return linear(kernel(made).tanh() + before, weight).exp()


def values() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    return weight.requires_grad_(), x.requires_grad_()


def gradients(
    forward: Callable[..., Tensor], arguments: tuple[Any, ...], recompute: Recompute | None
) -> list[Tensor]:
    result = forward(*arguments) if recompute is None else recompute(forward, arguments, {})
    return list(torch.autograd.grad(result.sum(), [x for x in arguments if isinstance(x, Tensor)]))


CASES = [(forward, kernel) for forward in (whole, view, part) for kernel in KERNELS]
# autograd refuses the others, because `sin` has saved its argument
CASES += [(read_before, kernel) for kernel in ("numpy", "data")]


@pytest.mark.parametrize(("forward", "kernel"), CASES)
def test_gradients_are_those_of_the_plain_block_in_every_step(
    forward: Callable[..., Tensor], kernel: str
) -> None:
    weight, x = values()
    recompute = Recompute(expensive())
    for scale in (1.0, 0.5, 2.0):
        arguments = (KERNELS[kernel], (x * scale).detach().requires_grad_(), weight)
        expected = gradients(forward, arguments, None)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = gradients(forward, arguments, recompute)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert len(warned) == (kernel in UNSEEN and scale == 1.0)


class Block(nn.Module):
    """Attention whose queries and keys a kernel rotates in place, and an MLP.

    Args:
        heads: number of heads.
        experts: number of projections of the MLP that run in a loop.
    """

    def __init__(self, heads: int = 2, experts: int = 1) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(8, 8, bias=False, dtype=torch.float64) for _ in range(4)
        )
        self.up = nn.ModuleList(
            nn.Linear(8, 8, bias=False, dtype=torch.float64) for _ in range(experts)
        )
        self.heads = heads
        self.rotates = True

    def forward(self, x: Tensor, experts: int = 1) -> Tensor:
        y = x.tanh()
        q = self.q(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        v = self.v(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if self.rotates:
            q, k = BothOfLiger.apply(q, k)
        x = x + self.o(
            scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + sum(up(x.tanh()).exp().tanh() for up in self.up[:experts])


class Operators(TorchDispatchMode):
    """Names operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.ran.append(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))


def step(
    block: Block, recompute: Recompute | None, **arguments: Any
) -> tuple[list[Tensor], list[str], list[str]]:
    """Gradients, and the operators of the forward and of the backward."""
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 3, 8).requires_grad_()
    block.zero_grad()
    with Operators() as forward:
        result = (
            block(x, **arguments)
            if recompute is None
            else recompute(block.forward, (x,), arguments)
        )
    with Operators() as backward:
        result.square().sum().backward()
    gradients = [
        x.grad,
        *(parameter.grad for parameter in block.parameters() if parameter.grad is not None),
    ]
    return gradients, forward.ran, backward.ran  # type: ignore[return-value]


def assert_same(block: Block, recompute: Recompute, **arguments: Any) -> list[str]:
    """Compare with the plain block. Returns the operators of the backward."""
    expected, _, plain = step(block, None, **arguments)
    found, _, again = step(block, recompute, **arguments)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    return again + ["more"] * (again.count("mm") - plain.count("mm"))


def made(**options: Any) -> Block:
    torch.manual_seed(0)
    return Block(**options)


def test_only_what_is_written_into_is_computed_again() -> None:
    """Queries and keys; the values, the output of attention and the products of the MLP are kept.
    One warning names both lines."""
    block, recompute = made(), Recompute(expensive())
    with pytest.warns(
        UserWarning,
        match=r"aten.mm.default \(test_unseen_writes.py:\d+\) and the result of aten.mm",
    ) as warned:
        for _ in range(3):
            again = assert_same(block, recompute)
            assert (
                again.count("more") == 2
                and "_scaled_dot_product_flash_attention_for_cpu" not in again
            )
    assert len(warned) == 1
    assert (
        assert_same(
            made(), Recompute(operators(["_scaled_dot_product_flash_attention_for_cpu"]))
        ).count("more")
        == 5
    )


@pytest.mark.filterwarnings("error")
def test_later_forwards_compare_nothing() -> None:
    block, recompute = made(), Recompute(expensive())
    block.rotates = False
    first, second, third = (step(block, recompute)[1] for _ in range(3))
    assert "equal" in first and second == third
    plain = step(block, None)[1]
    assert {"equal", "any", "sum", "_local_scalar_dense"}.isdisjoint(second) and second.count(
        "mm"
    ) == plain.count("mm")


@pytest.mark.filterwarnings("ignore:recompute=selective")
def test_blocks_with_such_code_compare_once() -> None:
    block, recompute = made(), Recompute(expensive())
    for place in range(4):
        assert ("equal" in step(block, recompute)[1]) == (place == 0)


@pytest.mark.filterwarnings("ignore:recompute=selective")
def test_blocks_are_compared_one_by_one() -> None:
    """A second block may take another path through the same code."""
    one, other, recompute = made(), made(), Recompute(expensive())
    one.rotates = False
    assert assert_same(one, recompute).count("more") == 0
    assert assert_same(other, recompute).count("more") == 2


@pytest.mark.filterwarnings("ignore:recompute=selective")
@pytest.mark.parametrize("zero", ["q", "k", "qk"])
def test_zeros_prove_nothing(zero: str) -> None:
    """A rotation of zeros changes nothing, until the weight is trained."""
    block, recompute = made(), Recompute(expensive())
    for name in zero:
        nn.init.zeros_(block.get_submodule(name).weight)  # type: ignore[arg-type]
    for _ in range(3):
        assert_same(block, recompute)
    for name in zero:
        nn.init.eye_(block.get_submodule(name).weight)  # type: ignore[arg-type]
    for _ in range(6):
        assert assert_same(block, recompute).count("more") == 2


@pytest.mark.filterwarnings("error")
def test_zeros_are_compared_again_until_they_are_none() -> None:
    """In the forwards 1, 2, 4, 8, ...; then their results are kept: values, and the output of
    attention, which is a sum of them."""
    block, recompute = made(), Recompute(expensive())
    block.rotates = False
    nn.init.zeros_(block.v.weight)
    compared = ["equal" in step(block, recompute)[1] for _ in range(6)]
    assert compared == [True, True, False, True, False, False]
    nn.init.eye_(block.v.weight)
    more = [assert_same(block, recompute).count("more") for _ in range(4)]
    assert more == [2, 0, 0, 0] and "equal" not in step(block, recompute)[1]


@pytest.mark.filterwarnings("ignore:recompute=selective")
def test_another_number_of_results_in_each_forward() -> None:
    """Experts that run in a loop: a result is known by its line, not by its number."""
    block, recompute = made(experts=3), Recompute(expensive())
    for experts in (1, 3, 2, 0, 3):
        assert assert_same(block, recompute, experts=experts).count("more") == 2


@pytest.mark.filterwarnings("ignore:recompute=selective")
def test_lines_that_appear_later_in_a_block_with_such_code() -> None:
    """Nothing was compared there yet, so their results are computed again until they were."""
    block, recompute = made(experts=2), Recompute(expensive())
    more = [
        assert_same(block, recompute, experts=experts).count("more") for experts in (0, 0, 2, 2, 2)
    ]
    assert more == [2, 2, 4, 2, 2]


@pytest.mark.filterwarnings("ignore:recompute=selective")
def test_hooks_that_come_later_change_no_line() -> None:
    block, recompute = made(), Recompute(expensive())
    assert_same(block, recompute)
    for module in block.modules():
        module.register_forward_hook(lambda module, args, result: None)
    assert assert_same(block, recompute).count("more") == 2


def tiny(family: str) -> nn.Module:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    more: dict[str, Any] = {
        "gemma3_text": {"head_dim": 8, "sliding_window": 4},
        "mixtral": {"num_local_experts": 4},
    }.get(family, {})
    config = AutoConfig.for_model(family, vocab_size=32, use_cache=False, **sizes, **more)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).double()


@pytest.mark.filterwarnings("error:recompute")
@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral", "gemma3_text", "gpt_neox"])
def test_no_false_alarm(family: str) -> None:
    """Models without such code keep all results from the first step on, and their later steps
    compare nothing."""
    plain, model = tiny(family), tiny(family)
    process_blocks(find_blocks(model, read_plan(model)), BlockOptions(recompute="selective"))
    generator = torch.Generator().manual_seed(0)
    for place in range(3):
        tokens = torch.randint(32, (2, 8), generator=generator)
        expected, found = [], []
        for one, gradients in ((plain, expected), (model, found)):
            with Operators() as ran:
                loss = one(tokens, labels=tokens).loss
            gradients += torch.autograd.grad(loss, list(one.parameters()), allow_unused=True)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert ("equal" in ran.ran) == (place == 0)


class Sum(torch.autograd.Function):
    """Sums over the ranks of the world, as a row-parallel layer does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        messages = torch.ops._c10d_functional
        return messages.wait_tensor(messages.all_reduce(x, "sum", dist.group.WORLD.group_name))  # type: ignore[union-attr]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


@pytest.fixture
def world() -> Iterator[None]:
    """A group of this process alone: its own, or the one that a fit of an earlier test left, as
    Lightning's strategies do."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@pytest.mark.filterwarnings("ignore:recompute=selective")
@pytest.mark.parametrize("writes", [True, False])
def test_sums_of_ranks_that_are_written_into_are_sent_again(writes: bool) -> None:
    """The memory of a message is that of the result that waits for it."""

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        summed = Sum.apply(linear(x, weight))
        return (
            linear((Rotary.apply(summed, False) if writes else summed).tanh(), weight).exp().tanh()
        )

    weight, x = values()
    recompute = Recompute(expensive())
    for _ in range(3):
        expected = gradients(forward, (x, weight), None)
        with Operators() as ran:
            found = gradients(forward, (x, weight), recompute)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert ran.ran.count("all_reduce") == 1 + writes
