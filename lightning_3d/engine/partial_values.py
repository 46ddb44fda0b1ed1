"""What a model leaves for the user's step after its call, and this rank has only a part of: refused
where the step reads it.

With pipeline stages, the states of layers that a model of Transformers returns are those of this
rank's layers. With tensor parallelism, an attribute that a block writes, or an output next to the
logits, may be that of this rank's heads, columns or tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.compat.transformers import is_transformers_model
from lightning_3d.engine.local_model import LocalModel
from lightning_3d.engine.self_check.partial import Remnant, entries
from lightning_3d.layout.layout import Layout
from lightning_3d.parallel.pipeline import Partial, Unknown


class PartialValues:
    """Takes the place of such values between the model's call and the end of the step or the next
    call.

    Args:
        parts: this rank's part of the model.
        layout: of the run.
    """

    def __init__(self, parts: LocalModel, layout: Layout) -> None:
        self._module, self._state, self._layout = parts.module, parts.state, layout
        self._layers, self._stages = parts.plan.layers, parts.assignment.stages
        self._is_library = is_transformers_model(parts.module) and any(
            kind.__module__.startswith("transformers.models.")
            for kind in type(parts.module).__mro__
        )
        self._outputs: set[str] = set()
        self._attributes: list[tuple[nn.Module, str, str]] = []
        if layout.tp * layout.pp * layout.cp * layout.ep > 1:
            self._module.register_forward_pre_hook(self._show)
            self._module.register_forward_hook(self._hide)

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialValues:
        """Share this object: a copied module has its hooks."""
        return self

    def add(self, places: Iterable[Remnant]) -> None:
        """Refuse to read what the self-check has found."""
        for kind, *names in places:
            if kind == "output":
                self._outputs.add(names[0])
                continue
            for path, module in self._modules(names[0]):
                self._attributes.append(
                    (
                        module,
                        names[1],
                        f"the attribute '{names[1]}' of '{path or type(self._module).__name__}'",
                    )
                )

    def _modules(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        """The modules that a path names; `*` is the number of each block."""
        inside = path.removeprefix(f"{self._layers}.*") if self._layers else path
        parts = dict(self._module.named_modules())
        blocks = self._module.get_submodule(self._layers).named_children() if inside != path else ()
        for name in [f"{self._layers}.{number}{inside}" for number, _ in blocks] or [path]:
            if name in parts:
                yield name, parts[name]

    def _show(self, module: nn.Module, args: Any) -> None:
        if module is self._module:
            self._state.left.show()

    def _hide(self, module: nn.Module, args: Any, output: Any) -> Any:
        chunk = self._state.chunk
        if (
            module is not self._module
            or chunk is None
            or not chunk.is_last
            or isinstance(output, Unknown)
        ):
            return output
        for owner, name, what in self._attributes:
            if name in vars(owner) or name in owner._buffers:
                self._state.left.put_away(owner, name, Partial(what, self._reason()))
        replaced = {key: self._replaced(key, value) for key, value in entries(output)}
        return _with_entries(
            output, {key: value for key, value in replaced.items() if value is not None}
        )

    def _reason(self) -> str:
        return (
            f"In {self._layout}, a rank has a part of it (of its heads, columns or tokens), or"
            " gradients through it would differ from those of one process. Outputs of whole blocks"
            " and the output of the model are the same on all ranks: compute the term from them,"
            f" or use a layout with dp alone, for example dp{self._layout.world_size}."
        )

    def _replaced(self, key: Any, value: Any) -> Any:
        """What the step gets in the place of an entry of the output; None for the entry itself."""
        if str(key) in self._outputs:
            return Partial(f"the output '{key}' of {type(self._module).__name__}", self._reason())
        if not self._is_library or value is None or isinstance(value, Tensor):
            return None
        what = f"'{key}' of the output of {type(self._module).__name__}"
        # In evaluation, generate() reads the cache, which is right for this rank.
        if "attentions" in str(key) and self._layout.tp > 1:
            return Partial(what, self._reason())
        if (
            str(key) == "past_key_values"
            and torch.is_grad_enabled()
            and self._layout.tp * self._layout.pp > 1
        ):
            return Partial(what, self._reason())
        of_layers = isinstance(value, (tuple, list)) and any(
            isinstance(item, Tensor) for item in value
        )
        return self._of_layers(what, value, every="router" not in str(key)) if of_layers else None

    def _of_layers(
        self, what: str, values: tuple[Any, ...] | list[Any], *, every: bool
    ) -> tuple[Any, ...] | Partial | None:
        """The states of all layers: one entry for each layer, and perhaps one for what enters the
        first layer. None: all are here.

        Args:
            every: whether each layer has an entry.
        """
        chunk = self._state.require_chunk()
        missing, own = chunk.layers.start, len(chunk.layers)
        if not missing:
            return None
        reason = (
            f"With pp = {self._layout.pp}, it is on an earlier pipeline stage than the loss. The"
            f" states of the last {own} of {chunk.layers.stop} layers are on the last stage. Read"
            " one of them, for example [-1], or use a layout with pp = 1."
        )
        if not every or self._stages != self._layout.pp or len(values) not in (own, own + 1):
            return Partial(what, reason)
        return (
            *(Partial(f"entry {number} of {what}", reason) for number in range(missing)),
            *values,
        )


def _with_entries(output: Any, replaced: Mapping[Any, Any]) -> Any:
    if not replaced:
        return output
    if isinstance(output, (list, tuple)):
        items = [replaced.get(number, item) for number, item in enumerate(output)]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    for key, value in replaced.items():
        if isinstance(output, dict):
            output[key] = value
        else:
            setattr(output, key, value)
    return output
