"""`lightning-3d verify`: the user's job in small on local ranks and in one process, and whether they compute the same.

Takes the arguments of `lightning-3d train`, and refuses what it refuses before torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_3d.cli.exit_codes import guarded
from lightning_3d.compat.imports import quiet_imports
from lightning_3d.config.options.zero import ZeroOptions
from lightning_3d.config.plan_run import RunPlan
from lightning_3d.errors import ConfigError, listed
from lightning_3d.layout.layout import Layout
from lightning_3d.runs.check import check_anywhere
from lightning_3d.verification.shrink import SEQUENCE, fold, micro_batches, shrink_model

USAGE = """\
lightning-3d verify [--steps N] [OVERRIDES]

Trains the model of a job in small (its family, few layers, narrow) on CPU ranks of this machine, at most 8, with 2 along each axis of the
job's layout, and in one process with plain PyTorch; prints the largest difference of loss, gradient norm and weights. Exit code 0: this
layout computes the same; 1: it does not. OVERRIDES are those of `lightning-3d train`.

  --steps N   optimizer steps; 4 by default
"""

_UNIFORM = ("moe_aux_loss", "moe_z_loss", "moe_bias_update", "moe_capacity_factor")
"""Options that change what is computed, which plain PyTorch has not."""


def run(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    if set(arguments) & {"--help", "-h"}:
        print(USAGE, end="")
        return 0
    return guarded(lambda: _run(*_read(arguments)), told=(RuntimeError,))


def _read(arguments: Sequence[str]) -> tuple[int, list[str]]:
    rest, steps, overrides = list(arguments), 4, []
    while rest:
        word = rest.pop(0)
        name, _, value = word.partition("=")
        if name == "--steps":
            value = value or (rest.pop(0) if rest else "")
            if not value.isdecimal() or int(value) < 1:
                raise ConfigError(f"--steps takes a number of optimizer steps, at least 1{f', not {value}' if value else ''}.")
            steps = int(value)
        elif word.startswith("-"):
            raise ConfigError(f"{name} is no option of verify. It takes --steps N and the overrides of a run.")
        else:
            overrides.append(word)
    return steps, overrides


def _run(steps: int, overrides: list[str]) -> int:
    config, plan = check_anywhere(overrides)
    small, left_out = fold(plan.layout)
    model = {**config["model"], "config": shrink_model(config["model"]["config"], plan.layout, small), "pretrained": None}
    arguments, dropped = strategy_arguments(config, plan, small)
    count = micro_batches(plan.schedule, small)
    sizes = model["config"]
    print(f"{plan.describe()}\nin small: {small.name} on CPU, fp32, {count} micro-batches of {arguments['micro_batch_size']}")
    layers = sizes.get("num_hidden_layers") or sizes.get("n_layer")
    width = sizes.get("hidden_size") or sizes.get("n_embd") or sizes.get("d_model")
    print(f"{sizes['model_type']} of {layers} layers, width {width}, vocabulary {sizes['vocab_size']}")
    if left_out:
        print(f"without {listed(left_out)}: all axes together need more than 8 ranks")
    if dropped:
        print(f"without {listed(dropped)}, which plain PyTorch has not")

    quiet_imports()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: threads would forbid a fork
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    from hydra.utils import get_class

    from lightning_3d.training.module import CausalLM
    from lightning_3d.training.run import quiet
    from lightning_3d.verification.compare import verify

    quiet()
    optimizer = {**config["optimizer"], "lr": 3e-4, "scheduler": None}
    if optimizer.get("eps") is not None:  # Adam would make of gradients that are zero but for rounding what it makes of others
        optimizer["eps"] = max(1e-6, optimizer["eps"])
    generator = torch.Generator().manual_seed(config["seed"])
    difference = verify(
        CausalLM(model, optimizer),
        arguments,
        [_batch(count * arguments["micro_batch_size"] * small.dp, sizes["vocab_size"], generator) for _ in range(steps)],
        clip=config["trainer"]["gradient_clip_val"],
        strategy_class=get_class(config["parallelism"]["_target_"]),
    )
    print(difference)
    if difference.same:
        print(f"this layout computes the same thing: {plan.layout.name}, {plan.schedule}, {plan.zero.describe()}")
        return 0
    print("this layout computes something else")
    for step, (loss, norm) in enumerate(zip(difference.losses, difference.norms, strict=True)):
        print(f"  step {step}: loss {loss[0]:.8g} on ranks, {loss[1]:.8g} on one; gradient norm {norm[0]:.8g} and {norm[1]:.8g}")
    return 1


def strategy_arguments(config: Mapping[str, Any], plan: RunPlan, small: Layout) -> tuple[dict[str, Any], list[str]]:
    """Arguments of the strategy for the small job, and the names of options that were left out."""
    arguments = {key: value for key, value in config["parallelism"].items() if not key.startswith("_")}
    neutral = {"moe_aux_loss": None, "moe_z_loss": 0.0, "moe_bias_update": 0.0, "moe_capacity_factor": None}
    dropped = [f"parallelism.{key}" for key in _UNIFORM if arguments[key] not in (None, 0.0)]
    zero = ZeroOptions(plan.zero.stage, plan.zero.reduce, plan.zero.gather, plan.zero.reduce_scatter, plan.zero.offload)
    folded = {"layout": small.name, "vp": small.vp, "schedule": _schedule(plan, small), "micro_batch_size": 2, "seed": config["seed"]}
    folded |= {"zero_reduce": zero.reduce, "zero_gather": zero.gather, "compile": False}
    return {**arguments, **neutral, **folded}, dropped


def _schedule(plan: RunPlan, small: Layout) -> str | None:
    """The job's, unless it lost its pipeline."""
    return plan.schedule if small.pp == plan.layout.pp or small.pp > 1 else None


def _batch(rows: int, vocabulary: int, generator: Any) -> dict[str, Any]:
    """Tokens, small ones more often; the first few labels of a row are no targets, so that rows weigh differently."""
    import torch

    ids = (torch.rand((rows, SEQUENCE), generator=generator).square() * vocabulary).long()
    prompt = torch.randint(0, SEQUENCE // 2, (rows, 1), generator=generator)
    return {"input_ids": ids, "labels": torch.where(torch.arange(SEQUENCE) < prompt, -100, ids)}
