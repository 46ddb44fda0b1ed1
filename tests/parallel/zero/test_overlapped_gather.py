"""ZeRO 1 and 2: the parameters of a step are gathered while the next forward runs, and nothing sees
old ones."""

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import cycle
from math import prod
from typing import Any

import lightning.pytorch as pl
import parity
import pytest
import torch
import torch.distributed as dist
from counting import Call, recording
from handmade_gradients import Run, check, full_shapes, train
from parity import Part, StepValues, quiet_trainer, train_on_rank
from plain_module import LanguageModel, TextData
from ranks import run_ranks
from reference import Recipe
from sweeps import by_default
from torch import Tensor, nn

from lightning_3d.errors import LayoutError
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.parallel.zero import parameter_store
from lightning_3d.parallel.zero.parameter_store import AwaitedParameter, OverlappedGather

# Exactness

SGD: dict[str, Any] = {
    "optimizer": "SGD",
    "options": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
}
BY_HAND = [
    Run("dp2", mode="1"),
    Run("dp4", mode="2 eager", shard=2, late=True, wakes=5, **SGD),
    Run("dp2", mode="1", precision="bf16"),
    Run("pp2_dp2", mode="1 scattered"),
    Run("dp4", mode="1 offloaded"),
]


@pytest.mark.slow
@pytest.mark.parametrize("run", by_default(BY_HAND, 1), ids=lambda run: f"{run.layout} {run.mode}")
def test_weights_and_norms_equal_those_of_one_process(run: Run) -> None:
    """Also with messages smaller than a parameter, and with parameters that no rank has a gradient
    for."""
    loose = run.precision == "bf16"
    check(
        Run(**vars(run) | {"overlap_gather": True, "bucket_bytes": 60}),
        weights=1e-2 if loose else 5e-5,
        norm=1e-2 if loose else 1e-5,
    )


CELLS: list[tuple[str, int, dict[str, Any]]] = [
    ("dp2", 1, {}),
    ("dp2", 2, {}),
    ("tp2_dp2", 1, {}),
    ("tp2_dp2", 2, {"zero_reduce_scatter": True}),
    ("pp2_dp2", 1, {"schedule": "Interleaved1F1B"}),
    ("pp2_dp2", 2, {"schedule": "ZBVZeroBubble"}),
    ("dp4", 1, {"zero_shard_size": 2}),
    ("dp4", 2, {"zero_shard_size": 2}),
    ("dp2", 1, {"recompute": "full"}),
    ("cp2_dp2", 2, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "stage", "options"), by_default(CELLS, 3, 4, 7), ids=str)
def test_training_is_bit_equal_to_that_without_overlap(
    layout: str, stage: int, options: dict[str, Any]
) -> None:
    """Old values stay in place until something waits for the new ones, so that a read that does not
    wait shows."""
    recipe = Recipe("llama", steps=6)
    options = {"layout": layout, "micro_batch_size": 4, "zero_stage": stage, **options}
    ranks = prod(int(part[2:]) for part in layout.split("_"))
    plain = run_ranks(train_on_rank, ranks, recipe, **options)
    for expected, found in zip(
        plain,
        run_ranks(train_late, ranks, recipe, zero_overlap_gather=True, **options),
        strict=True,
    ):
        assert (found.losses, found.grad_norms) == (expected.losses, expected.grad_norms)
        assert all(
            torch.equal(found.weights[name], weight) for name, weight in expected.weights.items()
        )


@pytest.mark.full
def test_experts_are_gathered_over_their_own_ranks() -> None:
    parity.assert_same_training("mixtral", "dp4_ep2", zero=1, zero_overlap_gather=True)


@pytest.mark.full
def test_compiled_blocks() -> None:
    parity.assert_same_training("llama", "dp2", zero=1, zero_overlap_gather=True, compile=True)


class Late(parameter_store._Message):
    """A message whose elements change only when it is waited for."""

    def start(self) -> None:
        self._new = self._elements.clone()
        self._work = dist.broadcast(self._new, self._source, group=self._group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._elements.copy_(self._new)


def train_late(recipe: Recipe, **options: Any) -> Part:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_store, "_Message", Late)
        return train_on_rank(recipe, **options)


# What reads parameters

WAYS: list[Callable[[nn.Parameter], Any]] = [
    lambda p: p.double().sum().item(),
    lambda p: p.data.double().sum().item(),
    lambda p: deepcopy(p).detach().double().sum().item(),
    lambda p: p.detach().numpy().sum().item(),
    lambda p: torch._foreach_norm([p.detach(), p])[1].item(),
    lambda p: torch.cat([torch.zeros(1), p.reshape(-1)]).double().sum().item(),
]
HOOKS = (
    *(
        "on_train_batch_start",
        "on_before_backward",
        "on_before_zero_grad",
        "on_train_batch_end",
        "on_train_epoch_end",
    ),
    *("on_validation_start", "on_validation_batch_end", "on_train_end"),
)


class Reader(pl.Callback):
    """Reads each parameter in every hook, in another way each time."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self._ways = cycle(WAYS)

    def read(self, hook: str, module: nn.Module) -> None:
        with torch.no_grad():
            self.seen.append(
                (hook, [next(self._ways)(parameter) for parameter in module.parameters()])
            )
            self.seen.append(
                (hook, [value.double().sum().item() for value in module.state_dict().values()])
            )


def _reading(hook: str) -> Callable[..., None]:
    return lambda self, trainer, module, *args: self.read(hook, module)


for _hook in HOOKS:
    setattr(Reader, _hook, _reading(_hook))


class Regularized(LanguageModel):
    """Its step reads parameters of all blocks before their forward, through references that it has
    kept."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        kept = vars(self).setdefault("kept", list(self.parameters()))
        norm = sum(parameter.square().sum() for parameter in reversed(kept))
        return super().training_step(batch, batch_idx) + 1e-3 * norm


def reading(
    *, every_hook: bool, **options: Any
) -> tuple[list[Any], list[float], dict[str, Tensor]]:
    from lightning_3d.strategy import Lightning3DStrategy

    values, reader = StepValues(), Reader()
    strategy = Lightning3DStrategy("dp2", micro_batch_size=4, zero_stage=1, seed=1, **options)
    callbacks = [values, reader] if every_hook else [values]
    trainer = quiet_trainer(
        strategy=strategy,
        devices=2,
        max_epochs=2,
        limit_train_batches=2,
        limit_val_batches=1,
        callbacks=callbacks,
    )
    module = Regularized()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_store, "_Message", Late)
        trainer.fit(module, datamodule=TextData(8))
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    return (
        reader.seen,
        values.losses,
        {name: value.clone() for name, value in module.state_dict().items()},
    )


@pytest.mark.slow
@pytest.mark.parametrize("every_hook", by_default([True, False], 0, 1))
def test_hooks_validation_and_the_users_step_see_new_values(every_hook: bool) -> None:
    """Read in a step alone, nothing else has waited for them."""
    plain = run_ranks(reading, 2, every_hook=every_hook)
    overlapped = run_ranks(reading, 2, every_hook=every_hook, zero_overlap_gather=True)
    for (seen, losses, weights), expected in zip(overlapped, plain, strict=True):
        assert (seen, losses) == expected[:2]
        assert all(torch.equal(weights[name], weight) for name, weight in expected[2].items())


class Message:
    """Takes the place of a message."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, arrives: bool = True) -> None:
        self.parameters, self.waited, self._arrives = parameters, 0, arrives

    def start(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1

    def has_arrived(self) -> bool:
        return self._arrives


def started(*messages: Message) -> OverlappedGather:
    gather = OverlappedGather(1)
    gather._messages = list(messages)  # type: ignore[arg-type]
    gather.start()
    return gather


def test_only_values_are_waited_for() -> None:
    parameter, other = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))
    first, both = Message([parameter]), Message([parameter, other])
    gather = started(first, both)
    assert (
        isinstance(parameter, nn.Parameter)
        and parameter.shape == (2, 3)
        and parameter.requires_grad
        and parameter.grad is None
    )
    parameter.grad = torch.ones(2, 3)
    assert parameter.numel() + parameter.dim() + len({parameter: 1}) == 9
    assert type(parameter) is AwaitedParameter and first.waited == both.waited == 0
    torch.add(1.0, parameter)
    assert type(parameter) is nn.Parameter and (first.waited, both.waited) == (1, 1)
    assert type(other) is AwaitedParameter
    gather.settle()
    assert type(other) is nn.Parameter and not vars(other)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_failed_rank_does_not_wait_for_ever(
    arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_store, "_PATIENCE", 0.0)
    parameter = nn.Parameter(torch.ones(2))
    message = Message([parameter], arrives=arrives)
    assert started(message).abandon() is not arrives
    assert type(parameter) is nn.Parameter and message.waited == arrives


# Order and traffic


class Events(pl.Callback):
    """Order of what one rank does, step by step."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = [[]]

    def note(self, event: str) -> None:
        self.steps[-1].append(event)

    def on_before_zero_grad(self, *args: Any) -> None:
        self.steps.append([])

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for index, block in enumerate(module.model.model.layers):  # type: ignore[union-attr]
            block.register_forward_pre_hook(
                lambda block, args, index=index: self.note(f"block {index}")
            )


def events(layout: str) -> list[list[str]]:
    from lightning_3d.strategy import Lightning3DStrategy

    seen = Events()

    class Noted(parameter_store._Message):
        def start(self) -> None:
            seen.note(f"send {self._source}")
            super().start()

        def wait(self) -> None:
            if self._work is not None:
                seen.note(f"wait {self._source}")
            super().wait()

    # Without the proof of the loss, which runs blocks again.
    strategy = Lightning3DStrategy(
        layout, zero_stage=1, zero_overlap_gather=True, self_check="never"
    )
    trainer = quiet_trainer(strategy=strategy, devices=2, max_steps=3, callbacks=[seen])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_store, "_Message", Noted)
        trainer.fit(OneGroup(), datamodule=TextData(8))
    return seen.steps


class OneGroup(LanguageModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return torch.optim.AdamW(self.parameters())


def test_a_block_waits_only_for_its_own_parameters() -> None:
    """The last block's part, which the other rank has stepped, is still under way when the first
    block's forward begins."""
    for steps in run_ranks(events, 2, "dp2"):
        in_order = [event for step in steps for event in step]
        sent = in_order.index("send 1")
        following = in_order[sent + 1 :]
        following = following[: following.index("send 0")]
        assert following.index("wait 0") < following.index("block 0")
        assert (
            following.index("block 0")
            < following.index("block 1")
            < following.index("wait 1")
            < following.index("block 3")
        )
        assert following.count("wait 0") == following.count("wait 1") == 1


def broadcasts(steps: int) -> Counter[Call]:
    with recording() as recorder:
        train(
            Run(
                "dp4",
                mode="1",
                shard=2,
                steps=steps,
                max_norm=None,
                bucket_bytes=200,
                overlap_gather=True,
            )
        )
    return Counter(
        call
        for call in recorder.calls
        if call.name == "broadcast" or call.name.startswith("all_gather")
    )


def test_as_many_bytes_as_an_all_gather_in_the_shard_group() -> None:
    trained = 4 * sum(
        prod(shape) for name, shape in full_shapes().items() if not name.endswith("frozen")
    )
    padding = 3 * 4 * 4  # of three groups
    for rank, (one, three) in enumerate(
        zip(run_ranks(broadcasts, 4, 1), run_ranks(broadcasts, 4, 3), strict=True)
    ):
        first = rank // 2 * 2
        two_steps = three - one  # without what DeepSpeed sends when it starts
        assert {(call.name, call.ranks) for call in two_steps} == {
            ("broadcast", (first, first + 1))
        }
        assert max(call.bytes for call in two_steps) <= 200
        assert (
            2 * trained
            <= sum(call.bytes for call in two_steps.elements())
            <= 2 * (trained + padding)
        )


@pytest.mark.parametrize(
    ("stage", "why"), [(0, "gathers no parameters"), (3, "already gathers each block")]
)
def test_what_is_refused(stage: int, why: str) -> None:
    with pytest.raises(
        LayoutError,
        match=f"zero_overlap_gather=true needs zero_stage=1 or 2; got {stage}, which {why}",
    ):
        ZeroOptions(stage, overlap_gather=True).resolve("1F1B", 1)
