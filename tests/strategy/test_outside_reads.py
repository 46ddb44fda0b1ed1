"""Steps and hooks that read parameters and gradients by themselves: the numbers of plain Lightning
on one process, or a refusal."""

import copy
import io
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from parity import quiet_trainer
from ranks import run_ranks
from sweeps import by_default
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d.errors import ConfigError, DataError, PlanError
from lightning_3d.layout import Layout
from lightning_3d.strategy import Lightning3DStrategy

PLAN = {
    "tp": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    "pp": {"enter": (["x"], ["h"]), "blocks": (["h"], ["h"]), "leave": (["h"], ["y"])},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks, self.leave = (
            nn.Linear(8, 16),
            nn.ModuleList(Block() for _ in range(4)),
            nn.Linear(16, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Own(pl.LightningModule):
    """A step or a hook of one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network, self.kind, self.losses = Network(), kind, []  # type: ignore[var-annotated]

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = F.mse_loss(self.network(batch[0].to_dense()), batch[1])
        if self.kind == "norms":
            loss = loss + 0.1 * sum(p.norm() for p in self.network.parameters())
        if self.kind == "piece":
            loss = loss + self.network.blocks[3].up(batch[0].new_ones(1, 16)).pow(2).sum()  # type: ignore[union-attr, operator]
        if self.kind == "gather":
            loss = loss + self.all_gather(loss).mean()
        if self.kind == "collective" and dist.is_initialized():
            dist.all_reduce(loss.detach().clone())
        if self.kind == "clamp":
            with torch.no_grad():
                for p in self.network.parameters():
                    p.clamp_(-0.2, 0.2)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.5)


class Hooked(Own):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.kind == "mask":
            for p in self.network.parameters():
                assert p.grad is not None
                p.grad.mul_(0.3)
        if self.kind == "own norm":
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            self.losses += [
                float(torch.stack([gradient.norm() for gradient in gradients]).norm()),
                max(g.max().item() for g in gradients),
            ]
        if self.kind == "grad_norm":
            norms = grad_norm(self.network, norm_type=2)
            assert len(norms) == 29
            self.losses += [float(norms[name]) for name in sorted(norms)]

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        if self.kind == "clip":
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Between(Own):
    """Hooks between steps, and on gradients of activations."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.first = {name: p.detach().clone() for name, p in self.network.named_parameters()}
        self.average = (
            copy.deepcopy(self.network).requires_grad_(False) if kind == "average" else None
        )
        if kind == "copied":
            self.average = copy.deepcopy(self.network.blocks).requires_grad_(False)  # type: ignore[assignment]
        self.target = (
            copy.deepcopy(self.network).requires_grad_(False)
            if kind.startswith(("loaded", "named"))
            else None
        )
        self.scale = nn.Parameter(torch.tensor(1.3)) if kind == "scale" else None
        self.seen: list[Tensor] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if self.kind not in ("clamped", "normalized", "scale", "function", "penalty"):
            self.seen.append(super().training_step(batch, index))
            return self.seen[-1]
        scale = self.scale if self.kind == "scale" else 1
        x = batch[0].requires_grad_(self.kind == "penalty")
        output = scale * self.network(x)
        if output.requires_grad and self.kind == "clamped":
            output.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        if output.requires_grad and self.kind == "normalized":
            output.register_hook(lambda gradient: gradient / gradient.norm())
        if self.kind == "function":
            output = Clamped.apply(output)
        if self.kind == "penalty":
            return torch.autograd.grad(output.sum(), x, create_graph=True)[0].pow(2).mean()
        return F.mse_loss(output, batch[1])

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.kind == "columns":
            with torch.no_grad():
                for block in self.network.blocks:
                    block.down.weight.copy_(F.normalize(block.down.weight, dim=1))  # type: ignore[union-attr, arg-type]

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.kind == "early":
            self.network.blocks[0].up.weight.data.clamp_(-0.1, 0.1)  # type: ignore[union-attr, operator]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.kind == "views":
            for block in self.network.blocks:
                block.up.weight.data[3:20].zero_()  # type: ignore[union-attr, index]
                block.down.weight.data[:, 5].mul_(2)  # type: ignore[union-attr, index]

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        for name, p in self.network.named_parameters():
            if self.kind == "kept":
                p.lerp_(self.first[name].to(p.dtype), 0.3)
            elif self.kind == "elements":
                p.clamp_(-0.2, 0.2).mul_(0.9)
            elif self.kind == "noise":
                p.add_(torch.randn_like(p))
            elif self.kind == "constant":
                nn.init.constant_(p, 0.1)
        if self.kind == "reset":
            self.network.blocks[3].up.reset_parameters()  # type: ignore[union-attr, operator]
        if self.kind == "scale":
            self.scale.data.clamp_(0, 1.2)  # type: ignore[union-attr]
        if self.kind == "total":
            total = torch.stack([p.norm() for p in self.network.parameters()]).norm()
            for p in self.network.parameters():
                p.div_(total)
        if self.kind == "moments":
            self.losses += [
                float(state["momentum_buffer"].norm())
                for state in self.trainer.optimizers[0].state.values()
            ]
        if self.kind == "logged":
            self.log("norm", torch.stack([p.norm() for p in self.network.parameters()]).norm())
        if self.kind == "saved":
            file = io.BytesIO()
            torch.save(self.network.state_dict(), file)
            file.seek(0)
            self.losses += [float(value.double().norm()) for value in torch.load(file).values()]
        if self.kind == "collected":
            self.log("mean", torch.stack(self.seen).mean())
        if self.target is not None and batch_idx > 0:  # where an error is not one of the first step
            own = self.network.state_dict()
            if self.kind == "named":
                for name, p in self.target.named_parameters():
                    p.copy_(own[name])
            else:
                self.target.load_state_dict(own, strict=self.kind == "loaded")
        if self.kind == "copied":
            for mean, p in zip(
                self.average.parameters(), self.network.blocks.parameters(), strict=False
            ):  # type: ignore[union-attr]
                mean.data.copy_(p.data)
        elif self.average is not None:
            for mean, p in zip(self.average.parameters(), self.network.parameters(), strict=False):
                mean.lerp_(p, 0.5)


class Clamped(torch.autograd.Function):
    """Clamps a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(-0.1, 0.1)


BETWEEN = ("columns", "constant", "kept", "views", "elements", "scale", "clamped", "function")
TARGETS = ("loaded", "loaded in part", "named")
KINDS = {
    **dict.fromkeys(("mask", "own norm", "clip", "grad_norm"), Hooked),
    **dict.fromkeys((*TARGETS, "collected", "copied", "saved"), Between),
    **dict.fromkeys(
        (
            *BETWEEN,
            "early",
            "noise",
            "total",
            "average",
            "normalized",
            "penalty",
            "moments",
            "logged",
            "reset",
        ),
        Between,
    ),
}


def sparse(rows: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    x, y = (torch.stack(values) for values in zip(*rows, strict=True))
    return [x.to_sparse(), y]


def fit(
    kind: str, strategy: Any, devices: int, dp: int = 1, dtype: torch.dtype = torch.float64
) -> list[float]:
    module = KINDS.get(kind, Own)(kind).to(dtype)
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(1), dtype=dtype)
    collate = sparse if kind == "sparse" else None
    rows = DataLoader(
        TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=8 // dp, collate_fn=collate
    )
    precision = "64-true" if dtype == torch.float64 else "32-true"
    quiet_trainer(strategy=strategy, devices=devices, max_steps=3, precision=precision).fit(
        module, rows
    )
    return module.losses


def fit_kinds(
    layout: str, kinds: list[str], options: dict[str, Any], dtype: torch.dtype
) -> list[list[float]]:
    """The losses of each kind."""
    parsed = Layout.parse(layout)
    plan: dict[str, Any] = {"plan": PLAN, "self_check": "never", **options}
    return [
        fit(kind, Lightning3DStrategy(layout, **plan), parsed.world_size, parsed.dp, dtype)
        for kind in kinds
    ]


EXACT = [
    (
        "tp2",
        {},
        [
            "norms",
            "mask",
            "clip",
            "own norm",
            "grad_norm",
            "logged",
            *BETWEEN,
            *TARGETS,
            "copied",
            "sparse",
            "saved",
        ],
    ),
    ("pp2", {}, ["mask", "clip", "grad_norm", *BETWEEN]),
    (
        "dp2",
        {},
        [
            "norms",
            "piece",
            "gather",
            "mask",
            "clip",
            "own norm",
            "grad_norm",
            "moments",
            "logged",
            *BETWEEN,
        ],
    ),
    ("dp2", {"micro_batch_size": 2}, ["clamped", "function"]),
    ("dp2", {"zero_stage": 1, "zero_reduce_scatter": False}, ["norms", "mask", "clip", "saved"]),
    ("dp2", {"zero_stage": 3, "zero_gather": "step"}, ["norms"]),
]


@pytest.mark.parametrize(
    ("layout", "options", "kinds"), by_default(EXACT, 0, 1), ids=lambda value: str(value)
)
def test_what_one_rank_has_a_part_of_is_read_as_on_one_process(
    layout: str, options: dict[str, Any], kinds: list[str]
) -> None:
    dtype = torch.float64 if not options else torch.float32
    for found in run_ranks(fit_kinds, 2, layout, kinds, options, dtype, process_group=False):
        for kind, losses in zip(kinds, found, strict=True):
            if kind != "gather":  # of each rank's own loss
                assert losses == pytest.approx(
                    fit(kind, "auto", 1, dtype=dtype), rel=1e-6 if not options else 1e-5
                ), kind


REFUSED = [
    ("pp2", {}, "average", "average.enter.weight|network.blocks"),
    *(("pp2", {}, kind, "of its own stage") for kind in (*TARGETS, "copied")),
    ("pp2", {}, "collected", "log numbers in the step"),
    ("pp2", {}, "saved", "torch.save"),
    ("dp2", {"zero_stage": 3}, "saved", "zero_stage=2"),
    ("pp2", {}, "sparse", "sparse tensor"),
    ("tp2", {}, "noise", "random"),
    ("tp2", {}, "reset", "random"),
    ("dp2", {}, "early", "on_train_batch_end"),
    ("pp2", {}, "total", "network.blocks"),
    ("dp2", {}, "normalized", "norm"),
    ("tp2", {}, "penalty", "autograd.grad"),
    ("pp2", {}, "penalty", "autograd.grad"),
    ("pp2", {}, "norms", "network.blocks.2"),
    ("dp2", {"zero_stage": 2}, "clip", "gradient_clip_val"),
    ("tp2", {}, "collective", "all_reduce"),
    ("tp2", {}, "piece", "blocks.3.up"),
    ("tp2", {}, "gather", "all_gather"),
    ("tp2", {}, "moments", "state of an optimizer"),
    ("dp2", {"zero_stage": 1}, "moments", "state of an optimizer"),
    ("pp2", {}, "logged", "network.blocks"),
    ("dp2", {"zero_stage": 2}, "grad_norm", "zero_stage=2"),
    ("tp2_dp2", {"zero_stage": 2}, "grad_norm", "zero_stage=2"),
    ("pp2", {}, "own norm", "gradient_clip_val"),
    ("pp2", {}, "collective", "all_reduce"),
    ("dp2", {"zero_stage": 2}, "mask", "zero_stage=2"),
    ("dp2", {"zero_stage": 3}, "norms", "zero_gather=step"),
]


@pytest.mark.parametrize(
    ("layout", "options", "kind", "names"), by_default(REFUSED, 0, 1), ids=lambda value: str(value)
)
def test_what_a_rank_cannot_get_is_refused(
    layout: str, options: dict[str, Any], kind: str, names: str
) -> None:
    dtype = torch.float64 if not options else torch.float32
    with pytest.raises((ConfigError, PlanError, DataError), match=names):
        run_ranks(
            fit_kinds,
            Layout.parse(layout).world_size,
            layout,
            [kind],
            options,
            dtype,
            process_group=False,
        )
