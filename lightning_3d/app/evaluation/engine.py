"""Scores and next tokens of rows of any length, in any layout. All ranks call with the same rows
and get the same results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.app.training.data.documents import IGNORE_INDEX
from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout
from lightning_3d.strategy.strategy import Lightning3DStrategy

PADDING = 0
"""Token after the end of a row. Causal attention never sees it."""


class EvaluationEngine:
    """The evaluation forward of a strategy, for rows of token ids. Collective.

    Rows are padded at their end, to a length that context- and tensor-parallel ranks can split.
    Data-parallel ranks share the rows.

    Args:
        trainer: the trainer, in the stage of prediction, with a `CausalLM` in evaluation mode.
        max_length: tokens that the model takes; None: any number.

    Attributes:
        batch: rows of one forward, over all data-parallel ranks.
    """

    def __init__(self, trainer: pl.Trainer, max_length: int | None) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, Lightning3DStrategy)
        self._strategy, self.max_length = strategy, max_length
        layout = strategy.mesh.layout
        self._dp, self._place = layout.dp, strategy.mesh.index("dp")
        self._unit = padding_unit(layout)
        self.batch = (strategy.micro_batch_size or 1) * layout.pp * layout.dp

    def score(self, rows: Sequence[tuple[Sequence[int], int]]) -> list[tuple[float, bool]]:
        """Score the ends of rows.

        Args:
            rows: (tokens, number of tokens at the end that are scored) of each row; at most
                `max_length + 1` tokens, because the last one is only predicted.

        Returns:
            The log-probability of these tokens, given those before them, and whether each of them
            is the most probable one.
        """
        results: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        longest_first = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]))
        for chosen in _batches(longest_first, self.batch):
            mine = [rows[index] for index in self._share(chosen)]
            length = self._padded(len(rows[chosen[0]][0]) - 1)
            inputs, targets = torch.full((2, len(mine), length), PADDING)
            targets.fill_(IGNORE_INDEX)
            for row, (tokens, scored) in enumerate(mine):
                inputs[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
                targets[row, len(tokens) - 1 - scored : len(tokens) - 1] = torch.tensor(
                    tokens[len(tokens) - scored :]
                )
            found = self._gather(self._predict({"input_ids": inputs, "targets": targets}))
            for index, (total, greedy) in zip(chosen, found.tolist(), strict=False):
                results[index] = total, bool(greedy)
        return results

    def next_logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Compute the logits of the token after each row: (rows, vocabulary), on the CPU, in
        float32 or wider.

        Raises:
            ConfigError: a row is longer than the model takes.
        """
        longest = max(len(row) for row in rows)
        if self.max_length is not None and longest > self.max_length:
            raise ConfigError(
                f"The text has {longest} tokens, and the model takes at most {self.max_length}. Use"
                " fewer."
            )
        found = []
        for chosen in _batches(range(len(rows)), self.batch):
            mine = [rows[index] for index in self._share(chosen)]
            inputs = torch.full((len(mine), self._padded(longest)), PADDING)
            for place, tokens in enumerate(mine):
                inputs[place, : len(tokens)] = torch.tensor(tokens)
            last = torch.tensor([len(tokens) - 1 for tokens in mine])
            found.append(
                self._gather(self._predict({"input_ids": inputs, "last": last}))[: len(chosen)]
            )
        logits = torch.cat(found).cpu()
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def agree(self, tokens: list[int]) -> list[int]:
        """Return the tokens of rank 0 on every rank: replicas may round differently."""
        shared = torch.tensor(tokens, device=self._strategy.root_device)
        if dist.is_initialized():
            dist.broadcast(shared, 0)
        return [int(token) for token in shared.tolist()]

    def broadcast(self, what: Any) -> Any:
        """Return the object of rank 0 on every rank, through host memory. Other ranks may pass
        anything."""
        shared = [what]
        if dist.is_initialized():
            dist.broadcast_object_list(shared, 0, group=self._strategy.mesh.world_control)
        return shared[0]

    def _share(self, chosen: Sequence[int]) -> list[int]:
        """Return the part of this data-parallel rank, of the same size on all of them: the last one
        is repeated."""
        mine = list(chosen[self._place :: self._dp]) or [chosen[0]]
        return mine + [mine[-1]] * (-(-len(chosen) // self._dp) - len(mine))

    def _padded(self, length: int) -> int:
        return -(-length // self._unit) * self._unit

    @property
    def longest(self) -> int | None:
        """Tokens of the longest row that the model takes after padding, which may need positions
        too; None: any number."""
        return None if self.max_length is None else longest_row(self.max_length, self._unit)

    def _predict(self, batch: dict[str, Tensor]) -> Tensor:
        moved = {name: tensor.to(self._strategy.root_device) for name, tensor in batch.items()}
        result = self._strategy.predict_step(moved, 0)
        assert isinstance(result, Tensor)
        return result

    def _gather(self, mine: Tensor) -> Tensor:
        """Gather the rows of all data-parallel ranks, in the order in which they were dealt."""
        if self._dp == 1:
            return mine
        parts = [torch.empty_like(mine) for _ in range(self._dp)]
        dist.all_gather(parts, mine.contiguous(), group=self._strategy.mesh.group("dp"))
        return torch.stack(parts, 1).flatten(0, 1)


def padding_unit(layout: Layout) -> int:
    """Return the number that the length of a row must be a multiple of, so that context- and
    tensor-parallel ranks can split it."""
    return math.lcm(2 * layout.cp if layout.cp > 1 else 1, layout.tp)


def longest_row(max_length: int, unit: int) -> int:
    """Return the tokens of the longest row that is no longer than `max_length` when it is padded to
    a multiple of `unit`."""
    return max_length // unit * unit


def _batches(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(indices), size):
        yield indices[start : start + size]
