"""One family on one layout: the training on ranks, the plain loop on one process that it is
compared with, and the verdict."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import lightning.pytorch as pl
import torch
from family_configs import SEQUENCE, VOCABULARY, tiny_config
from parity import (
    NOISE_FACTOR,
    PRECISIONS,
    TOLERANCES,
    Data,
    Part,
    Rows,
    StepValues,
    assemble,
    quiet_trainer,
)
from reference import default_dtype, one_thread
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_3d.errors import Lightning3DError
from lightning_3d.layout import Layout

STEPS = 4
ROWS = 8  # of a global batch
PLAIN_WEIGHT = 1e-5  # of the 1.2e-3 that AdamW moves a weight in 4 steps; more is looked at again
SHORTEST = 5  # tokens of a row with padding
EPSILON = 1e-8
LARGE_EPSILON = 1e-4  # at which a gradient of rounding errors does not move a weight
PADDING, ROUTERS, DROPOUT, BF16 = "padding", "routers", "dropout", "bf16"
VARIANTS = ("", PADDING, ROUTERS, DROPOUT, BF16)
ROUTER_LOSS = 0.1  # coefficient of the load-balancing loss
SAID = "refused: "
EXACT, REFUSED, WRONG, CRASH, HANG, NO_REFERENCE = (
    "exact",
    "refused",
    "WRONG",
    "crash",
    "hang",
    "no reference",
)


@dataclass(frozen=True)
class Recipe:
    """One training run of a family, without its layout.

    Attributes:
        variant: "padding": rows of different lengths, with labels for their tokens only. "routers":
            with `moe_aux_loss`. "dropout": dropout of 0.1 in the configuration, and the model in
            evaluation mode, in which it must do nothing. "bf16": bf16 parameters with float32
            master weights.
        rows, data_ranks: micro-batches of so many rows of what so many ranks read; of a layout,
            where the loss depends on them.
    """

    family: str
    dtype: str = "float32"
    epsilon: float = EPSILON
    variant: str = ""
    rows: int = ROWS
    data_ranks: int = 1


@dataclass(frozen=True)
class Run:
    """Per step the loss and the gradient norm; the final weights by full name, and how far each
    moved."""

    losses: Tensor
    norms: Tensor
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """Largest difference of two runs: relative for losses and norms, absolute for weights, with the
    name of the weight."""

    loss: float
    norm: float
    weight: float
    name: str = field(default="", compare=False)

    def within(self, limits: Difference) -> bool:
        """Whether nothing is larger; what is not a number is not within anything."""
        return (
            self.loss <= limits.loss and self.norm <= limits.norm and self.weight <= limits.weight
        )


ALLOWED = {
    dtype: Difference(relative, relative, absolute)
    for dtype, (relative, absolute) in TOLERANCES.items()
}
# 8 bits of a weight near 1 are 4e-3; 4 steps of AdamW move it by 1.2e-3
ALLOWED["bfloat16"] = Difference(1e-3, 1e-2, 5e-3)


@dataclass(frozen=True)
class Reference:
    """A run on one process, and what another order of its sums changes."""

    run: Run
    noise: Difference


def initial_model(recipe: Recipe) -> nn.Module:
    """The model in memory, the same in every process. No weight keeps a zero or a one, behind which
    an error could hide."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(recipe.family, 0.1 if recipe.variant == DROPOUT else 0.0)
    if recipe.dtype == "float64":  # grouped matrix products do not know it
        for own in (
            config,
            *(getattr(config, name, None) for name in getattr(config, "sub_configs", {})),
        ):
            if own is not None:
                own._experts_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.to(getattr(torch, recipe.dtype)).train(recipe.variant != DROPOUT)


def batches(variant: str = "") -> dict[str, Tensor]:
    """All rows of the run in their order; small tokens more often, so that there is something to
    learn."""
    uniform = torch.rand(
        (STEPS * ROWS, SEQUENCE), generator=torch.Generator().manual_seed(2), dtype=torch.float32
    )
    ids = 3 + (uniform.square() * (VOCABULARY - 3)).long()
    if variant != PADDING:
        return {"input_ids": ids, "labels": ids.clone()}
    lengths = torch.randint(
        SHORTEST, SEQUENCE + 1, (len(ids), 1), generator=torch.Generator().manual_seed(3)
    )
    there = torch.arange(SEQUENCE) < lengths
    return {
        "input_ids": ids * there,
        "labels": ids.masked_fill(~there, -100),
        "attention_mask": there.long(),
    }


def trained_tokens(batch: dict[str, Tensor]) -> int:
    """Tokens that count in the loss: the first of a row is not predicted."""
    return int((batch["labels"][:, 1:] != -100).sum())


class DoubleInside(TorchFunctionMode):
    """Lets code that asks for float32 compute in float64: models round their norms and routers, and
    float64 would show 1e-8."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {
            key: torch.float64 if value is torch.float32 else value
            for key, value in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


def loss_of(model: nn.Module, batch: dict[str, Tensor], dtype: str) -> Tensor:
    """The model's own loss from labels=."""
    with DoubleInside() if dtype == "float64" else contextlib.nullcontext():
        loss: Tensor = model(**batch).loss
    return loss


class Module(pl.LightningModule):
    """An ordinary LightningModule around the model."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe, self.model = recipe, initial_model(recipe)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.model, batch, self.recipe.dtype)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, eps=self.recipe.epsilon)


@one_thread()
def train(recipe: Recipe, rows: int | None = None, *, backwards: bool = False) -> Run:
    """The plain loop on one process, with micro-batches of so many rows; `backwards`: the last one
    of a step first."""
    model = initial_model(recipe)
    weights = MasterWeights(model) if recipe.dtype == "bfloat16" else Weights(model)
    optimizer = torch.optim.AdamW(weights.trained, lr=3e-4, eps=recipe.epsilon)
    routers = RouterLosses(model) if recipe.variant == ROUTERS else None
    losses, norms = [], []
    with default_dtype(getattr(torch, recipe.dtype)):
        for step in range(STEPS):
            loss = 0.0
            micro_batches = list(divide(recipe, step, rows or recipe.rows))
            whole = sum(trained_tokens(batch) for batch in micro_batches)
            for batch in reversed(micro_batches) if backwards else micro_batches:
                share = trained_tokens(batch) / whole
                part = loss_of(model, batch, recipe.dtype) * share
                loss += part.item()
                (part + ROUTER_LOSS * share * routers.take() if routers else part).backward()
                weights.collect()
            losses.append(loss)
            norms.append(
                nn.utils.get_total_norm(
                    [p.grad for p in weights.trained if p.grad is not None]
                ).item()
            )
            optimizer.step()
            optimizer.zero_grad()
            weights.spread()
    return Run(
        torch.tensor(losses).double(),
        torch.tensor(norms).double(),
        {f"model.{n}": p.detach() for n, p in model.named_parameters()},
    )


def divide(recipe: Recipe, step: int, rows: int) -> Iterator[dict[str, Tensor]]:
    """The micro-batches of one step: those of the first data-parallel rank, then those of the
    next."""
    batch = {key: value[step * ROWS :][:ROWS] for key, value in batches(recipe.variant).items()}
    for rank in range(recipe.data_ranks):
        for start in range(0, ROWS // recipe.data_ranks, rows):
            yield {
                key: value[rank :: recipe.data_ranks][start : start + rows]
                for key, value in batch.items()
            }


class Weights:
    """The parameters that the optimizer steps: those of the model."""

    def __init__(self, model: nn.Module) -> None:
        self.trained = list(model.parameters())

    def collect(self) -> None:
        """After the backward of each micro-batch."""

    def spread(self) -> None:
        """After each step."""


class MasterWeights(Weights):
    """float32 copies, to which the gradient of each micro-batch is added in float32."""

    def __init__(self, model: nn.Module) -> None:
        self._copied = list(model.parameters())
        self.trained = [nn.Parameter(parameter.detach().float()) for parameter in self._copied]

    def collect(self) -> None:
        for parameter, master in zip(self._copied, self.trained, strict=True):
            if parameter.grad is not None:
                master.grad = parameter.grad.float() + (0.0 if master.grad is None else master.grad)
                parameter.grad = None

    @torch.no_grad()
    def spread(self) -> None:
        for parameter, master in zip(self._copied, self.trained, strict=True):
            parameter.copy_(master)


class RouterLosses:
    """The load-balancing loss of every router, from what it returns; docs/experts.md has the
    formula.

    Raises:
        ValueError: the model has no routers that return (logits, weights, experts).
    """

    def __init__(self, model: nn.Module) -> None:
        self._values: list[Tensor] = []
        modules = dict(model.named_modules())
        mixtures = [name.removesuffix(".experts") for name in modules if name.endswith(".experts")]
        routers = [
            modules[name]
            for mixture in mixtures
            for name in (f"{mixture}.gate", f"{mixture}.router")
            if name in modules
        ]
        if not routers:
            raise ValueError("it has no routers")
        for router in routers:
            router.register_forward_hook(self._add)

    def _add(self, router: nn.Module, args: Any, output: Any) -> None:
        if not (isinstance(output, tuple) and len(output) == 3):
            raise ValueError("its routers do not return (logits, weights, experts)")
        logits, _, chosen = output
        scores = logits.softmax(-1)
        if hasattr(router, "e_score_correction_bias"):
            scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        count = logits.shape[-1]
        shares = torch.stack(
            [(chosen == expert).sum(-1).to(scores.dtype).mean() for expert in range(count)]
        )
        self._values.append(count * (shares * scores.mean(0)).sum())

    def take(self) -> Tensor:
        """The mean over layers in the last forward."""
        mean = torch.stack(self._values).mean()
        self._values = []
        return mean


@functools.cache
def reference(recipe: Recipe) -> Reference:
    """Runs in a rank.

    Raises:
        ValueError: the family computes something else every time, or what is not a number.
    """
    run = train(recipe)
    if not run.losses.isfinite().all() or not run.norms.isfinite().all():
        raise ValueError("its loss or gradient is not finite on one process")
    if compare(train(recipe), run).loss:
        raise ValueError("it draws random numbers in its forward, and two runs differ")
    # the loss of routers depends on the micro-batches
    other = train(recipe, None if recipe.variant == ROUTERS else 2, backwards=True)
    return Reference(run, compare(other, run))


def compare(run: Run, other: Run) -> Difference:
    """The largest differences."""
    if run.weights.keys() != other.weights.keys():
        raise AssertionError(
            "parameters that only one of the runs has:"
            f" {sorted(run.weights.keys() ^ other.weights.keys())[:5]}"
        )
    filled = (name for name, weight in run.weights.items() if weight.numel())
    errors = {
        name: (run.weights[name].double() - other.weights[name]).abs().max().item()
        for name in filled
    }
    worst = max(
        errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf")
    )
    return Difference(
        _relative(run.losses, other.losses), _relative(run.norms, other.norms), errors[worst], worst
    )


def _relative(values: Tensor, others: Tensor) -> float:
    if len(values) != len(others):
        raise AssertionError(f"{len(values)} steps against {len(others)}")
    return float(((values - others) / others).abs().max())


def train_on_rank(recipe: Recipe, layout: str, self_check: str = "auto") -> Part | str:
    """What this rank has at the end of the run on a layout, or the message with which the layout
    was refused."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # the Trainer makes its own
    degrees, zero = parse(layout)
    from lightning_3d.strategy import Lightning3DStrategy

    try:
        balanced = {"moe_aux_loss": ROUTER_LOSS} if recipe.variant == ROUTERS else {}
        rows = micro_batch_rows(degrees)
        strategy = Lightning3DStrategy(
            degrees, micro_batch_size=rows, zero_stage=zero, self_check=self_check, **balanced
        )
        values = StepValues()
        trainer = quiet_trainer(
            strategy=strategy,
            devices=degrees.world_size,
            precision=PRECISIONS[recipe.dtype],
            max_steps=STEPS,
            max_epochs=1,
            callbacks=[values],
        )
        module = Module(recipe)
        trainer.fit(module, datamodule=Data(Rows(batches(recipe.variant)), ROWS // degrees.dp))
    except Lightning3DError as error:
        text = f"{type(error).__name__}: {error}"
        # in the log: another rank may be ended before it can answer
        print(f"{SAID}{' '.join(text.split())}", flush=True)
        return text
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return Part(values.losses, values.grad_norms, weights, copy.deepcopy(dict(strategy.specs)))


def micro_batch_rows(degrees: Layout) -> int:
    """Rows of a micro-batch on a layout."""
    return 2 if degrees.tp * degrees.cp == 1 else 4


def on_layout(recipe: Recipe, layout: str) -> Recipe:
    """The recipe for the reference: with the micro-batches of the layout, if its loss depends on
    them."""
    degrees = parse(layout)[0]
    return (
        replace(recipe, rows=micro_batch_rows(degrees), data_ranks=degrees.dp)
        if recipe.variant == ROUTERS
        else recipe
    )


def parse(layout: str) -> tuple[Layout, int]:
    """(layout, ZeRO stage) of a name such as "tp2_pp2", "zero3" (dp2 with ZeRO 3) or
    "tp2_dp2_zero1"."""
    parts = layout.split("_")
    zero = next((int(part.removeprefix("zero")) for part in parts if part.startswith("zero")), 0)
    name = "_".join(part for part in parts if not part.startswith("zero"))
    return Layout.parse(name or "dp2"), zero


@dataclass(frozen=True)
class Verdict:
    """What a cell found."""

    kind: str
    detail: str = ""
    error: Difference | None = None
    noise: Difference | None = None

    @property
    def is_plain(self) -> bool:
        """Whether weights differ by no more than 1 % of what they move, or than 3 x the reference's
        own noise."""
        assert self.error is not None and self.noise is not None
        return self.error.weight <= max(PLAIN_WEIGHT, NOISE_FACTOR * self.noise.weight)


def judge(parts: list[Part], expected: Reference, dtype: str) -> Verdict:
    """Whether the ranks have computed what one process computes."""
    allowed, noise = ALLOWED[dtype], expected.noise
    limits = Difference(
        *(
            max(getattr(allowed, name), NOISE_FACTOR * getattr(noise, name))
            for name in ("loss", "norm", "weight")
        )
    )
    first = parts[0]
    try:
        if any(
            (part.losses, part.grad_norms) != (first.losses, first.grad_norms) for part in parts
        ):
            raise AssertionError(
                f"ranks report different values: {[part.losses for part in parts]}"
                f" {[part.grad_norms for part in parts]}"
            )
        weights, drift = assemble(parts)
        if drift:
            raise AssertionError(f"ranks that hold the same weights differ by {drift:.1e}")
        run = Run(
            torch.tensor(first.losses).double(), torch.tensor(first.grad_norms).double(), weights
        )
        error = compare(run, expected.run)
    except AssertionError as problem:
        return Verdict(WRONG, str(problem), noise=noise)
    kind = EXACT if error.within(limits) else WRONG
    return Verdict(kind, "" if kind == EXACT else f"most in {error.name}", error, noise)
