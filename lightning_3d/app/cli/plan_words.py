"""The command line that trains with a layout of the planner. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_3d.app.config.compose import compose
from lightning_3d.app.config.run_config import GROUPS
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import Machine
from lightning_3d.app.planner.tables import describe
from lightning_3d.errors import listed

_GROUPS = ("model", "cluster")
_BATCH = ("global_batch_size", "sequence_length")


@dataclass(frozen=True)
class TrainingWords:
    """Overrides of a command that trains, and the keys that they leave without a value."""

    words: list[str]
    missing: list[str]


def training_words(
    overrides: Sequence[str], job: Job, choices: Mapping[str, Any] | None = None
) -> TrainingWords:
    """Return overrides with which a run has the model, cluster and data of the plan, and exactly
    the layout of `job`.

    Model, cluster and batch are always named, so that the command does not depend on defaults.
    Words about keys that the planner chose are replaced.

    Args:
        overrides: words of the plan.
        job: a proposal.
        choices: `config_choices` of these words; None: they are composed.
    """
    wanted = _chosen(job)
    replaced = {
        "parallelism",
        "parallelism.layout",
        "trainer.dry",
        *(f"parallelism.{key}" for key in wanted),
    }
    words = [word for word in overrides if _key(word) not in replaced]
    choices = choices or config_choices(compose(words))
    if not choices.get("recipe"):  # a recipe names its model, cluster and batch
        given = {_key(word) for word in words}
        words = [f"{group}={choices[group]}" for group in _GROUPS if group not in given] + words
        values = zip(_BATCH, (job.global_batch, job.seq), strict=True)
        words += [f"data.{key}={value}" for key, value in values if f"data.{key}" not in given]
    words += describe(job).split()
    # What `describe` leaves out has its default, unless a recipe or a debug option sets it.
    composed = compose(words)
    found = composed["parallelism"]
    if composed["cluster"]["accelerator"] != "gpu" and found.get("sequence_parallel") is None:
        # the default where ranks communicate through gloo (`pays_off`)
        found["sequence_parallel"] = False
    others = {
        f"parallelism.{key}": value
        for key, value in wanted.items()
        if not _same(found.get(key), value, key, job)
    }
    words += [f"{key}={_text(value)}" for key, value in others.items()]
    return TrainingWords(words, [key for key in missing_keys(composed) if key not in others])


def config_choices(config: DictConfig) -> Mapping[str, Any]:
    """Return the option of each group in a composed configuration."""
    choices: Mapping[str, Any] = config["hydra"]["runtime"]["choices"]
    return choices


def missing_keys(config: DictConfig) -> list[str]:
    """Return the keys of a composed run that have no value."""
    return sorted(OmegaConf.missing_keys(OmegaConf.masked_copy(config, list(GROUPS))))


def introduce(missing: Sequence[str], machine: Machine) -> str:
    """Say what the command does, how it is started on several nodes, and which keys it still
    needs."""
    sentences = ["This command trains with the fastest layout"]
    if missing:
        sentences[0] += f", after you add {listed(f'{key}=...' for key in missing)}"
    if machine.nodes > 1:
        sentences.append("For several nodes, start it with srun, or replace train by launch slurm")
    return ". ".join(sentences) + ":"


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _chosen(job: Job) -> dict[str, Any]:
    """Keys of `parallelism` that the planner chooses, without the layout itself, and those that
    exclude a choice."""
    nothing = {"recompute_every": 1, "recompute_keep": None} if job.recompute == "none" else {}
    return {
        **nothing,
        "micro_batch_size": job.micro_batch,
        "zero_stage": job.zero,
        "zero_shard_size": job.shard_size,
        "schedule": job.schedule,
        "vp": job.layout.vp,
        "stages": None,
        "recompute": job.recompute,
        "sequence_parallel": job.sequence_parallel,
        "order": list(job.layout.order),
    }


def _same(found: Any, wanted: Any, key: str, job: Job) -> bool:
    """Return whether a key has the wanted value, or has no effect in this layout, or is left open
    and follows from the layout's name."""
    if (key == "schedule" and job.layout.pp == 1) or (
        key == "sequence_parallel" and job.layout.tp == 1
    ):
        return True
    if found is None and wanted is not None:
        return key in ("vp", "sequence_parallel")
    return bool(found == wanted)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)
