"""Compares, before the first forward, a whole block of each kind with the same block as it was
rewritten for the ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.compat.rank_zero import rank_zero_only
from lightning_3d.compat.torch import without_modes
from lightning_3d.compat.transformers import is_transformers_model
from lightning_3d.engine.self_check.compare import (
    LARGEST,
    Deviation,
    largest_deviation,
    why_not_comparable,
)
from lightning_3d.engine.self_check.explain import Explanation, additions, first_line
from lightning_3d.engine.self_check.local_sizes import (
    LocalSizes,
    apply_local_sizes,
    find_local_sizes,
    modules_to_try,
)
from lightning_3d.engine.self_check.model_copy import (
    copy_without_values,
    fill,
    kept_blocks,
    kinds_of,
    leave_out_blocks,
)
from lightning_3d.engine.self_check.noise import WithoutNoise, exact_products
from lightning_3d.engine.self_check.partial import Remnant, find_partial
from lightning_3d.engine.self_check.remembered import (
    Findings,
    has_own_code,
    identity,
    is_verified,
    recall,
    remember,
)
from lightning_3d.engine.self_check.stages import RewrittenModel
from lightning_3d.errors import Lightning3DError, PlanError, listed
from lightning_3d.layout.layout import Layout
from lightning_3d.models.multi_token import MultiTokenLM
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.models.reachable import hook_tables, is_of_others
from lightning_3d.options.blocks import BlockOptions
from lightning_3d.options.experts import ExpertOptions
from lightning_3d.options.model import ModelOptions
from lightning_3d.parallel.mesh import Mesh, TensorMesh
from lightning_3d.parallel.nested import tensors_of
from lightning_3d.parallel.pipeline import assign_stages
from lightning_3d.parallel.pipeline.towers import tower_inputs
from lightning_3d.parallel.tensor import pays_off
from lightning_3d.parallel.tensor.head_arguments import Place
from lightning_3d.parallel.trials.clone import in_float64
from lightning_3d.parallel.undone import undone
from lightning_3d.storage.numbers import gibibytes

_ROWS = 2
"""Rows of a micro-batch that a check runs."""

_TOKENS = 512
"""Tokens of each row that a check runs."""

_SMALL = 2**24
"""Parameters of a model up to which all blocks are run, in the stages of training."""

_SEEDS = (0, 1)
"""Seeds of the weights. Rounding may send a token on the border between two experts either way: a
fault shows with both seeds."""


class SelfCheck:
    """Checks a model once, when it is first called, and remembers the result.

    The check needs the memory of one whole block of each kind with its gradients, and of this
    rank's shard of it.

    Args:
        mode: "auto" (unless this combination of model, plan, layout and versions has passed
            before), "always" or "never".
        required: with "auto", refuse a model that cannot be checked, as "always" does.
        mesh: process groups of the run.
        options: options of the model.
        device: device of this rank.
    """

    def __init__(
        self,
        mode: str,
        mesh: Mesh | TensorMesh,
        options: ModelOptions,
        device: torch.device,
        *,
        required: bool = False,
    ) -> None:
        self._mode, self._mesh, self._device = mode, mesh, device
        self._must = required or mode == "always"
        blocks = BlockOptions(sequence_parallel=options.blocks.sequence_parallel)
        self._options = ModelOptions(
            "1F1B", blocks, ExpertOptions(), cp_kind=options.cp_kind, stages=options.stages
        )
        self._subject: _Subject | None = None
        self._findings = Findings()
        self._refuse_later: Callable[[Iterable[Remnant]], None] | None = None
        self._handles: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> SelfCheck:
        """Share the check: a copied model (weight averaging) is the one that is checked."""
        return self

    def inspect(self, module: nn.Module, plan: ParallelPlan, *, declared: bool) -> None:
        """Decide whether to check a model, the same on all ranks, and copy it before it is
        partitioned.

        Args:
            module: the whole pipelined module.
            plan: its parallel plan.
            declared: whether the model declares the plan itself.

        Communicates: one small object from rank 0 to all.
        """
        layout = self._mesh.layout
        if self._mode == "never" or layout.tp * layout.pp * layout.cp * layout.ep == 1:
            return
        wanted = self._options.blocks.sequence_parallel
        in_sequence = pays_off(self._mesh.group("tp")) if wanted is None else wanted
        more: list[Any] = [in_sequence, self._options.cp_kind]
        if self._options.stages is not None:
            more.append(list(self._options.stages))
        key: str | None = None
        known: Findings | None = None
        if self._mesh.rank == 0:
            # Families were verified with sequence parallelism.
            listed = (
                self._mode == "auto"
                and declared
                and (layout.tp == 1 or in_sequence)
                and is_verified(module, layout)
            )
            key = None if listed else identity(module, plan, layout, more)
            known = Findings() if listed else recall(key) if self._mode == "auto" else None
        agreed: list[Any] = [known, has_own_code(module)]
        dist.broadcast_object_list(agreed, src=0)
        known, own = agreed
        self._findings = known or self._findings
        copied = copy_without_values(module)
        apply_whole_config(copied)
        if isinstance(copied, MultiTokenLM):
            copied.returns_mtp_logits = True
        blocks = len(list(copied.get_submodule(plan.layers).children())) if plan.layers else 0
        unnamed = (
            modules_to_try(copied, plan, layout.tp, drafted=not declared) if layout.tp > 1 else []
        )
        passed = known is not None
        self._subject = _Subject(
            copied,
            plan,
            type(module).__name__,
            key,
            blocks,
            unnamed,
            drafted=not declared,
            own=own,
            passed=passed,
        )

    def attach(
        self, module: nn.Module, refuse_later: Callable[[Iterable[Remnant]], None] | None = None
    ) -> None:
        """Check this rank's part of the model at its first call. Where the model was checked
        before, apply what was found then.

        Args:
            module: this rank's part of the model.
            refuse_later: function that is given what the step may not read; None for a frozen
                model.
        """
        self._refuse_later = refuse_later
        self._apply(module, self._findings)
        subject = self._subject
        if subject is None:
            return
        self._handles = [module.register_forward_pre_hook(self.compare, with_kwargs=True)]
        if subject.passed:
            return
        parts = dict(module.named_modules())
        blocks = [f"{subject.plan.layers}.{index}" for index in range(subject.blocks)]
        for name in dict.fromkeys([*blocks, *subject.unnamed]):
            if parts.get(name) not in (None, module):
                self._handles.append(parts[name].register_forward_pre_hook(self._passed_by))

    def compare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare now the model that was inspected, and give `module` the local sizes that are
        found. Communicates.

        Args:
            module: this rank's part of the model.
            args: positional arguments of the model.
            kwargs: keyword arguments of the model.

        Raises:
            PlanError: the rewritten model does not reproduce the whole one.
        """
        subject = self._take()
        if subject is None:
            return
        started = time.monotonic()
        if _anywhere(self._mesh, self._device, _take_later_hooks(module, subject.whole)):
            subject = replace(subject, key=None, own=True, passed=False)
        if subject.passed:
            return
        with undone(subject.whole), _own_context(self._device):
            args, kwargs = self._example(subject, args, kwargs)
            findings = _Comparison(subject, self._mesh, self._options, self._device).run(
                args, kwargs, must=self._must
            )
        if findings is None:
            return
        self._apply(module, findings)
        state = getattr(module, "pipeline_state", None)
        if state is not None and state.has_towers and not tower_inputs(kwargs):
            state.towers_unchecked = True  # and not remembered
        elif self._mesh.rank == 0:
            remember(subject.key, findings, subject.model)
        _say(subject, self._mesh.layout, findings.sizes, time.monotonic() - started)

    def _apply(self, module: nn.Module, findings: Findings) -> None:
        apply_local_sizes(module, findings.sizes, place_of(self._mesh))
        if self._refuse_later is not None:
            self._refuse_later(findings.partial)

    def _take(self) -> _Subject | None:
        subject, self._subject = self._subject, None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return subject

    def _passed_by(self, module: nn.Module, args: Any) -> None:
        """Notice that a block runs although the model was not called, so that no hook of the model
        runs.

        The step calls `model.forward`, or layers one by one.

        Raises:
            PlanError: the run needs what the check would find, or asked for the check.
        """
        subject = self._take()
        if subject is None:
            return
        how = (
            f"the step runs the layers of {subject.model} through model.forward(...) or one by one,"
            " not through model(...)."
        )
        if subject.unnamed or self._must:
            wanted = (
                f" The check must find the sizes that '{subject.unnamed[0]}' has on each rank."
                if subject.unnamed
                else ""
            )
            raise PlanError(
                f"The self-check of {subject.model} cannot run: {how}{wanted} Call the model"
                " itself, model(...), or use self_check=never. Nothing was trained."
            )
        _print(f"self-check of {subject.model} skipped: {how}")

    def _example(
        self, subject: _Subject, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take a few rows of the model's arguments; with experts on several data-parallel ranks the
        same rows on all of them."""
        layout = self._mesh.layout
        # Copies: tensors that an evaluation makes in inference mode cannot take part in a backward.
        args, kwargs = _mapped((tuple(args), dict(kwargs)), _copied)
        if is_transformers_model(subject.whole):
            kwargs = _without_targets(subject.whole, kwargs)
            kwargs |= {
                key: False
                for key in ("output_router_logits", "output_hidden_states", "use_cache")
                if key in kwargs
            }
            args, kwargs = _shortened(args, kwargs, 2 * layout.tp * layout.cp)
        rows = {tensor.shape[0] for tensor in tensors_of((args, kwargs)) if tensor.ndim}
        if len(rows) == 1 and rows.pop() > _ROWS:
            args, kwargs = _mapped(
                (args, kwargs), lambda tensor: tensor[:_ROWS] if tensor.ndim else tensor
            )
        if layout.ep > 1 and layout.dp > 1:
            group = self._mesh.group("dp", "cp")
            shared: list[Any] = [(_moved(args, "cpu"), _moved(kwargs, "cpu"))]
            dist.broadcast_object_list(shared, dist.get_global_rank(group, 0), group=group)
            args, kwargs = _moved(shared[0][0], self._device), _moved(shared[0][1], self._device)
        return args, kwargs


def _without_targets(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove what only the loss of a Transformers model needs. A decoder that gets its input from
    the labels gets it without them."""
    rest = {
        key: value
        for key, value in kwargs.items()
        if key not in ("labels", "shift_labels", "num_items_in_batch")
    }
    labels, config = kwargs.get("labels"), getattr(model, "config", None)
    if labels is None or not getattr(config, "is_encoder_decoder", False):
        return rest
    if any(rest.get(key) is not None for key in ("decoder_input_ids", "decoder_inputs_embeds")):
        return rest
    shift: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    return rest | (
        {"labels": labels} if shift is None else {"decoder_input_ids": shift(labels=labels)}
    )


@dataclass(frozen=True)
class _Subject:
    """The model that is checked.

    Attributes:
        whole: copy of the whole model, without values.
        plan: its parallel plan.
        model: name of its class.
        key: key under which the result is remembered; None on ranks that do not, and where it
            cannot be.
        blocks: number of blocks.
        unnamed: names of modules whose local sizes only the check finds.
        drafted: whether the plan is not the model's own.
        own: whether code runs in it that no library brings.
        passed: whether it was checked before, as it was when it was inspected.
    """

    whole: nn.Module
    plan: ParallelPlan
    model: str
    key: str | None
    blocks: int
    unnamed: list[str]
    drafted: bool = False
    own: bool = False
    passed: bool = False


def apply_whole_config(module: nn.Module) -> None:
    """Turn off the loss of routers. A whole model adds it to its outputs, but ranks compute it
    elsewhere."""
    config = getattr(module, "config", None)
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # type: ignore[union-attr]


class _Comparison:
    """One check: the whole copy, and the copies that were partitioned and rewritten."""

    def __init__(
        self,
        subject: _Subject,
        mesh: Mesh | TensorMesh,
        options: ModelOptions,
        device: torch.device,
    ) -> None:
        self._subject, self._mesh, self._options, self._device = subject, mesh, options, device
        self._plan, self._layout = subject.plan, mesh.layout
        # Blocks behind the model are kinds of their own, and on the last stage, whatever stages the
        # others are on.
        row, ahead = self._plan.blocks_of(subject.whole), self._plan.ahead_of(subject.whole)
        blocks = [*row, *ahead]
        self._kinds = kinds_of(blocks)
        self._kept: list[int] = []
        # blocks of each stage that is compared; None: one stage
        self._stages: tuple[range, ...] | None = None
        if blocks:
            self._kept, boundary = kept_blocks([kind for kind in self._kinds if kind[0] < len(row)])
            self._kept += sorted(
                {
                    index
                    for kind in self._kinds
                    if kind[0] >= len(row)
                    for index in (kind[0], kind[-1])
                }
            )
            self._stages = (range(boundary), range(boundary, len(blocks)))
        if blocks and sum(parameter.numel() for parameter in subject.whole.parameters()) <= _SMALL:
            # A value that one block leaves for another, by its index alone, is seen only where both
            # run, in the stages of training.
            self._kept = list(range(len(blocks)))
            self._stages = assign_stages(
                subject.whole, self._plan, self._layout, options.schedule, options.stages
            ).layers
        self._tuples: dict[str, int] = {}
        self._training = False

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, must: bool) -> Findings | None:
        """Compare. Returns what was found; None where the whole model cannot run here, which is
        printed.

        Raises:
            PlanError: the rewritten model does not reproduce the whole one; on all ranks that share
                the model's stage.
        """
        reason = self._no_room()
        too_large = reason is not None
        if reason is None:
            reason = self._run_whole(args, kwargs)
        if reason is not None:
            if must or (self._subject.unnamed and not too_large):
                raise PlanError(
                    f"The self-check of {self._subject.model} cannot run: {reason} Use"
                    " self_check=never to train without it."
                )
            _print(
                f"self-check of {self._subject.model} skipped: {reason} To try a layout with a"
                " small model, run `lightning-3d verify`."
            )
            return None
        sizes: LocalSizes = {}
        if self._layout.tp > 1:
            sizes = find_local_sizes(
                self._whole(0),
                self._plan,
                self._layout.tp,
                args,
                kwargs,
                drafted=self._subject.drafted,
            )
        sizes = self._for_all_blocks(sizes)
        stages = self._stages if self._layout.pp > 1 else None
        failure = self._compare_often(args, kwargs, sizes, stages)
        if failure is None and not _anywhere(
            self._mesh, self._device, not self._can_train(args, kwargs)
        ):
            self._training = True
            failure = self._compare_often(args, kwargs, sizes, stages)
        if failure is None:
            return Findings(sizes, tuple(self._partial(args, kwargs, sizes, stages)))
        if isinstance(failure, Lightning3DError):
            raise failure
        added = (
            additions(self._subject.whole)
            if is_transformers_model(self._subject.whole) and not self._subject.drafted
            else ()
        )
        explanation = Explanation(self._subject.model, self._plan, self._layout, added)
        if stages is not None and self._compare(args, kwargs, sizes, _SEEDS[0], None) is None:
            raise PlanError(explanation.of_stages(failure))
        whole, rewritten = self._whole(_SEEDS[0]), self._rewritten(sizes, _SEEDS[0], None)
        raise PlanError(explanation.of_layers(failure, whole, rewritten, args, kwargs))

    def _partial(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sizes: LocalSizes,
        stages: tuple[range, ...] | None,
    ) -> list[Remnant]:
        """Find what a forward leaves for the step and this rank has a part of. Of models of
        libraries that is known.

        With pipeline stages alone, a value is here or on another stage, which stubs show.
        """
        if not self._subject.own or self._layout.tp * self._layout.cp * self._layout.ep == 1:
            return []
        anywhere = partial(_anywhere, self._mesh, self._device)
        whole, rewritten = self._whole(_SEEDS[0]), self._rewritten(sizes, _SEEDS[0], stages)
        return find_partial(
            whole, rewritten, _floats(args), _floats(kwargs), self._plan.layers, anywhere
        )

    def _compare_often(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sizes: LocalSizes,
        stages: tuple[range, ...] | None,
    ) -> Deviation | Exception | None:
        """Compare with several seeds, of which one must pass, and then in float64, where rounding
        that a model magnifies is not seen."""
        failure: Deviation | Exception | None = None
        for seed in _SEEDS:
            failure = self._compare(args, kwargs, sizes, seed, stages)
            if failure is None:
                return None
        if _anywhere(
            self._mesh,
            self._device,
            not isinstance(failure, Deviation) or self._no_room(torch.float64) is not None,
        ):
            return failure
        again = self._compare(args, kwargs, sizes, _SEEDS[0], stages, torch.float64)
        return None if again is None else failure

    def _can_train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the model runs the user's own code, which may differ in training mode, and
        can be compared in that mode."""
        if is_transformers_model(self._subject.whole) and not self._subject.own:
            return False
        try:
            return (
                why_not_comparable(self._whole(0).train(), _floats(args), _floats(kwargs)) is None
            )
        except Exception:
            return False

    def _no_room(self, dtype: torch.dtype = torch.float32) -> str | None:
        """Say why the check does not fit into this rank's memory; None where it does."""
        left_out = self._left_out(self._subject.whole)
        parameters = sum(
            p.numel()
            for name, p in self._subject.whole.named_parameters()
            if not name.startswith(left_out)
        )
        need = 4 * parameters * dtype.itemsize  # whole and local values with gradients
        if self._device.type == "cuda":
            free = torch.cuda.mem_get_info(self._device)[0]
        else:
            free = psutil.virtual_memory().available // max(1, self._layout.world_size)
        if need <= free // 2:
            return None
        return (
            f"a block of each kind takes about {gibibytes(need)}, more than half of the"
            f" {gibibytes(free)} that are free for this rank."
        )

    def _left_out(self, whole: nn.Module) -> tuple[str, ...]:
        layers = self._plan.layers
        count = len(list(whole.get_submodule(layers).children())) if layers else 0
        return tuple(f"{layers}.{index}." for index in range(count) if index not in self._kept) or (
            "\0",
        )

    def _run_whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Try the whole copy without most of its blocks, then with all. Returns why it cannot run;
        None where it can."""
        error: Exception | None = None
        every = list(range(sum(len(kind) for kind in self._kinds)))
        for kept in (self._kept, every):
            self._kept = kept
            try:
                return why_not_comparable(self._whole(0), _floats(args), _floats(kwargs))
            except Exception as failed:
                error = failed
            if self._stages is not None and len(self._stages) == 2:
                middle = (len(every) - self._plan.ahead) // 2
                self._stages = (range(middle), range(middle, len(every)))
        return (
            f"the whole model fails on one process ({type(error).__name__}: {first_line(error)})."
        )

    def _whole(self, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
        whole = self._reduced()
        fill(whole, {}, seed, self._device)
        return _in_dtype(whole, dtype).train(self._training)

    def _reduced(self) -> nn.Module:
        reduced = copy_without_values(self._subject.whole)
        if self._plan.layers:
            leave_out_blocks(reduced, self._plan, self._kept, self._tuples)
        return reduced

    def _compare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sizes: LocalSizes,
        seed: int,
        stages: tuple[range, ...] | None,
        dtype: torch.dtype = torch.float32,
    ) -> Deviation | Exception | None:
        """Return what differs, or what the rewritten model raised; None where nothing differs. All
        ranks of the stage agree whether."""
        failure: Deviation | Exception | None = None
        try:
            whole, rewritten = self._whole(seed, dtype), self._rewritten(sizes, seed, stages)
            for stage in rewritten.modules():
                _in_dtype(stage, dtype)
            outputs, gradients = largest_deviation(whole, rewritten, args, kwargs, dtype)
            failure = next(
                (found for found in (outputs, gradients) if not found.error <= LARGEST), None
            )
        except Exception as error:
            failure = error
        if _anywhere(self._mesh, self._device, failure is not None) and failure is None:
            return Deviation("a parameter of another rank", float("nan"))
        return failure

    def _rewritten(
        self, sizes: LocalSizes, seed: int, stages: tuple[range, ...] | None
    ) -> RewrittenModel:
        model = RewrittenModel(
            self._reduced(),
            self._plan,
            self._mesh,
            self._options,
            stages=stages,
            seed=seed,
            device=self._device,
        )
        for stage in model.modules():
            apply_local_sizes(stage, sizes, place_of(self._mesh))
            stage.train(self._training)
        return model

    def _for_all_blocks(self, sizes: LocalSizes) -> LocalSizes:
        """Repeat the sizes of one block of each kind for all blocks of that kind."""
        layers, everywhere = self._plan.layers, dict(sizes)
        for kind in self._kinds:
            for name, value in sizes.items():
                prefix = f"{layers}.{kind[0]}."
                if name.startswith(prefix):
                    everywhere |= {
                        f"{layers}.{index}.{name.removeprefix(prefix)}": value for index in kind
                    }
        return everywhere


def place_of(mesh: Mesh | TensorMesh) -> Place:
    """This rank among the tensor-parallel ranks."""
    return Place(mesh.index("tp"), mesh.size("tp"))


def _anywhere(mesh: Mesh | TensorMesh, device: torch.device, value: bool) -> bool:
    """Return whether something is true on any rank that a comparison communicates with."""
    found = torch.tensor([float(value)], device=device)
    for group in _groups(mesh):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return bool(found.item())


def _groups(mesh: Mesh | TensorMesh) -> Iterator[dist.ProcessGroup]:
    layout = mesh.layout
    if layout.tp * layout.cp > 1:
        yield mesh.group("tp", "cp")
    if layout.ep > 1:
        yield mesh.expert_group
        if layout.dp * layout.cp > 1:
            yield mesh.group("dp", "cp")


def _take_later_hooks(module: nn.Module, whole: nn.Module) -> bool:
    """Give a copy the hooks that modules got since it was made. Returns whether there are any,
    apart from those of this package.

    Args:
        module: this rank's part of the model.
        whole: the copy. Hooks have the same ids in it as when it was made.
    """
    copies, found = dict(whole.named_modules()), False
    for name, child in module.named_modules():
        for key, table in hook_tables(child).items():
            known = vars(copies[name]).get(key, {}) if name in copies else table
            later = {
                number: hook
                for number, hook in table.items()
                if number not in known and is_of_others(hook)
            }
            found |= bool(later)
            for number, hook in later.items():
                known[number] = hook
                for flag in (f"{key}_with_kwargs", f"{key}_always_called"):
                    if number in vars(child).get(flag, {}):
                        vars(copies[name])[flag][number] = True
    return found


@contextmanager
def _own_context(device: torch.device) -> Iterator[None]:
    """Run with gradients, in float32 and without noise, whatever the caller's context is."""
    with (
        without_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        WithoutNoise(),
        exact_products(),
    ):
        yield


def _in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Let a copy in float32 compute in `dtype`, float32 or float64, in place."""
    return in_float64(module) if dtype == torch.float64 else module


def _copied(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    # what a layer before the blocks has returned in the step of a later stage
    if copied.is_floating_point() and copied.isnan().any():
        copied = (
            torch.arange(copied.numel(), device=copied.device, dtype=copied.dtype)
            .sin()
            .view(copied.shape)
        )
    return copied.requires_grad_(tensor.requires_grad)


def _moved(value: Any, device: torch.device | str) -> Any:
    return _mapped(value, lambda tensor: tensor.detach().to(device))


def _floats(value: Any) -> Any:
    return _mapped(value, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_mapped(item, function) for item in value)
    return value


def _shortened(
    args: tuple[Any, ...], kwargs: dict[str, Any], multiple: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keep at most `_TOKENS` tokens, a multiple of `multiple`, where all tensors are (batch,
    sequence, ...)."""
    lengths = {tensor.shape[1] if tensor.ndim > 1 else -1 for tensor in tensors_of((args, kwargs))}
    wanted = _TOKENS // multiple * multiple
    if len(lengths) != 1 or -1 in lengths or lengths.pop() <= wanted or wanted == 0:
        return args, kwargs
    return _mapped(args, lambda tensor: tensor[:, :wanted]), _mapped(
        kwargs, lambda tensor: tensor[:, :wanted]
    )


def _say(subject: _Subject, layout: Layout, sizes: LocalSizes, seconds: float) -> None:
    changed = ""
    if sizes:
        names = sorted({name.rpartition(".")[2] for name in sizes})
        changed = f"; on each rank {listed(names)} {'is' if len(names) == 1 else 'are'} smaller"
    _print(
        f"self-check of {subject.model}: passed; {layout.name} reproduces the whole model"
        f" ({seconds:.1f} s){changed}"
    )


@rank_zero_only
def _print(text: str) -> None:
    print(f"lightning_3d: {text}", file=sys.stderr, flush=True)
