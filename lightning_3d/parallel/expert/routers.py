"""The routers of a model: their losses, their bias, and their statistics of a step."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.compat.torch import autograd_is_running
from lightning_3d.errors import ConfigError, PlanError, listed
from lightning_3d.options.experts import ExpertOptions
from lightning_3d.parallel.collectives import all_reduce_flat
from lightning_3d.parallel.expert.dispatch import DispatchedExperts
from lightning_3d.parallel.expert.losses import (
    attach,
    balancing_loss,
    fits,
    scores_of,
    tokens_per_expert,
    z_loss,
)
from lightning_3d.parallel.expert.router_operators import (
    place_of,
    register,
    router_note,
    router_total,
)
from lightning_3d.parallel.mesh import Mesh, StageMesh
from lightning_3d.parallel.sequence_shards import SequenceShards
from lightning_3d.parallel.specialize import specialize
from lightning_3d.parallel.witness import received, sent

ROUTER_NAMES = ("gate", "router")
"""Names of a router, next to the experts in their module. It returns (logits, weights, experts) of
its tokens."""

BIAS = "e_score_correction_bias"
"""Buffer of a router with sigmoid scores, added to them for the choice alone."""


@dataclass(frozen=True)
class RouterStatistics:
    """Statistics of the routers of the whole model in one batch, the same on every rank.

    Attributes:
        layers: names of the routers. aux_loss, z_loss: before their coefficients, the mean over
            layers and, by the weight of their loss, over micro-batches.
        tokens: for each layer, the number of pairs (token, choice) of each expert.
        dropped: for each layer, the fraction of pairs that experts had no room for.
    """

    layers: tuple[str, ...]
    aux_loss: float
    z_loss: float
    tokens: tuple[tuple[int, ...], ...]
    dropped: tuple[float, ...]

    @property
    def max_over_mean(self) -> tuple[float, ...]:
        """For each layer, the tokens of the fullest expert divided by the mean."""
        return tuple(max(counts) * len(counts) / max(sum(counts), 1) for counts in self.tokens)


@dataclass(frozen=True)
class RouterSums:
    """Sums over all ranks from which `RouterStatistics` are made.

    Attributes:
        layers: names of the routers.
        experts: number of experts of each.
        sums: a row for each router: tokens of each expert, then auxiliary loss, z-loss, pairs
            dropped, pairs in all.
    """

    layers: tuple[str, ...]
    experts: tuple[int, ...]
    sums: Tensor

    def read(self, weight: float) -> RouterStatistics:
        """Read the statistics. Waits for the device.

        Args:
            weight: of the loss, over all micro-batches and data-parallel ranks.
        """
        rows, widest = self.sums.tolist(), max(self.experts)
        aux, z = (
            sum(row[widest + at] for row in rows) / len(rows) / weight if weight > 0 else 0.0
            for at in (0, 1)
        )
        tokens = tuple(
            tuple(round(count) for count in row[:experts])
            for row, experts in zip(rows, self.experts, strict=True)
        )
        dropped = tuple(row[widest + 2] / max(row[widest + 3], 1.0) for row in rows)
        return RouterStatistics(self.layers, aux, z, tokens, dropped)


class Routers:
    """All routers of one pipelined module.

    A router's losses are attached to the weights that it returns, with the weight of the
    micro-batch's loss, so that their gradients are those of one loss of the whole model although no
    rank has it.

    Args:
        options: coefficients.
        names: names of all routers of the whole model, in order.
        experts: number of experts of each.
        mesh: statistics are summed over all ranks that see other tokens or have other layers: one
            all-reduce a batch.
        device: of the tensors.
        shards: split over tensor-parallel ranks of the tokens that routers see; None if each of
            these ranks sees all of them.

    Attributes:
        equal_weights: whether the losses of all micro-batches weigh the same, whatever their rows.
    """

    def __init__(
        self,
        options: ExpertOptions,
        names: Sequence[str],
        experts: Sequence[int],
        mesh: Mesh | StageMesh,
        device: torch.device,
        shards: SequenceShards | None = None,
    ) -> None:
        self.options = options
        self.names, self.experts = tuple(names), tuple(experts)
        self.aux_loss = options.moe_aux_loss or 0.0
        self._mesh, self._device, self._shards = mesh, device, shards
        self._tp_index, self._number = mesh.index("tp"), register(self)
        self._local: dict[int, Any] = {}
        self._weights: dict[int, Tensor] = {}
        self._fillers: set[int] = set()
        self._micro_batch = -1
        self._sums = self._zeros()
        self._loads = self._zeros()[:, : max(self.experts, default=0)]
        self._training = False
        self.equal_weights = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Routers:
        """A copied model (weight averaging) does not train."""
        return self

    def _zeros(self) -> Tensor:
        """For each layer: tokens of each expert, then the two losses times their weights, dropped
        pairs, all pairs."""
        return torch.zeros(
            len(self.names),
            max(self.experts, default=0) + 4,
            dtype=torch.float64,
            device=self._device,
        )

    def _may_drop(self) -> bool:
        return self.options.moe_capacity_factor is not None

    @property
    def token_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks that share the tokens of one micro-batch; None for one rank."""
        axes = [
            axis
            for axis in ("cp", "tp")
            if self._mesh.size(axis) > 1 and (axis == "cp" or self._shards is not None)
        ]
        return self._mesh.group(*axes) if axes else None

    def use(self, options: ExpertOptions) -> None:
        """Use other coefficients from now on. Those that `options` leave open stay as in the
        model's own configuration."""
        self.options = options
        self.aux_loss = self.aux_loss if options.moe_aux_loss is None else options.moe_aux_loss

    def translate(self, config: Any) -> None:
        """Take over the loss of routers that Transformers computes with `output_router_logits`, and
        turn it off there."""
        config.output_router_logits = False
        if self.options.moe_aux_loss is not None or self.aux_loss:
            return
        self.aux_loss = float(getattr(config, "router_aux_loss_coef", 0.0))
        if self.aux_loss:
            rank_zero_warn(
                "output_router_logits=True: the load-balancing loss is computed in each layer and"
                f" averaged over them (moe_aux_loss={self.aux_loss:g}, the model's"
                " router_aux_loss_coef). Transformers first sums over all layers and then"
                " multiplies, which is a different function. The loss that the model returns is"
                " only the cross-entropy."
            )

    def watch(self, module: nn.Module) -> None:
        """Take over the routers that are in `module`, this rank's part of the pipelined one."""
        found = dict(module.named_modules())
        for layer, name in enumerate(self.names):
            router = found.get(name)
            if router is None or next(router.parameters(), None) is None:
                continue
            self._local[layer] = router
            place = place_of(self._number, layer)
            specialize(
                router,
                WatchedRouter,
                routers=self,
                router_layer=layer,
                router_experts=self.experts[layer],
                router_place=place,
            )
            bias = getattr(router, BIAS, None)
            if isinstance(bias, Tensor) and bias.dtype in (torch.bfloat16, torch.float16):
                bias.data = bias.data.float()  # its steps are too small for bf16
        for child in found.values():
            if isinstance(child, DispatchedExperts):
                child.drops = self._may_drop

    # A step: begin, then for each micro-batch `enter` (before its backward too), `expect` and
    # `weigh`, then `finish`

    def begin(self, *, training: bool, scale: Tensor | None = None) -> None:
        self._training, self._scale = training, scale
        self._weights, self._fillers = {}, set()
        self._sums.zero_()

    def enter(self, micro_batch: int) -> None:
        """Prepare for the forward or backward of a micro-batch."""
        self._micro_batch = micro_batch

    def expect(self, rows: int, *, filler: bool = False) -> None:
        """Set the number of rows of the running micro-batch. It is the weight of the micro-batch's
        loss unless `weigh` sets another one, or weights are equal; a filler has weight 0."""
        rows = 1 if self.equal_weights else rows
        self._weights[self._micro_batch] = torch.full(
            (), 0 if filler else rows, dtype=torch.float64, device=self._device
        )
        if filler:
            self._fillers.add(self._micro_batch)

    def weigh(self, weight: Tensor) -> None:
        """Set the weight of the running micro-batch's loss."""
        if self._micro_batch not in self._fillers and not self.equal_weights:
            self._weights[self._micro_batch] = weight.to(self._device, torch.float64)

    def finish(self) -> RouterSums:
        """Sum the statistics since `begin` over all ranks. Does not wait for the device."""
        all_reduce_flat(
            self._sums, self._mesh.group("cp", "pp", "dp") if self._shards is None else None
        )
        widest = max(self.experts)
        self._loads = self._loads + self._sums[:, :widest]
        self._training = False
        return RouterSums(self.names, self.experts, self._sums.clone())

    @torch.no_grad()
    def update_biases(self) -> None:
        """After an optimizer step: move the bias of each expert by `bias_update` towards an even
        load (arXiv:2408.15664, algorithm 1)."""
        loads = self._loads
        self._loads = torch.zeros_like(loads)
        if self.options.moe_bias_update == 0:
            return
        for layer, router in self._local.items():
            counts = loads[layer, : self.experts[layer]]
            step = torch.sign(counts.mean() - counts) * self.options.moe_bias_update
            getattr(router, BIAS).add_(step.to(getattr(router, BIAS).dtype))

    def forget_loads(self) -> None:
        """Forget the loads of an optimizer step that was skipped: its tokens do not change any
        bias."""
        self._loads = torch.zeros_like(self._loads)

    def loads(self) -> Tensor:
        """Tokens of each expert since the last optimizer step, for `set_loads`."""
        return self._loads

    def set_loads(self, loads: Tensor) -> None:
        """Set the tokens of each expert since the last optimizer step, after a step was computed
        again."""
        self._loads = loads

    def routed(self, router: WatchedRouter, output: Any, *, training: bool) -> Any:
        """Attach the losses to a router's result and drop the pairs that experts have no room
        for."""
        if not (
            isinstance(output, tuple)
            and len(output) == 3
            and all(isinstance(part, Tensor) for part in output)
        ):
            if not self.options.asked_of_experts and not self.aux_loss:
                return output  # its output is unknown, and no option needs it
            raise PlanError(
                f"The router '{self.names[router.router_layer]}' does not return (logits, weights,"
                " experts) for its tokens. So it supports neither load-balancing losses nor a"
                " capacity. Remove"
                f" {listed([*self.options.asked_of_experts] or ['output_router_logits'])}."
            )
        logits, weights, chosen = output
        dropped = None
        if self.options.moe_capacity_factor is not None:
            lost = ~fits(
                self._real(chosen), router.router_experts, self.options.moe_capacity_factor
            )
            weights, dropped = (
                weights.masked_fill(self._with_padding(lost, len(chosen)), 0.0),
                lost.sum(),
            )
        if not (self._training and training):
            return logits, weights, chosen
        seen = self._real(chosen)
        counts = tokens_per_expert(seen, router.router_experts)
        totals, weight = self._total(torch.cat([counts, counts.new_full((1,), len(seen))]), router)
        aux, z = self._losses(self._real(logits), totals, sigmoid=hasattr(router, BIAS))
        factor = weight / len(self.names)
        if self._scale is not None:
            factor = factor * self._scale
        if self.aux_loss and weights.requires_grad:
            weights = attach(weights, aux, factor * self.aux_loss)
        if self.options.moe_z_loss and weights.requires_grad:
            weights = attach(weights, z, factor * self.options.moe_z_loss)
        pairs = counts.new_full((), seen.numel())
        last = torch.stack(
            [
                aux.detach().double() * weight,
                z.detach().double() * weight,
                _number(dropped, pairs),
                pairs,
            ]
        )
        return logits, self._noted(weights, torch.cat([counts, last]), router), chosen

    def _total(self, counts: Tensor, router: WatchedRouter) -> tuple[Tensor, Tensor]:
        return (
            router_total(counts, router.router_place)
            if torch.compiler.is_compiling()
            else self.total(counts)
        )

    def _noted(self, weights: Tensor, numbers: Tensor, router: WatchedRouter) -> Tensor:
        if torch.compiler.is_compiling():
            return router_note(weights, numbers, router.router_place)
        self.note(router.router_layer, numbers)
        return weights

    def total(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Sum `counts` over the ranks that share the tokens of a micro-batch: one all-reduce of
        experts + 1 numbers, if there are several.

        Returns:
            The sums, in new memory, and the weight of the running micro-batch's loss.
        """
        totals = counts.clone()
        if (group := self.token_group) is not None:
            sent("all-reduce", totals)
            dist.all_reduce(totals, group=group)
            received("all-reduce", totals)
        return totals, self._weights[self._micro_batch]

    def note(self, layer: int, numbers: Tensor) -> None:
        """Add tokens of each expert, losses times weights, dropped pairs and pairs to the
        statistics of a layer, once in a micro-batch."""
        if autograd_is_running() or self._micro_batch in self._fillers:
            return  # the first: it is recomputed
        self._sums[layer, : len(numbers) - 4] += numbers[:-4]
        self._sums[layer, -4:] += numbers[-4:]

    def _real(self, rows: Tensor) -> Tensor:
        """The rows of tokens, without the padding of a sequence that tensor-parallel ranks do not
        divide."""
        shards = self._shards
        if shards is None or shards.length % shards.ranks == 0:
            return rows
        return rows.unflatten(0, (-1, shards.part))[:, : shards.real(self._tp_index)].flatten(0, 1)

    def _with_padding(self, lost: Tensor, rows: int) -> Tensor:
        """Mark padding rows as `lost` (n, k), too."""
        if len(lost) == rows:
            return lost
        assert self._shards is not None
        every = lost.new_ones((rows // self._shards.part, self._shards.part, *lost.shape[1:]))
        every[:, : self._shards.real(self._tp_index)] = lost.unflatten(0, (len(every), -1))
        return every.flatten(0, 1)

    def _losses(self, logits: Tensor, totals: Tensor, *, sigmoid: bool) -> tuple[Tensor, Tensor]:
        """This rank's part of the two losses of a micro-batch.

        Args:
            totals: tokens of each expert and of all, over all ranks that share the micro-batch.
        """
        if not (self.aux_loss or self.options.moe_z_loss):
            logits = logits.detach()  # they are only returned to the user
        rows = totals[-1].clamp(min=1)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return balancing_loss(scores_of(logits, sigmoid=sigmoid), totals[:-1], rows), z_loss(
            wide, rows
        )


class WatchedRouter:
    """Mixin for a router.

    Attributes:
        routers: those of the whole model.
        router_layer: its place among them.
        router_experts: number of its experts.
        router_place: its name in operators, see `router_operators`.
    """

    routers: Routers
    router_layer: int
    router_experts: int
    router_place: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return self.routers.routed(self, output, training=self.training)  # type: ignore[attr-defined]


def find_routers(module: nn.Module, experts: Sequence[str]) -> dict[str, int]:
    """Name of every router of the whole `module` -> number of its experts, in order.

    Args:
        experts: names of the modules that hold experts.
    """
    found = {}
    modules = dict(module.named_modules())
    for name in experts:
        if name not in modules:
            continue
        parent = name.rpartition(".")[0]
        for candidate in (f"{parent}.{router}" for router in ROUTER_NAMES):
            count = getattr(modules[name], "num_experts", None)
            if candidate in modules and isinstance(count, int):
                found[candidate] = count
                break
    return found


def make_routers(
    module: nn.Module,
    experts: Sequence[str],
    options: ExpertOptions,
    mesh: Mesh | StageMesh,
    device: torch.device,
    shards: SequenceShards | None = None,
) -> Routers | None:
    """The routers of the whole `module`; None where there are none.

    Args:
        shards: see `Routers`.

    Raises:
        ConfigError: an option that the model has nothing for.
    """
    found = find_routers(module, experts)
    if not found:
        if options.asked_of_experts:
            raise ConfigError(
                f"{options.asked_of_experts[0]} needs a mixture of experts, but the model has no"
                " router. Remove the option."
            )
        return None
    modules = dict(module.named_modules())
    if options.moe_bias_update and not all(hasattr(modules[name], BIAS) for name in found):
        raise ConfigError(
            f"moe_bias_update needs routers with a bias for the choice of experts ({BIAS}), as in"
            f" DeepSeek-V3; {type(module).__name__} has none. Use moe_aux_loss."
        )
    for name in found:
        _check_top_k(name, modules[name], found[name])
    return Routers(options, list(found), list(found.values()), mesh, device, shards)


def _check_top_k(name: str, router: nn.Module, experts: int) -> None:
    top_k = getattr(router, "top_k", None)
    if isinstance(top_k, int) and top_k > experts:
        raise ConfigError(
            f"The router '{name}' sends each token to {top_k} experts, but there are only"
            f" {experts}. Use a smaller top_k."
        )


def _number(value: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if value is None else value.to(like.dtype)


def attend_calls(module: Any, routers: Routers) -> None:
    """Make every call of the pipelined `module` pass the weight of its loss to `routers`, and
    compute no router loss by itself.

    The weight is that of `step.weighting`: the target tokens, where the model computes the loss. It
    is known before the first layer, on every stage.
    """
    names = list(inspect.signature(module.forward).parameters)

    def set_weight(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if kwargs.get("output_router_logits"):
            routers.translate(module.config)
            kwargs = {**kwargs, "output_router_logits": False}
        count = getattr(getattr(module, "loss_function", None), "count_targets", None)
        if count is not None and (
            arguments.get("labels") is not None or arguments.get("shift_labels") is not None
        ):
            routers.weigh(count(arguments.get("labels"), arguments.get("shift_labels")))
        return args, kwargs

    module.register_forward_pre_hook(set_weight, with_kwargs=True)
    if getattr(getattr(module, "config", None), "output_router_logits", False):
        routers.translate(module.config)
