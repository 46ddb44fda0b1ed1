"""A dry run of a rank against a real run of the same job on 8 CPU ranks: memory by category,
collectives, parameters."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import models
import pytest
import torch
import torch.distributed as dist
from command_line import run_commands
from memory import LiveBytes
from parity import SCHEDULES, Cell, Data, Module, Rows, quiet_trainer, strategy_arguments
from ranks import run_ranks
from reference import Recipe, data
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from lightning_3d.app.cli.dryrun import read_options
from lightning_3d.app.dryrun.meter import CATEGORIES
from lightning_3d.app.dryrun.timeline import as_svg, as_text, idle, place
from lightning_3d.layout.pipeline_orders import training_order
from lightning_3d.parallel import host_channel

STEP = 4  # of a real run, after those in which ranks compare their data
TIMES = 3  # that memory is measured, from that step on

LAYERS = 12


class Deep(Cell):
    """A cell with several layers on each rank, of which hidden states between stages are a small
    part."""

    @property
    def layers(self) -> int:
        return LAYERS

    @property
    def recipe(self) -> Recipe:
        return replace(super().recipe, steps=STEP + TIMES)


class Averaged(Deep):
    """A cell that keeps an average of its weights: in float32 a third of what the optimizer
    keeps."""


@dataclass(frozen=True)
class Objective(Deep):
    """A cell whose step calls a second, frozen model: a reference of the model's own size, or a
    wider teacher with fewer layers."""

    objective: str = "dpo"
    attention: str = "sdpa"

    @property
    def layers(self) -> int:
        return 6

    @property
    def module(self) -> pl.LightningModule:
        from lightning_3d.app.training.objective import make_module

        fields = {
            "model_type": "llama",
            **models.COMMON,
            "vocab_size": 67,
            "num_key_value_heads": 2,
            "num_hidden_layers": self.layers,
        }
        teacher = {**fields, "hidden_size": 2 * fields["hidden_size"], "num_hidden_layers": 3}
        optimizer = {
            "name": "adamw",
            "lr": 3e-4,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.1,
        }
        model = {"config": fields, "attn_implementation": self.attention}
        return make_module(
            {"model": model, "optimizer": optimizer, "objective": {"name": self.objective}}, teacher
        )


CELLS = {
    "few ranks": Averaged("llama", pp=2, dp=2, zero=3),
    "zero 0": Deep("llama", tp=2, pp=2, dp=2, zero=0),
    "zero 3": Deep("llama", tp=2, pp=2, dp=2, zero=3),
    "interleaved": Deep("llama", tp=2, pp=2, dp=2, zero=1, schedule="Interleaved1F1B"),
    "ep": Deep("mixtral", ep=2, tp=2, dp=4, zero=1),
    "cp": Deep("llama", cp=2, tp=2, dp=2, zero=1),
    "dpo": Objective("llama", pp=2),
    "distillation": Objective("llama", tp=2, pp=2, objective="distillation"),
}


class Long(Deep):
    """A cell whose step has four micro-batches for each pipeline rank: a rank that kept every
    message would hold far too much."""

    @property
    def micro_batch(self) -> int:
        return self.recipe.global_batch // self.dp // (4 * self.pp)


MORE = {
    "zero 1": Deep("llama", tp=2, pp=2, dp=2, zero=1),
    "zero 2": Deep("llama", tp=2, pp=2, dp=2, zero=2),
    "zbv": Deep("llama", pp=4, dp=2, zero=0, schedule="ZBVZeroBubble"),
    "gpipe": Deep("gemma3", tp=2, pp=4, zero=1, schedule="GPipe"),
    "micro-batch": Deep("llama", tp=2, dp=4, zero=2),
    "gathered": Deep("llama", dp=8, zero=3),
    "plain": Deep("plain", tp=2, pp=2, dp=2, zero=1),
    "scattered": Deep("llama", tp=2, pp=2, dp=2, zero=2, options=(("zero_reduce_scatter", True),)),
    "offloaded": Deep("llama", dp=4, tp=2, zero=1, options=(("zero_offload", "optimizer"),)),
    "shard groups": Deep("llama", dp=4, tp=2, zero=3, options=(("zero_shard_size", 2),)),
    "shard groups scattered": Deep(
        "llama", dp=4, pp=2, zero=1, options=(("zero_reduce_scatter", True), ("zero_shard_size", 2))
    ),
    "shard groups of experts": Deep(
        "qwen3_moe", ep=2, tp=2, dp=4, zero=3, options=(("zero_shard_size", 2),)
    ),
    "overlapped gather": Deep(
        "llama", tp=2, dp=2, zero=1, options=(("zero_overlap_gather", True),)
    ),
    "averaged": Averaged("llama", dp=2, zero=2),
    "ep pp": Deep("qwen3_moe", ep=2, pp=2, dp=4, zero=2),
    "dpo zero 3": Objective("llama", pp=2, dp=2, zero=3),
    "dpo zbv": Objective("llama", pp=2, schedule="ZBVZeroBubble"),
    "distillation zero 2": Objective("llama", tp=2, dp=2, zero=2, objective="distillation"),
    "distillation cp": Objective("llama", cp=2, objective="distillation"),
}


@dataclass
class Seen:
    """What one real rank did in a step.

    Attributes:
        peak: bytes at the most, by a count of its own. by_category: of the meter. kept: held
            between steps, by looking at modules.
    """

    peak: int = 0
    by_category: Counter[str] = field(default_factory=Counter)
    collectives: Counter[tuple[str, tuple[int, ...], int]] = field(default_factory=Counter)
    parameters: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    flops: int = 0


class Operators(TorchDispatchMode):
    """Counts what operators of `torch.distributed` send: (name, ranks, bytes that this rank puts
    in)."""

    places = {
        "_allgather_base_": (1, 2),
        "_reduce_scatter_base_": (1, 2),
        "alltoall_base_": (1, 2),
        "allgather_": (1, 2),
    }

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, tuple[int, ...], int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace == "c10d":
            value, group = self.places.get(func._opname, (0, 1))
            tensors = args[value] if isinstance(args[value], list) else [args[value]]
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[group]))
            self.seen[
                func._opname, tuple(sorted(ranks)), sum(tensor.nbytes for tensor in tensors)
            ] += 1
        return func(*args, **(kwargs or {}))


NAMES = {  # of functions, by operators
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "_allgather_base_": "all_gather_into_tensor",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "alltoall_base_": "all_to_all_single",
    "allgather_": "all_gather",
    "send": "send",
    "recv_": "recv",
}


class Watch(pl.Callback):
    """Measures one batch of a real fit."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.open: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEP:
            self.open = self.watching(module)
            self.open.__enter__()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None

    @contextmanager
    def watching(self, module: Any) -> Iterator[None]:
        operators = Operators()
        with operators:
            yield
        self.seen.collectives = operators.seen
        self.seen.parameters = sum(parameter.numel() for parameter in module.parameters())


class Balance(pl.Callback):
    """Has routers choose every expert equally often, which a dry run takes them to do."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for layer in module.modules():
            if any(kind.__name__.endswith("TopKRouter") for kind in type(layer).__mro__):
                layer.register_forward_hook(self.deal)

    @staticmethod
    def deal(router: Any, args: Any, output: tuple[torch.Tensor, ...]) -> None:
        indices = output[-1].data
        indices.copy_((torch.arange(indices.numel()) % router.num_experts).view_as(indices))


def module_of(cell: Cell) -> pl.LightningModule:
    return cell.module if isinstance(cell, Objective) else Module(cell.recipe)


def data_of(cell: Cell) -> models.Batch:
    """All rows of the run; of pairs with those of the rejected answers, which are the same in
    another order."""
    rows = data(cell.recipe)
    if isinstance(cell, Objective) and cell.objective == "dpo":
        rows |= {
            "rejected_ids": rows["input_ids"].flip(1),
            "rejected_labels": rows["labels"].flip(1),
        }
    return rows


def decay_of(cell: Cell) -> float | None:
    return 0.9 if isinstance(cell, Averaged) else None


def real_rank(cell: Cell) -> Seen:
    """Train some steps as any user would, and watch one."""
    from lightning_3d import ExponentialAverage
    from lightning_3d.app.dryrun.meter import Meter
    from lightning_3d.app.dryrun.rank_report import Measured, RankReport
    from lightning_3d.strategy import Lightning3DStrategy

    strategy = Lightning3DStrategy(**strategy_arguments(cell), seed=cell.recipe.seed)
    seen = Seen()
    meter, live = Meter(), LiveBytes()
    report = RankReport(dist.get_rank(), {})
    measured = Measured(meter, report, STEP)
    callback = measured.follow(strategy)

    usages, peaks = [], []

    class Repeat(pl.Callback):
        def on_train_batch_start(
            self, trainer: Any, module: Any, batch: Any, batch_idx: int
        ) -> None:
            live.reset()

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == measured.step:
                usages.append(report.usage)
                peaks.append(live.peak)
                measured.step += 1

    averages = [ExponentialAverage(decay)] if (decay := decay_of(cell)) is not None else []
    callbacks = [Balance(), Watch(seen), callback, Repeat(), *averages]
    steps = cell.recipe.steps
    trainer = quiet_trainer(
        strategy=strategy,
        devices=cell.world_size,
        max_steps=steps,
        callbacks=callbacks,
        max_epochs=steps,
    )
    rows = Rows(data_of(cell))
    # A dry run knows only the messages that go through torch. Through shared memory, ranks of one
    # host would send others, and keep fewer.
    with patch.object(host_channel, "connect", return_value=None), live, meter:
        trainer.fit(module_of(cell), datamodule=Data(rows, cell.recipe.global_batch // cell.dp))
    # gloo's threads let go of what was sent now or a moment later
    least = min(usages, key=lambda usage: usage.peak_bytes)
    seen.peak, seen.by_category, seen.kept, seen.flops = (
        min(peaks),
        least.peak,
        report.kept,
        least.flops,
    )
    return seen


def dry_rank(cell: Cell, rank: int, **options: Any) -> Any:
    from lightning_3d.app.dryrun.run import DryJob, dry_run
    from lightning_3d.layout.resolve import resolve_layout

    layout, schedule = resolve_layout(cell.layout, cell.schedule, cell.vp)
    rows = cell.recipe.global_batch // cell.dp
    batch = {key: value[:rows] for key, value in data_of(cell).items()}
    job = DryJob(
        module=lambda: module_of(cell),
        strategy=lambda kind: kind(**strategy_arguments(cell)),
        batch=lambda micro_batches: {key: value.clone() for key, value in batch.items()},
        layout=layout,
        schedule=schedule,
        micro_batches=rows // cell.micro_batch,
        average_decay=decay_of(cell),
        **options,
    )
    return dry_run(job, rank)


def dry_ranks(cell: Cell, ranks: list[int], **options: Any) -> list[Any]:
    return [dry_rank(cell, rank, **options) for rank in ranks]


def run_dry(cell: Cell, ranks: list[int], **options: Any) -> list[Any]:
    """In a process without process groups."""
    [reports] = run_ranks(dry_ranks, 1, cell, ranks, timeout=300, process_group=False, **options)
    return reports


def called(report: Any) -> Counter[tuple[str, tuple[int, ...], int]]:
    return Counter(
        {
            (call.name, call.ranks, call.bytes): count
            for call, count in report.usage.collectives.items()
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [case if case == "few ranks" else pytest.param(case, marks=pytest.mark.full) for case in CELLS],
)
def test_is_what_a_real_run_does(case: str) -> None:
    assert_same(CELLS[case])


@pytest.mark.full
@pytest.mark.parametrize("case", MORE)
def test_is_what_a_real_run_does_elsewhere(case: str) -> None:
    assert_same(MORE[case])


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_are_held_as_long_as_in_a_real_run(schedule: str) -> None:
    assert_same(Long("llama", pp=4, schedule=schedule), [0, 1, 2, 3])


def assert_same(cell: Cell, ranks: Sequence[int] = ()) -> None:
    """On some ranks, else the first and the last: every collective; operations; memory within 2 %
    in every category and together."""
    real = run_ranks(real_rank, cell.world_size, cell, timeout=400)
    ranks = list(ranks or (0, cell.world_size - 1))
    # the whole data set, which a real rank holds
    rows = sum(tensor.nbytes for tensor in data_of(cell).values())
    for rank, report in zip(ranks, run_dry(cell, ranks), strict=True):
        seen, peak = real[rank], report.usage.peak
        seen.peak -= rows
        seen.by_category["other"] -= rows
        wanted = Counter(
            {(NAMES[name], *where): count for (name, *where), count in seen.collectives.items()}
        )
        print(
            f"rank {rank}\n  real {dict(sorted(seen.by_category.items()))}\n  dry "
            f" {dict(sorted(peak.items()))}"
        )
        print("  only real", wanted - called(report), "\n  only dry", called(report) - wanted)
        assert called(report) == wanted
        assert report.parameters == seen.parameters
        assert report.usage.flops == seen.flops
        for category in CATEGORIES:
            assert (
                abs(peak[category] - seen.by_category[category])
                <= 0.02 * seen.by_category[category]
            ), category
        assert abs(report.usage.peak_bytes - seen.peak) <= 0.02 * seen.peak


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        "1F1B",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("GPipe", "Interleaved1F1B")),
    ],
)
def test_some_micro_batches_tell_of_all(schedule: str) -> None:
    cell = Many("llama", tp=2, pp=2, schedule=schedule)
    [some] = run_dry(cell, [0])
    [whole] = run_dry(cell, [0], whole=True)
    assert some.micro_batches < whole.micro_batches == Many.count
    assert called(some) == called(whole)
    assert some.usage.flops == whole.usage.flops
    for category, size in whole.usage.peak.items():
        assert some.usage.peak[category] == pytest.approx(size, rel=0.005, abs=256), category


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", "distillation"])
def test_every_call_of_both_models_is_counted(objective: str) -> None:
    """Operations are those that torch counts in one process without this package; its counter knows
    no fused attention of CPUs."""
    cell = Objective("llama", pp=2, objective=objective, attention="eager")
    module: Any = cell.module
    module.configure_model()
    module.log = lambda *args, **kwargs: None
    rows = {key: value[: cell.recipe.global_batch] for key, value in data_of(cell).items()}
    with FlopCounterMode(display=False) as counter:
        module.training_step(rows, 0).backward()
    reports = run_dry(cell, [0, 1])
    assert sum(report.usage.flops for report in reports) == counter.get_total_flops()
    model, second = (
        sum(parameter.numel() for parameter in part.parameters()) for part in module.children()
    )
    assert [(report.whole, report.second) for report in reports] == [(model, second)] * 2
    first, last = (report.parameters for report in reports)
    half = sum(
        parameter.numel()
        for parameter in [
            module.model.model.embed_tokens.weight,
            *module.model.model.layers[:3].parameters(),
        ]
    )
    assert (first, last) == (half, model - half + second)
    assert [report.second_here for report in reports] == [0, second]


class Many(Cell):
    """A cell whose step has many micro-batches."""

    count = 16

    @property
    def micro_batch(self) -> int:
        return self.recipe.global_batch // self.dp // self.count


LINES = {
    "help": ["dryrun", "--help"],
    "layout": ["dryrun", "parallelism=tp3"],
    "rank": ["dryrun", "rank=8"],
    "word": ["dryrun", "rank=first"],
    "option": ["dryrun", "--josn", "x"],
    "folder": ["dryrun", "--json", "nowhere/x.json"],
    "no file": ["dryrun", "--json=."],
    "unwritable": ["dryrun", "--timeline", "/proc/x.svg"],
    "number": ["dryrun", "precision=64"],
    "no teacher": ["dryrun", "recipe=llama_tiny_distill_2xcpu"],
    "batch": ["dryrun", "model=llama3_70b", "cluster=h100_32x8", "parallelism=tp8_pp4_dp8"],
    "tiny": [
        "dryrun",
        "--json",
        "dry.json",
        "--timeline=dry.svg",
        "data=tokens",
        "data.sequence_length=128",
    ],
}


def test_a_rank_that_is_named_twice_is_run_once() -> None:
    assert read_options(["rank=2,0,2"]).ranks == (2, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_command_lines() -> None:
    *refused, _ = LINES
    results = dict(zip(refused, run_commands([LINES[name] for name in refused]), strict=True))
    assert results["help"].code == 0 and "--timeline FILE" in results["help"].output
    refusals = {
        "layout": "Tensor parallelism assigns",
        "rank": "rank=8 does not exist: tp2_pp2_dp2 has 8 ranks, 0 to 7.",
        "word": "rank=first must be a rank or a comma-separated list of ranks",
        "option": 'lightning-3d dryrun has no option --josn. Did you mean "--json"?',
        "folder": "there is no folder",
        "no file": "--json . is a folder",
        "unwritable": "--timeline /proc/x.svg cannot be written",
        "number": "must be the name of one of its configurations",
        "no teacher": "This run needs a teacher. Set objective.teacher=FOLDER.",
        "batch": "needs at least as many micro-batches as stages",
    }
    for name, words in refusals.items():
        result = results[name]
        assert (result.code, result.torch, result.left) == (2, False, []), result.output
        assert result.output.startswith("lightning_3d: ") and words in result.output
        assert result.output.count("\n") == 1
    [tiny] = run_commands([LINES["tiny"]], warm=True)
    assert tiny.code == 0, tiny.output
    assert tiny.left == ["dry.json", "dry.svg"], "nothing else is written"
    assert "The model has 3,033,856 parameters." in tiny.output
    assert (
        "Timeline of a step" in tiny.output
        and "parameters" in tiny.output
        and "all_reduce" in tiny.output
    )


@pytest.mark.full
def test_command_lines_with_a_second_model(tmp_path: Path) -> None:
    """Parameters are those of `conf/model/llama_tiny.yaml` and of the teacher's folder, whose
    weights are not there."""
    fields = {
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    LlamaConfig(**fields, tie_word_embeddings=True).save_pretrained(tmp_path)
    short = ["data.global_batch_size=8", "data.sequence_length=64", "--json", "dry.json"]
    teacher = [f"objective.teacher={tmp_path}", "parallelism.zero_stage=3"]
    lines = [
        ["dryrun", "recipe=llama_tiny_dpo_2xcpu", *short],
        ["dryrun", "recipe=llama_tiny_distill_2xcpu", *teacher, *short],
    ]
    pairs, distilled = run_commands(lines, warm=True)
    assert (pairs.code, distilled.code) == (0, 0), pairs.output + distilled.output
    assert (
        "The model has 3,033,856 parameters. The frozen reference has 3,033,856. It is on every"
        " rank of the last stage" in pairs.output
    )
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert (
        f"The frozen teacher has {257 * 32 + 2 * layer + 32:,}. It is on every rank, and ZeRO-3"
        " shards it" in distilled.output
    )


def test_idle_time_is_that_of_the_published_formulas() -> None:
    for name, stages, micro_batches, wanted in (
        ("1F1B", 4, 12, 3 / 15),
        ("GPipe", 4, 8, 3 / 11),
        ("1F1B", 1, 4, 0.0),
    ):
        seconds = {
            (letter, stage): {"F": 1.0, "B": 2.0}[letter]
            for letter in "FB"
            for stage in range(stages)
        }
        bars = place(training_order(name, stages, 1, micro_batches), seconds)
        assert idle(bars) == pytest.approx(wanted)
        assert len(as_text(bars).splitlines()) == stages
        assert as_svg(bars, "a < b").count("<title>") == 2 * stages * micro_batches


def dry_operations(*words: str) -> tuple[int, int]:
    """Operations in a step of rank 0, and its parameters."""
    from lightning_3d.app.cli.dryrun import job_of
    from lightning_3d.app.dryrun.run import dry_run
    from lightning_3d.app.runs.check import check_shapes

    config, plan = check_shapes(words)
    report = dry_run(job_of(config, plan), 0)
    return report.usage.flops, report.parameters


@pytest.mark.slow
def test_a_model_whose_plan_is_derived_runs_dry_on_shards() -> None:
    """GPT-2's attention reads a size of its own, which is smaller on a rank. Two ranks share all
    matrix products of a stage."""
    words = (
        "model=gpt2_tiny",
        "cluster=local_cpu",
        "parallelism.schedule=ZBVZeroBubble",
        "data.global_batch_size=8",
    )
    words += (
        "data.sequence_length=64",
        "parallelism.micro_batch_size=2",
        "force=true",
        "trainer.dry=true",
    )
    (whole, of_whole), (shared, of_shard) = (
        run_ranks(
            dry_operations, 1, *words, f"parallelism={layout}", process_group=False, timeout=300
        )[0]
        for layout in ("pp2", "tp2_pp2")
    )
    assert shared == pytest.approx(whole / 2, rel=0.02)
    assert 0.5 < of_shard / of_whole < 0.6
