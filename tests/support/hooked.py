"""A tiny Llama with what people add to a model: hooks and patches that see tokens, count, draw or
write; and fits of it."""

import functools
import itertools
import math
import os
import types
from typing import Any

import lightning.pytorch as pl
import torch
from parity import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import Lightning3DStrategy
from lightning_3d.errors import PlanError

ROWS, LENGTH, STEPS = 4, 16, 2
COUNTS: dict[str, int] = {}
SEEN: list[Tensor] = []


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))


def noise_by_length(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """As NEFTune adds it, but with numbers that do not depend on a generator."""
    if not module.training:
        return output
    largest = 5.0 / math.sqrt(output.shape[1] * output.shape[2])
    return output + largest * torch.ones_like(output)


def drawn_noise_by_length(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    if not module.training:
        return output
    largest = 5.0 / math.sqrt(output.shape[1] * output.shape[2])
    return output + torch.zeros_like(output).uniform_(-largest, largest)


def mean_of_tokens(module: nn.Module, args: Any, output: Any) -> Any:
    hidden = output[0] if isinstance(output, tuple) else output
    changed = hidden - 0.5 * hidden.mean(1, keepdim=True)
    return (changed, *output[1:]) if isinstance(output, tuple) else changed


def by_position(module: nn.Module, args: Any, output: Any) -> Any:
    hidden = output[0] if isinstance(output, tuple) else output
    changed = hidden * (1 + torch.arange(hidden.shape[1], device=hidden.device)[:, None] / 8)
    return (changed, *output[1:]) if isinstance(output, tuple) else changed


def doubled(module: nn.Module, args: Any, output: Any) -> Any:
    """Treats every token alone: right in every layout."""
    return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


def count(module: nn.Module, args: Any, output: Any) -> None:
    COUNTS["global"] = COUNTS.get("global", 0) + 1
    SEEN.append(torch.rand(1))
    module.calls = getattr(module, "calls", 0) + 1


class Counter:
    """Remembers in every place that a hook may write to."""

    made = 0

    def __init__(self) -> None:
        self.calls, self.outputs, self.drawn, self.generator = (
            0,
            [],
            [],
            torch.Generator().manual_seed(3),
        )
        self.numbers = itertools.count()
        self.sum = torch.zeros(())

    def hooks(self) -> list[Any]:
        calls = [0]
        by_name: dict[str, int] = {}
        rest = 0

        def in_closure(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal rest
            rest += 1
            calls[0] += 1
            by_name["in"] = by_name.get("in", 0) + 1

        self.in_closure: Any = lambda: (calls[0], by_name.get("in", 0), rest)
        return [in_closure, self.method, functools.partial(_into, self.outputs), count]

    def method(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls += 1
        Counter.made += 1
        next(self.numbers)
        self.sum += 1
        self.drawn.append(float(torch.rand((), generator=self.generator)))

    def state(self) -> list[Any]:
        first = torch.Generator().manual_seed(3)
        drawn = [float(torch.rand((), generator=first)) for _ in self.drawn] == self.drawn
        counted = (self.calls, len(self.outputs), Counter.made, float(self.sum), next(self.numbers))
        return [*self.in_closure(), *counted, drawn, COUNTS.get("global", 0), len(SEEN)]


def _into(outputs: list[Any], module: nn.Module, args: Any, output: Any) -> None:
    outputs.append(1)


def counted(layout: str | None, cache: str, micro_batch: int = ROWS, **options: Any) -> list[Any]:
    """Count with all kinds of hooks on the first block in one step, on this rank or in plain
    Lightning with as many micro-batches."""
    os.environ["XDG_CACHE_HOME"] = cache
    COUNTS.clear()
    SEEN.clear()
    Counter.made = 0
    module, counter = Text(None), Counter()
    block = module.model.model.layers[0]
    for hook in counter.hooks():
        block.register_forward_hook(hook)
    if layout is None:
        trainer = quiet_trainer(
            strategy="auto", devices=1, max_steps=1, accumulate_grad_batches=ROWS // micro_batch
        )
        trainer.fit(module, DataLoader(rows(), batch_size=micro_batch))
    else:
        strategy = Lightning3DStrategy(layout, micro_batch_size=micro_batch, **options)
        assert strategy.layout is not None
        trainer = quiet_trainer(strategy=strategy, devices=strategy.layout.world_size, max_steps=1)
        trainer.fit(module, DataLoader(rows(), batch_size=ROWS))
    return [*counter.state(), getattr(block, "calls", None)]


def patched_norm(self: Any, hidden: Tensor) -> Tensor:
    return self.weight * hidden / (1 + hidden.pow(2).mean((1, 2), keepdim=True).sqrt())


WHERE = {
    "embedding": lambda model: [model.model.embed_tokens],
    "norm": lambda model: [layer.input_layernorm for layer in model.model.layers],
    "last norm": lambda model: [model.model.norm],
    "block": lambda model: list(model.model.layers),
    "mlp": lambda model: [layer.mlp for layer in model.model.layers],
}


class Text(pl.LightningModule):
    """Adds to its model what `way` says: (hook, place), (hook, place, "late") or the name of a
    patch."""

    def __init__(self, way: Any) -> None:
        super().__init__()
        self.model, self.way = llama(), way
        if way == "patched norm":
            for layer in self.model.model.layers:
                layer.input_layernorm.forward = types.MethodType(
                    patched_norm, layer.input_layernorm
                )
        elif way is not None and way[-1] != "late":
            self._hook()

    def _hook(self) -> None:
        for module in WHERE[self.way[1]](self.model):
            module.register_forward_hook(self.way[0])

    def on_train_start(self) -> None:
        if self.way is not None and self.way[-1] == "late":
            self._hook()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def rows() -> TensorDataset:
    return TensorDataset(
        torch.randint(0, 32, (ROWS * STEPS, LENGTH), generator=torch.Generator().manual_seed(1))
    )


class _Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        self.losses.append(float(outputs["loss"]))


def one_process(way: Any) -> list[float]:
    """Losses of plain Lightning."""
    losses = _Losses()
    quiet_trainer(strategy="auto", devices=1, max_steps=STEPS, callbacks=[losses]).fit(
        Text(way), DataLoader(rows(), batch_size=ROWS)
    )
    return losses.losses


def fits(ways: list[Any], layout: str, cache: str, **options: Any) -> list[list[float] | str]:
    """Train with each way, on this rank: losses, or what was refused."""
    os.environ["XDG_CACHE_HOME"] = cache
    found: list[list[float] | str] = []
    for way in ways:
        strategy = Lightning3DStrategy(layout, micro_batch_size=ROWS, **options)
        assert strategy.layout is not None
        losses = _Losses()
        try:
            quiet_trainer(
                strategy=strategy,
                devices=strategy.layout.world_size,
                max_steps=STEPS,
                callbacks=[losses],
            ).fit(Text(way), DataLoader(rows(), batch_size=ROWS))
            found.append(losses.losses)
        except PlanError as error:
            found.append(str(error))
    return found


def crossed(x: Tensor) -> Tensor:
    """Mix features that tp ranks split."""
    return x / (0.1 + x.pow(2).mean(-1, keepdim=True).sqrt())


class Crossing(nn.Module):
    """A block whose activation is an argument. Its norm keeps trials of styles from running it
    alone."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.act = crossed if way == "function" else torch.tanh
        self._crossed = way == "private"
        if way == "hook":
            self.down.register_forward_pre_hook(lambda module, args: (crossed(args[0]),))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        return x + self.down(crossed(hidden) if self._crossed else self.act(hidden))


class Regression(pl.LightningModule):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Sequential(*(Crossing(way) for _ in range(2))), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def crossed_fits(ways: list[str], cache: str) -> list[str]:
    """Train with tp2 and one folder of remembered checks: "trained", or what was refused."""
    os.environ["XDG_CACHE_HOME"] = cache
    plan = {"tp": {"0.*.up": "colwise", "0.*.down": "rowwise"}}
    found = []
    for way in ways:
        try:
            trainer = quiet_trainer(
                strategy=Lightning3DStrategy("tp2", plan=plan), devices=2, max_steps=1
            )
            trainer.fit(Regression(way), DataLoader(TensorDataset(torch.ones(4, 8)), batch_size=4))
            found.append("trained")
        except PlanError as error:
            found.append(str(error))
    return found
