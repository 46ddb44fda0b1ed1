"""What a run costs a GPU beside its tensors: communicators, and waits of the host for the
device."""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import parity
import pytest
import simulated_fits
import simulated_ranks
import torch
from alphabet_fits import MODEL, OPTIMIZER
from fake_flash import fake_flash, use_flash
from masked_batches import with_mask
from parity import Cell
from reference import Recipe, data
from simulated_parity import LATE, check
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.app.training.module import CausalLM
from lightning_3d.app.training.optimizers import make_optimizer
from lightning_3d.app.training.parameter_groups import NamedGroup
from lightning_3d.engine.built_model import BuiltModel

COMMUNICATORS = {
    # world, tp, dp, tp+pp, pp+dp, and one for the messages of each direction
    Cell(tp=2, pp=2, dp=2): 7,
    # and one for the tied weights of the first and the last stage
    Cell("qwen2", tp=2, pp=2, dp=2, zero=2): 8,
    Cell(tp=2, pp=2, cp=2): 8,  # and a second one for the ranks of cp, which also sum gradients
    Cell("mixtral", tp=2, pp=2, dp=2, ep=2): 7,
    Cell("qwen2", tp=2, dp=2, zero=3): 3,
    Cell("qwen2", dp=2, zero=1): 1,
}


@pytest.mark.parametrize("cell", COMMUNICATORS, ids=lambda cell: cell.name)
def test_communicators(cell: Cell) -> None:
    """Each holds some hundred MB of a GPU. None is made for a single rank."""
    arguments = parity.strategy_arguments(cell)
    environment = LATE | {"CUDASIM_LOG": "nccl"}
    ranks = simulated_ranks.attempt(
        parity.train_on_rank, cell.world_size, cell.recipe, environment=environment, **arguments
    )
    assert [rank.code for rank in ranks] == [0] * cell.world_size, ranks[0].output[-2000:]
    for rank in ranks:
        made = re.findall(r"\] communicator \S+ \(ranks ([^)]*)\)", rank.output)
        assert len(made) <= COMMUNICATORS[cell], made
        assert all(" " in members for members in made), made


LAYERS, STEPS = 4, 5
LOGGING = {"parallel/expert/routers.py": 1}
"""Reads of a step that are logged: the loads of experts. Loss and norm are copied, and the host
waits for the copies."""


def train(recipe: Recipe, mask: str, **strategy: Any) -> None:
    """Run the recipe with masks of this kind, see `with_mask`."""
    parity.fit_on_rank(
        recipe, parity.Rows(with_mask(data(recipe), mask)), parity.Module(recipe), **strategy
    )


def waits(recipe: Recipe, mask: str, **strategy: Any) -> Counter[str]:
    """How often the host waits for the device in the last step, by the file that makes it wait."""
    import simulated_cuda

    found: Counter[str] = Counter()

    class Watch(TorchDispatchMode):
        on = False

        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            before = simulated_cuda.synchronizations()
            result = op(*args, **(kwargs or {}))
            if self.on and simulated_cuda.synchronizations() != before:
                frames = [frame.filename for frame in traceback.extract_stack()]
                places = [
                    name for name in frames if "/lightning_3d/" in name or "/transformers/" in name
                ]
                found[
                    places[-1].rpartition("/lightning_3d/")[2].rpartition("/transformers/")[2]
                ] += 1
            return result

    class LastStep(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            watch.on = trainer.global_step == STEPS - 1

        def on_train_batch_end(self, *args: Any) -> None:
            watch.on = False

    made = parity.quiet_trainer
    parity.quiet_trainer = lambda **arguments: made(
        **arguments | {"callbacks": [*arguments["callbacks"], LastStep()]}
    )
    with Watch() as watch:
        train(recipe, mask, **strategy)
    return found


WAITING = [
    Cell(),
    Cell(tp=2),
    Cell(tp=2, pp=2),
    Cell(pp=2, dp=2, schedule="ZBVZeroBubble"),
    Cell("qwen2", tp=2, dp=2, zero=2),
    Cell("qwen2", dp=2, zero=3),
    Cell("qwen2", pp=2, dp=2, zero=1, dtype="bfloat16"),
    Cell(cp=2),
    Cell("mixtral", ep=2, dp=2),
    Cell("mixtral", tp=2),
]
MASKED = [
    (Cell(tp=2, pp=2), "right"),
    (Cell("gemma3", pp=2, dp=2), "left"),
    (Cell("mistral", dp=2, zero=1), "packed"),
    (Cell("qwen3", dp=2), "ones"),
    (Cell(cp=2), "right"),
    (Cell(cp=2), "packed"),
]
"""Questions about masks are answered from host memory."""


@pytest.mark.parametrize(
    ("cell", "mask"),
    [*((cell, "none") for cell in WAITING), *MASKED],
    ids=lambda part: getattr(part, "name", part),
)
def test_the_host_waits_for_the_device_only_to_log(cell: Cell, mask: str) -> None:
    """Later than the first steps, in which batches are compared. Dispatching waits once for each
    mixture layer and micro-batch."""
    recipe = dataclasses.replace(cell.recipe, steps=STEPS)
    for found in simulated_ranks.run(
        waits, cell.world_size, recipe, mask, environment=LATE, **parity.strategy_arguments(cell)
    ):
        micro_batches = recipe.global_batch // cell.dp // cell.micro_batch
        allowed = Counter(
            LOGGING | {"parallel/expert/dispatch.py": LAYERS * micro_batches if cell.ep > 1 else 0}
        )
        assert found <= allowed, found - allowed


class Flash(parity.Module):
    """Its attention is FlashAttention 2."""

    def configure_model(self) -> None:
        super().configure_model()
        use_flash(self.model)  # type: ignore[arg-type]


def waits_with_flash(recipe: Recipe, mask: str, **strategy: Any) -> Counter[str]:
    with pytest.MonkeyPatch.context() as patch, fake_flash():
        patch.setattr(parity, "Module", Flash)
        return waits(recipe, mask, **strategy)


@pytest.mark.parametrize(
    ("cell", "mask", "strategy"),
    [
        (Cell(tp=2, pp=2), "right", {}),
        (Cell(dp=2), "left", {"recompute": "full"}),
        # Transformers separates the documents of a single row only, so that the loss of two rows is
        # not the mean of theirs.
        (Cell("qwen3", dp=2), "packed", {"micro_batch_size": 1, "self_check": "never"}),
    ],
    ids=lambda part: getattr(part, "name", str(part)),
)
def test_no_block_waits_for_what_flash_attention_asks(
    cell: Cell, mask: str, strategy: dict[str, Any]
) -> None:
    """Transformers asks in each layer, and again where a block is recomputed."""
    recipe = dataclasses.replace(cell.recipe, steps=STEPS)
    arguments = parity.strategy_arguments(cell) | strategy
    for found in simulated_ranks.run(
        waits_with_flash, cell.world_size, recipe, mask, environment=LATE, **arguments
    ):
        assert found <= Counter(LOGGING), found


def as_a_configuration_builds_it(module: Any) -> torch.optim.Optimizer:
    """What `CausalLM` makes of the group `optimizer` by default."""
    parameters = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    config = {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1, "fused": None}
    groups = [NamedGroup(frozenset(parameters), {"weight_decay": 0.1})]
    made = make_optimizer(config, parameters, groups, module.trainer.strategy.optimizer_device)
    assert made.param_groups[0]["fused"]
    return made


def waits_before_the_launch(recipe: Recipe, mask: str, **strategy: Any) -> int:
    """How often the host waits for the device in the training steps of the batches of the last
    step, of the last one until it has launched the optimizer. The model logs its loss and returns
    more."""
    import simulated_cuda

    from lightning_3d.strategy import Lightning3DStrategy

    counted: list[int] = [0]
    begun = [0]

    def total() -> int:
        return sum(simulated_cuda.synchronizations().values())

    train_batch, step, own_step = (
        Lightning3DStrategy.training_step,
        BuiltModel.step_optimizer,
        parity.Module.training_step,
    )

    def training_step(plan: Any, *args: Any) -> Any:
        begun[0] = total()
        outputs = train_batch(plan, *args)
        if not plan._steps.running.has_all:
            counted[-1] += total() - begun[0]
        return outputs

    def step_optimizer(built: Any) -> None:
        step(built)
        counted[-1] += total() - begun[0]
        counted.append(0)

    def logging_step(module: Any, *args: Any) -> Any:
        loss = own_step(module, *args)
        module.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "twice": 2 * loss.detach()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lightning3DStrategy, "training_step", training_step)
        patch.setattr(BuiltModel, "step_optimizer", step_optimizer)
        patch.setattr(parity.Module, "configure_optimizers", as_a_configuration_builds_it)
        patch.setattr(parity.Module, "training_step", logging_step)
        train(recipe, mask, **strategy)
    return counted[STEPS - 1]


LAUNCHES = [
    # experts of other ranks: the host waits for what each sends, see above
    *((cell, "none", 1) for cell in WAITING if cell.ep == 1),
    (Cell(tp=2, pp=2), "none", 2),
    (Cell(pp=2, dp=2, schedule="ZBVZeroBubble"), "none", 4),
    (Cell("qwen2", dp=2, zero=3), "none", 4),
    (MASKED[0][0], "right", 2),
]


@pytest.mark.parametrize(
    ("cell", "mask", "accumulate"), LAUNCHES, ids=lambda value: getattr(value, "name", str(value))
)
def test_the_host_launches_a_default_optimizer_before_it_waits(
    cell: Cell, mask: str, accumulate: int
) -> None:
    """After the last of several batches, too."""
    recipe = dataclasses.replace(cell.recipe, steps=STEPS)
    rows = min(cell.micro_batch, recipe.global_batch // cell.dp // accumulate)
    arguments = parity.strategy_arguments(cell) | {
        "accumulate": accumulate,
        "micro_batch_size": rows,
    }
    found = simulated_ranks.run(
        waits_before_the_launch, cell.world_size, recipe, mask, environment=LATE, **arguments
    )
    assert found == [0] * cell.world_size


def fused_in_a_run(optimizer: dict[str, Any], **strategy: Any) -> set[Any]:
    """`fused` of a `CausalLM`'s optimizer after a run of some steps."""
    from lightning_3d.strategy import Lightning3DStrategy

    rows = [{key: torch.arange(16) % 7 for key in ("input_ids", "labels")}] * 8
    plan = Lightning3DStrategy("dp2", micro_batch_size=2, **strategy)
    trainer = parity.quiet_trainer(strategy=plan, devices=2, max_steps=2)
    trainer.fit(CausalLM(MODEL, optimizer), datamodule=parity.Data(rows, 2))  # type: ignore[arg-type]
    return {group.get("fused") for group in trainer.optimizers[0].param_groups}


DEFAULTS: list[tuple[dict[str, Any], dict[str, Any], Any]] = [
    (OPTIMIZER, {"zero_stage": 1}, True),
    ({**OPTIMIZER, "fused": False}, {}, None),
    (OPTIMIZER, {"zero_stage": 1, "zero_offload": "optimizer"}, None),
    ({"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}, {}, True),
    ({"_target_": "torch.optim.Adagrad", "lr": 0.1, "weight_decay": 0.0}, {"zero_stage": 3}, True),
]


@pytest.mark.parametrize(("optimizer", "strategy", "fused"), DEFAULTS, ids=str)
def test_which_optimizers_are_fused(
    optimizer: dict[str, Any], strategy: dict[str, Any], fused: Any
) -> None:
    assert (
        simulated_ranks.run(fused_in_a_run, 2, optimizer, environment=LATE, **strategy)
        == [{fused}] * 2
    )


def train_with_noise(recipe: Recipe, **strategy: Any) -> parity.Part:
    """Kernels of the simulation always round alike, so each tensor-parallel rank adds another
    number to what all of them compute."""
    start = parity.Module.on_train_start

    def add_noise(module: Any) -> None:
        plan = module.trainer.strategy
        for name, parameter in module.named_parameters():
            if plan.specs[name].is_replicated(plan.mesh.size("tp")):
                # Not a hook of the parameter, which gets the gradient of all ranks.
                node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
                node.register_prehook(
                    lambda gradients: (gradients[0] + 1e-8 * plan.mesh.index("tp"),)
                )
                nodes.append(node)  # only the graph of a backward holds it otherwise
        start(module)

    nodes: list[Any] = []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity.Module, "on_train_start", add_noise)
        return parity.train_on_rank(
            recipe, **strategy, reliability={"check_replicas_every_n_steps": 1}
        )


@pytest.mark.parametrize(
    "cell", [Cell("qwen2", tp=2, zero=2), Cell(tp=2, zero=1)], ids=lambda cell: cell.name
)
def test_copies_stay_equal_whatever_kernels_do(cell: Cell) -> None:
    check(cell, fit=train_with_noise, sequence_parallel=False)


def registered(output: str) -> list[int]:
    """Bytes of each piece of host memory that was page-locked."""
    return [int(size) for size in re.findall(r"cudaHostRegister (\d+)", output)]


def test_page_locked_memory_is_as_large_as_what_is_copied(tmp_path: Path) -> None:
    """torch's own comes in powers of two. A save takes one piece for each rank."""
    environment = LATE | {"CUDASIM_LOG": "host"}
    ranks = simulated_ranks.attempt(
        simulated_fits.resumed, 2, "dp2", "dp2", str(tmp_path), environment=environment
    )
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].output[-2000:]
    for rank in ranks:
        sizes = registered(rank.output)
        assert len(sizes) == 1 and sizes[0] & (sizes[0] - 1), "one piece, not of a power of two"
        assert all(int(size) <= 4096 for size in re.findall(r"cudaHostAlloc (\d+)", rank.output)), (
            "torch's own, for single numbers"
        )


def test_offloaded_activations_come_back_before_they_are_needed() -> None:
    cell = Cell(dp=2)
    for needed, begun in simulated_ranks.run(
        simulated_fits.brought_back,
        2,
        cell.recipe,
        environment=LATE,
        **parity.strategy_arguments(cell),
    ):
        # of each micro-batch nothing is known before its backward begins
        of_last_block = needed / LAYERS
        assert needed > 0 and begun >= needed - 1.2 * of_last_block, (needed, begun)


def test_no_memory_is_locked_while_messages_go_from_gpu_to_gpu() -> None:
    [rank] = simulated_ranks.attempt(
        simulated_fits.locked_in_a_run, 1, environment=LATE | {"CUDASIM_LOG": "host"}
    )
    assert rank.result == [1 << 20, 1 << 20, 1 << 21], rank.output[-2000:]
    assert registered(rank.output) == [4 << 20]


def test_an_offloaded_tensor_that_is_written_in_place_is_named() -> None:
    [rank] = simulated_ranks.attempt(simulated_fits.written_in_place, 1, environment=LATE)
    assert rank.code and "Identity needs was changed in place" in rank.output, rank.output[-2000:]


def test_parameters_that_are_used_after_they_were_freed_are_named() -> None:
    simulated_ranks.run(simulated_fits.penalty, 2, "step", environment=LATE)
    for rank in simulated_ranks.attempt(simulated_fits.penalty, 2, "micro_batch", environment=LATE):
        assert rank.code and "used after zero_gather=micro_batch had freed them" in rank.output
