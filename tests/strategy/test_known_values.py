"""Masks and positions whose values the host knows: models compute the same, and a value that has
changed is read."""

from collections.abc import Callable
from typing import Any

import models
import parity
import pytest
import torch
from counting import HostWaits
from fake_flash import fake_flash, use_flash
from masked_batches import MASKS, known_on_cpu, with_mask
from models import Batch
from ranks import run_ranks
from reference import Recipe, data, initial_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_3d.compat.torch import innermost_function_mode, storage_key
from lightning_3d.engine.step.known_values import KnownValues
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.options.blocks import BlockOptions
from lightning_3d.parallel.blocks import find_blocks, process_blocks

CPU = torch.device("cpu")
Change = Callable[[Batch], Any]


def make(name: str = "llama") -> tuple[nn.Module, KnownValues]:
    """A model, and what knows the values of its inputs."""
    model, known = initial_model(Recipe(name, 2)), KnownValues(CPU, wanted=True)
    known.begin(model)
    return model, known


def batch_of(name: str, mask: str) -> Batch:
    return with_mask(data(Recipe(name, 2, steps=1, global_batch=3)), mask)


def loss_and_gradients(model: nn.Module, batch: Batch) -> list[Tensor]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return [
        loss.detach(),
        *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None),
    ]


def step(
    model: nn.Module,
    known: KnownValues,
    batch: Batch,
    change: Change = lambda batch: None,
    rows: slice = slice(1, 3),
) -> tuple[list[Tensor], list[str]]:
    """(loss and gradients, reads) of a step on a batch that is moved, split and changed as in a
    fit."""
    with known.moving():
        # as to other memory
        moved = {name: tensor.to(CPU, copy=True) for name, tensor in batch.items()}
    with HostWaits(("read_host_copy", "_computed_on_host")) as waits, known.following():
        own = {name: tensor[rows] for name, tensor in moved.items()}
        change(own)
        return loss_and_gradients(model, own), waits.names


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "qwen3"])
def test_models_compute_the_same_and_read_nothing(name: str, mask: str) -> None:
    model, known = make(name)
    batch = batch_of(name, mask)
    found, reads = step(model, known, batch)
    known.end()
    assert reads == []
    assert_equal(
        found, loss_and_gradients(model, {key: tensor[1:3] for key, tensor in batch.items()})
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("mask", "rows", "waits"),
    [("right", 2, 2), ("left", 2, 2), ("packed", 1, 3), ("none", 1, 1), ("none", 2, 0)],
)
def test_flash_attention_reads_nothing_in_blocks(
    mask: str, rows: int, waits: int, recompute: bool
) -> None:
    """Transformers would read where padding is, or whether one row has several documents, in each
    layer."""
    with fake_flash():
        model, known = make()
        use_flash(model)
        if recompute:
            process_blocks(find_blocks(model, ParallelPlan({})), BlockOptions(recompute="full"))
        batch = batch_of("llama", mask)
        found, reads = step(model, known, batch, rows=slice(1, 1 + rows))
        known.end()
        with HostWaits() as own:
            expected = loss_and_gradients(
                model, {key: tensor[1 : 1 + rows] for key, tensor in batch.items()}
            )
    assert reads == []
    assert_equal(found, expected)
    layers = 2 * (1 + recompute)
    assert len(own.names) >= waits * layers


def pad_in_place(batch: Batch) -> None:
    batch["attention_mask"][:, -3:] = 0


def pad_through_data(batch: Batch) -> None:
    batch["attention_mask"].data[:, -3:] = 0


def pad_through_data_of_a_view(batch: Batch) -> None:
    batch["attention_mask"][:, None, None].data[..., -3:] = 0


def pad_by_out(batch: Batch) -> None:
    mask = batch["attention_mask"]
    torch.mul(mask, (torch.arange(mask.shape[1]) < 13).long(), out=mask)


def pad_by_set(batch: Batch) -> None:
    other = torch.ones_like(batch["attention_mask"]).contiguous()
    batch["attention_mask"].set_(other.index_fill_(1, torch.arange(3), 0))  # type: ignore[call-overload]


def replace_by_what_no_host_knows(batch: Batch) -> None:
    batch["attention_mask"] = (
        torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(0)) < 0.7
    ).long()


def replace_by_a_function_of_tokens(batch: Batch) -> None:
    batch["attention_mask"] = (batch["input_ids"] % 3 != 0).long()


def pack_in_place(batch: Batch) -> None:
    positions = torch.arange(models.SEQUENCE).repeat(2, 1)
    positions[:, 7:] -= 7
    batch["position_ids"] = positions
    del batch["attention_mask"]


def test_flash_attention_reads_a_mask_that_has_changed() -> None:
    with fake_flash():
        model, known = make()
        use_flash(model)
        batch = batch_of("llama", "right")
        found, reads = step(model, known, batch, pad_in_place)
        known.end()
        own = {key: tensor[1:3].clone() for key, tensor in batch.items()}
        pad_in_place(own)
        assert_equal(found, loss_and_gradients(model, own))
    assert reads


CHANGES = [
    pad_in_place,
    pad_through_data,
    pad_through_data_of_a_view,
    pad_by_out,
    pad_by_set,
    replace_by_what_no_host_knows,
    replace_by_a_function_of_tokens,
    pack_in_place,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_read(change: Change) -> None:
    """A model that took the batch's mask of ones for the changed one would compute something
    else."""
    model, known = make()
    batch = batch_of("llama", "ones")
    found, reads = step(model, known, batch, change)
    known.end()
    own = {key: tensor[1:3].clone() for key, tensor in batch.items()}
    unchanged = loss_and_gradients(model, own)
    change(own)
    assert reads and found[0] != unchanged[0]
    assert_equal(found, loss_and_gradients(model, own))


def pad_uncounted(batch: Batch) -> None:
    """As a collective or a kernel of the user's own does."""
    mask = batch["attention_mask"]
    writes = mask._version
    mask.numpy()[:, -3:] = 0
    assert mask._version == writes


@pytest.mark.parametrize(("fits", "number"), [(1, 1), (1, 64), (2, 1)])
def test_a_write_that_torch_does_not_count_is_found(fits: int, number: int) -> None:
    """In the first batches of a fit and every 64th. From then on, the model reads what it asks
    about."""
    model, known = make()
    for _ in range(fits - 1):
        for _ in range(5):
            known.begin_batch(begins=True)
        known.begin(model)
    for _ in range(number - 1):
        known.begin_batch(begins=True)
    batch = batch_of("llama", "ones")
    known.begin_batch(begins=True)
    with pytest.warns(UserWarning, match="put a new tensor into the batch") as warned:
        found, reads = step(model, known, batch, pad_uncounted)
    assert ("last 64 batches" in str(warned[0].message)) == (number == 64)
    known.begin_batch(begins=True)
    again, reads_again = step(model, known, batch, pad_uncounted)
    known.end()
    pad_in_place(batch)
    expected = loss_and_gradients(model, {key: tensor[1:3] for key, tensor in batch.items()})
    for losses in (found, again):
        assert_equal(losses, expected)
    assert reads and reads_again and len(warned) == 1


def test_a_write_before_the_step_is_seen() -> None:
    """By a callback, for example."""
    model, known = make()
    batch = batch_of("llama", "ones")
    with known.moving():
        moved = {name: tensor.to(CPU, copy=True) for name, tensor in batch.items()}
    pad_in_place(moved)
    with known.following(), HostWaits(("read_host_copy",)) as waits:
        found = loss_and_gradients(model, moved)
    pad_in_place(batch)
    assert waits.names
    assert_equal(found, loss_and_gradients(model, batch))


def test_the_data_set_may_use_its_memory_again() -> None:
    """Once the batch was moved, what it was made of may hold the next one."""
    model, known = make()
    batch = batch_of("llama", "right")
    expected = loss_and_gradients(model, batch)
    with known.moving():
        moved = {name: tensor.to(CPU, copy=True) for name, tensor in batch.items()}
    batch["attention_mask"].fill_(1)
    with known.following(), HostWaits(("read_host_copy",)) as waits:
        found = loss_and_gradients(model, moved)
    assert waits.names == []
    assert_equal(found, expected)


def test_whoever_reads_a_copy_may_write_to_it() -> None:
    _, known = make()
    mask = torch.ones(2, 4, dtype=torch.bool)
    with known.moving():
        moved = mask.to(CPU)
    with known.following():
        copy = moved.cpu()
        copy.zero_()
        assert moved.cpu().all() and storage_key(copy) != storage_key(moved)


def test_large_tensors_and_real_numbers_are_not_followed() -> None:
    _, known = make()
    with known.following(), HostWaits(("read_host_copy",)) as waits:
        for tensor in (
            torch.arange(1 << 23),
            torch.ones(2, 2),
            torch.ones(2, 2, 2, dtype=torch.bool),
        ):
            assert bool((tensor == tensor).all())
    assert len(waits.names) == 3


def test_an_operator_that_fails_on_a_copy_makes_its_result_unknown() -> None:
    """A copy may lie in memory in another order than the tensor."""
    _, known = make()
    columns = torch.arange(6).view(2, 3).t()
    with known.moving():
        moved = columns.to(CPU).detach()
    known._known[id(moved)] = known._known[id(moved)]._replace(values=columns.contiguous())
    with known.following(), HostWaits(("read_host_copy",)) as waits:
        assert moved[0, 1] == 3 and bool((moved.t().view(6) == torch.arange(6)).all())
    assert waits.names == ["_local_scalar_dense"]


class Sees(TorchFunctionMode):
    """A mode of the user's own."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **kwargs or {})


def test_the_mode_is_left_in_blocks_and_after_a_failure() -> None:
    model, known = make()
    layers = model.get_submodule("model.layers")
    inside: list[Any] = []
    layers[0].self_attn.register_forward_pre_hook(
        lambda *args: inside.append(innermost_function_mode())
    )
    with known.following():
        model(**batch_of("llama", "none"))
        assert innermost_function_mode() is known
        with Sees() as own:
            model(**batch_of("llama", "none"))
        assert own.calls and innermost_function_mode() is known
    assert inside == [None, own]

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    layers[1].register_forward_pre_hook(fail)
    with own, pytest.raises(KeyboardInterrupt), known.following():
        model(**batch_of("llama", "none"))
    assert innermost_function_mode() is None
    known.end()
    assert [len(layer._forward_pre_hooks) for layer in layers] == [0, 1] and not any(
        layer._forward_hooks for layer in layers
    )


def test_a_compiler_finds_nothing_in_the_mode() -> None:
    _, known = make()
    mask = torch.ones(2, 4, dtype=torch.long)
    traced = torch.compile(
        lambda mask: (mask[:, 1:] == 1).sum(-1) + torch.arange(2), backend="eager", fullgraph=True
    )
    with known.moving():
        moved = mask.to(CPU)
    with known.following():
        assert traced(moved).tolist() == [3, 4]


class PadsInPlace(parity.Module):
    """Its step changes the batch, which is the data set's own."""

    change = staticmethod(pad_in_place)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        self.change(batch)
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        layers = self.model.get_submodule("model.layers")  # type: ignore[union-attr]
        self.hooks = [bool(layer._forward_pre_hooks) for layer in layers]


class PadsUncounted(PadsInPlace):
    change = staticmethod(pad_uncounted)


def fit_in_place(
    kind: type[PadsInPlace], *, known: bool
) -> tuple[list[float], list[bool], list[bool]]:
    """(losses, whether blocks have hooks at the end of the fit, and after it)."""
    recipe = Recipe("llama", 2, steps=2, global_batch=4)
    module = kind(recipe)
    rows = parity.Rows(with_mask(data(recipe), "ones"))

    def fit() -> parity.Part:
        return parity.fit_on_rank(recipe, rows, module, layout="dp1", micro_batch_size=2)

    if known:
        with known_on_cpu():
            part = fit()
    else:
        part = fit()
    layers = module.model.get_submodule("model.layers")  # type: ignore[union-attr]
    return part.losses, module.hooks, [bool(layer._forward_pre_hooks) for layer in layers]


@pytest.mark.parametrize("kind", [PadsInPlace, PadsUncounted])
def test_a_fit_sees_what_its_step_changes_and_leaves_no_hooks(kind: type[PadsInPlace]) -> None:
    [(losses, hooks, after)] = run_ranks(fit_in_place, 1, kind, known=True)
    [(expected, no_hooks, _)] = run_ranks(fit_in_place, 1, kind, known=False)
    assert losses == expected
    assert all(hooks) and not any(no_hooks) and not any(after)
