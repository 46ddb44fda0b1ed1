"""What once ended in messages that sent the user in a circle: it works, or one message says what
does."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from parity import quiet_trainer
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

from lightning_3d.engine.plan_draft import draft_plan
from lightning_3d.errors import PlanError
from lightning_3d.strategy import Lightning3DStrategy


class Translator(pl.LightningModule):
    """Calls an encoder-decoder with `labels` alone, as everybody does."""

    def __init__(self, generates: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_decoder_layers": 4,
            "num_heads": 4,
        }
        self.model = T5ForConditionalGeneration(
            T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
        )
        ids = torch.arange(2, 14).view(2, 6)
        self.example_input_array = {"input_ids": ids, "labels": ids}
        self.generates = generates
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)
        if self.generates == "step":
            self.model.generate(input_ids=batch["input_ids"], max_new_tokens=2)

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))
        if self.generates == "hook":
            self.model.generate(input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pairs(batch_size: int) -> DataLoader:
    rows = torch.randint(2, 64, (24, 6), generator=torch.Generator().manual_seed(0))
    targets = rows.flip(1).masked_fill(rows < 20, -100)
    data = [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": target}
        for row, target in zip(rows, targets, strict=True)
    ]
    return DataLoader(data, batch_size=batch_size)  # type: ignore[arg-type]


def translate(layout: str, cache: str, generates: str = "") -> list[float]:
    os.environ["XDG_CACHE_HOME"] = cache
    module = Translator(generates)
    strategy = Lightning3DStrategy(layout, plan="auto", micro_batch_size=2)
    assert strategy.layout is not None
    trainer = quiet_trainer(strategy=strategy, devices=strategy.layout.world_size, max_steps=3)
    trainer.fit(module, pairs(8 // strategy.layout.dp), pairs(8 // strategy.layout.dp))
    return module.losses


@pytest.mark.parametrize(
    ("layout", "ranks"), [("pp2", 2), pytest.param("pp2_dp2", 4, marks=pytest.mark.slow)]
)
def test_an_encoder_decoder_that_is_called_with_labels_trains_as_on_one_process(
    layout: str, ranks: int, tmp_path: Path
) -> None:
    plain = Translator()
    quiet_trainer(devices=1, max_steps=3).fit(plain, pairs(8))
    for losses in run_ranks(translate, ranks, layout, str(tmp_path), timeout=120):
        assert losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.parametrize("where", ["step", "hook"])
def test_generate_is_refused_with_what_works(where: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"generate\(\).*pp = 1"):
        run_ranks(translate, 2, "pp2", str(tmp_path), where, timeout=120)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.leave(x.mean(1))


class WithoutForward(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Images()
        self.example_input_array = torch.zeros(2, 3, 16, 16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def summarized(layout: str, cache: str) -> int:
    os.environ["XDG_CACHE_HOME"] = cache
    trainer = quiet_trainer(
        strategy=Lightning3DStrategy(layout, plan="auto"),
        devices=2,
        max_steps=1,
        enable_model_summary=True,
    )
    trainer.fit(WithoutForward(), DataLoader(torch.randn(8, 3, 16, 16), batch_size=4))  # type: ignore[arg-type]
    return trainer.global_step


def test_an_example_that_a_module_without_forward_has_does_not_end_the_run(tmp_path: Path) -> None:
    assert run_ranks(summarized, 2, "tp2", str(tmp_path), timeout=120) == [1, 1]


def test_an_example_on_the_meta_device_is_drafted_with() -> None:
    with torch.device("meta"):
        module = WithoutForward()
    found = draft_plan(module)
    assert not any(found.problems.values())
    assert list(found.plan["pp"]) == ["enter", "blocks", "leave"]
    assert found.plan == draft_plan(WithoutForward()).plan


class Stem(nn.Module):
    """An LSTM, which returns tuples, before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.leave = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        frames, (last, _) = self.lstm(x)
        x = frames[:, 0] + last[0]
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Replaced(pl.LightningModule):
    """Some modules have another forward than their class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Stem()
        self.example_input_array = torch.zeros(2, 3, 8)
        self.losses: list[float] = []
        for module in (self.net.blocks[1], self.net.blocks[2], self.net.leave):
            self.replace(module)

    @staticmethod
    def replace(module: Any) -> None:
        before = module.forward
        module.forward = lambda x: before(x) * 2

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch) - batch.sum((1, 2))[:, None]).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def fit_replaced(strategy: Any, devices: int) -> list[float]:
    module = Replaced()
    rows = torch.randn(24, 3, 8, generator=torch.Generator().manual_seed(0))
    quiet_trainer(strategy=strategy, devices=devices, max_steps=3).fit(
        module, DataLoader(rows, batch_size=8)
    )  # type: ignore[arg-type]
    return module.losses


def fit_replaced_over_stages(cache: str) -> list[float]:
    os.environ["XDG_CACHE_HOME"] = cache
    return fit_replaced(Lightning3DStrategy("pp2", plan="auto"), 2)


def test_replaced_forwards_and_modules_that_return_tuples_train_over_stages(tmp_path: Path) -> None:
    plain = fit_replaced("auto", 1)
    for losses in run_ranks(fit_replaced_over_stages, 2, str(tmp_path), timeout=120):
        assert losses == pytest.approx(plain, rel=1e-5)
