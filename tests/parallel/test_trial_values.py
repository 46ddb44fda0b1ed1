"""Random values of trials: no equal rows, however a product with a large matrix is written."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_3d.parallel.trials.values import LARGE, EqualRows, FewRows, draw

INPUTS, OUTPUTS, EXPERTS = 1024, 768, 3


@pytest.fixture
def values() -> FewRows:
    return FewRows()


def large(values: FewRows, *shape: int) -> Tensor:
    matrix = values.draw("weight", torch.empty(shape, device="meta"))
    assert matrix.numel() > LARGE and matrix.untyped_storage().nbytes() < 2**18
    return matrix


def rows_differ(product: Tensor) -> bool:
    """Return whether no two outputs have the same value, or the same up to a factor, for all
    tokens."""
    directions = F.normalize(product.flatten(0, -2), dim=0)
    alike = (directions.mT @ directions).abs().fill_diagonal_(0)
    return bool(alike.max() < 0.9999) and int(torch.linalg.matrix_rank(product.flatten(0, -2))) > 1


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "matmul": lambda x, weight: x @ weight.T,
    "turned": lambda x, weight: (weight @ x.mT).mT,
    "einsum": lambda x, weight: torch.einsum("bti,oi->bto", x, weight),
    "converted": lambda x, weight: F.linear(x.float(), weight.to(torch.float32)),
    "addmm": (
        lambda x, weight: torch.addmm(torch.zeros(OUTPUTS), x.flatten(0, 1), weight.T).view(
            *x.shape[:2], -1
        )
    ),
    "in a batch": lambda x, weight: torch.bmm(x, weight.T.expand(len(x), -1, -1)),
}


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_to_write_a_product_with_a_large_matrix_are_the_same(
    values: FewRows, way: str
) -> None:
    x, weight = torch.randn(2, 12, INPUTS, dtype=torch.float64), large(values, OUTPUTS, INPUTS)
    with values:
        product = WAYS[way](x, weight)
        torch.testing.assert_close(product.double(), F.linear(x, weight), rtol=0, atol=1e-5)
    assert product.shape == (2, 12, OUTPUTS) and rows_differ(product)
    product *= 2  # some models do


def test_a_large_conv1d_and_an_embedding_have_no_equal_rows(values: FewRows) -> None:
    with torch.device("meta"):
        layer, table = Conv1D(OUTPUTS, INPUTS), nn.Embedding(4 * INPUTS, OUTPUTS)
    layer.weight, layer.bias = (
        nn.Parameter(large(values, INPUTS, OUTPUTS)),
        nn.Parameter(draw("bias", (OUTPUTS,))),
    )
    table.weight = nn.Parameter(large(values, 4 * INPUTS, OUTPUTS))
    with values:
        product, embedded = (
            layer(torch.randn(2, 12, INPUTS, dtype=torch.float64)),
            table(torch.arange(24).view(2, 12)),
        )
        normed = F.layer_norm(product - layer.bias, (OUTPUTS,))
        torch.testing.assert_close(
            torch.stack([table.weight[3], table.weight[torch.tensor(4)]]), embedded[0, 3:5]
        )
    assert rows_differ(product) and rows_differ(embedded) and rows_differ(normed)


@pytest.mark.parametrize("rows", [OUTPUTS, 48])
def test_experts_differ_one_after_the_other_and_in_a_batch(values: FewRows, rows: int) -> None:
    experts = 12 if rows < OUTPUTS else EXPERTS
    weights, x = (
        large(values, experts, rows, INPUTS),
        torch.randn(experts, 12, INPUTS, dtype=torch.float64),
    )
    same = x[:1].expand_as(x)
    with values:
        one_by_one = torch.stack([F.linear(x[index], weights[index]) for index in range(experts)])
        torch.testing.assert_close(torch.bmm(x, weights.mT), one_by_one)
        torch.testing.assert_close(torch.einsum("eti,eoi->eto", x, weights), one_by_one)
        each = torch.bmm(same, weights.mT)
    assert (
        all(rows_differ(one) for one in one_by_one) and float((each[0] - each[1]).abs().max()) > 0.1
    )


@pytest.mark.parametrize(
    "use",
    [lambda x, weight: x * weight[:, 0].sum(), lambda x, weight: weight.softmax(-1), torch.add],
)
def test_what_would_see_equal_rows_raises(
    values: FewRows, use: Callable[[Tensor, Tensor], Tensor]
) -> None:
    x, weight = torch.randn(12, INPUTS, dtype=torch.float64), large(values, OUTPUTS, INPUTS)
    with values, pytest.raises(EqualRows):
        use(x[:1], weight)


def test_values_depend_on_name_shape_and_seed_only() -> None:
    assert torch.equal(draw("a", (3, 4)), draw("a", (3, 4)))
    for other in (draw("b", (3, 4)), draw("a", (3, 4), seed=1)):
        assert not torch.equal(draw("a", (3, 4)), other)
    assert 0.5 <= float(draw("norm", (100,)).min()) < float(draw("norm", (100,)).max()) <= 1.5
