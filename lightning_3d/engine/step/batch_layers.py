"""Layers that see the batch as a whole, or count their calls: with a split batch they give other
values than on one process."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_3d.engine.step.loss_finding import at_once, described
from lightning_3d.errors import ConfigError, listed
from lightning_3d.parallel.mesh import Mesh, gathered


def layers_of_whole_batches(root: nn.Module, *, micro_batches: int, dp: int) -> list[str]:
    """Describe the embeddings that train otherwise where a batch is split. The loss does not show
    it.

    Args:
        micro_batches: of a data-parallel rank.
        dp: data-parallel ranks.
    """
    found = []
    for name, module in root.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.scale_grad_by_freq and micro_batches * dp > 1:
            found.append(
                f"'{name}' has scale_grad_by_freq=True and would count how often ids are in a part"
                " of the batch"
            )
        if module.max_norm is not None and dp > 1:
            found.append(
                f"'{name}' has max_norm and would change the rows of its own ids on each"
                " data-parallel rank, so that ranks differ"
            )
    return found


def refuse_layers(root: nn.Module, mesh: Mesh, micro_batches: int, rows: int) -> None:
    """Refuse layers that need the whole batch. Collective.

    Args:
        micro_batches: of a data-parallel rank.
        rows: of a micro-batch.

    Raises:
        ConfigError: on all ranks, if any has such layers.
    """
    dp = mesh.size("dp")
    found = gathered(layers_of_whole_batches(root, micro_batches=micro_batches, dp=dp), mesh)
    layers = list(dict.fromkeys(layer for of_rank in found for layer in of_rank))
    if layers:
        raise ConfigError(
            f"{described(dp, micro_batches, rows)}, but {listed(layers)}. So this would not train"
            f" as one process does. Use {at_once(mesh.layout, dp * micro_batches * rows)}, remove"
            ' the option, or pass loss_reduction="accumulate" to train with the values of'
            " micro-batches."
        )


class BufferWrites:
    """The buffers that a training forward writes, such as running statistics, from the time of
    creation on.

    Only buffers that checkpoints have are looked at: the others are caches. Metrics are shared
    between ranks elsewhere.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._before = {name: (buffer, buffer._version) for name, buffer in self._buffers()}

    def names(self) -> list[str]:
        """Names of the modules that have written buffers since then."""
        written: dict[str, None] = {}
        for name, buffer in self._buffers():
            known, version = self._before.get(name, (None, 0))
            if known is not buffer or version != buffer._version:
                written[name.rpartition(".")[0] or "the module"] = None
        return list(written)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for owner, module in self._root.named_modules():
            if isinstance(module, Metric):
                continue
            for name, buffer in module._buffers.items():
                if (
                    buffer is not None
                    and name not in module._non_persistent_buffers_set
                    and not buffer.is_inference()
                ):
                    yield f"{owner}.{name}" if owner else name, buffer


def about_writes(names: list[str]) -> str:
    """Say what differs for modules that write buffers in a training forward."""
    shown = [f"'{name}'" for name in names[:3]]
    more = [f"{len(names) - 3} others"] if len(names) > 3 else []
    return (
        f"{listed([*shown, *more])} {'changes' if len(names) == 1 else 'change'} buffers in each"
        " training forward (running statistics or power iterations, for example). A forward sees"
        " one micro-batch of one data-parallel rank, so the buffers are not those of one process:"
        " statistics are of a micro-batch, and their momentum is applied once per micro-batch."
    )


def about_counters(names: list[str], micro_batches: int) -> str:
    """Say what differs for numbers that each call of the step changes."""
    shown = [f"'{name}'" for name in names[:3]]
    more = [f"{len(names) - 3} others"] if len(names) > 3 else []
    return (
        f"Each call of training_step changes {listed([*shown, *more])}. It is called"
        f" {micro_batches} times for a batch, once per micro-batch, and by one process once. If the"
        " loss will depend on it, count in on_train_batch_end or use self.global_step."
    )
