"""The state of a model in training, as a checkpoint stores it: under the names that it has on one
process.

Names of tensors: `model.<parameter or buffer>` and `optimizer.state.<parameter>.<state>`, as
torch.distributed.checkpoint's own helpers call them, and `average.<parameter or buffer>`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.checkpoint.reading import TensorFolder
from lightning_3d.checkpoint.resharding import Slices, flat_range, shard, whole
from lightning_3d.checkpoint.rng_state import GENERATORS, read_generators, set_generators
from lightning_3d.errors import CheckpointError
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import OptimizerShard, ShardSpec
from lightning_3d.storage.checkpoint_names import no_average
from lightning_3d.storage.remote_path import Place

MODEL, OPTIMIZER = "model.", "optimizer.state."
CURRENT = "current_model."
"""Prefix of the weights in training, where those called `model.` are an average of them."""
CURRENT_STATE = "current_model_state"
"""Key of `WeightAveraging` for them in Lightning's checkpoint dict."""
AVERAGE = "average."
"""Prefix of an exponential moving average of the trained weights and of buffers, beside these
themselves."""
MASTER = "master"
"""State key of float32 master weights, where parameters are narrower."""

SHOWN = 10
"""Most names in one list of an error."""


class OptimizerOwner(Protocol):
    """The interface of the data-parallel backend that checkpoints use: see
    `lightning_3d.parallel.zero.DataParallelBackend`."""

    def weight_shards(self) -> list[OptimizerShard]: ...
    def optimizer_shards(self, *, to_save: bool = False) -> list[OptimizerShard]: ...
    def average_shards(self) -> list[OptimizerShard]: ...
    def average_buffers(self) -> dict[str, Tensor]: ...
    @property
    def keeps_average(self) -> bool: ...
    def create_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor | float]]) -> None: ...


class LocalState:
    """This rank's part of a model in training.

    Args:
        module: the user's module, partitioned and sharded.
        specs: place of each of its parameters in the whole model.
        mesh: coordinates and groups of this rank.
        owner: owner of the values of parameters that are sharded over data-parallel ranks, which
            the module does not hold.
        device: device of this rank, whose random number generator is saved.

    Attributes:
        aliases: other names of tied parameters on this rank -> their name in the checkpoint.
    """

    def __init__(
        self,
        module: nn.Module,
        specs: Mapping[str, ShardSpec],
        mesh: Mesh,
        owner: OptimizerOwner | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._module = module
        self._device = device or torch.device("cpu")
        self._owner = owner
        self._specs = specs
        self._mesh = mesh
        # A tied parameter is saved once, by its first name in the whole model, which may be on
        # another stage.
        self._parameters: dict[str, tuple[str, ShardSpec]] = {}
        first: dict[int, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            here = first.setdefault(id(parameter), name)
            self._parameters[name] = (specs[here].tied_to or here, specs[here])
        self.aliases = {
            name: canonical
            for name, (canonical, _) in self._parameters.items()
            if name != canonical
        }

    def weights(
        self, state: Mapping[str, Any], *, offered: bool, prefix: str = MODEL
    ) -> dict[str, Slices]:
        """Slices of the tensors in a state dict of the module, by their names in the checkpoint.

        Args:
            offered: whether to return only the slices that this rank may write. Buffers are whole
                on every rank that has them, but differ between data- and context-parallel ranks
                (running means), so those of the first are taken.
            prefix: prefix of those names.
        """
        slices = {}
        sharded = self._data_parallel_shards(state)
        for name, tensor in state.items():
            if (
                not isinstance(tensor, Tensor)
                or tensor.layout != torch.strided
                or tensor.is_quantized
            ):
                warnings.warn(
                    f"'{name}' in the module's state is not a dense tensor, so checkpoints leave it"
                    " out.",
                    stacklevel=2,
                )
            elif name in sharded:
                canonical, spec = self._parameters[name]
                value, start = sharded[name]
                slices[prefix + canonical] = flat_range(
                    value, start, spec, replica=self._is_replica(spec)
                )
            elif name in self._parameters:
                canonical, spec = self._parameters[name]
                slices[prefix + canonical] = shard(tensor, spec)
            elif not offered or self._offers_buffers:
                slices[prefix + name] = whole(tensor)
        return slices

    @property
    def _offers_buffers(self) -> bool:
        return self._mesh.index("dp") == self._mesh.index("cp") == 0

    def _data_parallel_shards(self, state: Mapping[str, Any]) -> dict[str, tuple[Tensor, int]]:
        """By name in a state dict: this rank's elements, and the first of them, of parameters whose
        values the module has not.

        What a user's hook has put in their place is in the state dict itself.
        """
        found = {}
        held = {
            shard.name: shard
            for shard in (self._owner.weight_shards() if self._owner is not None else [])
        }
        first = {id(parameter): name for name, parameter in self._module.named_parameters()}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            part, given = held.get(first[id(parameter)]), state.get(name)
            if (
                part is not None
                and isinstance(given, Tensor)
                and given.data_ptr() == parameter.data_ptr()
            ):
                [value] = part.values.values()
                assert isinstance(value, Tensor) and part.start is not None
                found[name] = (value, part.start)
        return found

    def _is_replica(self, spec: ShardSpec) -> bool:
        return not spec.counts_in_norm(self._mesh.index("tp"), self._mesh.index("pp"))

    def optimizer(self, shards: Iterable[OptimizerShard]) -> tuple[dict[str, Slices], set[str]]:
        """Slices of optimizer state, by their names in the checkpoint, and the keys of states that
        are plain numbers.

        Args:
            shards: ranges of elements may be sharded differently where a parameter has replicas, so
                those of the replica that counts in the gradient norm are the ones that count here
                too.
        """
        slices, numbers = {}, set()
        for held in shards:
            spec = self._specs[held.name]
            for key, value in held.values.items():
                name = f"{OPTIMIZER}{spec.tied_to or held.name}.{key}"
                if not isinstance(value, Tensor):
                    numbers.add(key)
                    slices[name] = whole(
                        torch.tensor(
                            value, dtype=torch.float64 if isinstance(value, float) else None
                        )
                    )
                elif value.ndim == 0 or held.start is None:
                    slices[name] = _state_slices(held.name, key, value, spec)
                else:
                    slices[name] = flat_range(
                        value, held.start, spec, replica=self._is_replica(spec)
                    )
        return slices, numbers

    def average(
        self, shards: Iterable[OptimizerShard], buffers: Mapping[str, Tensor], *, offered: bool
    ) -> dict[str, Slices]:
        """Slices of an average of the trained weights and of buffers, by their names in the
        checkpoint.

        Args:
            shards: those of weights, which are sharded like optimizer states.
            buffers: those of buffers, by their names.
            offered: whether to return only the slices that this rank may write, as in `weights`.
        """
        slices = (
            {AVERAGE + name: whole(value) for name, value in buffers.items()}
            if not offered or self._offers_buffers
            else {}
        )
        for held in shards:
            spec = self._specs[held.name]
            [value] = held.values.values()
            assert isinstance(value, Tensor)
            name = AVERAGE + (spec.tied_to or held.name)
            whole_shard = held.start is None
            slices[name] = (
                shard(value, spec)
                if whole_shard
                else flat_range(value, held.start or 0, spec, replica=self._is_replica(spec))
            )
        return slices

    def load_average(
        self, folder: TensorFolder, shards: Iterable[OptimizerShard], buffers: Mapping[str, Tensor]
    ) -> None:
        """Fill an average from a checkpoint of any layout. What was not averaged there stays:
        parameters that were frozen."""
        saved, targets = folder.names(AVERAGE), self.average(shards, buffers, offered=False)
        folder.read_into(
            {name: part for name, part in targets.items() if name.removeprefix(AVERAGE) in saved}
        )

    def generators(self) -> dict[str, Slices]:
        """Slices of the random number generators: one row for each data-parallel index; ranks with
        the same data have the same."""
        if any(self._mesh.index(axis) for axis in ("tp", "cp", "pp")):
            return {}
        row = read_generators(self._device).unsqueeze(0)
        return {
            GENERATORS: Slices(
                (self._mesh.size("dp"), row.shape[1]), {(self._mesh.index("dp"), 0): row}
            )
        }

    def saved_generators(self, folder: TensorFolder) -> Tensor | None:
        """Read this rank's row of a checkpoint; None if it has none.

        If there are more data-parallel ranks now than before, the saved rows are reused in turn.
        """
        shape = folder.names(GENERATORS).get("")
        if shape is None:
            return None
        row = torch.empty(1, shape[1], dtype=torch.uint8)
        folder.read_into({GENERATORS: Slices(shape, {(self._mesh.index("dp") % shape[0], 0): row})})
        return row[0]

    def restore_generators(self, row: Tensor | None) -> None:
        """Restore the random number generators of this rank."""
        if row is not None:
            set_generators(row, self._device)

    def load_weights(self, folder: TensorFolder, *, strict: bool, part: str = "") -> None:
        """Fill parameters and buffers from a checkpoint of any layout.

        Collective over the pipeline ranks, which compare names. Each rank reads the slices that it
        holds. Parameters wider than the saved ones come from the master weights, if there are any.

        Args:
            strict: whether the names must be the same.
            part: prefix of the saved names to load, such as "model." for one of several models;
                others are ignored.

        Raises:
            CheckpointError: names or shapes differ; on every rank, with a list. Without `strict`
                only for shapes.
        """
        targets = self.weights(self._module.state_dict(), offered=False)
        saved = {
            name: shape for name, shape in folder.names(MODEL).items() if name.startswith(part)
        }
        gathered: list[Any] = [None] * self._mesh.size("pp")
        own_shapes = {name.removeprefix(MODEL): slices.shape for name, slices in targets.items()}
        dist.all_gather_object(gathered, own_shapes, group=self._mesh.control)
        _compare(
            {name: shape for part in gathered for name, shape in part.items()}, saved, strict=strict
        )
        # those of an average are other weights
        masters = folder.names(OPTIMIZER) if not folder.names(CURRENT) else {}
        sources = {}
        for name, slices in targets.items():
            short = name.removeprefix(MODEL)
            width = max((part.dtype.itemsize for part in slices.parts.values()), default=0)
            if short in saved:
                wider = f"{short}.{MASTER}" in masters and width > folder.dtype(name).itemsize
                sources[f"{OPTIMIZER}{short}.{MASTER}" if wider else name] = slices
        folder.read_into(sources)

    def states(self, folder: TensorFolder) -> dict[str, dict[str, Any]]:
        """Copy the weights that `load_weights` has read and, if they are an average, this rank's
        shard of the weights in training."""
        states = {"state_dict": copy.deepcopy(self._module.state_dict())}
        saved = folder.names(CURRENT)
        if saved:
            current = states[CURRENT_STATE] = copy.deepcopy(states["state_dict"])
            targets = self.weights(current, offered=False, prefix=CURRENT)
            folder.read_into(
                {
                    name: slices
                    for name, slices in targets.items()
                    if name.removeprefix(CURRENT) in saved
                }
            )
        return states

    def load_optimizer(self, folder: TensorFolder, owner: OptimizerOwner) -> None:
        """Fill the optimizer's state from a checkpoint of any layout and ZeRO stage. Each rank
        reads its own slices; nothing is communicated."""
        owner.create_optimizer_state(
            self._saved_state(folder, [held.name for held in owner.optimizer_shards()])
        )
        slices, _ = self.optimizer(owner.optimizer_shards())
        saved, per_element = folder.names(""), _per_element(folder)
        targets = {}
        for name, part in slices.items():
            parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
            if key == MASTER and name not in saved:
                # what the master weights of a run without any are
                name = CURRENT + parameter if CURRENT + parameter in saved else MODEL + parameter
            if name in saved and (part.shape or key in per_element):
                targets[name] = part
        folder.read_into(targets)

    def _saved_state(
        self, folder: TensorFolder, names: Iterable[str]
    ) -> dict[str, dict[str, Tensor | float]]:
        """Saved states of some parameters: those of the whole parameter (a step count) as they
        were, those of its elements as meta tensors."""
        per_element = _per_element(folder)
        saved: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in folder.names(OPTIMIZER).items():
            parameter, _, key = name.rpartition(".")
            saved.setdefault(parameter, {})[key] = shape
        state: dict[str, dict[str, Tensor | float]] = {}
        scalars: dict[str, Tensor] = {}
        for name in names:
            canonical = self._specs[name].tied_to or name
            for key, shape in saved.get(canonical, {}).items():
                full_name = f"{OPTIMIZER}{canonical}.{key}"
                is_count = not shape and key not in per_element
                tensor = torch.empty(
                    shape, dtype=folder.dtype(full_name), device="cpu" if is_count else "meta"
                )
                state.setdefault(name, {})[key] = tensor
                if is_count:
                    scalars[full_name] = tensor
        folder.read_into({name: whole(tensor) for name, tensor in scalars.items()})
        for values in state.values():
            values.pop(MASTER, None)
            for key in values.keys() & folder.notes.get("numbers", {}).keys():
                values[key] = values[key].item()  # type: ignore[union-attr]
        return state


def averaged(folder: Place) -> TensorFolder:
    """Open a checkpoint in which weights are read from their average.

    Raises:
        CheckpointError: it has none.
    """
    tensors = TensorFolder(folder, instead=(MODEL, AVERAGE))
    if not tensors.names(AVERAGE):
        raise CheckpointError(no_average(folder))
    return tensors


def _per_element(folder: TensorFolder) -> set[str]:
    """Keys of states with one value per element. For a parameter of shape (), the states of other
    parameters decide."""
    return {MASTER} | {
        name.rpartition(".")[2] for name, shape in folder.names(OPTIMIZER).items() if shape
    }


def _state_slices(name: str, key: str, value: Tensor, spec: ShardSpec) -> Slices:
    """Slices of a state that is not a flat range: of the parameter's shape, of shape (), or of an
    unsharded parameter."""
    if tuple(value.shape) == spec.local_shape:
        return shard(value, spec)
    if value.ndim == 0 or not spec.is_cut:
        return whole(value)
    raise CheckpointError(
        f"The optimizer state '{key}' of parameter '{name}' cannot be saved: it has shape"
        f" {tuple(value.shape)}, but this rank's shard of the parameter has shape"
        f" {spec.local_shape}. States must have the parameter's shape or be single numbers. Save"
        " weights only (save_weights_only=True), or use an optimizer such as AdamW."
    )


def _compare(
    wanted: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]], *, strict: bool
) -> None:
    missing = sorted(wanted.keys() - saved.keys()) if strict else []
    unknown = sorted(saved.keys() - wanted.keys()) if strict else []
    shapes = [
        f"{n} {saved[n]} (model: {wanted[n]})"
        for n in sorted(wanted.keys() & saved.keys())
        if wanted[n] != saved[n]
    ]
    problems = [
        f"{title}"
        f" {'; '.join(names[:SHOWN])}{f'; and {len(names) - SHOWN} more' if len(names) > SHOWN else ''}."  # noqa: E501
        for title, names in (
            ("Missing from the checkpoint:", missing),
            ("Missing from the model:", unknown),
            ("Different shapes:", shapes),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"The checkpoint does not fit the model. {' '.join(problems)} Build the model as it was"
            " when it was saved."
        )
