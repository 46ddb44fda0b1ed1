"""`lightning_3d.planned`: the planner for a Trainer of one's own."""

import re
import warnings
from typing import Any

import pytest
import torch
import yaml
from command_line import REPOSITORY
from transformers import LlamaConfig

from lightning_3d import planned
from lightning_3d.app.training.module import CausalLM
from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.layout import Layout
from lightning_3d.strategy import Lightning3DStrategy

CONFIG = yaml.safe_load((REPOSITORY / "conf/model/llama3_1_8b.yaml").read_text())["config"]
LARGE: dict[str, Any] = {"cluster": "h100_1x8", "sequence_length": 4096, "global_batch_size": 64}


class Wrapped(torch.nn.Module):
    """Holds what a user's module holds before its model is built."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = LlamaConfig(
            **{name: value for name, value in CONFIG.items() if name != "model_type"}
        )


@pytest.mark.slow
def test_a_layout_is_chosen_for_a_configuration_a_module_and_a_dict() -> None:
    chosen = [
        planned(model, **LARGE, seed=3)
        for model in (CONFIG, Wrapped(), Wrapped().settings, CausalLM({"config": CONFIG}))
    ]
    assert all(one == chosen[0] for one in chosen)
    strategy = Lightning3DStrategy(**chosen[0])
    assert isinstance(strategy.layout, Layout) and strategy.layout.world_size == 8
    assert strategy.micro_batch_size == chosen[0]["micro_batch_size"] and chosen[0]["seed"] == 3


def test_what_is_given_is_not_searched() -> None:
    chosen = planned(CONFIG, **LARGE, zero_stage=1, recompute="full", micro_batch_size=2)
    assert (chosen["zero_stage"], chosen["recompute"], chosen["micro_batch_size"]) == (1, "full", 2)


@pytest.mark.slow
def test_what_does_not_fit_is_refused_on_gpus_unless_forced() -> None:
    small = {"layout": "dp8", "micro_batch_size": 4, "zero_stage": 1}
    with pytest.raises(
        LayoutError,
        match=(
            r"dp8 needs about [0-9.]+ GiB on its fullest rank, but NVIDIA H100 SXM has 74.5 GiB"
            r" \(80 GB\)"
        ),
    ):
        planned(CONFIG, **LARGE, **small)
    assert planned(CONFIG, **LARGE, **small, force=True) == small
    assert planned(CONFIG, **LARGE, layout="tp8", micro_batch_size=1) == {
        "layout": "tp8",
        "micro_batch_size": 1,
    }


@pytest.mark.slow
def test_a_choice_is_likely_to_fit_and_a_named_layout_that_is_not_is_warned_of() -> None:
    mixtral = yaml.safe_load((REPOSITORY / "conf/model/mixtral_8x7b.yaml").read_text())["config"]
    where: dict[str, Any] = {
        "cluster": "h100_4x8",
        "sequence_length": 4096,
        "global_batch_size": 512,
    }
    full = planned(mixtral, **where, memory_risk=0.5)
    assert full["layout"] != planned(mixtral, **where)["layout"]
    with pytest.warns(
        UserWarning,
        match=r"is predicted to fill 97% of 74.5 GiB on its fullest rank. That leaves [0-9.]+ GiB",
    ):
        assert planned(mixtral, **where, **full) == full
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            planned(mixtral, **where, **full, memory_risk=0.5)
            == planned(mixtral, **where, **full, force=True)
            == full
        )
    with pytest.raises(ConfigError, match="plan.memory_risk must be .*; got 2"):
        planned(mixtral, **where, memory_risk=2)


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ({}, {3}),
        ({"zero_overlap_gather": True}, {1, 2}),
        ({"zero_gather": "micro_batch"}, {3}),
        ({"zero_offload": "parameters"}, {3}),
    ],
)
def test_only_stages_that_have_the_options_that_are_set_are_proposed(
    options: dict[str, Any], stages: set[int]
) -> None:
    where: dict[str, Any] = {
        "cluster": "h100_1x8",
        "sequence_length": 4096,
        "global_batch_size": 64,
    }
    assert planned(CONFIG, **where, **options)["zero_stage"] in stages
    with pytest.raises(
        LayoutError, match="zero_overlap_gather=true needs zero_stage=1 or 2; got 3"
    ):
        planned(CONFIG, **where, zero_stage=3, zero_overlap_gather=True)


@pytest.mark.slow
def test_what_does_not_fit_is_refused_on_the_cpu_unless_forced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = {
        "sequence_length": 16,
        "global_batch_size": 8,
        "cluster": "local_cpu",
        "layout": "dp8",
        "precision": "fp32",
    }
    parameters = 8 * 8.03  # 10^9 of them, of all ranks
    # each has its weights, its gradients, all reduced ones in one buffer, and an eighth of the
    # moments and of a copy of the weights
    needed = parameters * (4 + 4 + 4) + 8.03 * 12
    monkeypatch.setattr("lightning_3d.app.planner.advice.available_memory", lambda: 0.98e9 * needed)
    with pytest.raises(
        LayoutError, match=r"dp8 needs about \d+\.\d GiB for its 8 ranks on this machine, but only"
    ) as caught:
        planned(CONFIG, **here, zero_stage=1)
    assert float(re.findall(r"([0-9.]+) GiB", str(caught.value))[0]) == pytest.approx(
        needed * 1e9 / 2**30, rel=0.02
    )
    assert planned(CONFIG, **here, zero_stage=1, force=True)["layout"] == "dp8"
    advised = re.search(r"zero_stage=(\d)", str(caught.value))
    assert advised and planned(CONFIG, **here, zero_stage=int(advised[1]))["layout"] == "dp8", (
        "what is advised is accepted"
    )
    monkeypatch.setattr("lightning_3d.app.planner.advice.available_memory", lambda: 1.02e9 * needed)
    assert planned(CONFIG, **here, zero_stage=1)["layout"] == "dp8"


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        (torch.nn.Linear(2, 2), {}, "Linear has none"),
        ({**CONFIG, "model_type": "abacus"}, {}, "does not know the model family 'abacus'"),
        (CONFIG, {"cluster": "h100_0x8"}, "cluster.nodes"),
        (CONFIG, {"cluster": "abacus_1x8"}, "abacus"),
        (CONFIG, {"cluster": "local"}, "because its GPUs are unknown"),
        (CONFIG, {"global_batch_size": 0}, "global_batch_size"),
        (CONFIG, {"precision": "bf17"}, "bf17"),
    ],
)
def test_refusals(model: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, LayoutError), match=said):
        planned(model, **{**LARGE, **changes})


def test_auto_alone_says_what_it_needs() -> None:
    with pytest.raises(LayoutError, match=r"Lightning3DStrategy\(\*\*lightning_3d.planned\(module"):
        Lightning3DStrategy("auto")
