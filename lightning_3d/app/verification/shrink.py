"""Shrink a job: the same family and the same kinds of axes, few layers, narrow, on at most 8 ranks.
Pure Python: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_3d.layout.layout import Layout
from lightning_3d.layout.schedules import find_schedule
from lightning_3d.models.spec import EXPERT_COUNTS

MOST_RANKS = 8
SEQUENCE = 32
HEAD = 16
_LAST = ("dp", "cp", "pp", "tp")
"""Axes in the order in which they are left out if all together would need more ranks."""

_WIDTHS = {  # fields of Transformers' configurations that have a size of their own
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": HEAD,
    "qk_rope_head_dim": 8,
    "v_head_dim": HEAD,
    "sliding_window": 8,
    "query_pre_attn_scalar": HEAD,
}


def fold(layout: Layout, *, shard_groups: bool = False) -> tuple[Layout, list[str]]:
    """Reduce a layout to 2 ranks along each axis that has more, without the axes that do not fit on
    8 ranks.

    Args:
        shard_groups: ZeRO shards over a part of the data-parallel ranks: dp is reduced to 4, two
            groups of 2, if that fits.

    Returns:
        The layout, and the names of axes that were left out.
    """
    small = {axis: min(2, getattr(layout, axis)) for axis in ("tp", "pp", "dp", "cp", "ep", "vp")}
    if shard_groups and 2 * small["tp"] * small["pp"] * small["dp"] * small["cp"] <= MOST_RANKS:
        small["dp"] *= 2
    left_out = []
    for axis in _LAST:
        if small["tp"] * small["pp"] * small["dp"] * small["cp"] > MOST_RANKS and small[axis] > 1:
            small[axis] = 1
            left_out.append(axis)
    if small["tp"] * small["cp"] * small["dp"] % small["ep"]:
        small["ep"] = 1
        left_out.append("ep")
    return replace(layout, **small), left_out


def shrink_model(config: Mapping[str, Any], big: Layout, small: Layout) -> dict[str, Any]:
    """Shrink a Transformers configuration: few layers, small widths, no dropout.

    What is hard for layouts stays: key-value heads shared by tensor-parallel ranks, stages with
    unequal numbers of layers, a vocabulary that tp does not divide, tied embeddings, every kind of
    layer.
    """
    fields = dict(config)
    heads = 4 * small.tp * small.cp
    _set(fields, ("num_attention_heads", "n_head", "n_heads"), heads)
    if fields.get("num_key_value_heads") is not None:
        fields["num_key_value_heads"] = _kv_heads(config, big, small, heads)
    fields["num_hidden_layers" if "num_hidden_layers" in fields else "n_layer"] = layers = _layers(
        config, big, small
    )
    _set(fields, ("hidden_size", "n_embd", "d_model"), heads * HEAD)
    if fields.get("head_dim") is not None:
        fields["head_dim"] = HEAD
    for name in [name for name in _WIDTHS if fields.get(name) is not None]:
        fields[name] = _WIDTHS[name] * (small.tp if name.endswith("intermediate_size") else 1)
    for name in ("n_inner", "ffn_dim"):
        if fields.get(name) is not None:
            fields[name] = 96 * small.tp
    vocabulary = int(config["vocab_size"])
    fields["vocab_size"] = 256 * small.tp + (1 if vocabulary % big.tp else 0)
    fields["max_position_embeddings"] = max(SEQUENCE, 2 * SEQUENCE)
    for name in EXPERT_COUNTS:
        if fields.get(name):
            fields[name] = max(4, 2 * small.ep, int(fields.get("n_group") or 1) * 2)
            fields["num_experts_per_tok"] = min(
                int(fields.get("num_experts_per_tok") or 2), 2 * int(fields.get("topk_group") or 1)
            )
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(fields.get(name), list):
            fields[name] = fields[name][:layers]
    for name in [
        name for name in fields if "drop" in name.lower() and isinstance(fields[name], (int, float))
    ]:
        fields[name] = 0.0
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(fields.get(name), int) and fields[name] >= fields["vocab_size"]:
            fields[name] = fields["vocab_size"] - 1
    for name in ("rope_scaling", "rope_parameters"):
        fields[name] = (
            _plain_rope(fields[name]) if isinstance(fields.get(name), Mapping) else fields.get(name)
        )
        if fields[name] is None:
            del fields[name]
    return fields


def micro_batches(schedule: str, layout: Layout) -> int:
    """Return the fewest micro-batches that show every phase of a schedule: twice its stages, or the
    next number that it accepts."""
    info = find_schedule(schedule)
    count = 2 * layout.pp * layout.vp if layout.pp > 1 else 2
    while not info.accepts(layout.pp, layout.vp, count):
        count += 1
    return count


def _set(fields: dict[str, Any], names: tuple[str, ...], value: int) -> None:
    """Set the one of several fields that a family has."""
    for name in names:
        if fields.get(name) is not None:
            fields[name] = value
            return


def _kv_heads(config: Mapping[str, Any], big: Layout, small: Layout, heads: int) -> int:
    """Keep the relation of key-value heads to tp and to attention heads as in the large model."""
    there = int(config["num_key_value_heads"])
    if there == config.get("num_attention_heads"):
        return heads
    if there < big.tp:
        return max(1, small.tp // 2)
    return small.tp * small.cp


def _layers(config: Mapping[str, Any], big: Layout, small: Layout) -> int:
    """Two layers for each stage, one more if the large model's layers do not divide evenly, and
    enough for every kind of layer."""
    total = int(config.get("num_hidden_layers") or config.get("n_layer") or 2)
    stages = small.pp * small.vp
    wanted = 2 * stages + (1 if total % (big.pp * big.vp) else 0)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = config.get(name)
        if isinstance(kinds, list):
            wanted = max(wanted, *(kinds.index(kind) + 1 for kind in set(kinds)))
    pattern = config.get("sliding_window_pattern")
    wanted = max(wanted, int(pattern or 0), int(config.get("first_k_dense_replace") or 0) + 1)
    return max(min(wanted, total), stages)


def _plain_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the scaling to long sequences from rotary positions, also from nested ones of several
    kinds of layers."""
    if any(isinstance(value, Mapping) for value in rope.values()):
        return {
            key: _plain_rope(value) if isinstance(value, Mapping) else value
            for key, value in rope.items()
        }
    kept = ("rope_theta", "partial_rotary_factor")
    return {"rope_type": "default", **{key: value for key, value in rope.items() if key in kept}}
