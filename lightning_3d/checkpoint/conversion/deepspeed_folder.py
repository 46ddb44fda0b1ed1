"""A checkpoint folder of DeepSpeed, with ZeRO or without, as its engine and Lightning's
DeepSpeedStrategy write it (0.14 to 0.19).

`*_model_states.pt` hold the module as each rank has it and, with ZeRO, the order of the flattened
parameters. `*_optim_states.pt` hold the flat ranges of each data-parallel rank. With stages 1 and 2
a group of parameters is one flat tensor, sharded in equal ranges; with stage 3 each parameter is
sharded separately, and ranks have their shards of all parameters of a sub-group one after the
other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_3d.checkpoint.conversion.lightning_file import read_state
from lightning_3d.checkpoint.conversion.safe_unpickler import Known, StandIn, load
from lightning_3d.checkpoint.conversion.source_contents import Foreign, Later, step_count
from lightning_3d.errors import CheckpointError, listed

KNOWN: Known = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (StandIn, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (StandIn, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (StandIn, "deepspeed.utils.tensor_fragment.fragment_address"),
]
"""Classes of DeepSpeed in its files; what is needed of them is a number."""

_MASTER = "master"
_OWN = {
    *(
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
    ),
    *(
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
    ),
    *("mp_world_size", "ds_config", "ds_version", "checkpoint_parallel_dimensions"),
}
"""DeepSpeed's own entries; others are the program's, in Lightning its dict."""


def find_folder(path: Path) -> Path | None:
    """Find the folder with the files: `path`, the one that its file `latest` names, or Lightning's
    "checkpoint" in it."""
    latest = path / "latest"
    named = [path / latest.read_text().strip()] if latest.is_file() else []
    return next(
        (
            folder
            for folder in (path, *named, path / "checkpoint")
            if any(folder.glob("*_model_states.pt"))
        ),
        None,
    )


def read_folder(path: Path, *, optimizer: bool = True, plain_only: bool = False) -> Foreign:
    """Read the contents of a folder. Files are mapped; a tensor is joined when it is read.

    Raises:
        CheckpointError: the folder has pipeline or tensor-parallel shards, a file is missing, or
            the order of the state is unknown.
    """
    folder = find_folder(path)
    if folder is None:
        raise CheckpointError(
            f"{path} has no *_model_states.pt file, so it is not a DeepSpeed checkpoint. Choose a"
            " folder that DeepSpeed saved."
        )
    models = [
        load(file, KNOWN, plain_only=plain_only) for file in _of_ranks(folder, "model_states.pt")
    ]
    if (
        any(folder.glob("layer_*"))
        or any(folder.glob("*mp_rank_01_*"))
        or any(folder.glob("*expert_*"))
    ):
        raise CheckpointError(
            f"{folder} has shards of pipeline stages, tensor-parallel ranks or experts, but only"
            " shards of ZeRO can be converted. Save it without those kinds of parallelism."
        )
    files = _of_ranks(folder, "optim_states.pt")
    first = models[0]
    if not files:
        found = read_state(
            first["module"],
            [first["optimizer"]] if optimizer and first.get("optimizer") else None,
            None,
            str(folder),
        )
    else:
        found = _Flattened(
            folder, models, [load(file, KNOWN)["optimizer_state_dict"] for file in files]
        ).read(optimizer=optimizer)
    found.kind = f"a checkpoint folder of DeepSpeed {first.get('ds_version', '')}".rstrip()
    found.trainer = {key: value for key, value in first.items() if key not in _OWN}
    if "global_step" not in found.trainer:
        found.trainer |= {
            "global_step": first.get("global_steps", 0),
            "epoch": 0,
            "lr_schedulers": [],
        }
        _take_scheduler(found, first.get("lr_scheduler"))
    return found


def _take_scheduler(found: Foreign, scheduler: Any) -> None:
    if isinstance(scheduler, dict) and "last_epoch" in scheduler:
        found.trainer["lr_schedulers"] = [scheduler]
    elif scheduler:
        found.lost.append(
            "The learning-rate scheduler is DeepSpeed's own and is left out, so the new scheduler"
            " starts at its first step."
        )


def _of_ranks(folder: Path, ending: str) -> list[Path]:
    """Files of the data-parallel ranks, in their order."""

    def rank(file: Path) -> int:
        found = re.search(r"zero_pp_rank_(\d+)_", file.name)
        return int(found.group(1)) if found else 0

    return sorted(folder.glob(f"*_{ending}"), key=rank)


class _Flattened:
    """Tensors that ZeRO flattened and sharded, joined again."""

    def __init__(
        self,
        folder: Path,
        models: Sequence[Mapping[str, Any]],
        optimizers: Sequence[Mapping[str, Any]],
    ) -> None:
        self._folder, self._models, self._optimizers = folder, models, optimizers
        self._module = models[0]["module"]
        self._stage = int(optimizers[0].get("zero_stage", 1))
        counts = optimizers[0]["partition_count"]
        self._ranks = int(max(counts) if isinstance(counts, (list, tuple)) else counts)
        if len(optimizers) != self._ranks or (self._stage == 3 and len(models) != self._ranks):
            raise CheckpointError(
                f"{folder} has the files of {len(optimizers)} of {self._ranks} ranks. Copy the"
                " files of all ranks into it."
            )
        key = "fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"
        self._master = [state[key] for state in optimizers]
        self._base = [
            state["optimizer_state_dict" if self._stage == 3 else "base_optimizer_state"]
            for state in optimizers
        ]
        self._shapes: list[dict[str, tuple[int, ...]]] = [
            {n: tuple(s) for n, s in group.items()} for group in models[0]["param_shapes"]
        ]

    def read(self, *, optimizer: bool) -> Foreign:
        found = Foreign("", self._frozen())
        found.aliases = dict(self._models[0].get("shared_params") or {})
        found.groups = self._groups() if optimizer else None
        for group, shapes in enumerate(self._shapes):
            states = self._states(group)
            for name, (where, shape) in self._places(group, shapes).items():
                master = self._later(where, shape, [flat[group] for flat in self._master])
                weight = self._module.get(name)
                dtype = weight.dtype if isinstance(weight, Tensor) else torch.float32
                whole = isinstance(weight, Tensor) and tuple(weight.shape) == shape
                found.weights[name] = (
                    Later.of(weight) if whole and weight is not None else _converted(master, dtype)
                )
                if not optimizer:
                    continue
                own = found.states[name] = {
                    key: self._later(where, shape, parts)
                    for key, parts in states.items()
                    if key != "step"
                }
                if "step" in states:
                    own["step"] = step_count(states["step"][0])
                if dtype != master.dtype:
                    own[_MASTER] = master
        for name, value in self._module.items():
            known = name in found.weights or name in found.aliases
            # the placeholder of a sharded parameter is empty
            whole = self._stage < 3 or name in self._models[0]["buffer_names"]
            if not known and isinstance(value, Tensor) and whole:
                found.weights[name] = Later.of(value)
        missing = [
            name for name in self._module if name not in found.weights and name not in found.aliases
        ]
        if missing:
            raise CheckpointError(
                f"{self._folder} has no values for {listed(missing[:3])}, because they were"
                " excluded when it was saved. Save it with exclude_frozen_parameters=False."
            )
        order = {name: place for place, name in enumerate(self._module)}
        found.weights = dict(
            sorted(found.weights.items(), key=lambda item: order.get(item[0], len(order)))
        )
        return found

    def _frozen(self) -> dict[str, Later]:
        """Parameters outside the optimizer: whole with stages 1 and 2, sharded with stage 3."""
        shapes = self._models[0].get("frozen_param_shapes") or {}
        frozen = {}
        for name, shape in shapes.items():
            parts = [model["frozen_param_fragments"][name] for model in self._models]
            size = tuple(shape)
            if self._stage == 3:
                frozen[name] = Later(size, parts[0].dtype, _joined(parts, size))
            else:
                frozen[name] = Later.of(parts[0].view(size))
        return frozen

    def _groups(self) -> list[dict[str, Any]]:
        """Collect the hyperparameters of each group, with parameter names. With stage 3, a group
        has several sub-groups."""
        base = self._base[0]
        if isinstance(base, list):
            raise CheckpointError(
                f"{self._folder} was saved with elastic_checkpoint, so it has no hyperparameters of"
                " the optimizer. Use --weights-only."
            )
        groups = []
        for group in base["param_groups"]:
            names = [name for number in group["params"] for name in self._shapes[number]]
            groups.append(
                {
                    **{
                        key: value
                        for key, value in group.items()
                        if key not in ("params", "param_names")
                    },
                    "names": names,
                }
            )
        return groups

    def _states(self, group: int) -> dict[str, list[Any]]:
        """Collect the shards of each state of a group, by key: one entry per rank."""
        if isinstance(self._base[0], list):
            return {}
        parts = [base["state"].get(group, {}) for base in self._base]
        states = {key: [part[key] for part in parts] for key in parts[0]}
        settings = next(
            entry for entry in self._base[0]["param_groups"] if group in entry["params"]
        )
        if states and "step" not in states and "step" in settings:
            states["step"] = [settings["step"]]
        return states

    def _places(
        self, group: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Find the offset of a parameter in the flat tensor of its group (stage 3: in each
        rank's)."""
        paddings = (
            self._optimizers[0].get("param_alignment_paddings") or [None] * len(self._shapes)
        )[group] or [0] * len(shapes)
        places, at = {}, 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            places[name] = (at, shape)
            at += ceil(prod(shape) / self._ranks) if self._stage == 3 else prod(shape) + padding
        sizes = [flat[group].numel() for flat in self._master]
        if at > (sizes[0] if self._stage == 3 else sum(sizes)):
            raise CheckpointError(
                f"{self._folder} has only {sum(sizes)} elements for parameter group {group}, fewer"
                " than its parameters need: the checkpoint is damaged or incomplete. Use another"
                " one."
            )
        return places

    def _later(self, start: int, shape: tuple[int, ...], parts: Sequence[Tensor]) -> Later:
        """Read a parameter from a flat tensor that is sharded over ranks."""
        if any(part.ndim != 1 for part in parts):
            raise CheckpointError(
                f"{self._folder} has optimizer states that are not one-dimensional, so their shards"
                " cannot be joined. Use --weights-only."
            )
        if self._stage == 3:
            length = ceil(prod(shape) / self._ranks)
            cut = [part[start : start + length] for part in parts]
        else:
            cut, at, end = [], 0, start + prod(shape)
            for part in parts:
                cut.append(part[max(0, start - at) : max(0, end - at)])
                at += part.numel()
        return Later(shape, parts[0].dtype, _joined(cut, shape))


def _joined(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Callable[[], Tensor]:
    return lambda: torch.cat([part.flatten() for part in parts])[: prod(shape)].view(shape)


def _converted(source: Later, dtype: torch.dtype) -> Later:
    return Later(source.shape, dtype, lambda: source.read().to(dtype))
