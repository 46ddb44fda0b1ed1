"""Models that skip blocks at random."""

from __future__ import annotations

from torch import nn

from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout


def refuse_skipped_blocks(module: nn.Module, layout: Layout, zero_stage: int) -> None:
    """Refuse a model that skips blocks at random (LayerDrop) where ranks need each other in a
    block: each could skip another one.

    Raises:
        ConfigError: with what works.
    """
    if zero_stage < 3 and layout.world_size == layout.dp and layout.ep == 1:
        return
    for child in module.modules():
        if (rate := _layerdrop(child)) > 0:
            raise ConfigError(
                f"{type(child).__name__} skips blocks at random (layerdrop={rate}), each rank"
                " others. With tp, pp, cp, ep or zero_stage=3 ranks must run the same blocks. Set"
                " layerdrop=0 in the model's configuration, or use data parallelism alone, with"
                " zero_stage=2 or less."
            )


def _layerdrop(module: nn.Module) -> float:
    """Return the largest rate at which a module skips blocks, by its own attribute or those of its
    configuration.

    The configuration of a decoder may also name the rate of an encoder that is not there
    (`encoder_layerdrop`).
    """
    config = getattr(module, "config", None)
    rates = [
        getattr(module, "layerdrop", 0),
        *(getattr(config, name, 0) for name in ("layerdrop", "speech_encoder_layerdrop")),
    ]
    return max((float(rate) for rate in rates if isinstance(rate, (int, float))), default=0.0)
