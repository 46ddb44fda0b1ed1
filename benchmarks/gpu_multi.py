"""Llama 3 8B on 8 GPUs of one node in the layouts of torchtitan's published tables: tokens/s per
GPU, MFU and peak memory.

    python benchmarks/gpu_multi.py --output benchmarks/gpu_multi.md
    python benchmarks/gpu_multi.py --only "dp8 compile"
    python benchmarks/gpu_multi.py --smoke

Next to each measurement stands the figure that torchtitan published, with its source. Its GPUs were
"H100-96GB HBM2e 500W", so a ratio on other GPUs is no comparison of software. Its "selective"
recomputation keeps the results of some operators; ours keeps the matrix products of attention.
--smoke trains a tiny model on 8 CPU ranks (or the GPUs there are) to show that the benchmark works.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from gpu_single import MODEL, PEAK_FLOPS, TINY
from gpu_single_worker import CLIP, Settings, Watch, adamw

from lightning_3d.app.config.machine import visible_gpus
from lightning_3d.layout.layout import Layout
from lightning_3d.models.families import read_spec
from lightning_3d.ranks.supervisor import launch

SOURCE = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
COMPILED: dict[str, Any] = {"zero_stage": 3, "compile": True}
LONG: dict[str, Any] = {"zero_stage": 3, "compile": True, "fp8": True, "recompute": "full"}


@dataclass(frozen=True)
class Published:
    """A row of torchtitan's tables, all with FSDP2 on 8 GPUs.

    Attributes:
        name: name of the row.
        table: table of the source.
        layout: name of our layout.
        sequence: tokens of a row of the batch (table 1 does not print it; 8192 is torchtitan's
            default).
        rows: rows of a data-parallel rank in an optimizer step.
        speed: tokens/s per GPU.
        memory: peak memory in GiB, the largest of all ranks.
        options: arguments of our strategy.
    """

    name: str
    table: int
    layout: str
    sequence: int
    rows: int
    speed: float
    memory: float
    options: dict[str, Any] = field(default_factory=dict)


TABLES = (
    Published("dp8", 1, "dp8", 8192, 2, 5762, 82.4, {"zero_stage": 3, "recompute": "selective"}),
    Published("dp8 compile", 1, "dp8", 8192, 2, 6667, 77.0, COMPILED | {"recompute": "selective"}),
    Published(
        "dp8 compile fp8",
        1,
        "dp8",
        8192,
        2,
        8532,
        76.8,
        COMPILED | {"fp8": True, "recompute": "selective"},
    ),
    Published("dp8 32k", 2, "dp8", 32768, 1, 3890, 83.9, LONG),
    Published("dp4_cp2 64k", 2, "dp4_cp2", 65536, 1, 2540, 84.2, LONG),
    Published("dp2_cp4 128k", 2, "dp2_cp4", 131072, 1, 1071, 84.0, LONG),
    Published("cp8 256k", 2, "cp8", 262144, 1, 548, 84.5, LONG),
)


def train_rank(row: Published, settings: Settings, folder: str) -> None:
    """Train one rank, and write the seconds of its steps, its peak memory and its device."""
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_3d.strategy import Lightning3DStrategy

    layout, watch = Layout.parse(row.layout), Watch(settings)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = None

        def configure_model(self) -> None:
            if self.model is None:
                from transformers import LlamaConfig, LlamaForCausalLM

                fields = {
                    key: value for key, value in settings.config.items() if key != "model_type"
                }
                self.model = LlamaForCausalLM(
                    LlamaConfig(**fields, use_cache=False, attn_implementation="sdpa")
                )

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.model(input_ids=batch[0], labels=batch[0]).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.parameters(), settings)

    class Steps(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            watch.step_ended(trainer.strategy.last_step.loss)

    trainer = pl.Trainer(
        accelerator="gpu" if settings.device == "cuda" else "cpu",
        devices=layout.world_size,
        strategy=Lightning3DStrategy(layout, micro_batch_size=settings.micro_batch, **row.options),
        precision="bf16-true",
        max_epochs=1,
        gradient_clip_val=CLIP,
        callbacks=[Steps()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    count = (settings.warmup + settings.steps) * settings.micro_batch * layout.dp
    tokens = torch.randint(
        settings.config["vocab_size"],
        (count, settings.sequence),
        generator=torch.Generator().manual_seed(1),
    )
    trainer.fit(Module(), DataLoader(TensorDataset(tokens), batch_size=settings.micro_batch))
    name = torch.cuda.get_device_name() if settings.device == "cuda" else "CPU"
    found = watch.result() | {"device": name}
    (Path(folder) / f"rank_{trainer.global_rank}.json").write_text(json.dumps(found))


def measure(row: Published, settings: Settings) -> dict[str, Any]:
    """Start the ranks of a row. `failed` says why there are no numbers."""
    ranks = Layout.parse(row.layout).world_size
    with tempfile.TemporaryDirectory() as folder:
        cpu = settings.device == "cpu"
        outcome = launch(
            train_rank,
            (row, settings, folder),
            ranks,
            logs=Path(folder) / "logs",
            fork=False,
            threads=1 if cpu else None,
        )
        if outcome.exit_code:
            text = (outcome.message or f"exit code {outcome.exit_code}").strip()
            print(text, file=sys.stderr, flush=True)
            return {"failed": text.splitlines()[-1]}
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank_*.json"))]
    peaks = [one["peak"] for one in found if one["peak"] is not None]
    return {
        "seconds": median(found[0]["seconds"]),
        "peak": max(peaks, default=None),
        "device": found[0]["device"],
    }


def line(row: Published, settings: Settings, found: dict[str, Any]) -> str:
    """Return a line of the table."""
    published = f"{row.speed:,.0f} | {row.memory:.1f} | table {row.table}"
    if "failed" in found:
        return f"| {row.name} | {found['failed'].replace('|', '/')} | | | {published} |"
    layout = Layout.parse(row.layout)
    speed = (
        settings.sequence * settings.micro_batch * layout.dp / found["seconds"] / layout.world_size
    )
    peak_flops = PEAK_FLOPS.get(found["device"])
    flops = read_spec(settings.config).flops_per_token(settings.sequence)
    mfu = f"{speed * flops / peak_flops:.1%}" if peak_flops else "unknown"
    memory = f"{found['peak'] / 2**30:.1f}" if found["peak"] is not None else "unknown"
    return f"| {row.name} | {speed:,.0f} | {mfu} | {memory} | {published} |"


def smoke(row: Published) -> Published:
    """Shorten a row: no float8 and no compilation, which CPUs and tiny models lack or are slow
    in."""
    options = {key: value for key, value in row.options.items() if key not in ("fp8", "compile")}
    return replace(row, sequence=64, options=options)


def chosen_rows(only: str | None, small: bool) -> list[Published]:
    """Choose the rows to measure.

    Raises:
        SystemExit: there is no such row.
    """
    names = [row.name for row in TABLES]
    if only is not None and only not in names:
        raise SystemExit(f'--only must be one of {", ".join(names)}; got "{only}".')
    rows = [row for row in TABLES if only in (None, row.name)]
    return [smoke(row) for row in rows] if small else rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a tiny model, on CPU ranks where there are fewer than 8 GPUs",
    )
    parser.add_argument(
        "--only", metavar="ROW", help=f"one of {', '.join(row.name for row in TABLES)}"
    )
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--output", type=Path, help="Markdown file for the table")
    options = parser.parse_args()
    rows, there = chosen_rows(options.only, options.smoke), visible_gpus()
    if there < 8 and not options.smoke:
        raise SystemExit(
            f"gpu_multi needs 8 GPUs on this machine; it has {there}. --smoke shows on CPU ranks"
            " that it works."
        )
    config = yaml.safe_load(MODEL.read_text())["config"] | (
        {**TINY, "num_hidden_layers": 2} if options.smoke else {}
    )
    lines = [f"Published: torchtitan, {SOURCE}, 8 x H100-96GB HBM2e 500W.", ""]
    lines += [
        "| layout | tokens/s per GPU | MFU | peak GiB | published tokens/s per GPU | published GiB"
        " | source |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    failed = False
    for row in rows:
        steps = (1, 2) if options.smoke else (options.warmup, options.steps)
        settings = Settings(
            config, "cuda" if there >= 8 else "cpu", row.sequence, row.rows, 1, *steps
        )
        print(f"measuring {row.name} ...", file=sys.stderr, flush=True)
        found = measure(row, settings)
        failed |= "failed" in found
        lines.append(line(row, settings, found))
    if options.smoke:
        lines.append(
            "\nThis is a smoke test with a tiny model: its numbers do not compare with the"
            " published ones."
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output:
        options.output.write_text(text)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
