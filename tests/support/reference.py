"""The reference that every layout is compared with: a plain PyTorch loop on one process.

Same model, weights and global batches; gradients of the micro-batches accumulate, the loss is the
sum of the token losses over the global batch divided by its target tokens, the gradient is clipped
by its global norm, AdamW steps. Of the package it uses only ``initialize``, for the same initial
weights.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import models
import torch
from torch import Tensor, nn

from lightning_3d.weights.initialize import initialize

# fewer in tests, see conftest.py; zero_table.py has 20
STEPS = int(os.environ.get("PARITY_STEPS", "20"))
Step = Callable[[nn.Module, models.Batch], Tensor]
Optimizers = Callable[
    [nn.Module], tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]
]


@dataclass(frozen=True)
class Recipe:
    """One training run, without its layout. Sizes in rows of the global batch."""

    model: str = "llama"
    layers: int = 4
    dtype: str = "float32"
    steps: int = STEPS
    global_batch: int = 16
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    clip: float = 0.3
    seed: int = 0
    # parts of the names of the parameters that are trained; the others are frozen
    trained: tuple[str, ...] = ("",)
    # arguments of LoraConfig; PEFT decides what is trained then
    lora: tuple[tuple[str, Any], ...] = ()
    # PEFT finds the weights of the model; else adapters are made with the model
    adapted_in_memory: bool = False
    # coefficients of router losses: "aux_loss", "z_loss"; and "bias_update"
    routers: tuple[tuple[str, float], ...] = ()
    # terms of the loss beyond cross-entropy: "label_smoothing", "z_loss"
    loss: tuple[tuple[str, float], ...] = ()
    # micro-batches are those that so many ranks read; where losses of micro-batches are no sums
    # over tokens
    data_ranks: int = 1

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class Run:
    """What a run leaves: per step the loss and the gradient norm before clipping; the final weights
    by full name."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    # per step, before their coefficients
    router_losses: list[tuple[float, float]] = field(default_factory=list)


def data(recipe: Recipe) -> models.Batch:
    """All rows of the run in order: (steps * global_batch, ...) per key. The same for every
    layout."""
    generator = torch.Generator().manual_seed(recipe.seed + 1)
    rows = recipe.steps * recipe.global_batch
    return models.task(recipe.model).data(rows, models.vocabulary(recipe.model), generator)


def initial_model(recipe: Recipe) -> nn.Module:
    """The model in memory with the weights that every layout gets: a function of the seed and the
    parameters' names."""
    if recipe.adapted_in_memory:
        plain = initial_model(replace(recipe, lora=(), adapted_in_memory=False))
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(recipe.seed)
            return tuned(plain, recipe)
    with torch.device("meta"), default_dtype(recipe.torch_dtype):
        module = nn.ModuleDict({"model": tuned(models.build(recipe.model, recipe.layers), recipe)})
    # some routers are built in float32; Lightning's precision converts them before the values exist
    for parameter in module.parameters():
        parameter.data = parameter.data.to(recipe.torch_dtype)
    initialize(module, recipe.seed)
    return module["model"]


def tuned(model: nn.Module, recipe: Recipe) -> nn.Module:
    """The model with what the recipe does not train frozen, or with adapters."""
    if recipe.lora:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(**dict(recipe.lora)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in recipe.trained))
    return model


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As the ranks have. Two threads of a tiny model on two busy cores wait for each other ten
    times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def train(recipe: Recipe, micro_batch: int = 4, optimizers: Optimizers | None = None) -> Run:
    """Run the recipe's own data with micro-batches of ``micro_batch`` consecutive rows."""
    rows = data(recipe)
    starts = range(0, recipe.steps * recipe.global_batch, recipe.global_batch)
    batches = [cut(rows, start, recipe.global_batch) for start in starts]
    parts = [
        [part for own in dealt(batch, recipe.data_ranks) for part in split(own, micro_batch)]
        for batch in batches
    ]
    return train_on(recipe, parts, optimizers=optimizers)


def dealt(batch: models.Batch, ranks: int) -> list[models.Batch]:
    """What each of so many data-parallel ranks reads of a global batch."""
    return [{key: value[rank::ranks] for key, value in batch.items()} for rank in range(ranks)]


@one_thread()
def train_on(
    recipe: Recipe,
    global_batches: Sequence[Sequence[models.Batch]],
    step: Step | None = None,
    optimizers: Optimizers | None = None,
) -> Run:
    """The reference loop: one optimizer step for each global batch, which is a list of
    micro-batches.

    Args:
        step: a loss of the user's own, which weighs each micro-batch by its rows; None for the mean
            over target tokens.
        optimizers: makes an optimizer and a schedule; None for AdamW with a constant learning rate.
    """
    model = initial_model(recipe)
    task = models.task(recipe.model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        trained, lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    if optimizers is not None:
        optimizer, scheduler = optimizers(model)
    losses, norms, router_losses = [], [], []
    routers = RouterReference(model, recipe)
    for micro_batches in global_batches:
        count = row_count if step is not None else functools.partial(target_count, recipe.model)
        whole = sum(count(micro_batch) for micro_batch in micro_batches)
        loss = 0.0
        of_routers = [0.0, 0.0]
        for micro_batch in micro_batches:
            if step is not None:
                part = step(model, micro_batch) * count(micro_batch) / whole
            else:
                part = task.token_losses(model, micro_batch, **dict(recipe.loss)).sum() / whole
            loss += part.item()
            for index, (value, coefficient) in enumerate(
                routers.losses() if recipe.routers else ()
            ):
                share = value * count(micro_batch) / whole
                of_routers[index] += share.item()
                part = part + coefficient * share
            part.backward()
        losses.append(loss)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), recipe.clip).item())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        routers.after_step()
        router_losses.append((of_routers[0], of_routers[1]))
    weights = {f"model.{name}": value.detach().clone() for name, value in model.named_parameters()}
    return Run(losses, norms, weights, router_losses)


class RouterReference:
    """Losses of routers from their logits, as the papers define them, layer by layer, with loops
    over experts."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self._coefficients = dict(recipe.routers)
        self._routers = [
            module
            for module in model.modules()
            if type(module).__name__.lower().endswith("topkrouter")
        ]
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._loads = [torch.zeros(router.num_experts) for router in self._routers]
        for index, router in enumerate(self._routers if recipe.routers else ()):
            router.register_forward_hook(functools.partial(self._keep, index))

    def _keep(
        self, index: int, router: nn.Module, args: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        logits, _, chosen = output
        self._seen.append((logits, chosen))
        for expert in chosen.flatten().tolist():
            self._loads[index][expert] += 1

    def losses(self) -> list[tuple[Tensor, float]]:
        """(value, coefficient) of the balancing loss and the z-loss of the last micro-batch, means
        over layers."""
        balancing, z = [], []
        for router, (logits, chosen) in zip(self._routers, self._seen, strict=True):
            scores = logits.softmax(-1)
            if hasattr(router, "e_score_correction_bias"):
                scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
            experts = range(logits.shape[1])
            fractions = [(chosen == expert).any(-1).to(logits.dtype).mean() for expert in experts]
            balancing.append(
                logits.shape[1]
                * sum(fractions[expert] * scores[:, expert].mean() for expert in experts)
            )
            z.append(logits.exp().sum(-1).log().square().mean())
        self._seen = []
        means = [sum(values) / len(values) for values in (balancing, z)]
        return [
            (mean, self._coefficients.get(name, 0.0))
            for mean, name in zip(means, ("aux_loss", "z_loss"), strict=True)
        ]

    def after_step(self) -> None:
        speed = self._coefficients.get("bias_update", 0.0)
        for router, loads in zip(self._routers, self._loads, strict=True):
            if speed:
                router.e_score_correction_bias += speed * torch.sign(loads.mean() - loads)
            loads.zero_()


def split(batch: models.Batch, rows: int) -> list[models.Batch]:
    """Micro-batches of ``rows`` consecutive rows; the last one may be shorter."""
    return [cut(batch, start, rows) for start in range(0, row_count(batch), rows)]


def cut(batch: models.Batch, start: int, rows: int) -> models.Batch:
    return {key: value[start : start + rows] for key, value in batch.items()}


def row_count(batch: models.Batch) -> int:
    return len(next(iter(batch.values())))


def target_count(model: str, batch: models.Batch) -> int:
    if model == models.PLAIN:
        return batch["tokens"][:, 1:].numel()
    return int((batch["labels"][:, 1:] != models.IGNORE).sum())


@dataclass(frozen=True)
class Noise:
    """Largest difference that reordering alone makes: relative for losses and norms, absolute for
    weights."""

    loss: float
    grad_norm: float
    weight: float

    def within(self, limits: "Noise") -> bool:
        return (
            self.loss <= limits.loss
            and self.grad_norm <= limits.grad_norm
            and self.weight <= limits.weight
        )


def compare(run: Run, other: Run) -> Noise:
    """The largest differences between two runs of the same recipe."""
    if run.weights.keys() != other.weights.keys():
        missing = sorted(run.weights.keys() ^ other.weights.keys())
        raise AssertionError(f"parameters that only one of the runs has: {missing}")
    weight = max(
        (run.weights[name] - other.weights[name]).abs().max().item() for name in run.weights
    )
    return Noise(
        _relative(run.losses, other.losses), _relative(run.grad_norms, other.grad_norms), weight
    )


def _relative(values: list[float], others: list[float]) -> float:
    if len(values) != len(others):
        raise AssertionError(f"{len(values)} steps against {len(others)}")
    return max(abs(a - b) / abs(b) for a, b in zip(values, others, strict=True))


@functools.cache
def reference(recipe: Recipe) -> tuple[Run, Noise]:
    """The reference run with micro-batches of 4, and what one micro-batch instead of many changes
    in it."""
    run = train(recipe)
    if recipe.routers:
        return run, Noise(0.0, 0.0, 0.0)  # other micro-batches are another function
    return run, compare(train(recipe, recipe.global_batch), run)
