"""What a run costs a GPU beside its tensors: communicators, and waits of the host for the device."""

from __future__ import annotations

import re

import parity
import pytest
import simulated_ranks
from parity import Cell
from simulated_parity import LATE

COMMUNICATORS = {
    Cell(tp=2, pp=2, dp=2): 7,  # world, tp, dp, tp+pp, pp+dp, and one for the messages of each direction
    Cell("qwen2", tp=2, pp=2, dp=2, zero=2): 8,  # and one for the tied weights of the first and the last stage
    Cell(tp=2, pp=2, cp=2): 7,
    Cell("mixtral", tp=2, pp=2, dp=2, ep=2): 7,
    Cell("qwen2", tp=2, dp=2, zero=3): 3,
    Cell("qwen2", dp=2, zero=1): 1,
}


@pytest.mark.parametrize("cell", COMMUNICATORS, ids=lambda cell: cell.name)
def test_communicators(cell: Cell) -> None:
    """Each holds some hundred MB of a GPU. None is made for a single rank."""
    arguments = parity.strategy_arguments(cell)
    environment = LATE | {"CUDASIM_LOG": "nccl"}
    ranks = simulated_ranks.attempt(parity.train_on_rank, cell.world_size, cell.recipe, environment=environment, **arguments)
    assert [rank.code for rank in ranks] == [0] * cell.world_size, ranks[0].output[-2000:]
    for rank in ranks:
        made = re.findall(r"\] communicator \S+ \(ranks ([^)]*)\)", rank.output)
        assert len(made) <= COMMUNICATORS[cell], made
        assert all(" " in members for members in made), made
