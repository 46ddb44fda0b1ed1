"""The benchmarks compare equal work and count it right; the times themselves are nobody's test."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import peers
import peers_worker as worker
from measure import Contender, cores


def test_the_chain_of_layers_for_deepspeed_is_the_same_model() -> None:
    torch.manual_seed(0)
    model = worker.llama()
    chain = torch.nn.Sequential(*(kind(*arguments) for kind, arguments in worker.sequential_llama()))
    assert worker.count(chain) == worker.count(model)
    names = {
        "0.weight": "model.embed_tokens.weight",
        "9.norm.weight": "model.norm.weight",
        "9.linear.weight": "lm_head.weight",
    }
    weights = model.state_dict()
    chain.load_state_dict(
        {name: weights[names.get(name, f"model.layers.{int(name[0]) - 1}{name[1:]}")] for name in chain.state_dict()}
    )
    rows = next(worker.micro_batches(1))
    expected = model(input_ids=rows, labels=rows).loss
    torch.testing.assert_close(worker.next_token_loss(chain(rows), rows), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_data_ranks_share_the_rows_of_every_step(dp: int) -> None:
    dealt = [torch.cat(list(worker.micro_batches(2, rank, dp))).split(worker.GLOBAL_BATCH // dp) for rank in range(dp)]
    for step, expected in enumerate(worker.all_rows(2).split(worker.GLOBAL_BATCH)):
        together = torch.stack([rows[step] for rows in dealt], dim=1).flatten(0, 1)
        assert torch.equal(together, expected)


def test_a_contender_takes_one_step_when_it_is_told_to() -> None:
    with Contender("plain", "tp1", 1, steps=3) as contender:
        assert all(contender.step() > 0 for _ in range(2))
        with pytest.raises(RuntimeError, match="plain tp1: rank 0 waits"):
            contender.step(timeout=0)


def test_a_contender_that_fails_says_why() -> None:
    with Contender("nobody", "tp1", 1, steps=3) as contender, pytest.raises(RuntimeError, match="invalid choice: 'nobody'"):
        contender.step()


def test_the_table_shows_the_median_of_the_ratios_within_rounds() -> None:
    race = peers.RACES[0]
    rounds = [
        {"plain tp1": [4.0], "deepspeed_pipeline pp2_dp2": [theirs], "ours pp2_dp2": [mine, mine, 99.0]}
        for theirs, mine in ((2.0, 1.8), (20.0, 16.0), (2.0, 2.2))
    ]
    row = peers.row(race, rounds).split()
    assert row[:2] == ["pp2_dp2", "DeepSpeed"]
    fractions = [f"{4 / seconds / cores():.0%}" for seconds in (2.0, 2.2)]
    assert row[-7:] == ["2.000", "2.200", "0.900", "1.00", *fractions, f"{4 / cores():.3f}"]
