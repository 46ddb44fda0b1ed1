"""Parameters that are sharded over data-parallel ranks and gathered while they are used (ZeRO stage
3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.compat.torch import autograd_is_running, storage_key
from lightning_3d.errors import ConfigError, DataError
from lightning_3d.parallel.collectives import all_gather_flat
from lightning_3d.parallel.nested import tensors_of
from lightning_3d.parallel.zero.gradients import Slot, end_to_end

_SIGNS_OF_FREED = ("storage of size 0", "data is not allocated yet", "illegal memory access")
"""What CPU and CUDA say when freed parameters are used."""


class Uploads:
    """Copies from host memory and the collectives that wait for them, overlapping the computation
    on the device.

    Their targets must be allocated on the computation's own stream, so that the memory is not
    reused while either uses it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of such work: it waits for what has been computed so far, and later computation
        does not wait for it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def page_locked(self, piece: torch.Tensor) -> torch.Tensor:
        """Return the same values in page-locked memory, from which copies overlap with
        computation."""
        return piece if self._stream is None or piece.is_pinned() else piece.pin_memory()


class Unit:
    """Parameters that are gathered and freed together, one after the other in a flat buffer. Each
    rank keeps one part of it.

    What autograd saves in a forward, the parameters themselves and views of them, refers to the
    buffer's storage. That is freed and filled again for the backward, under the same tensors (as in
    torch's FSDP). In between the parameters are NaN everywhere, without memory, so that code that
    uses them outside of their modules is not silently wrong.

    Args:
        parameters: of one type; on all ranks of the group the same values.
        group: the data-parallel ranks.
        device: device on which parameters are gathered.
        uploads: the parts are kept in host memory and copied to the device for each gather; None:
            they are kept on the device.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        device: torch.device,
        uploads: Uploads | None = None,
    ) -> None:
        self.group, self._uploads = group, uploads
        self.slots = end_to_end(parameters)
        self.numel = self.slots[-1].stop
        self.part_numel = -(-self.numel // dist.get_world_size(group))
        self.rank = dist.get_rank(group)
        dtype = parameters[0].dtype
        nan = parameters[0].detach().new_full((), float("nan"), device=device)
        self._blanks = [nan.expand(parameter.shape) for parameter in parameters]
        self._flat = nan.new_empty(self.part_numel * dist.get_world_size(group))
        self._views = [
            self._flat[slot.start : slot.stop].view(slot.parameter.shape) for slot in self.slots
        ]
        self._work: Any = None
        self.gathered = False
        self.in_backward = False
        self.pieces = {
            slot.parameter: (
                slot.parameter.detach()
                .reshape(-1)[first:last]
                .to(device if uploads is None else "cpu", copy=True)
            )
            for slot, first, last in self.owned()
        }
        """By parameter: the elements that this rank keeps, flattened. What trains them may put
        other tensors here."""
        missing = self.part_numel - sum(piece.numel() for piece in self.pieces.values())
        self._padding = torch.zeros(missing, dtype=dtype, device=device)
        self._hide()

    def owned(self, rank: int | None = None) -> Iterator[tuple[Slot, int, int]]:
        """(slot, first, last) for each parameter that a rank, by default this one, keeps the
        elements first to last - 1 of."""
        start = (self.rank if rank is None else rank) * self.part_numel
        for slot in self.slots:
            first, last = max(slot.start, start), min(slot.stop, start + self.part_numel)
            if first < last:
                yield slot, first - slot.start, last - slot.start

    def kept(self) -> list[torch.Tensor]:
        """The gather buffer, which has no memory while parameters are freed, and this rank's part
        of them."""
        return [self._flat, *self.pieces.values(), self._padding]

    def start_gathering(self) -> None:
        """Start the all-gather of the parameters. Collective over the group."""
        if self.gathered or self._work is not None:
            return
        self._flat.untyped_storage().resize_(self._flat.numel() * self._flat.element_size())
        if self._uploads is None:
            part = torch.cat([*(piece.detach() for piece in self.pieces.values()), self._padding])
            self._work = (all_gather_flat(self._flat, part, self.group), part)
            return
        for parameter, piece in self.pieces.items():
            if not isinstance(piece, nn.Parameter):  # else it is trained, and DeepSpeed keeps it
                self.pieces[parameter] = self._uploads.page_locked(piece)
        part = torch.empty(self.part_numel, dtype=self._flat.dtype, device=self._flat.device)
        with self._uploads.running():
            pieces = [*(piece.detach() for piece in self.pieces.values()), self._padding]
            for target, piece in zip(
                part.split([len(piece) for piece in pieces]), pieces, strict=True
            ):
                target.copy_(piece, non_blocking=True)
            self._work = (all_gather_flat(self._flat, part, self.group), part)

    def gather(self) -> None:
        """Finish the all-gather, starting it if necessary, and point the parameters at the
        buffer."""
        self.start_gathering()
        if self._work is not None:
            self._work[0].wait()
            self._work = None
            for slot, view in zip(self.slots, self._views, strict=True):
                slot.parameter.data = view
            self.gathered = True

    def free(self) -> None:
        """Keep only this rank's part."""
        if self._work is not None:
            self._work[0].wait()
        if self._work is not None or self.gathered:
            self._work = None
            self._hide()

    def _hide(self) -> None:
        self.gathered = self.in_backward = False
        for slot, blank in zip(self.slots, self._blanks, strict=True):
            slot.parameter.data = blank
        self._versions = [slot.parameter._version for slot in self.slots]
        self._flat.untyped_storage().resize_(0)

    def require_untouched(self) -> None:
        """Refuse values that were written into a parameter while it was freed."""
        for slot, blank, version in zip(self.slots, self._blanks, self._versions, strict=True):
            if slot.parameter._version != version or storage_key(slot.parameter) != storage_key(
                blank
            ):
                raise ConfigError(
                    f"A parameter of shape {tuple(slot.parameter.shape)} was changed between two"
                    " batches. With zero_stage=3 the change would be lost, because the whole"
                    " parameter is in memory only during a batch. Use zero_stage=2, or change it"
                    " before the fit begins."
                )

    def restore(self) -> None:
        """Give every parameter its whole value in memory of its own on the CPU. Collective."""
        self.gather()
        values = [view.to("cpu", copy=True) for view in self._views]
        self._flat.untyped_storage().resize_(0)
        for slot, value in zip(self.slots, values, strict=True):
            slot.parameter.data = value


class ParameterUnits:
    """All parameters of a rank in units: one for each block, and for everything outside the blocks
    one of trained and one of frozen ones.

    The latter is gathered while a batch is computed. A block is gathered before its forward and
    before its backward and freed after them; the next one of its model is gathered meanwhile. What
    is `whole` is gathered for the whole batch.

    A function with a backward of its own may run blocks without autograd, and parts of them again
    in its backward (Reformer's reversible layers): neither passes the block. The modules inside
    such a block are watched from its first forward on, and the first one that is called while the
    parameters are away gathers them, until the backward of the micro-batch is over.

    Args:
        module: the user's module; its parameters are sharded here.
        models: blocks of each model, in the order in which they are called: of the trained one
            first, then of frozen ones.
        group: the data-parallel ranks.
        control: a group of the same ranks for tensors in host memory.
        is_active: whether a call of a block will run it (it does not while another pipeline stage
            is running).
        finished: called with the parameters of a block whose backward is over, at the same point on
            all ranks of the group.
        whole: gather the trained model for the whole batch. The passes of a split backward read a
            block's parameters at different times.
        whole_frozen: gather the frozen models for the whole batch.
        on_host: the parts are kept in host memory.
        apart: by id of a parameter that is not the same on all ranks of `group`, the group of those
            on which it is.
    """

    def __init__(
        self,
        module: nn.Module,
        models: Sequence[Sequence[nn.Module]],
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        device: torch.device,
        *,
        whole: bool,
        whole_frozen: bool,
        is_active: Callable[[nn.Module], bool],
        finished: Callable[[list[nn.Parameter]], None],
        on_host: bool = False,
        apart: Mapping[int, dist.ProcessGroup] | None = None,
    ) -> None:
        self._group, self._control = group, control
        self._is_active = is_active
        self._finished = finished
        self._in_use = self._trains = False
        self._order = 0
        # places of blocks that have run without autograd in a training forward
        self._watched: set[int] = set()
        # places of blocks that were gathered for a backward of this batch
        self._used_again: set[int] = set()
        blocks = [block for model in models for block in model]
        # by place of a block
        self._model = [index for index, model in enumerate(models) for _ in model]
        uses = _users(module, blocks)
        inside = [
            [p for p in block.parameters() if uses[id(p)] == 1 and p.is_floating_point()]
            for block in blocks
        ]
        known = {id(parameter) for parameters in inside for parameter in parameters}
        outside = [p for p in module.parameters() if id(p) not in known and p.is_floating_point()]
        uploads = Uploads(device) if on_host else None
        groups = apart or {}

        def units(parameters: Sequence[nn.Parameter]) -> list[Unit]:
            return _units(
                parameters, lambda parameter: groups.get(id(parameter), group), device, uploads
            )

        # Apart: trained parameters between large frozen ones would be on few ranks, with all of
        # their optimizer states.
        trained, frozen = (
            [p for p in outside if p.requires_grad is wanted] for wanted in (True, False)
        )
        self._outside = [*units(trained), *units(frozen)]
        self._blocks = [
            (block, units(parameters)) for block, parameters in zip(blocks, inside, strict=True)
        ]
        self._place = {id(block): index for index, (block, _) in enumerate(self._blocks)}
        self._passing = [
            place
            for place, model in enumerate(self._model)
            if not (whole_frozen if model else whole)
        ]
        in_blocks = {id(inner) for block in blocks for inner in block.modules()}
        away = {id(parameter) for parameter in outside}
        self._around = [
            owner
            for owner in module.modules()
            if id(owner) not in in_blocks
            and any(id(parameter) in away for parameter in owner.parameters(recurse=False))
        ]
        self._hooks: list[Any] = []
        self.open()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterUnits:
        """A copied module has hooks that belong to the original's blocks and leave its own
        alone."""
        return self

    def open(self) -> None:
        """Hook into the calls of the blocks, and of the modules around them that have
        parameters."""
        if self._hooks:
            return
        for owner in self._around:
            self._hooks.append(owner.register_forward_pre_hook(self._require_use, prepend=True))
        for block, _ in self._blocks:
            self._hooks.append(block.register_forward_pre_hook(self._before_forward, prepend=True))
            self._hooks.append(block.register_forward_hook(self._after_forward))

    @property
    def all(self) -> list[Unit]:
        return [*self._outside, *(unit for _, units in self._blocks for unit in units)]

    @property
    def outside_blocks(self) -> list[nn.Parameter]:
        """Parameters that are not in any block."""
        return [slot.parameter for unit in self._outside for slot in unit.slots]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context of the forward and backward of a batch. Collective, as is the forward and
        backward of every block that is not `whole`.

        Raises:
            ConfigError: a block's parameters were used outside of it.
            DataError: ranks called different blocks.
        """
        self.free()
        for unit in self.all:
            unit.require_untouched()
        self._in_use, self._order, self._trains = True, 0, torch.is_grad_enabled()
        self._used_again.clear()
        passing = set(self._passing)
        whole = [
            unit
            for place, (_, units) in enumerate(self._blocks)
            if place not in passing
            for unit in units
        ]
        _gather([*self._outside, *whole])
        try:
            yield
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _SIGNS_OF_FREED):
                raise
            certain = "illegal memory access" not in str(error)
            raise ConfigError(
                f"A block's parameters {'were' if certain else 'may have been'} used after"
                " zero_gather=micro_batch had freed them. They"
                f" {'were' if certain else 'would have been'} read outside the block's forward, or"
                " in a backward that does not run the blocks in the reverse order of the forward."
                " Use zero_gather=step."
                + (
                    ""
                    if certain
                    else (
                        " If that does not help, CUDA_LAUNCH_BLOCKING=1 shows which operation"
                        " fails."
                    )
                )
            ) from error
        finally:
            self._in_use = False
        self.free()
        self._require_same_order()

    def _require_same_order(self) -> None:
        """Refuse ranks that gathered different blocks: each would have computed with another's
        parameters."""
        if not self._passing or dist.get_world_size(self._group) == 1:
            return
        extremes = torch.tensor([self._order, -self._order], dtype=torch.int64)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._control)
        if extremes[0] != -extremes[1]:
            raise DataError(
                "Data-parallel ranks called different blocks of the model, or in different orders."
                " With zero_gather=micro_batch they gather the parameters of each block together,"
                " so they must call the same blocks in the same order. Use zero_gather=step."
            )

    def free(self) -> None:
        """Free whatever is gathered."""
        self._in_use = False
        for unit in self.all:
            unit.free()

    def after_backward(self) -> None:
        """Free the blocks: the backward of a micro-batch through a stage is over."""
        for place in self._passing:
            for unit in self._blocks[place][1]:
                unit.free()

    def require_gathered_again(self) -> None:
        """Refuse gradients of a micro-batch, not taken yet, that were computed while a block's
        parameters were away."""
        for place in sorted(self._watched - self._used_again):
            block, units = self._blocks[place]
            if any(slot.parameter.grad is not None for unit in units for slot in unit.slots):
                raise ConfigError(
                    f"The parameters of a {type(block).__name__} got gradients after"
                    " zero_gather=micro_batch had freed them: the block ran without autograd, and"
                    " the gradients were computed without calling it. Use zero_gather=step."
                )

    def restore(self) -> None:
        """Undo the sharding: every parameter has its current value, on the CPU. Collective."""
        self.close()
        self.free()  # what a batch that failed has gathered is older than the optimizer's last step
        for unit in self.all:
            unit.restore()

    def close(self) -> None:
        """Remove all hooks from the modules."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._watched.clear()

    def _require_use(self, module: nn.Module, args: Any) -> None:
        """Refuse a call while the parameters are NaN."""
        if not self._in_use and not autograd_is_running():
            raise ConfigError(
                f"The model (its {type(module).__name__}) was called between two batches, by"
                " generate() in a hook for example. With zero_stage=3, no rank has its whole"
                " parameters then. Call it only in training_step, validation_step, test_step or"
                " predict_step, or use zero_stage=2."
            )

    def _before_forward(self, block: nn.Module, args: Any) -> None:
        self._require_use(block, args)
        place = self._runs(block)
        if place is not None and not self._is_recomputing(place):
            self._gather(place, 1)

    def _runs(self, block: nn.Module) -> int | None:
        """Place of a block whose parameters this call must gather; None if it need not."""
        place = self._place.get(id(block))
        return place if self._in_use and place in self._passing and self._is_active(block) else None

    def _is_recomputing(self, place: int) -> bool:
        """True if a block runs again inside its own backward, which needs its parameters
        afterwards."""
        return autograd_is_running() and any(unit.in_backward for unit in self._blocks[place][1])

    def _after_forward(self, block: nn.Module, args: Any, output: Any) -> None:
        place = self._runs(block)
        if place is None or self._is_recomputing(place):
            return
        units = self._blocks[place][1]
        if torch.is_grad_enabled():
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._before_backward(place))
        elif self._trains and self._model[place] == 0:
            self._watch(block, place)
        for unit in units:
            unit.free()

    def _watch(self, block: nn.Module, place: int) -> None:
        """Hook into the calls of the modules in a block that have parameters of their own."""
        if place in self._watched:
            return
        self._watched.add(place)
        for inner in block.modules():
            if next(inner.parameters(recurse=False), None) is not None:
                self._hooks.append(
                    inner.register_forward_pre_hook(
                        lambda module, args: self._before_inner(place), prepend=True
                    )
                )

    def _before_inner(self, place: int) -> None:
        if self._in_use and not all(unit.gathered for unit in self._blocks[place][1]):
            self._used_again.add(place)
            self._gather(place, 0)

    def _before_backward(self, place: int) -> None:
        """Gather a block for its backward: the gradient of its output has arrived, so the backward
        of the blocks after it is over."""
        if not self._in_use:
            return
        _, units = self._blocks[place]
        if any(unit.in_backward for unit in units):
            return  # another tensor of the same output
        for _, others in self._blocks:
            if any(unit.in_backward for unit in others):
                for unit in others:
                    unit.free()
                self._finished([slot.parameter for unit in others for slot in unit.slots])
        self._used_again.add(place)
        self._gather(place, -1)
        for unit in units:
            unit.in_backward = True

    def _gather(self, place: int, direction: int) -> None:
        """Gather a block and start on the next one of its model in the direction, 1 or -1; with 0,
        only the block."""
        self._order = (self._order * 1_000_003 + place * 3 + direction + 2) % 2**61
        _gather(self._blocks[place][1])
        if direction == 0:
            return
        following = place + direction
        if not 0 <= following < len(self._blocks) or self._model[following] != self._model[place]:
            return
        if self._is_active(self._blocks[following][0]):
            for unit in self._blocks[following][1]:
                unit.start_gathering()


def _gather(units: Sequence[Unit]) -> None:
    for unit in units:
        unit.start_gathering()
    for unit in units:
        unit.gather()


def _units(
    parameters: Sequence[nn.Parameter],
    group_of: Callable[[nn.Parameter], dist.ProcessGroup],
    device: torch.device,
    uploads: Uploads | None,
) -> list[Unit]:
    """One unit for each group and type, those of the first parameter's group first: in one order on
    all ranks."""
    groups = list(dict.fromkeys(group_of(parameter) for parameter in parameters))
    types = sorted({parameter.dtype for parameter in parameters}, key=str)
    chosen = [
        (group, [p for p in parameters if p.dtype == dtype and group_of(p) == group])
        for group in groups
        for dtype in types
    ]
    return [Unit(members, group, device, uploads) for group, members in chosen if members]


def _users(module: nn.Module, blocks: Sequence[nn.Module]) -> Counter[int]:
    """By parameter: how many modules have it, the inside of a block as one."""
    inside: dict[int, list[int]] = {}  # a module may be in several blocks
    for index, block in enumerate(blocks):
        for inner in block.modules():
            inside.setdefault(id(inner), []).append(index)
    found = {
        (id(parameter), place)
        for number, owner in enumerate(module.modules())
        for parameter in owner.parameters(recurse=False)
        for place in inside.get(id(owner), [-1 - number])
    }
    return Counter(parameter for parameter, _ in found)
