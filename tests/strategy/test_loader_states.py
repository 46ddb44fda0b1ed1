"""Loaders that know their position resume on every data-parallel rank at its next batch, and
streams end on all ranks together."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from parity import quiet_trainer
from ranks import run_ranks
from sweeps import by_default
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from lightning_3d.errors import DataError
from lightning_3d.layout import Layout
from lightning_3d.strategy import Lightning3DStrategy

STEPS = 14
Read = tuple[int, list[list[float]], float]


class Documents:
    """A stream of a rank's own documents: rank r takes r + 1 for a batch. A pass has `batches`; the
    next one goes on where it ended."""

    def __init__(self, rank: int, batches: int) -> None:
        self.rank = rank
        self.batches = batches
        self.state = {"next": 0, "last": [0]}

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.batches):
            first = self.state["next"]
            self.state["next"] += self.rank + 1
            self.state["last"].append(first)  # changed in place: a saved state must be a copy
            yield torch.tensor([[float(first)], [float(self.rank)]])

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Sized(Documents):
    def __len__(self) -> int:
        return self.batches


class Passes(Documents):
    """A stream without a length that begins again after its last document."""

    def __iter__(self) -> Iterator[Tensor]:
        while self.state["next"] < self.batches * (self.rank + 1):
            yield next(iter(Documents.__iter__(self)))
        self.state["next"] = 0


class Alike(Passes):
    """The same batches on all ranks."""

    def __init__(self, rank: int, batches: int) -> None:
        super().__init__(0, batches)


class Dealt(Sized):
    """A stream that other ranks can take over: all of them together have read what the states of
    the ranks count."""

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        self.state = {"next": sum(state["next"] for state in states), "last": []}


class Numbers(Dataset):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Rows(IterableDataset):
    """A stream that cannot say where it is."""

    def __init__(self, rank: int, rows: int) -> None:
        self.rank = rank
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        yield from (torch.tensor([100.0 * self.rank + row]) for row in range(self.rows))


def shuffled(batches: int) -> DataLoader:
    return DataLoader(Numbers(4 * batches), 2, shuffle=True)


class Pairs(BatchSampler):
    """A batch sampler of one's own."""


KINDS: dict[str, Callable[[int], Any]] = {
    "sized": lambda rank: Sized(rank, 6),
    "endless": lambda rank: Documents(rank, 1000),
    "passes": lambda rank: Passes(rank, 6),
    "rows": lambda rank: DataLoader(Rows(rank, 12), 2),
    "shuffled": lambda rank: shuffled(6),
    "batch sampler": lambda rank: DataLoader(
        Numbers(24), batch_sampler=Pairs(RandomSampler(range(24)), 2, False)
    ),
    "beside a shorter plain loader": lambda rank: {"plain": shuffled(3), "own": Sized(rank, 6)},
    "beside a longer plain loader": lambda rank: [shuffled(6), Sized(rank, 3)],
    "as long as the shorter": lambda rank: CombinedLoader(
        [shuffled(6), Sized(rank, 9)], "min_size"
    ),
    "none after the shorter": lambda rank: CombinedLoader(
        [shuffled(6), Passes(rank, 3)], "max_size"
    ),
    "two streams": lambda rank: (Passes(rank, 4), Passes(rank + 5, 6)),
}


class Net(nn.Module):
    """A model for any layout."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(1, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.leave = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


PLAN = {
    "tp": {},
    "pp": {"enter": (["x"], ["h"]), "blocks": (["h"], ["h"]), "leave": (["h"], ["y"])},
}


class Script(pl.LightningModule):
    """Keeps what this rank reads, and the losses."""

    def __init__(self, make: Callable[[int], Any], asks: bool) -> None:
        super().__init__()
        self.net = Net()
        self.make = make
        self.asks = asks
        self.seen: list[Read] = []

    def train_dataloader(self) -> Any:
        return self.make(self.trainer.distributed_sampler_kwargs["rank"])

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Numbers(4), 2)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = [leaf for leaf in tree_leaves(batch) if leaf is not None]
        return self.net(torch.stack(rows).sum(0) / 100).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rows = [leaf.flatten().tolist() for leaf in tree_leaves(batch) if leaf is not None]
        self.seen.append((batch_idx, rows, outputs["loss"].item()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        if not self.asks:
            return optimizer
        assert self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer)]


class Save(pl.Callback):
    """Saves once, in a hook of the step."""

    def __init__(self, path: str, hook: str, step: int) -> None:
        self.path = path
        self.step = step
        setattr(self, hook, self.save)

    def save(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(
    kind: str,
    layout: str,
    hook: str = "",
    step: int = 0,
    path: str = "",
    resume: bool = False,
    asks: bool = False,
) -> list[Read]:
    """Return what this rank read in a fit that is saved in `hook` after `step`, or that ends there
    ("end"), or that resumes."""
    pl.seed_everything(0, verbose=False)
    module = Script(KINDS[kind], asks)
    ends = hook == "end"
    trainer = quiet_trainer(
        strategy=Lightning3DStrategy(layout, plan=PLAN),
        devices=Layout.parse(layout).world_size,
        max_steps=step if ends else STEPS,
        max_epochs=4,
        callbacks=[Save(path, hook, step)] if hook and not ends else [],
    )
    trainer.fit(module, ckpt_path=path if resume else None)
    if ends:
        trainer.save_checkpoint(path)
    return module.seen


def resumed(
    kinds: list[str], layout: str, hook: str, step: int, folder: str
) -> list[tuple[str, list[Read], list[Read]]]:
    """For each kind of loader, what this rank reads after `step` without a break, and in a fit that
    resumes there."""
    found = []
    for index, kind in enumerate(kinds):
        path = f"{folder}/{hook}{index}"
        asks = index % 2 == 0
        whole = fit(kind, layout, asks=asks)
        fit(kind, layout, hook, step, path, asks=asks)
        found.append((kind, whole[step:], fit(kind, layout, path=path, resume=True, asks=asks)))
    return found


def require_resumed(kinds: list[str], layout: str, hook: str, step: int, folder: Path) -> None:
    found = run_ranks(
        resumed,
        Layout.parse(layout).world_size,
        kinds,
        layout,
        hook,
        step,
        str(folder),
        process_group=False,
    )
    for rank, parts in enumerate(found):
        for kind, expected, read in parts:
            assert len(expected) == STEPS - step and read == expected, (rank, kind)


def test_loaders_go_on_at_the_next_batch_of_their_rank(tmp_path: Path) -> None:
    require_resumed(
        ["sized", "passes", "beside a shorter plain loader"],
        "dp2",
        "on_train_batch_end",
        8,
        tmp_path,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "hook", "step"),
    by_default(
        [
            ("dp2", "on_train_batch_end", 4),
            ("dp2", "end", 9),
            ("dp2", "on_train_epoch_end", 6),
            ("dp2", "on_validation_end", 6),
            ("dp2", "end", 6),
            ("pp2_dp2", "on_train_batch_end", 10),
            ("dp1", "end", 8),
        ],
        0,
        2,
        5,
    ),
)
def test_loaders_of_all_kinds_go_on_at_the_next_batch(
    layout: str, hook: str, step: int, tmp_path: Path
) -> None:
    kinds = list(KINDS)
    if hook == "on_train_epoch_end":
        kinds.remove("endless")
    require_resumed(kinds, layout, hook, step, tmp_path)


def resume_elsewhere(
    make: type[Documents], layout: str, path: str, steps: int
) -> list[list[float]]:
    """Return the documents that this rank reads until `steps`."""
    KINDS["elsewhere"] = lambda rank: make(rank, 1000)
    module = Script(KINDS["elsewhere"], asks=False)
    resume = Path(path).exists()
    trainer = quiet_trainer(
        strategy=Lightning3DStrategy(layout, plan=PLAN),
        devices=Layout.parse(layout).world_size,
        max_steps=steps,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return [rows[0] for _, rows, _ in module.seen]


@pytest.mark.parametrize(("make", "expected"), [(Alike, [3.0, 4.0]), (Dealt, [9.0, 10.0])])
def test_another_number_of_data_ranks_resumes_what_it_can(
    make: type[Documents], expected: list[float], tmp_path: Path
) -> None:
    run_ranks(resume_elsewhere, 2, make, "dp2", str(tmp_path / "three"), 3, process_group=False)
    (found,) = run_ranks(
        resume_elsewhere, 1, make, "dp1", str(tmp_path / "three"), 5, process_group=False
    )
    assert [first for first, _ in found] == expected


def test_another_number_of_data_ranks_is_refused_where_states_differ(tmp_path: Path) -> None:
    run_ranks(resume_elsewhere, 2, Sized, "dp2", str(tmp_path / "three"), 3, process_group=False)
    with pytest.raises(DataError, match="dp=1.*dp=2"):
        run_ranks(
            resume_elsewhere, 1, Sized, "dp1", str(tmp_path / "three"), 5, process_group=False
        )


class Uneven(Script):
    """Ranks have different numbers of batches."""

    def test_dataloader(self) -> Any:
        return self.train_dataloader()

    predict_dataloader = val_dataloader = test_dataloader

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.net(batch).mean(), sync_dist=True)

    validation_step = test_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)


def run_uneven(
    what: str, layout: str, by_global_rank: bool = False, **options: Any
) -> tuple[int, int, list[str]]:
    """Return how many batches this rank ran, the steps, and the warnings."""
    strategy = Lightning3DStrategy(layout, plan=PLAN, **options)
    validates = 1.0 if what == "validate" else 0
    trainer = quiet_trainer(
        strategy=strategy,
        devices=Layout.parse(layout).world_size,
        max_epochs=2,
        limit_val_batches=validates,
    )

    def make(rank: int) -> DataLoader:
        return DataLoader(Rows(rank, 4 + 4 * (trainer.global_rank if by_global_rank else rank)), 2)

    module = Uneven(make, asks=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = getattr(trainer, what)(module)
    ran = len(module.seen) if what == "fit" else len(found or [])
    return ran, trainer.global_step, [str(warning.message) for warning in caught]


def test_an_epoch_of_streams_ends_with_the_shortest_and_a_prediction_with_each() -> None:
    found = run_ranks(run_uneven, 2, "fit", "dp2", process_group=False)
    assert [(ran, steps) for ran, steps, _ in found] == [(4, 4), (4, 4)]  # two epochs
    assert any("limit_train_batches=2" in warning for warning in found[0][2])
    predicted = run_ranks(run_uneven, 2, "predict", "dp2", process_group=False)
    assert [ran for ran, _, _ in predicted] == [2, 4]


@pytest.mark.parametrize(
    ("what", "layout", "options"),
    by_default(
        [
            ("test", "dp2", {}),
            ("validate", "dp2", {}),
            ("predict", "dp2", {"zero_stage": 3}),
            ("fit", "pp2", {"by_global_rank": True}),
        ],
        0,
        3,
    ),
)
def test_results_of_a_part_of_the_data_are_refused(
    what: str, layout: str, options: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match="2 .* batches"):
        run_ranks(run_uneven, 2, what, layout, process_group=False, **options)
