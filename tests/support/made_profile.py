"""A file of `lightning-3d profile` of a GPU that was never built."""

from collections.abc import Callable
from typing import Any

import yaml
from command_line import REPOSITORY

from lightning_3d.app.planner.profile_file import FORMAT


def made(
    factor: Callable[[dict[str, Any]], float] = lambda one: 1.0, **more: Any
) -> dict[str, Any]:
    """A profile of a GPU that was never built: 400e12 operations a second and 5 us a product,
    200e12 in attention, 2e12 bytes/s of 2.5e12, 300e9 bytes/s and 2 us between GPUs, 30 bytes that
    the optimizer moves and 1 ms, 4 ms of the host for a block. `more` replaces entries."""
    config = yaml.safe_load((REPOSITORY / "conf/model/llama3_1_8b.yaml").read_text())["config"]
    found: list[dict[str, Any]] = []
    for tokens, outputs, inputs in [
        (1024, 4096, 4096),
        (4096, 4096, 4096),
        (4096, 14336, 4096),
        (4096, 4096, 14336),
    ]:
        moved = 2 * (tokens * (outputs + inputs) + outputs * inputs) / 2e12
        seconds = 2 * tokens * outputs * inputs / 400e12 + moved + 5e-6
        found.append(
            {
                "kind": "matmul",
                "tokens": tokens,
                "outputs": outputs,
                "inputs": inputs,
                "seconds": seconds,
            }
        )
    found += [
        {"kind": "attention", "flops": flops, "seconds": flops / 200e12} for flops in (1e12, 4e12)
    ]
    found += [{"kind": "copy", "bytes": size, "seconds": size / 2.5e12} for size in (1e8, 1e9)]
    found += [{"kind": "elementwise", "bytes": size, "seconds": size / 2e12} for size in (1e8, 1e9)]
    found += [
        {"kind": "optimizer", "parameters": count, "seconds": 30 * count / 2e12 + 1e-3}
        for count in (1e7, 1e8)
    ]
    for layers in (1, 3):
        model = {"config": {**config, "num_hidden_layers": layers}, "tokens": 4096, "seq": 4096}
        found.append(
            {"kind": "model", **model, "seconds": 0.02 + 0.03 * layers, "kept": 4e9 + 2e9 * layers}
        )
        found.append(
            {"kind": "host", **model, "tokens": 16, "seq": 16, "seconds": 0.01 + 0.004 * layers}
        )
    for size in (1e4, 1e8):
        for name, messages, share in [
            ("all_gather", 7, 7 / 8),
            ("all_reduce", 14, 14 / 8),
            ("all_to_all", 1, 7 / 8),
            ("send", 1, 1),
        ]:
            seconds = messages * 2e-6 + share * size / 300e9
            found.append(
                {
                    "kind": "collective",
                    "name": name,
                    "placement": "node",
                    "ranks": 8,
                    "bytes": size,
                    "seconds": seconds,
                }
            )
    operations = [{**one, "seconds": one["seconds"] * factor(one)} for one in found]
    about = {
        "device": "cuda",
        "name": "NVIDIA H100 80GB HBM3",
        "memory": 85e9,
        "ranks": 8,
        "ranks_per_node": 8,
        "precision": "bf16",
    }
    return {"format": FORMAT, "date": "2026-11-22", **about, "operations": operations} | more
