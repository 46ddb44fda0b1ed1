"""With gradients whose sums do not round, Muon on any shards has the bits of `torch.optim.Muon` on
one process.

Its iterations are in bfloat16, so that one wrong or differently rounded element of a momentum
changes all elements of the update.
"""

from typing import Any

import handmade_gradients as handmade
import pytest
import torch
from handmade_gradients import MODES, Run, full_shapes
from ranks import run_ranks
from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.parallel.zero.muon import MuonWithAdamW

STEPS = 4
LR, DECAY = 1e-2, 0.1
MATRICES = ("up.weight", "key.weight")


def gradient(name: str, weight: Tensor, step: int, micro_batch: int, use: str = "") -> Tensor:
    """Multiples of 1/16 below 8: a sum of some of them is exact in float32."""
    noise = handmade._noise(name + use, tuple(weight.shape), step + 1, micro_batch + 1)
    return (noise * 16).round().clamp(-127, 127).div(16).to(weight.dtype)


def by_torch(run: Run, named: dict[str, nn.Parameter]) -> tuple[Any, Any]:
    """torch's optimizers, as one that steps both; the learning rate falls."""
    muon = torch.optim.Muon(
        [p for name, p in named.items() if name.endswith(MATRICES)], lr=LR, weight_decay=DECAY
    )
    adamw = torch.optim.AdamW(
        [p for name, p in named.items() if not name.endswith(MATRICES)], lr=LR, weight_decay=0.0
    )
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.5**step) for each in (muon, adamw)
    ]

    class Both:
        def __init__(self, parts: list[Any]) -> None:
            self.parts = parts

        def step(self) -> None:
            for part in self.parts:
                part.step()

    return Both([muon, adamw]), Both(schedules)


def ours(run: Run, named: dict[str, nn.Parameter]) -> tuple[Any, Any]:
    matrices = [p for name, p in named.items() if name.endswith(MATRICES)]
    others = [p for name, p in named.items() if not name.endswith(MATRICES)]
    groups = [
        {"params": matrices, "algorithm": "muon", "weight_decay": DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = MuonWithAdamW(groups, lr=LR, betas=(0.9, 0.999), adjust_lr_fn="original")
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def train(run: Run) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handmade, "gradient", gradient)
        patch.setattr(handmade, "make_optimizer", ours)
        return handmade.train(run)


def assert_same_bits(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handmade, "gradient", gradient)
    monkeypatch.setattr(handmade, "make_optimizer", by_torch)
    expected, _ = handmade.reference(run)
    compared = set()
    for result in run_ranks(train, Layout.parse(run.layout).world_size, run):
        for name, weight in result["weights"].items():
            spec = result["specs"][name]
            wanted = spec.cut(expected[spec.tied_to or name]).to(weight.dtype)
            if name.endswith(MATRICES):
                assert torch.equal(weight, wanted), (
                    f"{name}: {(weight - wanted).abs().max().item():.1e}"
                )
                compared.add(name)
            else:
                torch.testing.assert_close(weight, wanted)
    assert len(compared) == sum(name.endswith(MATRICES) for name in full_shapes())


ON_DEVICE = [mode for mode in MODES if "off" not in mode and "host" not in mode]


@pytest.mark.parametrize(
    ("layout", "mode", "precision"),
    [
        ("tp2_dp2", "0", "fp64"),
        ("tp2_dp2", "2 eager", "fp32"),
        ("dp4", "1", "bf16"),
        *(
            pytest.param(layout, mode, precision, marks=pytest.mark.full)
            for layout in ("dp3", "tp2_dp2", "tp4", "tp2_pp2", "pp2_dp2")
            for mode in ON_DEVICE
            for precision in ("fp32", "bf16")
        ),
    ],
)
def test_the_bits_of_torch(
    layout: str, mode: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(layout, mode, precision, steps=STEPS, max_norm=None, late=layout != "dp3")
    assert_same_bits(run, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["1", "2 scattered", "3"])
def test_groups_of_neighbours_that_shard(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_bits(Run("dp4", mode, steps=STEPS, max_norm=None, shard=2), monkeypatch)


def test_a_step_in_host_memory_is_refused() -> None:
    run_ranks(refuse_offload, 1)


def refuse_offload() -> None:
    with pytest.raises(
        ConfigError,
        match="zero_offload moves the optimizer's step to host memory. Use zero_offload=none",
    ):
        train(Run("tp1", "1 offloaded", steps=1))


def test_one_process_without_a_strategy() -> None:
    """A stack of matrices is stepped as its matrices are; tall, wide and square ones."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 5), (5, 8), (6, 6), (3, 4, 7)]
    own = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    slices = [nn.Parameter(own[-1].detach()[index].clone()) for index in range(3)]
    theirs = [*(nn.Parameter(parameter.detach().clone()) for parameter in own[:-1]), *slices]
    ours_ = MuonWithAdamW([{"params": own, "algorithm": "muon"}], lr=LR, weight_decay=DECAY)
    muon = torch.optim.Muon(theirs, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    for _ in range(STEPS):
        for parameter in own:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        grads = [*(parameter.grad for parameter in own[:-1]), *own[-1].grad]  # type: ignore[misc]
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad
        ours_.step()
        muon.step()
    for parameter, wanted in zip(
        own, [*theirs[:3], torch.stack([each.detach() for each in slices])], strict=True
    ):
        assert torch.equal(parameter, wanted)


def test_vectors_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"a parameter in its groups has the shape \(3,\). Train it with AdamW"
    ):
        MuonWithAdamW([{"params": [nn.Parameter(torch.zeros(3))], "algorithm": "muon"}])


def test_groups_with_different_iterations_are_refused() -> None:
    matrices = [nn.Parameter(torch.eye(3)) for _ in range(2)]
    with pytest.raises(
        ConfigError, match=r"must have the same ns_steps; got 3 and 5\. Use ns_steps=5"
    ):
        MuonWithAdamW(
            [
                {"params": [each], "algorithm": "muon", "ns_steps": steps}
                for each, steps in zip(matrices, (5, 3), strict=True)
            ]
        )
    equal = MuonWithAdamW(
        [{"params": [matrix], "algorithm": "muon", "ns_steps": 3} for matrix in matrices]
    )
    equal.param_groups[1]["ns_steps"] = 4  # as a checkpoint may
    for matrix in matrices:
        matrix.grad = torch.ones(3, 3)
    with pytest.raises(ConfigError, match="got 3 and 4"):
        equal.step()
    adamw = nn.Parameter(torch.ones(3))
    MuonWithAdamW(
        [
            {"params": matrices, "algorithm": "muon", "ns_steps": 3},
            {"params": [adamw], "ns_steps": 5},
        ]
    )
