"""Random numbers by row: parts of a batch draw what the whole batch draws."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.engine.step.row_random import DrawnShapes, RowDraws

ROWS = 8
PARTS = [slice(0, 4), slice(4, 8), slice(1, 8, 2), slice(2, 3), slice(0, 8)]


def _conv_layout(x: Tensor) -> Tensor:
    return F.dropout(
        x[..., None].expand(-1, -1, -1, 3).contiguous(memory_format=torch.channels_last), 0.5
    )


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(len(x), 6, 4),
    "randint": lambda x: torch.randint(1000, (len(x), 3)),
    "low": lambda x: torch.randint(5, 1000, (len(x),)),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "uniform_": lambda x: torch.empty(len(x), 2).uniform_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_p": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.flatten(1).exp(), 3),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
    "tokens": lambda x: F.dropout(x.flatten(0, 1), 0.5).unflatten(0, x.shape[:2]),
    "transposed": lambda x: F.dropout(x.transpose(1, 2), 0.5),
    "channels_last": _conv_layout,
    "attention": lambda x: F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None], dropout_p=0.5
    ),
    "drop_path": lambda x: x * x.new_empty((len(x), 1, 1)).bernoulli_(0.5),
    "generator": lambda x: x + torch.randn(x.shape, generator=torch.Generator().manual_seed(5)),
    "two": lambda x: F.dropout(F.dropout(x, 0.5) + torch.randn(()), 0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_row_of_a_part_has_the_numbers_of_the_whole_batch(name: str) -> None:
    x = torch.randn(ROWS, 6, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    whole = DRAWS[name](x)
    after = torch.get_rng_state()
    for rows in PARTS:
        torch.manual_seed(3)
        with RowDraws(rows, ROWS):
            part = DRAWS[name](x[rows])
        torch.testing.assert_close(part, whole[rows], rtol=0, atol=0)
        assert torch.equal(torch.get_rng_state(), after)


def test_a_draw_that_all_rows_share_is_the_same_for_parts() -> None:
    def drawn(x: Tensor) -> Tensor:
        return x + torch.randn(6, 4) + torch.randn(())  # 6 is a multiple of 2 rows

    x = torch.randn(ROWS, 6, 4)
    torch.manual_seed(3)
    with DrawnShapes() as recorded:
        whole = drawn(x)
    assert recorded.shapes == [(6, 4), ()]
    torch.manual_seed(3)
    with RowDraws(slice(2, 4), ROWS, recorded.shapes):
        assert torch.equal(drawn(x[2:4]), whole[2:4])


@pytest.mark.parametrize("rows", PARTS)
def test_rows_need_not_be_in_the_first_dimension_of_a_draw(rows: slice) -> None:
    def drawn(x: Tensor) -> Tensor:
        return F.dropout(x.transpose(0, 1).contiguous(), 0.5).transpose(0, 1)

    x = torch.randn(ROWS, 6, 4)
    torch.manual_seed(3)
    with DrawnShapes() as recorded:
        whole = drawn(x)
    torch.manual_seed(3)
    with RowDraws(rows, ROWS, recorded.shapes) as draws:
        assert torch.equal(drawn(x[rows]), whole[rows])
    assert draws.unmatched == 0


def test_gradients_of_a_part_pass_the_numbers_that_were_drawn() -> None:
    x = torch.randn(ROWS, 6, requires_grad=True)
    torch.manual_seed(3)
    F.dropout(x, 0.5).sum().backward()
    part = x.detach()[2:5].requires_grad_()
    torch.manual_seed(3)
    with RowDraws(slice(2, 5), ROWS):
        F.dropout(part, 0.5).sum().backward()
    assert torch.equal(part.grad, x.grad[2:5])  # type: ignore[index, arg-type]
