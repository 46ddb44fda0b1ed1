"""Contract tests for what `lightning_fetchers` uses of Lightning's data fetchers and combined
loaders. Tried with Lightning 2.6."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from lightning.pytorch.loops import evaluation_loop, fit_loop, prediction_loop
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from parity import quiet_trainer

from lightning_3d.compat.lightning_fetchers import JoinedFetcher, Reached, join_fetchers


class Stream:
    """Counts what was read of it."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        while self.read < self.end:
            self.read += 1
            yield self.read
        self.read = 0

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def fetcher_of(loaders: Any, mode: str = "max_size_cycle", agree: Any = None) -> JoinedFetcher:
    fetcher = JoinedFetcher(agree, resumes=True)
    fetcher.setup(CombinedLoader(loaders, mode))
    iter(fetcher)
    return fetcher


def read(fetcher: JoinedFetcher) -> list[Any]:
    """Read what is left, without another iterator."""
    batches = []
    while (found := next(fetcher, None)) is not None:
        batches.append(found[0])
    return batches


def test_a_position_is_that_of_the_next_batch_and_the_last_batch_is_known() -> None:
    fetcher = fetcher_of(Stream(3))
    places = [
        (batch, fetcher.done, fetcher.position["states"][0]["read"]) for batch, _, _ in fetcher
    ]
    assert places == [(1, False, 1), (2, False, 2), (3, True, 0)]


@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
def test_loaders_go_on_where_they_were(mode: str) -> None:

    def make() -> list[Any]:
        return [Stream(2), [10, 20, 30, 40, 50], Stream(4)]  # the second one cannot say where it is

    whole = read(fetcher_of(make(), mode))
    for done in range(1, len(whole)):
        first = fetcher_of(make(), mode)
        for _ in range(done):
            next(first)
        rest = fetcher_of(make(), mode)
        rest.restart(deepcopy(first.position), done)
        assert read(rest) == whole[done:], done


def test_an_epoch_ends_when_ranks_agree() -> None:
    places: list[Reached] = []

    def agree(reached: Reached) -> bool | None:
        places.append(reached)
        return True if reached.before == 1 else None

    fetcher = fetcher_of(Stream(5), agree=agree)
    assert [batch for batch, _, _ in fetcher][:2] == [1, 2] and fetcher.done
    assert places[:2] == [Reached(True, False, 0, 0), Reached(True, False, 0, 1)]


def test_only_loops_of_a_joined_trainer_have_the_fetcher() -> None:
    joined, other = quiet_trainer(), quiet_trainer()
    for trainer in (joined, other):
        trainer.strategy.connect(fit_loop.pl.LightningModule())
    join_fetchers(joined, None)
    for module, stage in (
        (fit_loop, "TRAINING"),
        (evaluation_loop, "TESTING"),
        (prediction_loop, "PREDICTING"),
    ):
        select: Any = vars(module)["_select_data_fetcher"]
        assert type(select(joined, RunningStage[stage])) is JoinedFetcher
        assert type(select(other, RunningStage[stage])) is _PrefetchDataFetcher
