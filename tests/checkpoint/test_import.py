"""Checkpoints of others, made by the real thing in this very test, are converted and trained on:
the next steps are those of the run that wrote them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
import foreign
import lightning.pytorch as pl
import pytest
import torch
from checkpoint_fits import GLOBAL_BATCH
from command_line import environment
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from omegaconf import OmegaConf
from parity import StepValues, micro_batch_rows, quiet_trainer
from plain_module import TextData
from ranks import run_ranks
from torch import nn

from lightning_3d.app.cli.import_ import run as command
from lightning_3d.checkpoint import load_full_state_dict, read_manifest
from lightning_3d.checkpoint.conversion import convert
from lightning_3d.checkpoint.conversion.lightning_file import find_names
from lightning_3d.checkpoint.folder import read_trainer_state
from lightning_3d.checkpoint.reading import TensorFolder
from lightning_3d.errors import CheckpointError
from lightning_3d.layout import Layout

DEEPSPEED = [
    (0, "float32", 2),
    (1, "float32", 4),
    (2, "float32", 2),
    (1, "bfloat16", 2),
    (2, "bfloat16", 4),
    (3, "bfloat16", 4),
]


def resumed(
    path: str,
    layout: str,
    options: dict[str, Any],
    clip: float | None,
    anew: bool,
    precision: str,
    **strategy: Any,
) -> list[float]:
    """The losses of the steps after the checkpoint; `anew`: of which nothing tells how many there
    were before."""
    from lightning_3d.strategy import Lightning3DStrategy

    size, values = Layout.parse(layout), StepValues()
    plan = Lightning3DStrategy(
        layout, micro_batch_size=micro_batch_rows(size.dp, size.pp, GLOBAL_BATCH), **strategy
    )
    assert plan.layout is not None
    steps = foreign.MORE if anew else foreign.STEPS + foreign.MORE
    options_of_trainer = {
        "max_steps": steps,
        "gradient_clip_val": clip,
        "callbacks": [values],
        "precision": precision,
    }
    trainer = quiet_trainer(strategy=plan, devices=plan.layout.world_size, **options_of_trainer)
    trainer.fit(
        foreign.Module(**options),
        datamodule=TextData(GLOBAL_BATCH // plan.layout.dp),
        ckpt_path=path,
    )
    return values.losses


def train_on(
    path: Path,
    layout: str,
    options: dict[str, Any],
    clip: float | None = 0.5,
    anew: bool = False,
    precision: str = "32-true",
    **strategy: Any,
) -> list[float]:
    ranks = 4 if layout == "tp2_pp2" else 2
    return run_ranks(resumed, ranks, str(path), layout, options, clip, anew, precision, **strategy)[
        0
    ]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    path = tmp_path_factory.mktemp("ddp") / "x.ckpt"
    return path, run_ranks(foreign.lightning_losses, 2, str(path), "ddp")[0]


@pytest.mark.slow
def test_a_file_of_ddp(
    ddp: tuple[Path, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With tied parameters, two parameter groups, a scheduler, a buffer, from the middle of an
    epoch."""
    path, expected = ddp
    assert command([str(path), "--output", str(tmp_path / "new.ckpt")]) == 0
    assert f"step {foreign.STEPS}, 39 weights, 114 optimizer states" in capsys.readouterr().out
    state, saved = load_full_state_dict(tmp_path / "new.ckpt"), torch.load(path, weights_only=True)
    assert state.keys() == saved["state_dict"].keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in saved["state_dict"].items())
    assert read_manifest(tmp_path / "new.ckpt")["global_step"] == foreign.STEPS
    assert train_on(tmp_path / "new.ckpt", "tp2_pp2", {}) == pytest.approx(expected, rel=1e-5)


def test_without_conversion_it_is_said_how(ddp: tuple[Path, list[float]]) -> None:
    with pytest.raises(
        CheckpointError, match=f"is a file.*lightning-3d import {ddp[0]} --output NEW"
    ):
        load_full_state_dict(ddp[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.full), "sharded"])
@pytest.mark.parametrize(
    "tied", [False, pytest.param(True, marks=pytest.mark.full)], ids=["untied", "tied"]
)
def test_fsdp(kind: str, tied: bool, tmp_path: Path) -> None:
    """Lightning's strategy and torch's FSDP on two CPU ranks."""
    expected = run_ranks(foreign.lightning_losses, 2, str(tmp_path / "x.ckpt"), kind, tied=tied)[0]
    found = convert(tmp_path / "x.ckpt", str(tmp_path / "new.ckpt"))
    assert (found.step, found.states) == (foreign.STEPS, 114 + (0 if tied else 3))
    assert train_on(tmp_path / "new.ckpt", "tp2_pp2", {"tied": tied}, clip=None) == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.full
def test_fsdp_consolidated_by_lightnings_tool(tmp_path: Path) -> None:
    run_ranks(foreign.lightning_losses, 2, str(tmp_path / "x.ckpt"), "sharded", tied=False)
    tool = [
        sys.executable,
        "-m",
        "lightning.pytorch.utilities.consolidate_checkpoint",
        str(tmp_path / "x.ckpt"),
    ]
    subprocess.run(tool, check=True, env=environment(), timeout=300)
    convert(tmp_path / "x.ckpt", str(tmp_path / "sharded.ckpt"))
    convert(tmp_path / "x.ckpt.consolidated", str(tmp_path / "file.ckpt"))
    sharded, file = TensorFolder(tmp_path / "sharded.ckpt"), TensorFolder(tmp_path / "file.ckpt")
    assert sharded.names("") == file.names("")
    assert all(torch.equal(sharded.read(name), file.read(name)) for name in file.names(""))
    states = [
        read_trainer_state(tmp_path / name, {})["optimizer_states"]
        for name in ("sharded.ckpt", "file.ckpt")
    ]
    assert states[0] == states[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dtype", "ranks"),
    [(3, "float32", 2), *(pytest.param(*case, marks=pytest.mark.full) for case in DEEPSPEED)],
)
def test_deepspeed(stage: int, dtype: str, ranks: int, tmp_path: Path) -> None:
    """Its own engine and loop. It says nothing of the position in the data: the checkpoint is from
    the end of an epoch."""
    expected = run_ranks(foreign.deepspeed_losses, ranks, str(tmp_path / "x"), stage, dtype)[0]
    found = convert(tmp_path / "x", str(tmp_path / "new.ckpt"))
    assert found.step == foreign.STEPS_DEEPSPEED and any(
        "position in the data" in sentence for sentence in found.lost
    )
    tensors = TensorFolder(tmp_path / "new.ckpt")
    if stage:
        whole = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "x"))
        aliases = load_full_state_dict(tmp_path / "new.ckpt")
        for name, tensor in whole.items():
            master = f"optimizer.state.{name}.master"
            mine = tensors.read(master) if master in tensors.names("") else aliases[name]
            assert mine.dtype == aliases[name].dtype or dtype == "bfloat16"
            if name not in tensors.notes["aliases"]:
                assert torch.equal(mine, tensor), name
    precision, tolerance = ("32-true", 1e-5) if dtype == "float32" else ("bf16-true", 5e-3)
    assert train_on(
        tmp_path / "new.ckpt", "tp2_pp2", {}, anew=True, precision=precision
    ) == pytest.approx(expected, rel=tolerance)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_on_three_ranks_with_frozen_parameters(stage: int, tmp_path: Path) -> None:
    """Sizes that three does not divide; whoever wrote it says what they are. And one file is
    missing."""
    run_ranks(foreign.deepspeed_losses, 3, str(tmp_path / "x"), stage, "float32", kind="frozen")
    convert(tmp_path / "x", str(tmp_path / "new.ckpt"))
    state = load_full_state_dict(tmp_path / "new.ckpt")
    for name, tensor in get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "x")).items():
        assert torch.equal(state[name], tensor), name
    saved = TensorFolder(tmp_path / "new.ckpt").names("optimizer.state.")
    assert not [name for name in saved if "layers.1." in name] and [
        name for name in saved if "layers.2." in name
    ]
    next((tmp_path / "x" / "checkpoint").glob("zero_pp_rank_2_*_optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match="the files of 2 of 3 ranks"):
        convert(tmp_path / "x", str(tmp_path / "other.ckpt"))
    assert not (tmp_path / "other.ckpt").exists()


@pytest.mark.full
def test_deepspeed_with_the_dict_of_lightning(
    ddp: tuple[Path, list[float]], tmp_path: Path
) -> None:
    """As Lightning's DeepSpeedStrategy hands its dict to the engine; then the position in the data
    is carried over."""
    run_ranks(foreign.deepspeed_losses, 2, str(tmp_path / "x"), 2, "float32", client=str(ddp[0]))
    found = convert(tmp_path / "x", str(tmp_path / "new.ckpt"))
    assert found.step == foreign.STEPS and not any(
        "position" in sentence for sentence in found.lost
    )
    losses = train_on(tmp_path / "new.ckpt", "dp2", {}, zero_stage=2)
    assert losses == pytest.approx(ddp[1], rel=1e-5)


# One process


class Normalized(pl.LightningModule):
    """Frozen parameters, float buffers, a parameter of no optimizer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2)
        )
        self.layers[2].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        if self.kind == "two":
            return [
                torch.optim.SGD(self.layers[0].parameters()),
                torch.optim.SGD(self.layers[3].parameters()),
            ]
        if self.kind == "last":
            return torch.optim.AdamW(self.layers[3].parameters())
        return torch.optim.AdamW(p for p in self.parameters() if p.requires_grad)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch).square().mean()


def saved(path: Path, kind: str = "all", **more: Any) -> Path:
    module = Normalized(kind)
    optimizers = module.configure_optimizers()
    for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
        module.training_step(torch.randn(6, 4), 0).backward()
        optimizer.step()
    states = [
        optimizer.state_dict()
        for optimizer in (optimizers if isinstance(optimizers, list) else [optimizers])
    ]
    contents = {
        "state_dict": module.state_dict(),
        "optimizer_states": states,
        "global_step": 1,
        "epoch": 0,
        "lr_schedulers": [],
    }
    torch.save(contents | more, path)
    return path


def test_names_of_a_plain_optimizer_state(tmp_path: Path) -> None:
    """The statistics of a batch norm and frozen layers stand between the trained parameters."""
    source = saved(tmp_path / "x.ckpt", "last")
    convert(source, str(tmp_path / "last.ckpt"))
    own = torch.load(source, weights_only=True)["optimizer_states"][0]["state"]
    folder = TensorFolder(tmp_path / "last.ckpt")
    names = folder.names("optimizer.state.")
    assert {name.rpartition(".")[0] for name in names} == {"layers.3.weight", "layers.3.bias"}
    assert torch.equal(folder.read("optimizer.state.layers.3.weight.exp_avg"), own[0]["exp_avg"])


def test_what_shapes_do_not_tell_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two linear layers have the same bias as a batch norm, and one of them is frozen."""
    source = saved(tmp_path / "x.ckpt")
    assert command([str(source), "--output", str(tmp_path / "new.ckpt")]) == 2
    error = capsys.readouterr().err
    assert (
        "It is unknown which parameters" in error
        and "--groups FILE" in error
        and not (tmp_path / "new.ckpt").exists()
    )
    names = [
        name for name, parameter in Normalized("all").named_parameters() if parameter.requires_grad
    ]
    (tmp_path / "groups.json").write_text(json.dumps([names]))
    assert (
        command(
            [
                str(source),
                "--output",
                str(tmp_path / "new.ckpt"),
                "--groups",
                str(tmp_path / "groups.json"),
            ]
        )
        == 0
    )
    folder = TensorFolder(tmp_path / "new.ckpt")
    state = torch.load(source, weights_only=True)["optimizer_states"][0]["state"]
    assert all(
        torch.equal(folder.read(f"optimizer.state.{name}.exp_avg"), state[number]["exp_avg"])
        for number, name in enumerate(names)
    )
    (tmp_path / "groups.json").write_text(json.dumps([names[::-1]]))
    assert (
        command(
            [
                str(source),
                "--output",
                str(tmp_path / "other.ckpt"),
                "--groups",
                str(tmp_path / "groups.json"),
            ]
        )
        == 2
    )
    assert "--groups gives" in capsys.readouterr().err
    assert (
        command(
            [
                str(source),
                "--output",
                str(tmp_path / "other.ckpt"),
                "--weights-only",
                "--rename",
                "layers.=net.",
            ]
        )
        == 0
    )
    assert "net.0.weight" in load_full_state_dict(tmp_path / "other.ckpt")
    assert "There is no optimizer state" in capsys.readouterr().out


def test_shapes_in_order() -> None:
    parameters = [("a", (2, 2)), ("b", (2,)), ("c", (3, 2)), ("d", (3,)), ("e", (2, 2))]
    assert find_names(parameters, [[(2, 2), (3, 2), (2, 2)], [(2,), (3,)]]) == [
        ["a", "c", "e"],
        ["b", "d"],
    ]
    assert find_names(parameters, [[(3, 2), (2, 2)]]) == [["c", "e"]]
    for groups in ([[(2, 2)]], [[(2, 2)], [(2, 2)]], [[(9,)]], [[(3, 2), (2,)]]):
        with pytest.raises(CheckpointError, match="It is unknown which"):
            find_names(parameters, groups)


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


def test_f34_code_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = saved(tmp_path / "x.ckpt", callbacks={"Mine": Evil()})
    assert command([str(source), "--output", str(tmp_path / "new.ckpt")]) == 2
    error = capsys.readouterr().err
    assert (
        "was not loaded: it contains" in error
        and "pathlib.Path" in error
        and "not plain data" in error
        and len(error.splitlines()) == 1
    )
    assert not (tmp_path / "executed").exists() and not (tmp_path / "new.ckpt").exists()
    torch.load(source, weights_only=False)
    assert (tmp_path / "executed").exists(), "it would have run"


def test_what_asks_for_classes_is_left_out_if_that_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hyper parameters as Hydra gives them."""
    source = saved(
        tmp_path / "x.ckpt",
        "last",
        hyper_parameters={"width": 8, "layers": OmegaConf.create({"depth": [1, 2]})},
    )
    assert command([str(source), "--output", str(tmp_path / "new.ckpt")]) == 2
    assert "omegaconf.dictconfig.DictConfig" in capsys.readouterr().err
    with pytest.warns(
        UserWarning, match="new.ckpt leaves out what is not plain data: hyper_parameters.layers"
    ):
        assert command([str(source), "--output", str(tmp_path / "new.ckpt"), "--plain-only"]) == 0
    assert read_trainer_state(tmp_path / "new.ckpt", {})["hyper_parameters"] == {"width": 8}


def test_other_things_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = saved(tmp_path / "two.ckpt", "two")
    broken = tmp_path / "broken.ckpt"
    shutil.copy(two, broken)
    broken.write_bytes(broken.read_bytes()[:1000])
    (tmp_path / "text").write_text("no checkpoint")
    (tmp_path / "empty").mkdir()
    torch.save([1], tmp_path / "list.pt")
    for name, words in (
        ("two.ckpt", "the state of 2 optimizers"),
        ("broken.ckpt", "cannot be read"),
        ("text", "cannot be read"),
        ("empty", "cannot be converted"),
        ("list.pt", "not a Lightning checkpoint"),
        ("nothing", "There is no checkpoint"),
    ):
        assert command([str(tmp_path / name), "--output", str(tmp_path / "new")]) == 2
        error = capsys.readouterr().err
        assert words in error and len(error.splitlines()) == 1, error
    assert (
        command([str(two), "--output", str(tmp_path / "empty")]) == 2
        and "already exists" in capsys.readouterr().err
    )


def test_classes_of_deepspeed_are_where_they_were() -> None:
    """They are known by their names; whoever moves one moves it here too."""
    from importlib import import_module

    from lightning_3d.checkpoint.conversion.deepspeed_folder import KNOWN

    assert deepspeed.__version__
    for _, name in KNOWN:
        module, _, kind = name.rpartition(".")
        assert isinstance(getattr(import_module(module), kind), type)
