"""One flipped bit in what several ranks hold alike is found, and the rank is named; healthy runs
are never accused."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from parity import PRECISIONS, Data, Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data
from sweeps import by_default

from lightning_3d.errors import ReplicaError
from lightning_3d.health.bit_hash import hash_bits
from lightning_3d.layout import Layout

BATCH, EVERY = 4, 2
CPU = torch.device("cpu")


def test_one_flipped_bit_always_changes_the_hash() -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(70_001),
        torch.randn(3),
        torch.randn(9).bfloat16(),
        torch.zeros(()),
        torch.randn(5)[1:],
        torch.tensor([True]),
    ]
    before = int(hash_bits(tensors, CPU))
    assert before == int(hash_bits([tensor.clone() for tensor in tensors], CPU))
    for tensor in tensors:
        flat = tensor.view(-1) if tensor.dim() else tensor.reshape(1)
        words = flat.view(torch.uint8)
        for place in {0, len(words) // 2, len(words) - 1}:
            for bit in range(8):
                words[place] ^= 1 << bit
                assert int(hash_bits(tensors, CPU)) != before
                words[place] ^= 1 << bit
    assert int(hash_bits(tensors, CPU)) == before


@pytest.mark.parametrize("columns", [64, 1 << 10])
def test_two_flips_and_exchanged_values_change_the_hash(columns: int) -> None:
    value = torch.arange(10_000, dtype=torch.float32)
    before = int(hash_bits([value], CPU))
    for first, second in ((0, 1), (5, 9_999), (3, 3 + columns), (1, 1 + (1 << 12))):
        changed = value.clone()
        changed[[first, second]] = value[[second, first]]
        assert int(hash_bits([changed], CPU)) != before
        signs = value.clone()
        signs[[first, second]] *= -1  # the top bit of two words
        assert int(hash_bits([signs], CPU)) != before


@dataclass(frozen=True)
class Flip:
    """One bit that flips on a rank, when a batch begins.

    Attributes:
        name: part of the name of the parameter.
        state: key of the optimizer's state; None flips the weight.
    """

    rank: int
    name: str
    batch: int = 3
    state: str | None = None

    def __call__(self, strategy: Any) -> None:
        backend = strategy.built.backend
        if self.state is not None:
            shards = [shard for shard in backend.optimizer_shards() if self.name in shard.name]
            [tensor] = [shard.values[self.state] for shard in shards]
        elif strategy.zero_stage == 3:
            tensor = next(
                s.values["weight"]
                for s in backend.weight_shards()
                if self.name in s.name and s.values["weight"].numel()
            )
        else:
            [tensor] = [
                p.detach()
                for name, p in strategy.lightning_module.named_parameters()
                if self.name in name
            ]
        tensor.view(-1).view(torch.uint8)[0] ^= 1


class Flipper(pl.Callback):
    def __init__(self, flip: Flip | None) -> None:
        self.flip = flip

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        if (
            self.flip is not None
            and trainer.global_rank == self.flip.rank
            and batch_idx == self.flip.batch
        ):
            self.flip(trainer.strategy)


def train(
    layout: str,
    flip: Flip | None = None,
    *,
    model: str = "llama",
    dtype: str = "float32",
    steps: int = 6,
    every: int = EVERY,
    micro_batch_size: int = 1,
    folder: Path | None = None,
    **options: Any,
) -> tuple[str, int, int | None]:
    """Fit on this rank. Returns the text of the error, the steps taken, and the last step after
    which ranks agreed."""
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe(model, 4, steps=steps, global_batch=BATCH)
    reliability = {"check_replicas_every_n_steps": every}
    strategy = Lightning3DStrategy(
        layout, micro_batch_size=micro_batch_size, reliability=reliability, **options
    )
    assert strategy.layout is not None
    saves = (
        [ModelCheckpoint(folder, "step_{step}", every_n_train_steps=4, save_top_k=-1)]
        if folder is not None
        else []
    )
    trainer = quiet_trainer(
        strategy=strategy,
        devices=strategy.layout.world_size,
        precision=PRECISIONS[dtype],
        max_epochs=1,
        callbacks=[Flipper(flip), *saves],
        enable_checkpointing=bool(saves),
    )
    error = ""
    try:
        trainer.fit(
            Module(recipe), datamodule=Data(Rows(data(recipe)), BATCH // strategy.layout.dp)
        )
    except ReplicaError as found:
        error = str(found)
    return error, trainer.global_step, strategy._replicas.agreed


NORM = "layers.0.input_layernorm.weight"
TWO_LEVELS = {"zero_stage": 3, "zero_shard_size": 2}
FLIPS: list[tuple[str, Flip, dict[str, Any], str]] = [
    (
        "dp4",
        Flip(2, "layers.1.mlp.up_proj"),
        {},
        r"rank 2 \(.*, cpu\) holds other weights of model.*layers.1.mlp.up_proj.* than 3 other",
    ),
    (
        "tp2",
        Flip(1, NORM),
        {},
        rf"rank 0 \(.*\) and rank 1 \(.*\) hold different weights of .*{NORM}",
    ),
    (
        "dp2",
        Flip(1, NORM, state="exp_avg"),
        {},
        rf"rank 0 .* and rank 1 .* hold different optimizer state of .*{NORM}, ",
    ),
    (
        "dp2",
        Flip(0, NORM),
        {"zero_stage": 1},
        rf"rank 0 .* and rank 1 .* hold different weights of .*{NORM}, ",
    ),
    (
        "dp2",
        Flip(1, NORM),
        {"zero_stage": 2, "dtype": "bfloat16"},
        rf"rank 0 .* and rank 1 .* hold different weights of .*{NORM}, ",
    ),
    (
        "pp2_dp2",
        Flip(3, "layers.3.self_attn.q_proj"),
        {},
        r"rank 1 .* and rank 3 .* hold different weights of .*layers.3.self_attn.q_proj",
    ),
    (
        "tp2",
        Flip(1, NORM),
        {"zero_stage": 3},
        rf"rank 0 .* and rank 1 .* hold different weights of .*{NORM}, ",
    ),
    (
        "pp2",
        Flip(1, "lm_head"),
        {"model": "qwen2"},
        r"rank 0 .* and rank 1 .* hold different weights of .*embed_tokens.weight, ",
    ),
    (
        "dp4_ep2",
        Flip(1, "layers.1.mlp.experts.down"),
        {"model": "mixtral"},
        r"rank 1 .* and rank 3 .* hold different weights of .*experts",
    ),
    (
        "dp4",
        Flip(3, NORM, state="exp_avg"),
        TWO_LEVELS,
        rf"rank 1 .* and rank 3 .* hold different optimizer state of .*{NORM}, ",
    ),
    ("cp2", Flip(1, "lm_head"), {}, r"rank 0 .* and rank 1 .* hold different weights of .*lm_head"),
]


@pytest.mark.parametrize(
    ("layout", "flip", "options", "said"), by_default(FLIPS, 0, 1, 2, 3, 5, 9), ids=str
)
def test_f45_one_flipped_bit_on_one_rank_is_found_and_named(
    layout: str, flip: Flip, options: dict[str, Any], said: str
) -> None:
    parts = run_ranks(train, Layout.parse(layout).world_size, layout, flip, **options)
    assert len({error for error, _, _ in parts}) == 1
    error, steps, agreed = parts[0]
    assert re.search(f"^After step 3, {said}", error), error
    assert (steps, agreed) == (3, 1)  # found in step 4, before the optimizer's fourth step
    assert "They last agreed after step 1. Resume a checkpoint of step 1 or earlier." in error


@pytest.mark.slow
def test_f45_no_checkpoint_is_written_of_ranks_that_differ(tmp_path: Path) -> None:
    flip = Flip(1, NORM, batch=6)
    parts = run_ranks(train, 2, "dp2", flip, every=100, steps=10, folder=tmp_path)
    error, steps, agreed = parts[0]
    assert (steps, agreed) == (8, 4)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == [
        "step_step=4.ckpt"
    ]
    assert "After step 8, rank 0" in error and "They last agreed after step 4." in error
    assert f"Resume the checkpoint {tmp_path}/step_step=4.ckpt (step 4)" in error


CLEAN: list[tuple[str, dict[str, Any]]] = [
    ("tp2_dp2", {"zero_stage": 1}),
    ("pp2_dp2", {}),
    ("tp2_pp2", {"model": "qwen2"}),
    ("dp2", {"zero_stage": 3, "dtype": "bfloat16"}),
    ("dp2_cp2", {"zero_stage": 2}),
    ("dp4_ep2", {"model": "mixtral"}),
    ("dp4", TWO_LEVELS),
    ("tp2_pp2_dp2", {"zero_stage": 2}),
    ("tp4", {"model": "qwen2", "sequence_parallel": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "options"), by_default(CLEAN, 0, 2), ids=str)
def test_f45_healthy_ranks_are_not_accused(layout: str, options: dict[str, Any]) -> None:
    parts = run_ranks(train, Layout.parse(layout).world_size, layout, every=1, **options)
    assert all(part == ("", 6, 5) for part in parts)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("layout", "options"), CLEAN, ids=str)
def test_f45_no_false_alarm_in_a_thousand_steps(layout: str, options: dict[str, Any]) -> None:
    parsed = Layout.parse(layout)
    # a thousand steps, each as short as it can be
    few = {"micro_batch_size": max(BATCH // parsed.dp // parsed.pp, 1), "timeout": 1200}
    parts = run_ranks(train, parsed.world_size, layout, every=10, steps=1000, **few, **options)
    assert all(part == ("", 1000, 999) for part in parts)
