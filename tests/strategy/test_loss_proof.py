"""The first step proves that the loss is a mean over rows; what a user declares instead trains as
plain Lightning does on one process."""

import random
import warnings
from contextlib import nullcontext
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from parity import quiet_trainer
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import Layout, Lightning3DStrategy
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.undone import places_of_step

ROWS, CLASSES, STEPS = 16, 10, 3
LABELS = torch.linspace(0.1, 5, CLASSES)


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module], dropout: float) -> None:
        super().__init__()
        self.norm, self.drop = norm(16), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        norm = nn.BatchNorm1d if kind == "batchnorm" else nn.LayerNorm
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, CLASSES)
        self.blocks = nn.ModuleList(
            Block(norm, 0.2 if kind == "dropout" else 0.0) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


PLAN = {
    "tp": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    "pp": {"enter": (["x"], ["h"]), "blocks": (["h"], ["h"]), "leave": (["h"], ["y"])},
}


class Steps(pl.LightningModule):
    """A loss of each kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.net = Net(kind)
        self.seen: list[float] = []
        self.table: dict[str, Any] = {"steps": 0, "rows": []}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x, y = batch
        self.table["steps"] += 1
        self.table["rows"].append(len(x))
        kind = self.kind
        if kind == "mixup":
            other = torch.arange(len(x)).roll(1)
            out = self.net(0.7 * x + 0.3 * x[other])
            return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y[other])
        if kind == "noise":
            x = x + random.random() * torch.randn_like(x) + torch.randn(8)
        out = self.net(x)
        if kind == "sum":
            return F.cross_entropy(out, y, reduction="sum")
        if kind == "ignore":
            return F.cross_entropy(out, torch.where(y < 5, y, -100))
        if kind == "weights":
            return F.cross_entropy(out, y, weight=LABELS)
        if kind == "weighed":
            return {"loss": F.cross_entropy(out, y, weight=LABELS), "loss_weight": LABELS[y].sum()}
        if kind == "contrastive":
            z = F.normalize(out, dim=-1)
            return F.cross_entropy(z @ z.T * 5, torch.arange(len(z)))
        if kind == "partners":  # none among a few rows
            z = F.normalize(out, dim=-1)
            same = (y[:, None] == y).float().fill_diagonal_(0)
            logp = (z @ z.T * 5).log_softmax(1)
            return -((same * logp).sum(1) / same.sum(1).clamp(min=1)).mean()
        if kind == "gradients":
            one, other = F.cross_entropy(out, y), out.square().mean()
            sizes = [
                torch.autograd.grad(loss, out, retain_graph=True)[0].norm() for loss in (one, other)
            ]
            return one + sizes[0] / sizes[1] * other
        if kind == "variance":
            return F.cross_entropy(out, y) + F.relu(1 - out.std(0)).mean()
        if kind == "rmse":
            return F.mse_loss(out, F.one_hot(y, CLASSES).float()).sqrt()
        loss = F.cross_entropy(out, y)
        if kind == "penalty":
            loss = loss + 1e-2 * sum(p.square().sum() for p in self.net.parameters())
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(kind: str, layout: str = "dp1", size: int | None = 4, **strategy: Any) -> Steps:
    """Train; with the layout "plain" by Lightning alone."""
    pl.seed_everything(1, verbose=False)
    return fit_module(Steps(kind), layout, size, **strategy)


def fit_module(module: Steps, layout: str, size: int | None, **strategy: Any) -> Steps:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(ROWS * STEPS, 8, generator=generator),
        torch.randint(CLASSES, (ROWS * STEPS,), generator=generator),
    )
    if layout == "plain":
        trainer, rows = quiet_trainer(max_epochs=1, accelerator="cpu", devices=1), ROWS
    else:
        parsed = Layout.parse(layout)
        options = {"plan": PLAN, "micro_batch_size": size, **strategy}
        trainer = quiet_trainer(
            max_epochs=1, devices=parsed.world_size, strategy=Lightning3DStrategy(layout, **options)
        )
        rows = ROWS // parsed.dp
    trainer.fit(module, DataLoader(data, batch_size=rows))
    return module


def refusals(kinds: list[str], layout: str, **strategy: Any) -> dict[str, str]:
    """What training of each kind is refused with; empty where it trains."""
    said = {}
    for kind in kinds:
        try:
            fit(kind, layout, **strategy)
            said[kind] = ""
        except ConfigError as error:
            said[kind] = str(error)
    return said


OTHERS = [
    "partners",
    "gradients",
    "mixup",
    "sum",
    "ignore",
    "weights",
    "contrastive",
    "variance",
    "rmse",
    "batchnorm",
]
MEANS = ["mean", "dropout", "noise", "penalty", "weighed"]


@pytest.mark.parametrize("kind", OTHERS)
def test_a_loss_that_is_not_a_mean_over_rows_is_refused_before_the_first_step(kind: str) -> None:
    with pytest.raises(ConfigError) as error:
        fit(kind)
    assert "rows together" in str(error.value)
    assert ('loss_reduction="sum"' if kind == "sum" else 'loss_reduction="accumulate"') in str(
        error.value
    )
    assert f"micro_batch_size={ROWS}" in str(error.value)


@pytest.mark.parametrize("kind", OTHERS)
def test_any_loss_trains_where_the_global_batch_is_one_micro_batch(kind: str) -> None:
    assert fit(kind, size=None).seen == pytest.approx(fit(kind, "plain").seen, rel=1e-5)


@pytest.mark.parametrize("kind", MEANS)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_mean_over_rows_is_not_refused_and_the_comparison_leaves_nothing_behind(
    kind: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    proved = fit(kind, size=size)
    assert "was not compared" not in capsys.readouterr().err
    alone = fit(kind, size=size, self_check="never")
    assert proved.seen == alone.seen and proved.table == alone.table
    assert [block.calls for block in proved.net.blocks] == [
        block.calls for block in alone.net.blocks
    ]
    for (name, ours), theirs in zip(
        proved.state_dict().items(), alone.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("kind", ["weights", "batchnorm"])
@pytest.mark.parametrize("reduction", ["accumulate", "mean"])
def test_a_declared_loss_is_not_compared(kind: str, reduction: str) -> None:
    assert len(fit(kind, loss_reduction=reduction).seen) == STEPS


def test_the_split_of_the_global_batch_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    fit("mean")
    assert capsys.readouterr().err.count("global batch 16 rows: 4 micro-batches of 4 rows") == 1


DECLARED = [
    ("sum", {"loss_reduction": "sum"}),
    ("weighed", {}),
    ("mean", {"loss_reduction": "mean"}),
    ("mean", {"loss_reduction": "accumulate"}),
]


def fits(layout: str, **strategy: Any) -> list[list[float]]:
    return [fit(kind, layout, **options, **strategy).seen for kind, options in DECLARED]


def test_declared_losses_train_as_on_one_process() -> None:
    for ours, (kind, _) in zip(fits("dp1"), DECLARED, strict=True):
        assert ours == pytest.approx(fit(kind, "plain").seen, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("dp2", {}),
        ("dp2", {"zero_stage": 1}),
        ("dp2", {"zero_stage": 2}),
        ("dp2", {"zero_stage": 3}),
        ("tp2_pp2", {}),
        ("pp2", {}),
    ],
    ids=str,
)
def test_declared_losses_train_as_on_one_process_in_every_layout(
    layout: str, options: dict[str, Any]
) -> None:
    for found in run_ranks(fits, Layout.parse(layout).world_size, layout, **options, timeout=180):
        for ours, (kind, _) in zip(found, DECLARED, strict=True):
            assert ours == pytest.approx(fit(kind, "plain").seen, rel=1e-5)


BY_BLOCK = {"zero_stage": 3, "zero_gather": "micro_batch"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [("dp2", {}), ("dp2", BY_BLOCK), ("tp2", {}), ("pp2", {}), ("tp2_pp2", {})],
    ids=str,
)
def test_the_loss_is_proved_in_every_layout(layout: str, options: dict[str, Any]) -> None:
    parsed = Layout.parse(layout)
    by_block = parsed.pp > 1 or options  # the step may not read parameters, or differentiate
    means = [kind for kind in MEANS if kind != "penalty" or not by_block]
    others = [kind for kind in OTHERS if kind != "gradients" or not by_block]
    for said in run_ranks(
        refusals, parsed.world_size, [*others, *means], layout, **options, timeout=180
    ):
        assert {kind for kind, text in said.items() if text} == set(others)


class Writes(Steps):
    """A step that writes something in each call."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.steps, self.last, self.mean_loss = 0, 1.0, 0.0
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("centers", torch.zeros(CLASSES))
        self.shift = nn.Parameter(torch.zeros(CLASSES))
        self.average = nn.Linear(8, CLASSES).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        self.steps += 1
        if self.kind == "counter":
            return loss / self.steps
        if self.kind == "last":
            self.last, loss = loss.item(), loss * self.last
        if self.kind == "centers":
            loss = loss + (out - self.centers).square().mean()
            self.centers = 0.5 * self.centers + 0.5 * out.detach().mean(0)
        if self.kind == "average":
            weight = self.net.enter.weight.detach()
            self.average.weight.data[:, 0] = (
                0.5 * self.average.weight.data[:, 0] + 0.5 * weight[:CLASSES, 0]
            )
            loss = loss + (out - self.average(x)).square().mean()
        if (self.kind == "first call" and self.steps == 1) or (
            self.kind == "blank" and not self.shift.any()
        ):
            self.shift.data.copy_(-out.detach().mean(0))
        if self.kind in ("first call", "blank"):
            loss = loss + (out + self.shift).square().mean()
        if self.kind == "codebook":
            if not self.centers.any():
                self.centers.copy_(out.detach().mean(0))
            loss = loss + (out - self.centers).square().mean()
        if self.kind == "normalized":
            self.average.weight.data.div_(self.average.weight.data.norm())
            loss = loss + (out - self.average(x)).square().mean()
        if self.kind == "clamped":
            self.average.weight.data.clamp_(-0.1, 0.1)
            loss = loss + (out - self.average(x)).square().mean()
        if self.kind == "logged":
            self.mean_loss = 0.9 * self.mean_loss + 0.1 * float(loss)
        if self.kind == "drawn":
            loss = (
                loss + (out * (1 + torch.rand(len(x), 1, generator=self.generator))).square().mean()
            )
        if self.kind == "late" and self.trainer.global_step > 0:
            loss = loss + out.std(0).mean()
        return loss


WRITES = {
    "counter": "self.steps",
    "last": "self.last",
    "centers": "self.centers",
    "average": "average.weight",
}
FIRST = {"first call": "shift", "blank": "shift", "codebook": "not a mean over rows"}
"""What the first call sets from its rows, and what the message says."""
HARMLESS = ["clamped", "normalized", "logged", "drawn"]


def written_refused(kinds: list[str], layout: str, size: int | None) -> dict[str, str]:
    """What training of each kind is refused with."""
    said = {}
    for kind in kinds:
        pl.seed_everything(1, verbose=False)
        try:
            fit_module(Writes(kind), layout, size)
            said[kind] = ""
        except ConfigError as error:
            said[kind] = str(error)
    return said


def test_a_loss_that_depends_on_earlier_calls_of_the_step_is_refused() -> None:
    said = written_refused([*WRITES, *HARMLESS], "dp1", 4)
    for kind, name in WRITES.items():
        assert (
            name in said[kind] and "4 times" in said[kind] and "on_train_batch_end" in said[kind]
        ), kind
    assert not any(said[kind] for kind in HARMLESS)
    assert not any(written_refused([*WRITES, *HARMLESS], "dp1", None).values())


def test_what_the_first_call_sets_from_its_rows_is_refused() -> None:
    said = written_refused([*FIRST], "dp1", 4)
    for kind, name in FIRST.items():
        assert name in said[kind] and "micro_batch_size=16" in said[kind], kind
    assert not any(written_refused([*FIRST], "dp1", None).values())


@pytest.mark.slow
def test_what_ranks_write_matters_where_it_depends_on_their_rows() -> None:
    for said in run_ranks(
        written_refused, 2, [*WRITES, *FIRST, *HARMLESS], "dp2", None, timeout=180
    ):
        assert {kind for kind, text in said.items() if text} == {"last", "centers", *FIRST}
    for said in run_ranks(
        written_refused, 2, ["counter", "centers", "logged", *FIRST], "pp2", 4, timeout=180
    ):
        assert {kind for kind, text in said.items() if text} == {"counter", "centers", *FIRST}


def test_a_loss_is_proved_again_in_later_steps() -> None:
    assert "is not a mean over rows" in written_refused(["late"], "dp1", 4)["late"]


class Logs(Steps):
    """A mean as loss, and beside it numbers that are none."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        right = (self.net(batch[0]).argmax(1) == batch[1]).float()
        self.log_dict(
            {
                "root": loss.sqrt(),
                "perplexity": loss.exp(),
                "accuracy": right.mean(),
                "constant": 2.0,
            }
        )
        self.log("count", right.sum(), reduce_fx="sum")
        return loss


def warned(layout: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_module(Logs("mean"), layout, 4)
    return [text for text in (str(one.message) for one in caught) if "not means over rows" in text]


def test_logged_numbers_that_are_no_means_are_named_once() -> None:
    for found in ([warned("dp1")], run_ranks(warned, 2, "pp2")):
        text = " ".join(found[0])
        assert text.count("'root'") == text.count("'perplexity'") == 1
        assert not any(f"'{name}'" in text for name in ("loss", "accuracy", "constant", "count"))


def test_numbers_that_each_call_changes_are_reported() -> None:
    with pytest.warns(UserWarning, match="self.mean_loss"):
        written_refused(["logged"], "dp1", 4)


class NeedsRows(Steps):
    """A step that fails in the middle of the model with fewer than four rows, if their labels are
    odd."""

    def __init__(self) -> None:
        super().__init__("mean")
        self.net.blocks[0].register_forward_hook(self.require_rows)

    def require_rows(self, block: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if len(output) < 4 and self.odd:
            raise ValueError("too few rows")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.odd = bool((batch[1] % 2).all())
        return F.cross_entropy(self.net(batch[0]), batch[1])


def needs_rows(shift: int, **options: Any) -> Tensor:
    """The weights after one step."""
    pl.seed_everything(1, verbose=False)
    # ranks have the even rows, and the odd ones
    data = TensorDataset(torch.randn(ROWS, 8), (torch.arange(ROWS) + shift) % CLASSES)
    trainer = quiet_trainer(
        max_epochs=1,
        devices=2,
        strategy=Lightning3DStrategy("dp2", plan=PLAN, micro_batch_size=4, **options),
    )
    module = NeedsRows()
    trainer.fit(module, DataLoader(data, batch_size=ROWS // 2))
    assert len(module.seen) == 1
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("shift", [0, 1])
def test_a_step_that_fails_with_the_rows_of_one_rank_lets_no_other_wait(shift: int) -> None:
    [expected, _] = run_ranks(needs_rows, 2, shift)
    for weights in run_ranks(needs_rows, 2, shift, **BY_BLOCK):
        assert torch.allclose(weights, expected, rtol=0, atol=1e-6)


class NeedsGraph(Steps):
    """A step that fails without gradients, in the first part that is tried."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        out.register_hook(lambda gradient: gradient)
        return F.cross_entropy(out, batch[1])


def needs_graph() -> list[float]:
    return fit_module(NeedsGraph("mean"), "pp2", 4).seen


def test_a_step_that_fails_on_the_last_stage_lets_the_first_one_not_wait() -> None:
    for seen in run_ranks(needs_graph, 2):
        assert len(seen) == STEPS


class Labels(Steps):
    """Rows without a label do not count."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


@pytest.mark.parametrize("module", [Labels("mean"), Writes("codebook")], ids=["labels", "codebook"])
def test_the_first_step_looks_at_the_most_telling_rows(module: Steps) -> None:
    y = torch.tensor([1, 2, 3, 4] * 3 + [1, 2, 2, -100])
    with pytest.raises(ConfigError, match="is not a mean over rows"):
        trainer = quiet_trainer(
            max_steps=1,
            devices=1,
            strategy=Lightning3DStrategy("dp1", micro_batch_size=4, plan=PLAN),
        )
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(ROWS, 8), y), batch_size=ROWS))


class LabelsOfSome(Steps):
    """Labels are a list, with None for rows that do not count; without any label, the loss is no
    tensor, zero or NaN."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        out, labels = self.net(batch["x"]), batch["y"]
        found = [row for row, label in enumerate(labels) if label is not None]
        if not found:
            return {"number": 0, "zero": out.sum() * 0, "nan": out.sum() * torch.nan}[self.kind]
        return F.cross_entropy(out[found], torch.tensor([labels[row] for row in found]))


def collate(rows: list[tuple[Tensor, Any]]) -> dict[str, Any]:
    x, y = zip(*rows, strict=True)
    return {"x": torch.stack(x), "y": list(y)}


@pytest.mark.parametrize(
    ("kind", "size"), [("zero", 1), *product(["number", "zero", "nan"], [2, 4])]
)
def test_a_mean_over_labelled_rows_is_refused_whatever_it_is_without_any(
    kind: str, size: int
) -> None:
    """The first micro-batches have equal shares of labels, and those without None have more kinds
    of labels."""
    labels = [1, None, 2, None, 3, None, None, 4, 1, 2, 3, 4, None, 2, 3, 4][
        :: 1 if size > 1 else -1
    ]
    data = list(
        zip(torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0)), labels, strict=True)
    )
    for micro_batch_size in (ROWS, size):
        strategy = Lightning3DStrategy("dp1", micro_batch_size=micro_batch_size, plan=PLAN)
        trainer = quiet_trainer(max_steps=1, devices=1, strategy=strategy)
        refused = (
            pytest.raises(ConfigError, match="is not a mean over rows")
            if micro_batch_size == size
            else nullcontext()
        )
        with refused:
            trainer.fit(LabelsOfSome(kind), DataLoader(data, batch_size=ROWS, collate_fn=collate))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["variance", "batchnorm", "ignore"])
def test_statistics_of_single_rows_are_no_pass(kind: str) -> None:
    with pytest.raises(ConfigError, match="is not a mean over rows"):
        fit(kind, size=2)


@pytest.mark.slow
def test_single_rows_of_two_ranks_are_compared() -> None:
    for said in run_ranks(
        single_rows_refused, 2, ["mean", "contrastive", "dropout", "weights"], timeout=180
    ):
        assert {kind for kind, text in said.items() if text} == {"contrastive", "weights"}


def single_rows_refused(kinds: list[str]) -> dict[str, str]:
    said = {}
    for kind in kinds:
        data = TensorDataset(
            torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6)
        )
        trainer = quiet_trainer(
            max_epochs=1, devices=2, strategy=Lightning3DStrategy("dp2", plan=PLAN)
        )
        pl.seed_everything(1, verbose=False)
        try:
            trainer.fit(Steps(kind), DataLoader(data, batch_size=1))
            said[kind] = ""
        except ConfigError as error:
            said[kind] = str(error)
    return said


class Table(Steps):
    """A step with an embedding of some kind."""

    def __init__(self, **options: Any) -> None:
        super().__init__("mean")
        self.table_of_labels = nn.Embedding(CLASSES, 8, **options)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x + self.table_of_labels(y)), y)


def table_refused(layout: str, **options: Any) -> str:
    try:
        fit_module(Table(**options), layout, 4)
    except ConfigError as error:
        return str(error)
    return ""


def test_gradients_by_frequency_are_refused_where_a_batch_is_split() -> None:
    said = table_refused("dp1", scale_grad_by_freq=True)
    assert (
        "'table_of_labels' has scale_grad_by_freq=True" in said
        and f"micro_batch_size={ROWS}" in said
    )
    fit_module(Table(scale_grad_by_freq=True), "dp1", None)
    fit_module(Table(scale_grad_by_freq=True), "dp1", 4, loss_reduction="accumulate")
    assert table_refused("dp1", max_norm=0.5) == ""


@pytest.mark.slow
def test_embeddings_that_renormalize_are_refused_on_several_replicas() -> None:
    for said in run_ranks(table_refused, 2, "dp2", max_norm=0.5, timeout=180):
        assert "max_norm" in said and "dp = 1" in said


class Normed(Steps):
    def __init__(self) -> None:
        super().__init__("mean")
        nn.utils.parametrizations.spectral_norm(self.net.enter)


def test_power_iterations_and_running_statistics_are_reported_once() -> None:
    for module, options in ((Normed(), {}), (Steps("batchnorm"), {"loss_reduction": "accumulate"})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit_module(module, "dp1", 4, **options)
        assert sum("buffers in each training forward" in str(one.message) for one in caught) == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_module(Steps("batchnorm"), "dp1", None)
    assert not any("buffers in each training forward" in str(one.message) for one in caught)


class Counter:
    def __init__(self) -> None:
        self.count = 0


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number, self.items, self.own = 1, [1, [2]], Counter()
        self.queue = torch.zeros(3)
        self.names: set[str] = {"a"}


def test_attributes_come_back_with_what_they_contained() -> None:
    module = nn.Sequential(Holds())
    holds: Any = module[0]
    items, places = holds.items, places_of_step(module)
    before = places.now()
    holds.number, holds.more = 2, 3
    holds.items[1].append(5)
    holds.items.append(4)
    holds.own.count += 1
    holds.queue += 1
    holds.names.add("b")
    after = places.now()
    assert set(places.changed(before, after)) >= {
        "self.0.number",
        "self.0.more",
        "self.0.items",
        "self.0.own.count",
        "self.0.queue",
    }
    places.restore(before)
    assert (holds.number, holds.items, holds.own.count, holds.names) == (1, [1, [2]], 0, {"a"})
    assert holds.items is items and not hasattr(holds, "more") and holds.queue.sum() == 0
