"""How often and how much is communicated: counted in real training steps, and asserted exactly."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import models
import pytest
from counting import Call, Recorder, recording
from parity import Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data
from sweeps import by_default
from torch.utils.data import DataLoader

from lightning_3d.layout import Layout
from lightning_3d.options.blocks import SUPPORTED

ROWS = 16  # per data-parallel rank and step
HIDDEN = models.COMMON["hidden_size"]


def activation(micro_batch: int) -> int:
    """Elements of the hidden states of one micro-batch."""
    return micro_batch * models.SEQUENCE * HIDDEN


@dataclass(frozen=True)
class Counted:
    """Calls of one rank in its second training step and in one validation batch, and where the rank
    stands."""

    training: list[Call]
    validation: list[Call]
    groups: dict[str, tuple[int, ...]]
    parameters: int

    def of(
        self, axis: str, *names: str, numel: int | None = None, validation: bool = False
    ) -> list[Call]:
        recorder = Recorder()
        recorder.calls = self.validation if validation else self.training
        return recorder.over(self.groups[axis], *names, numel=numel)


class Evaluated(Module):
    """Validation is the same forward as training."""

    def validation_step(self, batch: models.Batch, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def count_step(layers: int, zero_stage: int = 0, model: str = "llama", **strategy: Any) -> Counted:
    """Record the second of two optimizer steps: in the first, shapes and log names are agreed
    upon."""
    from lightning_3d.strategy import Lightning3DStrategy

    # Without the proof of the loss, which runs the model again in the second step.
    plan = Lightning3DStrategy(zero_stage=zero_stage, self_check="never", **strategy)
    assert plan.layout is not None
    recipe = Recipe(model, layers=layers, steps=4, global_batch=ROWS * plan.layout.dp)
    trainer = quiet_trainer(
        strategy=plan,
        devices=plan.layout.world_size,
        max_steps=2,
        max_epochs=1,
        gradient_clip_val=recipe.clip,
    )
    module = Evaluated(recipe)
    loader = DataLoader(Rows(data(recipe)), batch_size=ROWS)
    # Lightning runs the training step inside the optimizer step, as its closure.
    training, validation = (
        _record_latest(plan, "optimizer_step"),
        _record_latest(plan, "validation_step"),
    )
    trainer.fit(module, loader)
    trainer.validate(module, loader, verbose=False)
    assert plan.mesh is not None
    groups = {axis: plan.mesh.ranks(axis) for axis in ("tp", "pp", "dp")}
    counted = sum(parameter.numel() for parameter in module.parameters())
    return Counted(training.calls, validation.calls, groups, counted)


def _record_latest(strategy: Any, hook: str) -> Recorder:
    """What the latest call of a strategy's hook communicated."""
    latest, method = Recorder(), getattr(strategy, hook)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        with recording() as recorder:
            result = method(*args, **kwargs)
        latest.calls = recorder.calls
        return result

    setattr(strategy, hook, recorded)
    return latest


@pytest.mark.slow
@pytest.mark.parametrize("model_layers", by_default([2, 4], 0))
def test_a_block_costs_two_all_reduces_forward_and_two_backward(model_layers: int) -> None:
    """Beside the blocks: the vocabulary-parallel embedding (forward) and the head's input
    (backward) cost one each."""
    micro_batches = 4
    options: dict[str, Any] = {
        "layout": "tp2",
        "micro_batch_size": ROWS // micro_batches,
        "sequence_parallel": False,
    }
    for counted in run_ranks(count_step, 2, model_layers, **options):
        size = activation(ROWS // micro_batches)
        forward = len(counted.of("tp", "all_reduce", numel=size, validation=True))
        both = len(counted.of("tp", "all_reduce", numel=size))
        assert forward == micro_batches * (2 * model_layers + 1)
        assert both - forward == micro_batches * (2 * model_layers + 1)
        assert not counted.of(
            "tp", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"
        )


def test_the_loss_never_gathers_the_vocabulary() -> None:
    """Cross-entropy sends a few numbers per token, not one per token and vocabulary entry."""
    tokens = 4 * models.SEQUENCE
    for counted in run_ranks(
        count_step, 2, 2, layout="tp2", micro_batch_size=4, sequence_parallel=False
    ):
        others = [call.numel for call in counted.of("tp") if call.numel not in (activation(4), 0)]
        assert max(others) <= 4 * tokens


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", by_default([0, 1], 1))
def test_gradients_are_reduced_once_whatever_the_number_of_micro_batches(zero_stage: int) -> None:
    counts = {}
    for micro_batches in (1, 16):
        arguments: dict[str, Any] = {
            "layout": "dp2",
            "micro_batch_size": ROWS // micro_batches,
            "zero_stage": zero_stage,
        }
        counted = run_ranks(count_step, 2, 2, **arguments)[0]
        counts[micro_batches] = Counter((call.name, call.numel) for call in counted.of("dp"))
        reduced = sum(
            call.numel
            for call in counted.of(
                "dp", "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"
            )
        )
        # and a few numbers: loss, norm, padding
        assert counted.parameters <= reduced <= counted.parameters + 64
    assert counts[1] == counts[16]


@pytest.mark.parametrize(
    ("pp", "schedule", "crossings"),
    by_default(
        [
            (2, "GPipe", 1),
            (2, "1F1B", 1),
            (4, "1F1B", 3),
            (2, "Interleaved1F1B", 3),
            (2, "LoopedBFS", 3),
            (2, "InterleavedZeroBubble", 3),
            # of three boundaries, the one at the bottom of the V stays on its rank
            (2, "ZBVZeroBubble", 2),
            (2, "DualPipeV", 2),
        ],
        1,
        6,
    ),
)
def test_each_boundary_carries_an_activation_and_its_gradient(
    pp: int, schedule: str, crossings: int
) -> None:
    micro_batch, element = 2, 4  # rows, bytes
    counted = run_ranks(
        count_step, pp, 4, layout=f"pp{pp}", schedule=schedule, micro_batch_size=micro_batch
    )
    sent = [call for rank in counted for call in rank.training if call.name in ("send", "isend")]
    assert all(call.numel == activation(micro_batch) for call in sent)
    expected = 2 * activation(micro_batch) * element * crossings * (ROWS // micro_batch)
    assert sum(call.bytes for call in sent) == expected


def count_step_over_gloo(*arguments: Any, **strategy: Any) -> Counted:
    """As `count_step`, where the strategy knows that these ranks communicate through gloo
    (`tests/support/preloaded.py`)."""
    from lightning_3d.parallel import gloo_exchange
    from lightning_3d.parallel.tensor import sequence_parallel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence_parallel, "uses_gloo", gloo_exchange.uses_gloo)
        return count_step(*arguments, **strategy)


@pytest.mark.slow
def test_over_gloo_a_region_costs_two_sums_unless_sequence_parallelism_is_asked_for() -> None:
    options: dict[str, Any] = {"layout": "tp2", "micro_batch_size": ROWS}
    parts = ("all_gather_into_tensor", "reduce_scatter_tensor")
    [by_default, *_] = run_ranks(count_step_over_gloo, 2, 2, **options)
    assert len(by_default.of("tp", "all_reduce", numel=activation(ROWS))) == 2 * (
        2 * 2 + 1
    ) and not by_default.of("tp", *parts)
    [asked, *_] = run_ranks(count_step_over_gloo, 2, 2, **options, sequence_parallel=SUPPORTED)
    assert len(asked.of("tp", *parts)) == 2 * 10 + 2, (
        "ten in each layer, and to split and to gather the sequence"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "share"), by_default([(2, True, 2), (4, True, 4), (2, False, 1)], 0)
)
def test_a_boundary_carries_a_part_of_the_sequence(
    tp: int, sequence_parallel: bool, share: int
) -> None:
    micro_batch, layout = 2, f"tp{tp}_pp2"
    counted = run_ranks(
        count_step,
        2 * tp,
        2,
        layout=layout,
        micro_batch_size=micro_batch,
        sequence_parallel=sequence_parallel,
    )
    for rank in counted:
        sent = [call.numel for call in rank.training if call.name in ("send", "isend")]
        assert sent == [activation(micro_batch) // share] * (ROWS // micro_batch)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", by_default([True, False], 0))
def test_a_routed_token_travels_once_to_its_expert_and_once_back(sequence_parallel: bool) -> None:
    """Whatever tensor-parallel ranks hold alike. With parts of the sequence a mixture gathers
    nothing; attention does, and the head."""
    layers, choices, experts, micro_batches, data_ranks = 3, 2, 8, 4, 2
    options: dict[str, Any] = {
        "layout": "tp2_ep4_dp2",
        "micro_batch_size": ROWS // micro_batches,
        "sequence_parallel": sequence_parallel,
    }
    ranks = run_ranks(count_step, 4, layers, model="mixtral", **options)
    pairs = data_ranks * ROWS * models.SEQUENCE * choices
    for ways, calls in (
        (2, [rank.validation for rank in ranks]),
        (4, [rank.training for rank in ranks]),
    ):
        dealt = [
            [call.numel for call in of_rank if call.name == "all_to_all_single"]
            for of_rank in calls
        ]
        # and the counts, one number for each expert
        assert all(len(sent) == layers * micro_batches * (ways + 1) for sent in dealt)
        assert (
            sum(map(sum, dealt))
            == ways * layers * pairs * HIDDEN + len(ranks) * layers * micro_batches * experts
        )
    for rank in ranks if sequence_parallel else ():
        part = activation(ROWS // micro_batches) // 2
        assert len(
            rank.of("tp", "all_gather_into_tensor", numel=part, validation=True)
        ) == micro_batches * (layers + 1)
        assert (
            len(rank.of("tp", "reduce_scatter_tensor", validation=True)) == micro_batches * layers
        )


@pytest.mark.slow
@pytest.mark.parametrize("layout", by_default(["cp2", "tp2_cp2", "cp4"], 1))
def test_a_ring_moves_the_keys_of_other_ranks_once(layout: str) -> None:
    """2 * (cp - 1) / cp of the bytes of a rank's key heads, forward; tensor-parallel ranks have
    some of the heads."""
    layers, micro_batches, element = 3, 4, 4
    config, degrees = models.build("llama", 1).config, Layout.parse(layout)
    key_heads, cp = config.num_key_value_heads // degrees.tp, degrees.cp
    ranks = run_ranks(
        count_step,
        degrees.world_size,
        layers,
        layout=layout,
        micro_batch_size=ROWS // micro_batches,
    )
    keys = (
        ROWS
        * models.SEQUENCE
        * key_heads
        * (config.hidden_size // config.num_attention_heads)
        * element
    )
    for rank in ranks:
        assert (
            sum(call.bytes for call in rank.validation if call.name == "isend")
            == layers * 2 * keys * (cp - 1) // cp
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    by_default(
        [
            {"zero_stage": 0},
            {"zero_stage": 1},
            {"zero_stage": 1, "zero_reduce_scatter": True},
            {"zero_stage": 2},
            {"zero_stage": 3},
            {"zero_stage": 3, "zero_gather": "step", "zero_reduce_scatter": True},
        ],
        2,
        4,
    ),
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_finished_stage_is_reduced_while_others_compute(options: dict[str, Any]) -> None:
    """The last stage of a pipeline rank is complete first: its gradients are on their way before
    the other stage's backward ends, and data ranks send the same in the same order."""
    ranks = run_ranks(
        count_step,
        4,
        4,
        layout="pp2_dp2",
        schedule="Interleaved1F1B",
        micro_batch_size=4,
        zero_reduce="step",
        **options,
    )
    sent: dict[tuple[int, ...], list[Any]] = {}
    for place, counted in enumerate(ranks):
        calls = counted.training
        reductions = [
            index
            for index, call in enumerate(calls)
            if call.ranks == counted.groups["dp"]
            and call.name in ("all_reduce", "reduce", "reduce_scatter_tensor")
            and call.numel > 1000
        ]
        if place % 2 == 1:  # the second pipeline rank ends with sending a gradient to the first
            last_message = max(
                index for index, call in enumerate(calls) if call.name in ("send", "isend")
            )
            assert reductions[0] < last_message < reductions[-1]
        sent.setdefault(counted.groups["dp"], []).append(
            [(calls[index].name, calls[index].numel) for index in reductions]
        )
    assert all(one == other for one, other in sent.values())


ALONE: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "tp2", {}),
    ("llama", "pp2", {"micro_batch_size": 4}),
    ("llama", "cp2", {}),
    ("llama", "dp2", {}),
    ("mixtral", "tp2_ep2", {}),
    ("mixtral", "dp2_ep2", {}),
]


def calls_alone(zero_stage: int) -> list[tuple[str, str, list[Call]]]:
    """For each layout, the calls of a step over groups of one rank, with the default of CUDA for
    gradients."""
    found = []
    for model, layout, options in ALONE:
        scatters = {} if zero_stage == 0 else {"zero_reduce_scatter": True}
        counted = count_step(2, zero_stage, model, layout=layout, **scatters, **options)
        found.append(
            (
                model,
                layout,
                [call for call in (*counted.training, *counted.validation) if len(call.ranks) == 1],
            )
        )
    return found


@pytest.mark.parametrize(
    "zero_stage", [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2, 3))]
)
def test_a_rank_alone_sends_nothing(zero_stage: int) -> None:
    for calls in run_ranks(calls_alone, 2, zero_stage, process_group=False):
        assert calls and not any(of_layout for _, _, of_layout in calls), calls


def test_one_rank_sends_nothing() -> None:
    [calls] = run_ranks(
        count_step, 1, 2, 1, layout="dp1", zero_reduce_scatter=True, process_group=False
    )
    assert not [call for call in calls.training if call.numel], calls
