"""`lightning-3d verify`: check on a small model that a layout computes what one process computes.

Takes the arguments of `lightning-3d train` and makes the same checks before torch is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_3d.app.cli.options import OVERRIDES, Command
from lightning_3d.app.config.lora import LoraOptions
from lightning_3d.app.config.machine import hide_gpus
from lightning_3d.app.config.objective import DPO, ObjectiveOptions
from lightning_3d.app.config.parameter_groups import matching
from lightning_3d.app.config.plan_run import RunPlan
from lightning_3d.app.runs.check import check_shapes
from lightning_3d.app.verification.shrink import SEQUENCE, fold, micro_batches, shrink_model
from lightning_3d.errors import listed, plural
from lightning_3d.layout.layout import Layout
from lightning_3d.models.families import read_spec
from lightning_3d.options.options import Options
from lightning_3d.options.schema import RESULT, defaults_of
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.ranks.progress import task

if TYPE_CHECKING:
    from lightning_3d.app.verification.differences import Comparison

_SCRIPT_STEPS, _JOB_STEPS = 3, 4

COMMAND = Command(
    "verify",
    "Check that a layout computes what one process computes. Exit code 0: they agree up to"
    " rounding; 1: they do not, and the first difference is named; 2: nothing was compared.\n\nWith"
    " a script (or -m MODULE) that has a Trainer with Lightning3DStrategy: runs it unchanged on"
    " ranks of this machine, and again with plain Lightning on one process. Compares data, losses,"
    " logged values, gradient norms, weights, buffers and optimizer state after each step. It saves"
    " no checkpoints and logs. LIGHTNING_3D_VERIFY=1 python mine.py does the same.\n\nWith a run:"
    " trains a small model of the same family (few layers, narrow) on at most 8 CPU ranks, with 2"
    " ranks along each axis of the job's layout, and again in one process with plain PyTorch.",
    takes=f"[SCRIPT.py [ARGUMENTS]] or {OVERRIDES}",
    examples=[
        "mine.py --my-option 3",
        "model=llama3_70b cluster=h100_32x8 parallelism=tp8_pp4_dp8 data.global_batch_size=64",
    ],
)
COMMAND.count(
    "--steps",
    f"steps; default: {_SCRIPT_STEPS} of a script, {_JOB_STEPS} of a run. Words after -- are the"
    " script's own",
)


def run(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    own, script = split_script(arguments)
    if script:
        return COMMAND.run(own, lambda options, _: _run_script(options.steps, script))
    return COMMAND.run(
        arguments,
        lambda options, overrides: _run(options.steps or _JOB_STEPS, overrides),
        shown=(RuntimeError,),
    )


def split_script(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separate the options of this command from a script with its arguments, or "-m", a module and
    its arguments.

    `--steps` belongs to this command, also after the script. What follows "--" belongs to the
    script.

    Returns:
        Both; no words of a script where the arguments are those of a run.
    """
    first = next((place for place, word in enumerate(arguments) if _names_script(word)), None)
    if first is None or any("=" in word and not word.startswith("-") for word in arguments[:first]):
        return arguments, []
    named = first + (2 if arguments[first] == "-m" else 1)
    own, script, rest = arguments[:first], arguments[first:named], arguments[named:]
    while rest:
        word = rest.pop(0)
        if word == "--":
            return own, [*script, *rest]
        if word == "--steps":
            own += [word, *rest[:1]]
            del rest[:1]
        elif word.startswith("--steps="):
            own.append(word)
        else:
            script.append(word)
    return own, script


def _names_script(word: str) -> bool:
    return word == "-m" or (word.endswith(".py") and "=" not in word)


def _run_script(steps: int | None, script: list[str]) -> int:
    from lightning_3d.app.verification.two_runs import verify_script

    return verify_script(script, steps or _SCRIPT_STEPS)


def _run(steps: int, overrides: list[str]) -> int:
    config, plan = check_shapes(overrides)
    objective = plan.run.objective
    teacher = objective.teacher_fields(config["model"]["config"]["vocab_size"])
    small, left_out = fold(plan.layout, shard_groups=plan.zero.shard_size is not None)
    model = {
        **config["model"],
        "config": shrink_model(config["model"]["config"], plan.layout, small),
        "pretrained": None,
    }
    arguments, dropped = strategy_arguments(config, plan, small)
    if plan.zero.shard_size is not None and arguments["zero_shard_size"] is None:
        left_out.append("zero_shard_size")
    groups, absent = groups_of_small_model(config["optimizer"].get("groups") or [], model)
    count = micro_batches(plan.schedule, small)
    sizes = model["config"]
    print(
        f"{plan.describe()}\nsmall model: {small.name} on CPU, fp32, {count} micro-batches of"
        f" {arguments['micro_batch_size']}"
    )
    layers = sizes.get("num_hidden_layers") or sizes.get("n_layer")
    width = sizes.get("hidden_size") or sizes.get("n_embd") or sizes.get("d_model")
    print(
        f"{sizes['model_type']} of {layers} layers, width {width}, vocabulary {sizes['vocab_size']}"
    )
    if teacher is not None:
        teacher = shrink_model(teacher, plan.layout, small)
    if objective.second_model is not None:
        print(
            f"objective.name={objective.name}, with a frozen {objective.second_model} that has new"
            " weights too"
        )
    if left_out:
        print(f"left out: {listed(left_out)}, because all axes together need more than 8 ranks")
    if dropped:
        print(f"left out: {listed(dropped)}, which plain PyTorch does not have")
    if absent:
        print(
            f"left out: {plural(absent, 'group')} of optimizer.groups without parameters in the"
            " small model"
        )
    sys.stdout.flush()

    hide_gpus()
    # before torch is imported: its threads would make forking unsafe
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with task("importing torch and Transformers"):
        import torch

        from lightning_3d.app.training.objective import make_module
        from lightning_3d.app.training.objects import strategy_class
        from lightning_3d.app.training.run import quiet
        from lightning_3d.app.verification.compare import verify

    quiet()
    optimizer = {**config["optimizer"], "lr": 3e-4, "scheduler": None, "groups": groups}
    # with a tiny eps, Adam amplifies gradients that are zero except for rounding
    if isinstance(optimizer.get("eps"), float):
        optimizer["eps"] = max(1e-6, optimizer["eps"])
    generator = torch.Generator().manual_seed(config["seed"])
    difference = verify(
        make_module({**config, "model": model, "optimizer": optimizer}, teacher),
        arguments,
        [
            draw_batch(
                objective,
                count * arguments["micro_batch_size"] * small.dp,
                sizes["vocab_size"],
                generator,
            )
            for _ in range(steps)
        ],
        clip=config["trainer"]["gradient_clip_val"],
        strategy_class=strategy_class(config["parallelism"]["_target_"]),
    )
    print(difference)
    if difference.same:
        print(
            f"MATCH: this layout reproduces one process: {plan.layout.name}, {plan.schedule},"
            f" {plan.zero.describe()}"
        )
        return 0
    print("MISMATCH: this layout does not reproduce one process")
    _print_steps(difference)
    return 1


def _print_steps(difference: Comparison) -> None:
    """Print the loss and the gradient norm of every step, of ranks and of one process."""
    print("  step        loss: ranks   one process   gradient norm: ranks   one process")
    for step, (loss, norm) in enumerate(zip(difference.losses, difference.norms, strict=True)):
        print(f"  {step:<6} {loss[0]:>16.8g} {loss[1]:>13.8g} {norm[0]:>22.8g} {norm[1]:>13.8g}")


def strategy_arguments(
    config: Mapping[str, Any], plan: RunPlan, small: Layout
) -> tuple[dict[str, Any], list[str]]:
    """Return the strategy's arguments for the small job, and the names of options that were left
    out."""
    arguments = {
        key: value for key, value in config["parallelism"].items() if not key.startswith("_")
    }
    plain = defaults_of(Options, beyond_torch=[RESULT])
    dropped = [f"parallelism.{key}" for key in plain if arguments[key] not in (None, 0.0)]
    dropped += ["parallelism.stages"] if arguments["stages"] is not None else []
    zero = ZeroOptions(
        plan.zero.stage,
        plan.zero.reduce,
        plan.zero.gather,
        plan.zero.reduce_scatter,
        plan.zero.offload,
    )
    folded = {
        "layout": small.name,
        "vp": small.vp,
        "schedule": _schedule(plan, small),
        "micro_batch_size": 2,
        "seed": config["seed"],
    }
    if arguments["sequence_parallel"] is None and plan.run.cluster.accelerator == "cpu":
        folded["sequence_parallel"] = False  # as the job itself runs
    folded["zero_shard_size"] = 2 if plan.zero.shard_size is not None and small.dp == 4 else None
    folded |= {
        "stages": None,
        "zero_reduce": zero.reduce,
        "zero_gather": zero.gather,
        "compile": False,
        "elastic": False,
    }
    return {**arguments, **plain, **folded}, dropped


def groups_of_small_model(entries: list[Any], model: Mapping[str, Any]) -> tuple[list[Any], int]:
    """Return the entries of `optimizer.groups` that the small model has parameters for, and the
    number of the others.

    All of them, where the names of its parameters are known only to Transformers or PEFT.
    """
    names = (
        read_spec(model["config"], model.get("mtp_layers")).parameter_names
        if LoraOptions.of(model).r is None
        else None
    )
    kept = matching(entries, names) if names is not None else entries
    return kept, len(entries) - len(kept)


def _schedule(plan: RunPlan, small: Layout) -> str | None:
    """Return the job's schedule; None if the small job has no pipeline."""
    return plan.schedule if small.pp == plan.layout.pp or small.pp > 1 else None


def draw_batch(
    objective: ObjectiveOptions, rows: int, vocabulary: int, generator: Any
) -> dict[str, Any]:
    """Draw a batch of tokens, small ones more often. The first labels of each row, its prompt, are
    ignored, so that rows have different weights. For DPO, rejected answers follow the same
    prompts."""
    import torch

    def tokens() -> Any:
        return (torch.rand((rows, SEQUENCE), generator=generator).square() * vocabulary).long()

    ids = tokens()
    is_prompt = torch.arange(SEQUENCE) < torch.randint(
        0, SEQUENCE // 2, (rows, 1), generator=generator
    )
    batch = {"input_ids": ids, "labels": torch.where(is_prompt, -100, ids)}
    if objective.name == DPO:
        rejected = torch.where(is_prompt, ids, tokens())
        batch |= {
            "rejected_ids": rejected,
            "rejected_labels": torch.where(is_prompt, -100, rejected),
        }
    return batch
