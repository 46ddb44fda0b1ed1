"""CausalLM, the optimizer configuration and the callbacks, under an ordinary Trainer on one
process."""

import csv
import io
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from alphabet_fits import MODEL, OPTIMIZER, alphabet, trainer
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_3d.app.config.files import conf_folder
from lightning_3d.app.config.optimizer import check_optimizer
from lightning_3d.app.runs.metrics_file import read_rows
from lightning_3d.app.training.callbacks import MetricsCSV, ProgressBar, Summary
from lightning_3d.app.training.callbacks.metrics_csv import COLUMNS
from lightning_3d.app.training.callbacks.progress_bar import format_seconds, progress_line
from lightning_3d.app.training.module import CausalLM, transformers_config
from lightning_3d.app.training.optimizers import make_optimizer
from lightning_3d.app.training.parameter_groups import NamedGroup, find_groups, undecayed_names
from lightning_3d.app.training.schedules import lr_factor
from lightning_3d.app.training.step_clock import StepNumbers
from lightning_3d.errors import ConfigError, DataError


class Seen(Callback):
    """Remembers the batches and the losses of a fit."""

    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append(batch["input_ids"])
        self.losses.append(float(outputs["loss"]))


# The module


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One fit with every callback."""
    folder = tmp_path_factory.mktemp("run")
    out, table, seen = io.StringIO(), io.StringIO(), Seen()
    callbacks = [
        seen,
        MetricsCSV(folder / "metrics.csv"),
        ProgressBar(every=5, stream=out),
        Summary("smallest", stream=table),
        ModelCheckpoint(folder / "checkpoints", every_n_train_steps=10, save_top_k=-1),
    ]
    seed_everything(1, verbose=False)
    module = CausalLM(MODEL, OPTIMIZER)
    fit = trainer(folder, *callbacks)
    fit.fit(module, datamodule=alphabet())
    return {
        "folder": folder,
        "out": out.getvalue(),
        "table": table.getvalue(),
        "seen": seen,
        "module": module,
        "fit": fit,
    }


@pytest.mark.parametrize("name", ["flash_attention_3", "flash"])
def test_attention_that_is_not_installed_or_unknown_is_refused(name: str) -> None:
    module = CausalLM({**MODEL, "attn_implementation": name})
    with pytest.raises(
        ConfigError, match=f"attn_implementation={name} cannot be used here: .*Use model.attn_impl"
    ):
        module.configure_model()


def test_it_learns(trained: dict[str, Any]) -> None:
    losses = trained["seen"].losses
    assert losses[0] == pytest.approx(math.log(257), abs=0.3)
    assert losses[-1] < 2.0
    assert float(trained["fit"].callback_metrics["val_loss"]) < 2.0


def test_the_first_loss_is_the_cross_entropy_of_the_shifted_inputs(trained: dict[str, Any]) -> None:
    seed_everything(1, verbose=False)
    module = CausalLM(MODEL, OPTIMIZER)
    module.configure_model()
    assert module.model is not None
    batch = trained["seen"].batches[0]
    logits = module.model(input_ids=batch).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    assert float(loss) == pytest.approx(trained["seen"].losses[0], rel=1e-5)


def test_the_model_is_built_once() -> None:
    module = CausalLM(MODEL)
    module.configure_model()
    first = module.model
    module.configure_model()
    assert module.model is first
    assert first is not None
    assert module.parameter_count == sum(parameter.numel() for parameter in first.parameters())
    assert first.config._attn_implementation == "sdpa"
    assert first.config.use_cache is False


def test_a_checkpoint_brings_module_and_weights_back(trained: dict[str, Any]) -> None:
    path = trained["folder"] / "checkpoints" / "epoch=0-step=20.ckpt"
    loaded = CausalLM.load_from_checkpoint(path, map_location="cpu")
    assert loaded.model_config == MODEL
    for name, value in trained["module"].state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])


def test_metrics_that_a_full_disk_does_not_take_are_not_worth_the_run(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="Cannot write to /dev/full; training continues .*No space left"
    ) as warned:
        fit = trainer(tmp_path, MetricsCSV("/dev/full"), max_steps=4, val_check_interval=2)
        fit.fit(CausalLM(MODEL, OPTIMIZER), datamodule=alphabet())
    assert fit.global_step == 4
    assert len([one for one in warned if "some rows will be missing" in str(one.message)]) == 1


def test_a_module_without_an_optimizer_cannot_be_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Pass optimizer="):
        trainer(tmp_path).fit(CausalLM(MODEL), datamodule=alphabet())


def test_configurations_of_hydra_are_taken(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    module = CausalLM(OmegaConf.create(MODEL), OmegaConf.create(OPTIMIZER))
    assert (type(module.model_config["config"]), type(module.hparams["optimizer"]["betas"])) == (
        dict,
        list,
    )


def test_the_position_in_the_data_is_part_of_the_checkpoint(
    trained: dict[str, Any], tmp_path: Path
) -> None:
    path = trained["folder"] / "checkpoints" / "epoch=0-step=10.ckpt"
    seen = Seen()
    trainer(tmp_path, seen).fit(CausalLM(MODEL, OPTIMIZER), datamodule=alphabet(), ckpt_path=path)
    assert len(seen.batches) == 10
    for again, first in zip(seen.batches, trained["seen"].batches[10:], strict=True):
        assert torch.equal(again, first)
    assert seen.losses == pytest.approx(trained["seen"].losses[10:], rel=1e-6)


@pytest.mark.full
def test_a_run_resumed_in_a_later_epoch_sees_the_same_samples(tmp_path: Path) -> None:
    """325 samples: 5 batches of 64 an epoch."""
    whole, rest = Seen(), Seen()
    keep = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1, save_top_k=-1)
    options = {"max_steps": 12, "val_check_interval": None, "limit_val_batches": 0}
    fit = trainer(tmp_path, whole, keep, **options)
    fit.fit(CausalLM(MODEL, OPTIMIZER), datamodule=alphabet(global_batch_size=64))
    for step in (5, 7):
        (path,) = (tmp_path / "checkpoints").glob(f"*step={step}.ckpt")
        rest = Seen()
        resumed = trainer(tmp_path, rest, **options)
        resumed.fit(
            CausalLM(MODEL, OPTIMIZER), datamodule=alphabet(global_batch_size=64), ckpt_path=path
        )
        assert len(rest.batches) == 12 - step
        assert all(
            torch.equal(a, b) for a, b in zip(rest.batches, whole.batches[step:], strict=True)
        )


def test_f26_a_checkpoint_without_the_position_is_refused(
    trained: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = torch.load(
        trained["folder"] / "checkpoints" / "epoch=0-step=10.ckpt", weights_only=False
    )
    del checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"], checkpoint["Alphabet"]
    torch.save(checkpoint, tmp_path / "other.ckpt")
    with pytest.raises(DataError, match="does not contain the position in the data"):
        trainer(tmp_path).fit(
            CausalLM(MODEL, OPTIMIZER), datamodule=alphabet(), ckpt_path=tmp_path / "other.ckpt"
        )


# The optimizer

ALL = [NamedGroup(frozenset({"weight"}), {"weight_decay": 0.1})]


@pytest.mark.parametrize("name", ["adamw", "adamw_large", "adamw_wsd", "sgd", "torch", "muon"])
def test_the_optimizer_files_work(name: str) -> None:
    config = yaml.safe_load((conf_folder() / "optimizer" / f"{name}.yaml").read_text())
    check_optimizer(config)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = make_optimizer(config, {"weight": parameter}, ALL)
    parameter.sum().backward()
    optimizer.step()
    assert bool((parameter < 1).all())


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_optimizer_of_deepspeed_is_adamw() -> None:
    """It is compiled first, which takes minutes."""
    ours, theirs = (
        nn.Parameter(torch.linspace(-0.02, 0.02, 101)),
        nn.Parameter(torch.linspace(-0.02, 0.02, 101)),
    )
    optimizer = make_optimizer({**OPTIMIZER, "name": "cpu_adamw"}, {"weight": ours}, ALL)
    expected = make_optimizer(OPTIMIZER, {"weight": theirs}, ALL)
    assert type(optimizer).__name__ == "DeepSpeedCPUAdam"
    for step in range(20):
        for parameter in (ours, theirs):
            parameter.grad = torch.sin(torch.arange(101.0) * (step + 1))
        optimizer.step()
        expected.step()
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)


def test_decay_groups_of_a_tied_model() -> None:
    config = {
        **MODEL["config"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
    }  # type: ignore[dict-item]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers_config(config))
    names = undecayed_names(model, ["norm", "bias", "embedding"])
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= names
    assert "model.layers.1.self_attn.q_proj.bias" in names
    assert "model.layers.1.self_attn.q_proj.weight" not in names
    assert undecayed_names(model, ["bias"]) == {name for name in names if name.endswith("bias")}


def test_weight_decay_touches_its_group_only() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2, bias=False))
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(OPTIMIZER, parameters, find_groups(model, OPTIMIZER, 0.1))
    assert [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups] == [
        (1, 0.1),
        (1, 0.0),
    ]
    assert optimizer.param_groups[1]["params"][0] is parameters["1.weight"]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert len(find_groups(model, OPTIMIZER, 0.0)) == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]),
    ],
)
def test_learning_rate_schedules(name: str, expected: list[float]) -> None:
    factor = lr_factor({"name": name, "warmup_steps": 2, "min_lr_ratio": 0.1}, 10)
    assert [factor(step) for step in (0, 1, 2, 6, 10, 99)] == pytest.approx(expected)


def test_the_decay_may_end_before_the_run() -> None:
    factor = lr_factor({"name": "linear", "decay_steps": 5}, 100)
    assert [factor(step) for step in (0, 1, 5, 50)] == pytest.approx([1.0, 0.8, 0.0, 0.0])
    assert lr_factor({"name": "constant"}, math.inf)(1000) == 1.0
    with pytest.raises(ConfigError, match="Set trainer.max_steps or"):
        lr_factor({"name": "cosine"}, math.inf)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": -1e-3}, "optimizer.lr must be a number above 0, .*; got -0.001"),
        ({"lr": math.nan}, "optimizer.lr must be .*; got nan"),
        ({"lr": "fast"}, "optimizer.lr must be .*; got 'fast'"),
        ({"lr": None}, "optimizer.lr must be .*; got None"),
        ({"betas": [0.9, 1.0]}, "each of optimizer.betas must be .*; got 1.0"),
        ({"betas": [0.9]}, "optimizer.betas must be two numbers, .*; got 1 number"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay must be .*; got -0.1"),
        ({"no_decay": ["norms"]}, "no_decay may contain .*; got 'norms'.* Did you mean \"norm\""),
        (
            {"name": "adam"},
            "optimizer.name must be adamw, cpu_adamw, sgd or muon; got 'adam'. .* optimizer=torch",
        ),
        (
            {"name": "cpu_adamw", "fused": True},
            "optimizer.fused is an option of adamw and sgd, because cpu_adamw is always fused",
        ),
        ({"wieght_decay": 0.1}, "no option 'wieght_decay'.* Did you mean \"weight_decay\""),
        ({"momentum": 0.9}, "no option 'momentum'"),
        ({"scheduler": {"name": "cosin"}}, "optimizer.scheduler.name must be .*; got 'cosin'"),
        (
            {"scheduler": {"name": "cosine", "warmup_steps": -1}},
            "warmup_steps must be a number of at least 0; got -1",
        ),
        (
            {"scheduler": {"name": "cosine", "min_lr_ratio": 2}},
            "min_lr_ratio must be a number from 0 to 1; got 2",
        ),
        (
            {"scheduler": {"name": "cosine", "decay_steps": 0}},
            "decay_steps must be a number of at least 1; got 0",
        ),
        ({"scheduler": {"name": "cosine", "steps": 5}}, "no option 'steps'"),
    ],
    ids=str,
)
def test_f21_optimizer_options_that_cannot_work_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CausalLM(MODEL, {**OPTIMIZER, **changes})


# Callbacks


def test_metrics_have_one_row_a_step(trained: dict[str, Any]) -> None:
    with (trained["folder"] / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [int(row["step"]) for row in rows] == list(range(1, 21))
    assert [float(row["loss"]) for row in rows] == pytest.approx(trained["seen"].losses, rel=1e-6)
    assert [float(row["lr"]) for row in rows[:5]] == pytest.approx(
        [0.0025, 0.005, 0.0075, 0.01, 0.01]
    )
    assert {row["tokens"] for row in rows} == {"64"}
    for row in rows:
        assert float(row["tokens_per_second"]) * float(row["step_seconds"]) == pytest.approx(
            64, rel=1e-2
        )
    assert [row["val_loss"] for row in rows[:-1]] == [""] * 19
    assert float(rows[-1]["val_loss"]) == pytest.approx(
        float(trained["fit"].callback_metrics["val_loss"])
    )


def test_metrics_of_a_resumed_run_go_on(trained: dict[str, Any], tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.csv"
    text = (trained["folder"] / "metrics.csv").read_text()
    metrics.write_text(text + "21,3.0,,0.0")
    path = trained["folder"] / "checkpoints" / "epoch=0-step=10.ckpt"
    resumed = trainer(tmp_path, MetricsCSV(metrics), max_steps=15, val_check_interval=15)
    resumed.fit(CausalLM(MODEL, OPTIMIZER), datamodule=alphabet(), ckpt_path=path)
    lines = metrics.read_text().splitlines()
    assert lines[:11] == text.splitlines()[:11]
    assert [line.split(",")[0] for line in lines[1:]] == [str(step) for step in range(1, 16)]


class Tells(CausalLM):
    """Remembers what its steps return, which Lightning divides where gradients accumulate."""

    def __init__(self) -> None:
        super().__init__(MODEL, OPTIMIZER)
        self.told: list[float] = []

    def training_step(self, batch: Any, *args: Any) -> Any:
        loss = super().training_step(batch, *args)
        self.told.append(float(loss.detach()))
        return loss


def test_several_batches_of_a_step_are_one_row(tmp_path: Path) -> None:
    module, out, table = Tells(), io.StringIO(), io.StringIO()
    callbacks = (
        MetricsCSV(tmp_path / "metrics.csv"),
        ProgressBar(every=1, stream=out),
        Summary("smallest", stream=table),
    )
    fit = trainer(
        tmp_path, *callbacks, max_steps=3, val_check_interval=6, accumulate_grad_batches=2
    )
    fit.fit(module, datamodule=alphabet())
    rows = read_rows(tmp_path / "metrics.csv", last_step=9)
    assert [row["step"] for row in rows] == ["1", "2", "3"] and len(module.told) == 6
    assert [float(row["loss"]) for row in rows] == pytest.approx(
        [sum(module.told[at : at + 2]) / 2 for at in (0, 2, 4)]
    )
    assert [row["tokens"] for row in rows] == ["128"] * 3 and [
        row["tokens_seen"] for row in rows
    ] == ["128", "256", "384"]
    assert (
        float(rows[0]["lr"]) == pytest.approx(OPTIMIZER["lr"] / 4)
        and rows[2]["val_loss"]
        and not rows[1]["val_loss"]
    )
    assert [line.split(" |")[0] for line in out.getvalue().splitlines() if "tokens/s" in line] == [
        "step 1/3",
        "step 2/3",
        "step 3/3",
    ]
    assert re.search(r"^steps +3$", table.getvalue(), re.MULTILINE) and re.search(
        r"^tokens +384$", table.getvalue(), re.MULTILINE
    )


@pytest.mark.parametrize(("share", "more"), [(250, ", of which rank 0 keeps 250"), (1000, "")])
def test_the_size_of_the_model_is_printed_when_a_fit_begins(share: int, more: str) -> None:
    told = []
    for rank in range(2):
        out = io.StringIO()
        strategy = SimpleNamespace(parameter_counts=(1000, share))
        Summary("small", stream=out).on_fit_start(
            SimpleNamespace(strategy=strategy, is_global_zero=rank == 0), Tells()
        )  # type: ignore[arg-type]
        told.append(out.getvalue())
    assert told == [f"small: 1,000 parameters{more}\n", ""]


class Uneven(Callback):
    """Gives the strategy what ours has after batches of a step with 30 and 90 target tokens."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        last = (
            {"loss": 2.0, "grad_norm": None, "tokens": 30.0}
            if index % 2 == 0
            else {"loss": 1.0, "grad_norm": 0.25, "tokens": 90.0}
        )
        trainer.strategy.last_step = type("StepResult", (), last)()


def test_batches_of_a_step_weigh_as_many_tokens_as_they_have(tmp_path: Path) -> None:
    fit = trainer(
        tmp_path,
        Uneven(),
        MetricsCSV(tmp_path / "metrics.csv"),
        max_steps=2,
        limit_val_batches=0,
        accumulate_grad_batches=2,
    )
    fit.fit(CausalLM(MODEL, OPTIMIZER), datamodule=alphabet())
    rows = read_rows(tmp_path / "metrics.csv", last_step=9)
    assert [(row["loss"], row["grad_norm"], row["tokens"]) for row in rows] == [
        ("1.25", "0.25", "120")
    ] * 2


def test_rows_cut_off_by_a_crash_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    cells = ["2.0", "", "1e-3"] + [""] * (len(COLUMNS) - 4)
    path.write_text("\n".join([",".join(COLUMNS), ",".join(["1", *cells]), "2,1.9,,1e-"]))
    assert [row["step"] for row in read_rows(path, last_step=9)] == ["1"]
    assert read_rows(tmp_path / "nowhere.csv", last_step=9) == []


class FromStrategy(Callback):
    """Gives the strategy what ours has."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        trainer.strategy.last_step = type(
            "StepResult", (), {"loss": 1.5, "grad_norm": 0.25, "tokens": 60.0}
        )()


def test_metrics_come_from_the_strategy_when_it_has_them(tmp_path: Path) -> None:
    fit = trainer(
        tmp_path,
        FromStrategy(),
        MetricsCSV(tmp_path / "metrics.csv"),
        max_steps=2,
        limit_val_batches=0,
    )
    fit.fit(CausalLM(MODEL, OPTIMIZER), datamodule=alphabet())
    rows = read_rows(tmp_path / "metrics.csv", last_step=9)
    assert [(row["loss"], row["grad_norm"], row["tokens"]) for row in rows] == [
        ("1.5", "0.25", "60")
    ] * 2


def test_progress_is_a_line_every_few_steps_where_there_is_no_terminal(
    trained: dict[str, Any],
) -> None:
    lines = trained["out"].splitlines()
    steps = [line.split(" |")[0] for line in lines if "tokens/s" in line]
    assert steps == ["step  1/20", "step  5/20", "step 10/20", "step 15/20", "step 20/20"]
    assert lines[-1].startswith("step 20: validation loss ")
    assert "\r" not in trained["out"]


def test_a_terminal_has_one_line_that_is_rewritten(tmp_path: Path) -> None:
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    fit = trainer(tmp_path, ProgressBar(stream=out), max_steps=4, val_check_interval=4)
    fit.fit(CausalLM(MODEL, OPTIMIZER), datamodule=alphabet())
    first, last = out.getvalue().splitlines()[-2:]
    assert out.getvalue().count("\r") == 4
    assert "step 4/4" in first
    assert last.startswith("step 4: validation loss ")


def test_a_progress_line() -> None:
    steps = [StepNumbers(9, 3.0, 1.0, 1e-3, 1000, 0.5), StepNumbers(10, 2.5, 1.0, 1e-3, 1000, 1.5)]
    assert (
        progress_line(steps, 130)
        == "step  10/130 | loss 2.5000 | 1,000 tokens/s | 1.000 s/step | 2:00 left"
    )
    assert progress_line(steps, None) == "step 10 | loss 2.5000 | 1,000 tokens/s | 1.000 s/step"
    assert (format_seconds(42.4), format_seconds(11250)) == ("0:42", "3:07:30")


def test_the_summary(trained: dict[str, Any]) -> None:
    rows = dict(
        line.split("  ", 1)
        for line in trained["table"].replace("  bigram", "bigram").splitlines()
        if "  " in line
    )
    rows = {key.strip(): value.strip() for key, value in rows.items()}
    assert rows["model"] == f"smallest, {trained['module'].parameter_count:,} parameters"
    assert rows["steps"] == "20"
    assert rows["tokens"] == "1,280"
    assert rows["validation loss"].startswith(
        f"{float(trained['fit'].callback_metrics['val_loss']):.4f} nats/byte"
    )
    assert rows["bigram entropy"].startswith("0.0000 nats/byte")
    assert rows["checkpoint"].endswith("step=20.ckpt")
