"""Checkpoints belong to the model: any layout saves them, any other loads them, and they are whole
or not there."""

import copy
import dataclasses
import json
import math
import warnings
from argparse import Namespace
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_fits import (
    STEPS_PER_EPOCH,
    TiedModel,
    all_tensors,
    assert_equal,
    make_trainer,
    run_fit,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf
from ranks import run_ranks
from sweeps import by_default
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_3d.checkpoint import load_full_state_dict, read_manifest
from lightning_3d.checkpoint.folder import MANIFEST, begin
from lightning_3d.checkpoint.json_state import Packer, unpack
from lightning_3d.checkpoint.reading import TensorFolder
from lightning_3d.checkpoint.resharding import flat_range, rectangles
from lightning_3d.checkpoint.rng_state import GENERATORS
from lightning_3d.errors import CheckpointError
from lightning_3d.parallel.sharding import cut_along

SOURCES = {"zero0": ("tp2_pp2", 0), "zero1": ("tp2_dp2", 1)}


class ScaledModel(TiedModel):
    """With a trained number: a parameter of shape ()."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints after one epoch, saved when the fit was over."""
    folder = tmp_path_factory.mktemp("saved")
    paths = {name: folder / f"{name}.ckpt" for name in SOURCES}
    for name, (layout, zero) in SOURCES.items():
        run_fit(layout, 1, at_end=str(paths[name]), zero_stage=zero)
    return paths


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    return run_fit("tp2_pp2", 2)


TARGETS: list[tuple[str, dict[str, Any]]] = [
    ("tp1", {}),
    ("pp4", {}),
    ("dp2", {"zero_stage": 1}),
    ("tp4_dp2", {"zero_stage": 1}),
    ("dp4", {"zero_stage": 2}),
    ("tp2_dp2", {"zero_stage": 3}),
    ("tp2_pp2_dp2", {}),
    ("pp2_dp2", {"schedule": "Interleaved1F1B", "zero_stage": 1}),
]


def pairs() -> list[Any]:
    return [
        pytest.param(
            source, layout, strategy, id=f"{source}-{layout}-zero{strategy.get('zero_stage', 0)}"
        )
        for source in SOURCES
        for layout, strategy in TARGETS
    ]


@pytest.mark.slow
@pytest.mark.full  # by default test_checkpoint_matrix.py has such pairs
@pytest.mark.parametrize(("source", "layout", "strategy"), pairs())
def test_any_layout_restores_every_bit_and_goes_on(
    source: str,
    layout: str,
    strategy: dict,
    saved: dict[str, Path],
    uninterrupted: list[float],
    tmp_path: Path,
) -> None:
    """Weights, buffers and optimizer state, read and written again by the other layout; then the
    same training."""
    losses = run_fit(
        layout, 2, resume=str(saved[source]), at_start=str(tmp_path / "again.ckpt"), **strategy
    )
    assert_equal(all_tensors(tmp_path / "again.ckpt"), all_tensors(saved[source]))
    assert losses == pytest.approx(uninterrupted[STEPS_PER_EPOCH:], rel=1e-5)


@pytest.mark.slow
def test_resuming_on_the_same_layout_is_exact(
    saved: dict[str, Path], uninterrupted: list[float]
) -> None:
    assert run_fit("tp2_pp2", 2, resume=str(saved["zero0"])) == uninterrupted[STEPS_PER_EPOCH:]


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "other"), by_default([(0, 1), (1, 3), (3, 0)], 1))
def test_bf16_resumes_with_its_master_weights(zero: int, other: int, tmp_path: Path) -> None:
    first, again, wide = (str(tmp_path / f"{name}.ckpt") for name in ("first", "again", "wide"))
    run_fit("pp2_dp2", 1, at_end=first, zero_stage=zero, precision="bf16-true")
    run_fit("tp2", 2, resume=first, at_start=again, zero_stage=other, precision="bf16-true")
    tensors = all_tensors(Path(first))
    assert_equal(all_tensors(Path(again)), tensors)
    run_fit("dp2", 2, resume=first, at_start=wide)  # parameters in float32 are the master weights
    name = "model.norm.weight"
    assert torch.equal(
        load_full_state_dict(wide)[f"model.{name}"], tensors[f"optimizer.state.model.{name}.master"]
    )


@pytest.mark.slow
def test_a_parameter_that_is_one_number_resumes_as_well(tmp_path: Path) -> None:
    first, again = tmp_path / "first.ckpt", tmp_path / "again.ckpt"
    run_fit("tp1", 1, at_end=str(first), model=ScaledModel, precision="bf16-true")
    tensors = all_tensors(first)
    states = {
        key: tensors[f"optimizer.state.scale.{key}"]
        for key in ("step", "exp_avg", "exp_avg_sq", "master")
    }
    assert states["step"] == STEPS_PER_EPOCH and all(
        value.shape == () and value != 0 for value in states.values()
    )
    assert states["master"].bfloat16() == tensors["model.scale"] != states["master"], (
        "the master weight has more digits"
    )
    run_fit(
        "tp1", 2, resume=str(first), at_start=str(again), model=ScaledModel, precision="bf16-true"
    )
    assert_equal(all_tensors(again), tensors)


def test_one_process_loads_the_whole_model(saved: dict[str, Path], tmp_path: Path) -> None:
    state = load_full_state_dict(saved["zero0"])
    module = TiedModel()
    module.configure_model()
    module.load_state_dict(state)
    assert int(module.batches) == STEPS_PER_EPOCH
    assert state["model.lm_head.weight"] is state["model.model.embed_tokens.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(saved["zero0"], tmp_path / "torch.pt")  # torch's own tool reads it too
    exported = torch.load(tmp_path / "torch.pt", weights_only=True)
    assert torch.equal(exported["model.model.model.norm.weight"], state["model.model.norm.weight"])


def test_the_manifest_says_what_it_is(saved: dict[str, Path]) -> None:
    manifest = read_manifest(saved["zero1"])
    assert manifest["layout"] == "tp2_dp2"
    assert (manifest["zero_stage"], manifest["global_step"], manifest["optimizer_state"]) == (
        1,
        STEPS_PER_EPOCH,
        True,
    )
    assert sorted(manifest["files"]) == sorted(
        p.name for p in saved["zero1"].iterdir() if p.name != MANIFEST
    )
    state = load_full_state_dict(saved["zero1"])
    trained = sum(
        tensor.numel()
        for name, tensor in state.items()
        if name not in ("batches", "model.lm_head.weight")
    )
    scalars = 4 * (len(state) - 2) + 8  # Adam's step counts and the buffer
    generators = math.prod(TensorFolder(saved["zero1"]).names(GENERATORS)[""])
    assert manifest["tensor_bytes"] == 3 * 4 * trained + scalars + generators, (
        "every element once: weights and two moments"
    )
    shares = [file["bytes"] for name, file in manifest["files"].items() if name.endswith(".distcp")]
    assert len(shares) == 4 and max(shares) < 1.5 * min(shares), "all ranks write, about the same"


def keep_best(folder: str) -> dict[str, Any]:
    callback = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True)
    trainer, rows = make_trainer("tp2", 4, [callback])
    module = TiedModel()
    module.learning_rate = 0.1  # so that the loss does not fall in every epoch
    trainer.fit(module, datamodule=rows)
    scores = {Path(path).name: float(score) for path, score in callback.best_k_models.items()}
    trainer.validate(module, datamodule=rows, ckpt_path="best", verbose=False)
    best_again = float(trainer.callback_metrics["val_loss"])
    return {"scores": scores, "best": callback.best_model_path, "best_again": best_again}


@pytest.mark.slow
def test_model_checkpoint_keeps_the_best(tmp_path: Path) -> None:
    outcomes = run_ranks(keep_best, 2, str(tmp_path))
    outcome = outcomes[0]
    assert all(other == outcome for other in outcomes)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*outcome["scores"], "last.ckpt"]
    )
    assert outcome["best_again"] == min(outcome["scores"].values())
    assert read_manifest(tmp_path / "last.ckpt")["global_step"] == 4 * STEPS_PER_EPOCH


def load_into(path: str, hidden_size: int, tied: bool) -> str:
    trainer, rows = make_trainer("pp2", 1, [])
    with pytest.raises(CheckpointError) as refused:
        trainer.validate(
            TiedModel(hidden_size, tied), datamodule=rows, ckpt_path=path, verbose=False
        )
    return str(refused.value)


def test_f35_another_model_is_refused_with_a_list(saved: dict[str, Path]) -> None:
    shapes, names = (
        run_ranks(load_into, 2, str(saved["zero0"]), *model) for model in ((64, True), (32, False))
    )
    assert shapes[0] == shapes[1] and names[0] == names[1], "every rank sees the whole list"
    assert (
        "model.model.embed_tokens.weight (61, 32) (model: (61, 64))" in shapes[0]
        and "and 28 more" in shapes[0]
    )
    assert "Missing from the checkpoint: model.lm_head.weight." in names[0]


def failing_save(folder: str) -> list[str]:
    """Save, then fail to save over it: once because a rank cannot say what it holds, once because
    the disk refuses."""
    from lightning_3d.checkpoint.state import LocalState

    trainer, rows = make_trainer("dp2", 1, [])
    module = TiedModel()
    trainer.fit(module, datamodule=rows)
    trainer.save_checkpoint(f"{folder}/a.ckpt")
    messages = []
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(LocalState, "weights", lambda *args, **kwargs: [][0])
        with pytest.raises(CheckpointError) as failed:
            trainer.save_checkpoint(f"{folder}/a.ckpt")
        messages.append(str(failed.value))
    with pytest.raises(CheckpointError) as failed:
        trainer.save_checkpoint("/proc/a.ckpt")
    return [*messages, str(failed.value)]


def test_f32_a_failed_save_leaves_the_last_one(tmp_path: Path) -> None:
    for held, disk in run_ranks(failing_save, 2, str(tmp_path)):
        assert "rank 1" in held and "IndexError" in held
        assert "/proc" in disk
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
    assert load_full_state_dict(tmp_path / "a.ckpt")


@pytest.mark.slow
def test_replacing_leaves_nothing_beside(saved: dict[str, Path], tmp_path: Path) -> None:
    """An interrupted save to the same name is cleared away by the next one."""
    path = tmp_path / "last.ckpt"
    begin(path, {"epoch": 0})
    assert [p.name for p in tmp_path.iterdir()] == [".last.ckpt.saving"], (
        "not a checkpoint yet, for nobody"
    )
    for _ in range(2):
        run_fit("dp2", 1, at_end=str(path))
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 5), (4, 1, 3, 2)])
def test_flat_ranges_are_few_rectangles(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    flat = torch.arange(numel)
    for start in range(numel):
        for stop in range(start, numel + 1):
            boxes = list(rectangles(shape, start, stop))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            found = [flat.view(shape)[box.global_slices()].flatten() for box in boxes]
            assert torch.equal(torch.cat(found) if found else flat[:0], flat[start:stop])


def test_flat_ranges_of_a_packed_shard_find_their_place() -> None:
    """A fused gate and up projection: one shard is two boxes of the whole."""
    spec = cut_along("gate_up", (12, 5), 0, [(2, 2), (8, 2)], tp_replicas=(1,))
    full = torch.arange(60).view(12, 5)
    local = spec.cut(full).flatten()
    for cuts in ((0, 20), (0, 3, 20), (0, 7, 13, 20), (0, 1, 11, 20)):
        rebuilt = torch.full_like(full, -1)
        for start, stop in zip(cuts, cuts[1:], strict=False):
            for offset, part in flat_range(local[start:stop], start, spec).parts.items():
                rebuilt[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))] = (
                    part
                )
        expected = torch.full_like(full, -1)
        spec.paste(spec.cut(full), expected)
        assert torch.equal(rebuilt, expected)


@dataclasses.dataclass
class NotPlain:
    value: int


def test_lightning_state_is_plain_data() -> None:
    state = {
        "numbers": [1, 2.5, True, None, float("inf"), 10**20],
        "tuple": (1, (2, "three")),
        "set": {1, 2},
        "counter": Counter({30: 1, 60: 2}),
        3: {"$looks like a word": 1},
        "path": Path("a/b"),
        "bytes": b"\x00\xff",
        "time": timedelta(seconds=1.5),
        "dtype": torch.bfloat16,
        "namespace": Namespace(a=1),
        "config": OmegaConf.create({"a": [1, {"b": "${a}"}], "c": "${a}"}).a,
    }
    tensors = {"bf16": torch.randn(3).bfloat16(), "scalar": torch.tensor(2.0, dtype=torch.float64)}
    packer = Packer()
    document = json.loads(
        json.dumps(
            packer.pack_entries({**state, **tensors, "bad": {"inner": [NotPlain(1)], "good": 1}})
        )
    )
    assert packer.left_out == ["bad.inner (NotPlain)"]
    found = unpack(document, packer.tensors)
    assert found.pop("bad") == {"good": 1}
    assert {name: found.pop(name).dtype for name in copy.copy(tensors)} == {
        name: t.dtype for name, t in tensors.items()
    }
    expected = state | {
        "config": OmegaConf.to_container(OmegaConf.create(state["config"]), resolve=False)
    }
    assert found.keys() == expected.keys()
    assert {k: v for k, v in found.items() if k != "config"} == {
        k: v for k, v in expected.items() if k != "config"
    }
