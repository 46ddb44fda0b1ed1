"""The planner for scripts with their own Trainer: chooses a layout, or refuses one that does not
fit. Imports no torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from lightning_3d.app.config.cluster import ClusterConfig
from lightning_3d.app.config.plan import MEMORY_RISK, PlanOptions
from lightning_3d.app.config.run_config import ParallelismConfig, RunConfig, complete_run
from lightning_3d.app.planner.advice import PlannerAdvice
from lightning_3d.errors import ConfigError
from lightning_3d.layout.batch_rules import check_batch, largest_micro_batch
from lightning_3d.layout.given_stages import AUTO
from lightning_3d.layout.layout import AXES
from lightning_3d.layout.resolve import resolve_layout
from lightning_3d.layout.sizes import check_sizes
from lightning_3d.options.options import OPEN, command_line_options
from lightning_3d.options.precision import PRECISIONS, unknown_precision


def planned(
    model: Any,
    *,
    cluster: str | ClusterConfig,
    sequence_length: int,
    global_batch_size: int,
    layout: str = "auto",
    precision: str = "bf16",
    profile: str | None = None,
    force: bool = False,
    memory_risk: float = MEMORY_RISK,
    **options: Any,
) -> dict[str, Any]:
    """Return arguments of `Lightning3DStrategy` that the planner chose or checked, before a model
    is built or a rank started:

        strategy = Lightning3DStrategy(**planned(module, cluster="h100_4x8", sequence_length=4096, global_batch_size=256))

    Args:
        model: Transformers model or its configuration (an object or a dict), or a module that
            contains one.
        cluster: name as in `cluster=` on the command line, or a `ClusterConfig`.
        sequence_length: tokens of a sequence.
        global_batch_size: sequences of one optimizer step over all ranks.
        layout: `auto` for the fastest that fits; or a name, which is refused if it does not fit on
            the cluster's GPUs.
        precision: name in the group `precision`: bf16, bf16_mixed, fp8, fp32, fp64.
        profile: file that `lightning-3d profile` wrote.
        force: whether to accept layouts that do not fit.
        memory_risk: largest probability, 0.001 to 0.5, with which the layout of `auto` may run out
            of memory; a named layout that exceeds it causes a warning.
        options: other arguments of the strategy. `auto` searches for schedule, micro_batch_size,
            zero_stage, zero_shard_size, recompute, sequence_parallel and order, except for those
            that are given here. `stages="auto"` splits the blocks so that they fit.

    Raises:
        ConfigError: the model has no configuration or its family is unknown; or, with `auto`, the
            GPUs of the cluster are unknown.
        LayoutError: no layout fits, or the named one does not; the message has a table of the
            memory.
    """  # noqa: E501
    check_sizes(sequence_length=sequence_length, global_batch_size=global_batch_size)
    if precision not in PRECISIONS:
        raise unknown_precision(precision)
    defaults = {entry.name: entry.default for entry in command_line_options()}
    if layout == "auto":
        defaults |= dict.fromkeys(OPEN)
    given = {name: value for name, value in options.items() if name in defaults}
    asked = RunConfig(
        model={"config": config_of(model)},
        data={"sequence_length": sequence_length, "global_batch_size": global_batch_size},
        parallelism=ParallelismConfig(**{**defaults, **given, "layout": layout}),
        cluster=_cluster(cluster),
        force=force,
        profile=profile,
        plan=PlanOptions(memory_risk),
    )
    run = complete_run(asked)
    run.plan.check()
    advice = PlannerAdvice()
    if layout == "auto":
        return options | advice.choose(run, precision)
    wanted = run.parallelism
    resolved, schedule = resolve_layout(
        layout, wanted.schedule, wanted.vp, tuple(wanted.order or AXES)
    )
    size = wanted.micro_batch_size or largest_micro_batch(resolved, schedule, global_batch_size)
    check_batch(resolved, global_batch_size, size, schedule)
    if wanted.stages == AUTO:
        options["stages"] = advice.stages(run, precision, resolved, schedule, size)
        run = replace(run, parallelism=replace(wanted, stages=options["stages"]))
    if force:
        return options | {"layout": layout}
    if run.cluster.accelerator == "cpu":
        advice.refuse_here(
            run, precision, resolved, schedule, size, resolved.world_size // run.cluster.nodes
        )
    else:
        for warning in advice.refuse(run, precision, resolved, schedule, size):
            warnings.warn(warning, stacklevel=2)
    return options | {"layout": layout}


def _cluster(given: str | ClusterConfig) -> ClusterConfig:
    if isinstance(given, ClusterConfig):
        found = given
    else:
        from lightning_3d.app.config.compose import compose
        from lightning_3d.app.config.explain import explain, is_composition_error
        from lightning_3d.app.config.plan_run import check_keys

        try:
            found = check_keys(compose([f"cluster={given}", "trainer.dry=true"])).cluster
        except Exception as error:
            if is_composition_error(error):
                raise ConfigError(str(explain(error))) from error
            raise
    found.check()
    return found


def config_of(model: Any) -> dict[str, Any]:
    """Return the fields of the Transformers configuration of a model, of a module that contains
    one, or of a configuration.

    Raises:
        ConfigError: no configuration.
    """
    for one in _candidates(model):
        if isinstance(one, Mapping) and one.get("model_type"):
            return dict(one)
        if getattr(one, "model_type", None) and hasattr(one, "to_dict"):
            return dict(one.to_dict())
    raise ConfigError(
        f"The planner needs the configuration of a Transformers model, and {type(model).__name__}"
        " has none. Pass the configuration, or name a layout without planned(...):"
        " Lightning3DStrategy(layout) takes any module with a plan."
    )


def _candidates(model: Any) -> Iterable[Any]:
    """Yield possible configurations of a model: itself, its own, and those of its attributes and
    submodules."""
    yield model
    yield getattr(model, "config", None)
    yield from vars(model).values() if hasattr(model, "__dict__") else ()
    for part in model.modules() if hasattr(model, "modules") else ():
        yield getattr(part, "config", None)
