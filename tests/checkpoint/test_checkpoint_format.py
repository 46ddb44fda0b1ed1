"""What a save writes and what it sends: the bytes of the unique state, and descriptions."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_fits import TiedModel, make_trainer, world_size
from plain_checkpoints import PlainState, save
from plain_module import LanguageModel
from ranks import run_ranks
from starts import in_fresh_process
from torch.distributed import checkpoint as dcp
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_3d.checkpoint import (
    CheckpointStore,
    SaveMode,
    load_full_state_dict,
    read_manifest,
    reading,
)
from lightning_3d.checkpoint.reading import TensorFolder
from lightning_3d.checkpoint.resharding import Slices
from lightning_3d.checkpoint.rng_state import GENERATORS
from lightning_3d.options.checkpoints import CheckpointOptions


class Sent(TorchDispatchMode):
    """Counts the bytes of all tensors that go into collectives and messages, by the operators that
    they all end in.

    Attributes:
        bytes: on this rank. types: of those tensors; objects travel as uint8, with their sizes as
            int64.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            for tensor in torch.utils._pytree.tree_leaves(args):
                if isinstance(tensor, torch.Tensor):
                    self.bytes += tensor.nbytes
                    self.types.add(tensor.dtype)
        return func(*args, **(kwargs or {}))


class Wide(LanguageModel):
    """Large enough that the headers of files do not count."""

    key_heads = 4

    def configure_model(self) -> None:
        if self.model is None:
            sizes = {
                "hidden_size": 384,
                "intermediate_size": 768,
                "num_hidden_layers": 4,
                "vocab_size": 512,
            }
            heads = {
                "num_attention_heads": 4,
                "num_key_value_heads": self.key_heads,
                "max_position_embeddings": 12,
            }
            self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


class SharedKeys(Wide):
    """Two heads of keys: four tensor-parallel ranks hold each of them twice."""

    key_heads = 2


def save_and_count(
    path: str, model: type[Wide], layout: str, precision: str, **strategy: Any
) -> tuple[int, list[str]]:
    """Bytes that this rank sends and receives during a save, and the types of the tensors."""
    trainer, rows = make_trainer(layout, 1, [], precision, **strategy)
    trainer.fit_loop.epoch_loop.max_steps = 1
    trainer.fit(model(), datamodule=rows)
    with Sent() as sent:
        dist.broadcast_object_list([None])
        alone = sent.bytes
        trainer.save_checkpoint(path)
    assert alone > 0, "what goes through collectives is seen"
    return sent.bytes, sorted(map(str, sent.types))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "strategy", "precision"),
    [
        (SharedKeys, "tp4_dp2", {"zero_stage": 1}, "32-true"),
        pytest.param(Wide, "tp2_pp2_dp2", {"zero_stage": 1}, "32-true", marks=pytest.mark.full),
        pytest.param(Wide, "cp2_dp4", {"zero_stage": 3}, "bf16-true", marks=pytest.mark.full),
        pytest.param(SharedKeys, "tp4_dp2", {"zero_stage": 2}, "bf16-true", marks=pytest.mark.full),
        pytest.param(Wide, "tp2_pp2_dp2", {}, "32-true", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_every_byte_is_written_once_and_none_is_sent(
    model: type[Wide], layout: str, strategy: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    sent = run_ranks(save_and_count, 8, str(path), model, layout, precision, **strategy)
    state = load_full_state_dict(path)
    numel = sum(tensor.numel() for tensor in state.values())
    # weights and two moments; bf16 weights, and these in float32
    wide = 4 * 3 if precision == "32-true" else 2 + 4 * 3
    files = [file.stat().st_size for file in path.iterdir()]
    assert wide * numel <= sum(files) <= 1.02 * wide * numel
    shards = [file.stat().st_size for file in path.glob("*.distcp")]
    assert len(shards) == 8 and max(shards) < 1.1 * min(shards)
    for nbytes, types in sent:
        assert set(types) <= {"torch.uint8", "torch.int64"}, "objects, no weights"
        assert nbytes < 0.05 * sum(files) / 8, "descriptions are short"


@pytest.mark.slow
def test_a_checkpoint_holds_all_of_a_run(tmp_path: Path) -> None:
    run_ranks(save_some, 2, str(tmp_path / "a.ckpt"))
    state = json.loads((tmp_path / "a.ckpt" / "trainer.json").read_text())
    expected = {
        "epoch",
        "global_step",
        "loops",
        "callbacks",
        "lr_schedulers",
        "optimizer_states",
        "hyper_parameters",
    }
    assert expected <= state.keys()
    folder = TensorFolder(tmp_path / "a.ckpt")
    names = folder.names("")
    weight = "model.model.layers.3.mlp.up_proj.weight"
    for key in (
        f"model.{weight}",
        *(f"optimizer.state.{weight}.{key}" for key in ("exp_avg", "exp_avg_sq", "master")),
    ):
        assert names[key] == (64, 32)
    assert (
        folder.dtype(f"model.{weight}") == torch.bfloat16
        and folder.dtype(f"optimizer.state.{weight}.master") == torch.float32
    )
    assert names[GENERATORS][0] == 2, "a row for each data-parallel rank"
    loaded = {f"model.{weight}": torch.zeros(64, 32, dtype=torch.bfloat16)}
    # torch's own tool reads the folder
    dcp.load(loaded, checkpoint_id=tmp_path / "a.ckpt", no_dist=True)
    assert torch.equal(loaded[f"model.{weight}"], load_full_state_dict(tmp_path / "a.ckpt")[weight])


def save_some(path: str) -> None:
    trainer, rows = make_trainer("dp2", 1, [], "bf16-true", zero_stage=1)
    trainer.fit(TiedModel(), datamodule=rows)
    trainer.save_checkpoint(path)


def bytes_read() -> int:
    """By this process so far, from the kernel's books."""
    return int(
        dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"]
    )


def test_only_the_needed_rows_are_read(tmp_path: Path) -> None:
    save(tmp_path / "a", 1, numel=2**20)
    folder = TensorFolder(tmp_path / "a")
    part = torch.zeros(2**16)
    before = bytes_read()
    folder.read_into({"model.weight": Slices((2**20,), {(2**18,): part})})
    assert part.nbytes <= bytes_read() - before < 1.1 * part.nbytes
    assert part.eq(1).all()


def test_nothing_is_missing_without_a_word(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    known = read_manifest(tmp_path / "a")
    assert known["tensor_bytes"] == 4 * 1000 + 8 * 5 and math.isclose(known["global_step"], 1)


def resident(name: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM at the most since `new_peak`."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{name}:")
    )
    return 1024 * int(line.split()[1])


def new_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


@pytest.mark.parametrize("asynchronous", [True, False], ids=["background", "at once"])
def test_a_save_needs_one_copy_of_what_it_writes_at_the_most(
    asynchronous: bool, tmp_path: Path
) -> None:
    """In the background: that copy, in memory that all saves share. At once: one block of what is
    in another order than in the file.

    In a process of its own: threads that other tests left would count.
    """
    grown, written = in_fresh_process(grow, asynchronous, tmp_path)
    assert grown < (1.15 if asynchronous else 0.2) * written


def grow(asynchronous: bool, tmp_path: Path) -> tuple[int, int]:
    """Bytes by which three saves have raised the peak of this process, and what each wrote."""
    store = CheckpointStore(CheckpointOptions(checkpoint_asynchronous=asynchronous))
    save(tmp_path / "small", 0, store, mode=SaveMode.BACKGROUND)
    store.wait()
    weights = torch.ones(16, 2**20)
    state = {f"w{index}": row for index, row in enumerate(weights)} | {
        "turned": torch.ones(2**10, 2**10).T
    }
    before = new_peak()
    for step in range(3):
        weights += 1
        assert store.save(
            tmp_path / f"{step}",
            {"global_step": step, "state_dict": state},
            PlainState(),
            None,
            {},
            SaveMode.BACKGROUND,
        )  # type: ignore[arg-type]
        store.wait()
    grown = resident("VmHWM") - before
    assert load_full_state_dict(tmp_path / "2")["w3"].eq(4).all()
    return grown, weights.nbytes


def resume_and_count(path: str, layout: str, **strategy: Any) -> tuple[int, int, int]:
    """Bytes that this rank reads of tensors when it resumes, bytes that it holds of them, and
    slices that it reads."""
    counted, slices, read_into, fill = 0, 0, TensorFolder.read_into, reading._read

    def counting(folder: TensorFolder, targets: Any) -> None:
        nonlocal counted
        before = bytes_read()
        read_into(folder, targets)
        counted += bytes_read() - before

    def count_slice(file: int, read: Any) -> None:
        nonlocal slices
        slices += 1
        fill(file, read)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorFolder, "read_into", counting)
        patch.setattr(reading, "_read", count_slice)
        trainer, rows = make_trainer(layout, 1, [], checkpoint_verify=False, **strategy)
        trainer.fit_loop.epoch_loop.max_steps = 1
        trainer.fit(Wide(), datamodule=rows, ckpt_path=path)
    shards = trainer.strategy.built.backend.optimizer_shards()
    moments = sum(
        value.nbytes
        for shard in shards
        for value in shard.values.values()
        if isinstance(value, torch.Tensor)
    )
    weights = (
        sum(p.nbytes for p in trainer.lightning_module.parameters())
        if strategy["zero_stage"] < 3
        else moments // 2
    )
    return counted, weights + moments, slices


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target", "zero_stage"),
    [
        ("tp2_pp2_dp2", "dp2", 3),
        pytest.param("tp2_pp2_dp2", "dp8", 3, marks=pytest.mark.full),
        pytest.param("tp2_pp2_dp2", "dp4", 1, marks=pytest.mark.full),
        pytest.param("dp8", "pp4_dp2", 1, marks=pytest.mark.full),
    ],
)
def test_a_rank_reads_what_it_holds(
    source: str, target: str, zero_stage: int, tmp_path: Path
) -> None:
    run_ranks(save_and_count, 8, str(tmp_path / "a.ckpt"), Wide, source, "32-true", zero_stage=1)
    found = run_ranks(
        resume_and_count,
        world_size(target),
        str(tmp_path / "a.ckpt"),
        target,
        zero_stage=zero_stage,
    )
    for counted, held, slices in found:
        assert 0.95 * held < counted < 1.05 * held + 2048 * slices
