"""Multi-token prediction: every layout trains what Transformers' own layers train on one process,
and files keep it."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from multi_token import (
    DEPTHS,
    LAYERS,
    WEIGHT,
    expected,
    in_double,
    model_group,
    module_of,
    plain_model,
    recipe,
    rows,
    train_ahead,
)
from parity import Part, Rows, assemble, differences, quiet_trainer
from ranks import run_ranks
from sweeps import by_default
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from lightning_3d import Lightning3DStrategy
from lightning_3d.app.cli.export import run as export_command
from lightning_3d.app.runs.metrics_file import read_rows
from lightning_3d.app.training.callbacks import MetricsCSV
from lightning_3d.app.training.module import CausalLM
from lightning_3d.compat import torch as torch_compat
from lightning_3d.errors import PlanError
from lightning_3d.models.multi_token import MultiTokenLM, following
from lightning_3d.models.parallel_plan import read_plan
from lightning_3d.parallel.context.following import TokensOfOthers

LIMITS = {"float64": 1e-12, "float32": 1e-6}
OF_WEIGHTS = {"float64": 1e-12, "float32": 5e-5}
"""Other micro-batches change weights of float32 by 1.4e-5 on one process: AdamW divides small
gradients by small ones."""
FLOAT32 = {"dtype": "float32"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dp1", {}),
    ("tp2_pp2", {"sequence_parallel": True, "self_check": "always"}),
    ("dp2_ep2", {}),
    ("tp2", {"sequence_parallel": False}),
    ("tp2", {"sequence_parallel": True, "recompute": "full"}),
    ("tp2", {"recompute": "selective"}),
    ("tp2", {"loss_chunks": 4}),
    ("tp2_ep2", {"sequence_parallel": True}),
    ("pp2", {"tied": True}),
    ("pp2", {"schedule": "GPipe", "recompute": "full"}),
    ("pp2", {"schedule": "ZBVZeroBubble"}),
    ("pp2", {"schedule": "DualPipeV"}),
    ("pp2_vp2", {"schedule": "Interleaved1F1B"}),
    ("pp2_vp2", {"schedule": "InterleavedZeroBubble"}),
    ("pp2", {"stages": [1, 3], "loss_chunks": 3}),
    ("pp2", {"offload_activations": True}),
    ("pp4", {}),
    ("pp2_dp2_ep2", {"self_check": "always"}),
    ("pp2_dp2", {"zero_stage": 1} | FLOAT32),
    ("pp2_dp2", {"zero_stage": 2, "zero_reduce": "micro_batch"} | FLOAT32),
    ("pp2_dp2", {"zero_stage": 3, "tied": True} | FLOAT32),
    ("dp2", {"zero_stage": 3} | FLOAT32),
    ("cp2", {"documents": True}),
    ("pp2_cp2", {"self_check": "always"}),
    ("cp2", {"cp_kind": "ulysses"}),
    ("cp2", {"tied": True, "loss_chunks": 3}),
    ("cp2", {"rope": "dynamic"}),
    ("tp2_cp2", {"rope": "dynamic", "self_check": "always"}),
    ("tp2_cp2", {"sequence_parallel": True, "recompute": "full"}),
    ("tp2_cp2", {"cp_kind": "ulysses", "documents": True}),
    ("cp2_dp2", {}),
    ("cp2_dp2_ep2", {"self_check": "always"}),
    ("pp2_cp2", {"schedule": "ZBVZeroBubble", "documents": True}),
    ("pp2_cp2", {"schedule": "DualPipeV", "cp_kind": "ulysses"}),
    ("pp2_vp2_cp2", {"schedule": "Interleaved1F1B", "rope": "dynamic"}),
    ("tp2_pp2_cp2", {"sequence_parallel": True}),
    ("cp2_dp2", {"zero_stage": 1} | FLOAT32),
    ("pp2_cp2", {"zero_stage": 3} | FLOAT32),
    ("pp2", {"schedule": "ZBVZeroBubble", "recompute": "full", "tied": True}),
    ("pp2_vp2", {"schedule": "InterleavedZeroBubble", "recompute": "full", "loss_chunks": 3}),
]
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
"""Positions for which each rank of cp computes attention for all tokens (`SplitBlocks`)."""


def group_of(*, tied: bool = False, rope: str = "default") -> dict[str, Any]:
    return model_group(tie_word_embeddings=tied, **(DYNAMIC if rope == "dynamic" else {}))


def assert_same(
    layout: str,
    *,
    dtype: str = "float64",
    tied: bool = False,
    rope: str = "default",
    documents: bool = False,
    **strategy: Any,
) -> None:
    """Compare losses, gradient norms, weights and what is logged after three steps.

    Args:
        rope: kind of the model's positions. For so few tokens, dynamic ones are the default ones,
            which the reference has.
    """
    arguments = {
        "layout": layout,
        "micro_batch_size": 1 if "pp" in layout else 2,
        "zero_stage": 0,
    } | strategy
    world = Lightning3DStrategy(layout).layout.world_size  # type: ignore[union-attr]
    group = group_of(tied=tied, rope=rope)
    found = run_ranks(
        train_ahead, world, group, recipe(dtype), documents=documents, **arguments, timeout=240
    )
    run, parts = expected(dtype, tied=tied, documents=documents)
    error, drift = differences([part for part, _ in found], run)
    assert drift == 0.0
    assert max(error.loss, error.grad_norm) < LIMITS[dtype], error
    assert error.weight < OF_WEIGHTS[dtype], error
    wanted = {
        "loss": run.losses[-1],
        "cross_entropy": parts[-1][0],
        "mtp_loss": sum(parts[-1][1:]) / DEPTHS,
    }
    for _, logged in found:  # Lightning keeps what is logged in float32
        assert logged == pytest.approx(wanted, rel=max(LIMITS[dtype], 1e-6))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "options"), by_default(CASES, *range(3), 22, 23))
def test_a_layout_trains_what_one_process_trains(layout: str, options: dict[str, Any]) -> None:
    assert_same(layout, **options)


def compiled_ahead(*args: Any, **strategy: Any) -> tuple[Part, dict[str, int]]:
    """What `train_ahead` returns of the run with compiled blocks, and the graph breaks."""
    torch._dynamo.reset()
    broken = torch_compat.graph_breaks()
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        part, _ = train_ahead(*args, compile=True, **strategy)
    return part, dict(torch_compat.graph_breaks() - broken)


COMPILED: list[tuple[str, dict[str, Any]]] = [
    ("cp2", FLOAT32),
    ("pp2_cp2", {}),
    ("tp2_pp2", {"sequence_parallel": True, "recompute": "selective"} | FLOAT32),
    ("dp2_ep2", {}),
    ("cp2", {"recompute": "full", "rope": "dynamic"}),
    ("pp2", {"schedule": "ZBVZeroBubble"} | FLOAT32),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("layout", "options"), by_default(COMPILED, 0))
def test_compiled_modules_train_what_one_process_trains(
    layout: str, options: dict[str, Any]
) -> None:
    """In float32, without a break in a graph. In float64, Transformers' experts have one: they look
    which of them get tokens."""
    arguments = {
        "layout": layout,
        "micro_batch_size": 1 if "pp" in layout else 2,
        "zero_stage": 0,
    } | options
    dtype, group = (
        arguments.pop("dtype", "float64"),
        group_of(rope=arguments.pop("rope", "default")),
    )
    world = Lightning3DStrategy(layout).layout.world_size  # type: ignore[union-attr]
    found = run_ranks(compiled_ahead, world, group, recipe(dtype), **arguments, timeout=500)
    error, drift = differences([part for part, _ in found], expected(dtype)[0])
    assert drift == 0.0
    assert max(error.loss, error.grad_norm) < LIMITS[dtype], error
    assert error.weight < OF_WEIGHTS[dtype], error
    assert dtype == "float64" or [breaks for _, breaks in found] == [{}] * world


def check_wrongly(*args: Any, **strategy: Any) -> None:
    """Train with modules that read, on each rank of cp, only the tokens that this rank has."""
    with patch.object(TokensOfOthers, "tokens_ahead", MultiTokenLM.tokens_ahead):
        train_ahead(*args, **strategy)


@pytest.mark.slow
def test_the_self_check_compares_the_modules() -> None:
    with pytest.raises(
        PlanError, match="does not reproduce the whole model: the output mtp_logits_. differs"
    ):
        run_ranks(
            check_wrongly,
            2,
            model_group(),
            recipe(),
            layout="cp2",
            micro_batch_size=2,
            zero_stage=0,
            self_check="always",
        )


def test_without_modules_nothing_changes() -> None:
    module = CausalLM(model_group(depths=None))
    with torch.device("meta"):
        module.configure_model()
    plan = read_plan(module.model)
    assert (len(module.model.model.layers), plan.ahead, plan.carried) == (LAYERS, 0, ())


def test_an_evaluation_reads_the_model_alone() -> None:
    module = CausalLM(model_group())
    module.configure_model()
    module.eval()
    batch = {key: values[:2] for key, values in rows(recipe()).items()}
    output = module.model(**batch)
    module.train()
    assert output.loss.item() == module.model(**batch).loss.item()
    assert not hasattr(output, "mtp_loss")


@pytest.mark.slow
def test_documents_are_kept_apart() -> None:
    """A packed sample has the losses of its documents alone."""
    module = CausalLM(model_group())
    module.configure_model()
    model = module.model.double()
    in_double(model, recipe())
    documents = [
        rows(recipe())["input_ids"][:1, start:stop] for start, stop in ((0, 5), (5, 7), (7, 12))
    ]
    ids = torch.cat(documents, 1)
    labels = ids.clone()
    labels[0, [5, 7]] = -100
    packed = model(
        input_ids=ids,
        labels=labels,
        position_ids=torch.cat([torch.arange(part.shape[1])[None] for part in documents], 1),
    )
    alone = [model(input_ids=part, labels=part) for part in documents]
    for name in ("loss", "mtp_loss"):
        total = sum(
            getattr(output, name).item() * (part.shape[1] - 1)
            for output, part in zip(alone, documents, strict=True)
        )
        # Transformers' loss is in float32
        assert getattr(packed, name).item() * 9 == pytest.approx(total, rel=1e-6)


@pytest.mark.slow
def test_metrics_have_both_parts_of_the_loss(tmp_path: Path) -> None:
    plan = replace(recipe("float32"), steps=1)
    trainer = quiet_trainer(
        max_epochs=1, callbacks=[MetricsCSV(tmp_path / "metrics.csv")], default_root_dir=tmp_path
    )
    trainer.fit(module_of(model_group(), plan), DataLoader(Rows(rows(plan)), plan.global_batch))
    (row,) = read_rows(tmp_path / "metrics.csv")
    loss, model, modules = (float(row[name]) for name in ("loss", "cross_entropy", "mtp_loss"))
    assert model > 0
    assert modules > 0
    assert loss == pytest.approx(model + WEIGHT * modules, rel=1e-6)


def test_values_are_shifted() -> None:
    row = torch.arange(1, 5)[None]
    assert following(row, 1, -100).tolist() == [[2, 3, 4, -100]]
    assert following(row, 9, -100).tolist() == [[-100] * 4]
    assert following(row[..., None].expand(1, 4, 2), 3, 0.0).tolist() == [
        [[4, 4], [0, 0], [0, 0], [0, 0]]
    ]


# Files


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after the first step, by two stages."""
    path = tmp_path_factory.mktemp("ahead") / "first.ckpt"
    run_ranks(
        train_ahead,
        2,
        model_group(),
        recipe(),
        layout="pp2",
        micro_batch_size=2,
        zero_stage=0,
        save=str(path),
        timeout=240,
    )
    return path


@pytest.mark.slow
def test_another_layout_resumes(checkpoint: Path) -> None:
    found = run_ranks(
        train_ahead,
        2,
        model_group(),
        recipe(),
        layout="dp2",
        micro_batch_size=2,
        zero_stage=0,
        resume=str(checkpoint),
        timeout=240,
    )
    run, _ = expected()
    weights, drift = assemble([part for part, _ in found])
    assert drift == 0.0
    assert (
        max((weights[name] - run.weights[name]).abs().max().item() for name in run.weights)
        < LIMITS["float64"]
    )
    assert found[0][0].losses == pytest.approx(run.losses[1:], rel=1e-12)


@pytest.mark.slow
def test_transformers_reads_what_is_exported(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "exported"
    assert export_command([str(checkpoint), "--output", str(folder), "--dtype", "float32"]) == 0
    assert f"with {DEPTHS} modules of multi-token prediction" in capsys.readouterr().out
    kind = type(plain_model(model_group(), recipe()).model)
    # Transformers looks for the modules where the released model has them, behind 61 blocks.
    monkeypatch.setattr(
        kind,
        "_keys_to_ignore_on_load_unexpected",
        [rf"model\.layers\.{LAYERS + depth}\..*" for depth in range(DEPTHS)],
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.num_mtp_layers == DEPTHS
    ahead = MtpModel.from_pretrained(model)
    loaded = CausalLM(model_group() | {"pretrained": str(folder)})
    loaded.configure_model()
    ours = dict(loaded.model.named_parameters())
    for depth, layer in enumerate(ahead.layers):
        theirs = dict(layer.named_parameters())
        for name, value in theirs.items():
            inner = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
            assert torch.equal(value, ours[f"model.layers.{LAYERS + depth}.{inner}"]), name
        assert len(theirs) == sum(
            name.startswith(f"model.layers.{LAYERS + depth}.") for name in ours
        )
