"""A small GPT as people write it, without a word of this project, in several hands; and a fit of
it."""

import copy
import io
import os
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from parity import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import Lightning3DStrategy
from lightning_3d.models.parallel_plan import Cut

WIDTH, HEADS, VOCABULARY, LENGTH, STEPS = 32, 4, 64, 12, 2


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads (batch, heads, length, width) -> (batch, length, features)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Takes the number of heads from what it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head_width = WIDTH // HEADS

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(
            attend(
                *(
                    layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
                    for layer in (self.q, self.k, self.v)
                )
            )
        )


class FixedHeads(Attention):
    """Asks for as many heads as there are in all, and for the width that follows from the input."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        return self.proj(
            attend(
                *(
                    layer(x).view(b, t, HEADS, c // HEADS).transpose(1, 2)
                    for layer in (self.q, self.k, self.v)
                )
            )
        )


class NamedHeads(Attention):
    """Has the number of heads in an attribute whose name says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.nh = HEADS

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        return self.proj(
            attend(
                *(
                    layer(x).view(b, t, self.nh, -1).transpose(1, 2)
                    for layer in (self.q, self.k, self.v)
                )
            )
        )


class SharedKeys(nn.Module):
    """Two key heads for four query heads, counted in attributes: H, HK and how many queries share
    one."""

    def __init__(self) -> None:
        super().__init__()
        self.H, self.HK, self.rep, self.width = HEADS, 2, HEADS // 2, WIDTH // HEADS
        self.q, self.proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.H, self.width).transpose(1, 2)
        k, v = (
            layer(x).view(b, t, self.HK, self.width).transpose(1, 2).repeat_interleave(self.rep, 1)
            for layer in (self.k, self.v)
        )
        return self.proj(attend(q, k, v))


class NormedHeads(Attention):
    """One norm for the queries of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(self.head_width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return self.proj(attend(self.norm(q), k, v))


class Packed(nn.Module):
    """nanoGPT's: one layer for query, key and value, split by the width."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        return self.proj(
            attend(*(part.view(b, t, self.n_head, -1).transpose(1, 2) for part in parts))
        )


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module], dropout: float) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.n2(x)))))


class GPT(nn.Module):
    def __init__(
        self, attention: type[nn.Module] = Attention, *, dropout: float = 0.0, tied: bool = False
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block(attention, dropout) for _ in range(4))
        self.f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.head(self.f(x))


class Text(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (ids,) = batch
        return F.cross_entropy(self.net(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


ATTENTION = {f"h.*.attn.{name}": "colwise" for name in "qkv"} | {"h.*.attn.proj": "rowwise"}
PACKED = {
    "h.*.attn.c_attn": Cut("packed_colwise", units=HEADS, parts=(WIDTH,) * 3),
    "h.*.attn.proj": "rowwise",
}
MLP = {"h.*.up": "colwise", "h.*.down": "rowwise"}
PIPELINE = {
    "wte": (["ids"], ["x"]),
    "wpe": ([], ["x"]),
    "h": (["x"], ["x"]),
    "f": (["x"], ["x"]),
    "head": (["x"], ["y"]),
}
PLAN: dict[str, Any] = {"tp": ATTENTION | MLP, "pp": PIPELINE}


@dataclass
class Fitted:
    """Losses of all steps, and what was printed to standard error."""

    losses: list[float]
    printed: str = ""


class _Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        self.losses.append(float(outputs["loss"]))


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(0, VOCABULARY, (4 * STEPS, LENGTH), generator=generator))


def fit(
    model: nn.Module,
    layout: str,
    plan: dict[str, Any] | None = None,
    cache: str | None = None,
    **options: Any,
) -> Fitted:
    """Train on this rank. `cache` is the folder in which self-checks are remembered."""
    if cache is not None:
        os.environ["XDG_CACHE_HOME"] = cache
    strategy = Lightning3DStrategy(layout, plan=plan or PLAN, micro_batch_size=2, **options)
    assert strategy.layout is not None
    losses = _Losses()
    printed = io.StringIO()
    with redirect_stderr(printed):
        quiet_trainer(
            strategy=strategy,
            devices=strategy.layout.world_size,
            max_steps=STEPS,
            callbacks=[losses],
        ).fit(Text(copy.deepcopy(model)), DataLoader(rows(), batch_size=4 // strategy.layout.dp))
    return Fitted(losses.losses, printed.getvalue())


def validate(model: nn.Module, cache: str) -> str:
    """Evaluate on tp2, in inference mode where the backend allows it. What was printed."""
    os.environ["XDG_CACHE_HOME"] = cache
    module, printed = Text(copy.deepcopy(model)), io.StringIO()
    module.validation_step = module.training_step  # type: ignore[method-assign]
    with redirect_stderr(printed):
        strategy = Lightning3DStrategy("tp2", plan=PLAN, micro_batch_size=2)
        quiet_trainer(strategy=strategy, devices=2, max_steps=1).validate(
            module, DataLoader(rows(), batch_size=4), verbose=False
        )
    return printed.getvalue()


def one_process(model: nn.Module) -> list[float]:
    """The losses of a plain loop."""
    module = Text(copy.deepcopy(model))
    optimizer, losses = module.configure_optimizers(), []
    for batch in DataLoader(rows(), batch_size=4):
        loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
