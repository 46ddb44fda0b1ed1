"""The cells of a self-test: what each trains, in which layout and precision, and what it needs.
Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_3d.errors import ConfigError, did_you_mean, plural
from lightning_3d.layout.layout import Layout

FP32, BF16 = "fp32", "bf16"
FIT, CHECKPOINT, KERNEL = "fit", "checkpoint", "kernel"
SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
TWO_STAGES_PER_RANK = SCHEDULES[2:]
ROWS = 8
"""Rows of a global batch."""

TOLERANCES = {FP32: (1e-5, 1e-4, 1e-3), BF16: (1e-2, 5e-2, 2e-2)}
"""Largest relative differences of loss, gradient norm and weights. The difference of a parameter's
shard is the norm of the difference over the norm of the shard. Adam divides by gradients, so
weights differ more than gradients do."""

ROUTED_TOLERANCES = (1e-2, 5e-2, 1e-1)
"""The same for experts in bf16: where two experts are almost equally good for a token, rounding
decides which of them gets it."""

FP8_TOLERANCES = (5e-2, 2e-1, 5e-2)
"""The same for float8 products, which are compared with the loop in bf16."""


@dataclass(frozen=True)
class Cell:
    """One comparison.

    Attributes:
        group: word for `--only`.
        technique: name in the table.
        layout: name of the layout; for a checkpoint, the layout that saves.
        precision: "fp32" or "bf16".
        strategy: further arguments of `Lightning3DStrategy`.
        model: "llama", "tied" (tied embeddings) or "mixtral".
        kind: "fit", "checkpoint" (save and resume) or "kernel" (one attention, without training).
        resume: layout that resumes the checkpoint.
        capability: least compute capability of the GPU; None: also runs on CPUs.
        seconds: time limit.
    """

    group: str
    technique: str
    layout: str
    precision: str = FP32
    strategy: Mapping[str, Any] = field(default_factory=dict)
    model: str = "llama"
    kind: str = FIT
    resume: str | None = None
    capability: tuple[int, int] | None = None
    seconds: float = 60.0

    @property
    def name(self) -> str:
        return f"{self.technique}, {self.shown_layout}, {self.precision}"

    @property
    def shown_layout(self) -> str:
        return f"{self.layout}>{self.resume}" if self.resume else self.layout

    @property
    def ranks(self) -> int:
        return max(Layout.parse(name).world_size for name in (self.layout, self.resume) if name)

    @property
    def layers(self) -> int:
        """Blocks of the model: at least one for each pipeline stage."""
        per_rank = 2 if self.strategy.get("schedule") in TWO_STAGES_PER_RANK else 1
        return max(4, per_rank * Layout.parse(self.layout).pp)

    @property
    def tolerances(self) -> tuple[float, float, float]:
        if self.strategy.get("fp8"):
            return FP8_TOLERANCES
        return (
            ROUTED_TOLERANCES
            if self.model == "mixtral" and self.precision == BF16
            else TOLERANCES[self.precision]
        )

    def missing(
        self, ranks: int, capability: tuple[int, int] | None, absent: Mapping[str, str]
    ) -> str | None:
        """Say what the hardware or the installation lacks for this cell; None if nothing.

        Args:
            capability: compute capability of the GPUs; None on CPU ranks.
            absent: what the installation lacks, by group.
        """
        if self.ranks > ranks:
            return f"needs {plural(self.ranks, 'rank')}"
        if self.capability and (capability is None or capability < self.capability):
            return f"needs a GPU with compute capability {self.capability[0]}.{self.capability[1]}"
        parts = [self.group]
        parts += ["zero"] if self.strategy.get("zero_stage") else []
        parts += ["triton"] if self.group == "compile" and capability is not None else []
        return next((absent[part] for part in parts if part in absent), None)


def micro_batch(layout: str) -> int:
    """Choose the rows of a micro-batch so that there are twice as many micro-batches as pipeline
    ranks."""
    size = Layout.parse(layout)
    return max(1, ROWS // size.dp // (2 * size.pp))


def all_cells(ranks: int) -> list[Cell]:
    """List the cells, the most important first: all in fp32, and then in bf16. The last ones are
    slow to compile."""
    fp32 = _cells(FP32, ranks)
    return [*fp32, *_cells(BF16, ranks), *_precision_cells(), *_compiled(FP32), *_compiled(BF16)]


def _cells(precision: str, ranks: int) -> list[Cell]:
    def cell(group: str, technique: str, layout: str, **more: Any) -> Cell:
        fields = {key: more.pop(key) for key in ("model", "kind", "resume") if key in more}
        return Cell(group, technique, layout, precision, more, **fields)

    combined = "combined"
    return [
        cell("dp", "data parallel", "dp2"),
        cell("tp", "tensor parallel", "tp2"),
        cell("tp", "sequence parallel", "tp2", sequence_parallel=True),
        cell("vocabulary", "vocabulary-parallel loss", "tp4"),
        cell("pp", "pipeline 1F1B", "pp2", schedule="1F1B"),
        cell("zero", "ZeRO-1", "dp2", zero_stage=1),
        cell("zero", "ZeRO-2", "dp2", zero_stage=2),
        cell("zero", "ZeRO-3", "dp2", zero_stage=3),
        cell("cp", "ring attention", "cp2", cp_kind="ring"),
        cell("cp", "Ulysses", "cp2", cp_kind="ulysses"),
        cell("ep", "experts (Mixtral)", "dp2_ep2", model="mixtral"),
        cell(combined, "tp, pp and dp", "tp2_pp2_dp2", zero_stage=1),
        cell(combined, "tp, dp and ZeRO-3", "tp2_dp2", zero_stage=3),
        cell(combined, "pp, dp and ZeRO-2", "pp2_dp2", zero_stage=2),
        cell(
            "checkpoint", "checkpoint, resumed", "dp2", kind=CHECKPOINT, resume="tp2", zero_stage=1
        ),
        cell("tied", "tied weights", "pp2", model="tied"),
        *(
            cell("pp", f"pipeline {name}", "pp2", schedule=name)
            for name in SCHEDULES
            if name != "1F1B"
        ),
        cell("recompute", "recompute", "dp2", recompute="full"),
        cell("offload", "activations offloaded", "dp2", offload_activations=True),
        cell("zero", "ZeRO-2, reduce per step", "dp2", zero_stage=2, zero_reduce="step"),
        cell("zero", "ZeRO-2, reduce-scatter", "dp2", zero_stage=2, zero_reduce_scatter=True),
        cell("zero", "ZeRO-3, gather per step", "dp2", zero_stage=3, zero_gather="step"),
        cell("offload", "optimizer offloaded", "dp2", zero_stage=1, zero_offload="optimizer"),
        cell("offload", "parameters offloaded", "dp2", zero_stage=3, zero_offload="parameters"),
        *(
            [cell("pp", f"pipeline {name}", "pp4", schedule=name) for name in SCHEDULES]
            if ranks >= 4
            else []
        ),
    ]


def _precision_cells() -> list[Cell]:
    """Cells that exist in one precision on one kind of hardware."""
    return [
        Cell("kernel", "flash attention", "dp1", BF16, kind=KERNEL, capability=(8, 0)),
        Cell("fp8", "float8 products", "dp2", BF16, {"fp8": True}, capability=(8, 9)),
    ]


def _compiled(precision: str) -> list[Cell]:
    return [Cell("compile", "torch.compile", "dp2", precision, {"compile": True}, seconds=120.0)]


def chosen(cells: Sequence[Cell], only: str | None) -> list[Cell]:
    """Keep the cells of the groups in a comma-separated list.

    Raises:
        ConfigError: there is no such group.
    """
    if only is None:
        return list(cells)
    groups = list(dict.fromkeys(cell.group for cell in cells))
    wanted = [word.strip() for word in only.split(",") if word.strip()]
    for word in wanted or [only]:
        if word not in groups:
            raise ConfigError(
                f"--only must name groups of cells ({', '.join(groups)}); got"
                f' "{word}".{did_you_mean(word, groups)}'
            )
    return [cell for cell in cells if cell.group in wanted]
