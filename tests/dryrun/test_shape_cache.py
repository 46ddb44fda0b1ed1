"""Operations on fake tensors that were seen before return what they returned the first time: new
memory, views of the right place, or their own arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_3d.app.dryrun.shapes import ShapeMeter

OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "product": lambda x: x @ x.T,
    "view": lambda x: x[2:].view(-1),
    "of a view": lambda x: x[2:].chunk(2, 1)[1].mul(2),
    "in place": lambda x: x.add_(1),
    "into": lambda x: torch.mul(x, 2, out=x),
    "several": lambda x: torch.linalg.svd(x),
    "list": lambda x: torch.split(x, 2),
    "other type": lambda x: x.to(torch.bfloat16),
    "bits": lambda x: x.view(torch.int32)[1],
    "strided": lambda x: x[1:].as_strided((2, 2), (4, 1), 8),
    "transposed": lambda x: x.t().contiguous().t(),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None]
    ),
    "lists": lambda x: torch._foreach_mul([x, x[1:]], 2.0),
}


def seen(mode: Any, make: Callable[..., Tensor], operation: Callable[[Tensor], Any]) -> list[Any]:
    """Of every result: shape, strides, type, place in its storage, bytes of that, and whether it is
    that of the argument; of two arguments that begin at different places of their storage."""
    found = []
    for start in (0, 8):
        whole = make((72,))
        x = whole[start : start + 64].view(8, 8)
        with mode:
            result = operation(x)
        for part in [result] if isinstance(result, Tensor) else result:
            storage = part.untyped_storage()
            shared = storage._cdata == whole.untyped_storage()._cdata
            about = (
                tuple(part.shape),
                part.stride(),
                part.dtype,
                part.storage_offset(),
                storage.nbytes(),
                str(part.device),
            )
            found.append((*about, shared, part is x))
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_is_what_fake_tensors_say(name: str) -> None:
    plain = FakeTensorMode()

    def asked(shape: tuple[int, ...]) -> Tensor:
        with plain:
            return torch.empty(shape)

    meter = ShapeMeter()
    expected = seen(plain, asked, OPERATIONS[name])
    for _ in range(3):
        assert (
            seen(meter, lambda shape: meter.fake(shape, torch.float32), OPERATIONS[name])
            == expected
        )


def test_a_step_that_repeats_itself_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_3d.app.dryrun import shapes

    asked = []
    ask = shapes._ask
    monkeypatch.setattr(shapes, "_ask", lambda func, *rest: asked.append(func) or ask(func, *rest))
    meter = ShapeMeter()
    x = meter.fake((8, 8), torch.float32)
    for _ in range(5):
        with meter:
            (x @ x).relu().sum()
    assert [func._opname for func in asked] == ["mm", "relu", "sum"]
