"""A blend of several sources of tokens: which row comes from where depends on the seed and the
number of the row only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_3d.app.config.blend_sources import Source, read_sources
from lightning_3d.app.config.data_urls import check_data_urls, has_url
from lightning_3d.app.training.data.base import PackedDataModule
from lightning_3d.app.training.data.blend_sources import BlendPlan, find_sources
from lightning_3d.app.training.data.corpus import Corpus, require_separator
from lightning_3d.app.training.data.packing import PackedDataset, Samples, Tokens
from lightning_3d.app.training.data.permutation import Permutation
from lightning_3d.app.training.data.remote_corpora import Finder
from lightning_3d.app.training.data.tokens import map_corpora
from lightning_3d.errors import DataError, plural
from lightning_3d.storage.piece_cache import Piece, PieceCache


class Blend(PackedDataModule):
    """Rows of several sources, in fixed shares. Each source has an order, epochs and a validation
    set of its own.

    Args:
        sources: name -> options of a source; see `blend_sources.Source`.
        tokenizer: tokenizer that made all files, a folder or a name on the hub, to compare with
            their manifests; None: no comparison.
        check_hashes: compare the SHA-256 of every shard with its manifest, which reads all of them.
        cache_dir, cache_bytes: folder and bytes of the cache for sources at URLs; see `data_cache`.
        **kwargs: see `PackedDataModule`. `val_sequences` is for each source.

    Attributes:
        val_names: names of the sources that have a validation set, in order.
    """

    def __init__(
        self,
        *,
        sources: dict[str, Any],
        tokenizer: str | None = None,
        check_hashes: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.sources = read_sources(sources, self.sequence_length)
        self.tokenizer, self.check_hashes = tokenizer, check_hashes
        self.cache_dir, self.cache_bytes = cache_dir, cache_bytes
        check_data_urls({**vars(self), "name": "blend", "sources": sources})
        self.val_sets: dict[str, PackedDataset] = {}
        self.plan: BlendPlan | None = None

    @override
    def prepare_data(self) -> None:
        """Make the checks that take time, and look at URLs. Lightning calls this on one rank per
        node while the others wait."""
        remote = has_url(
            *(path for source in self.sources for path in (source.train_path, source.val_path))
        )
        if self.tokenizer is not None or self.check_hashes or remote:
            find_sources(
                self.sources, self.tokenizer, self.check_hashes, Finder(vars(self), fresh=True)
            )

    @override
    def setup(self, stage: str | None = None) -> None:
        """Map the files and check them.

        Raises:
            DataError: a file cannot be used, or the blend is shorter than the run that is to train
                on it.
        """
        if self.plan is None:
            self._map_sources()
        assert self.plan is not None
        if stage != "validate":
            self.plan.require_steps(
                max(1, self.trainer.max_steps if self.trainer is not None else 1), self.batches
            )

    def _map_sources(self) -> None:
        find = Finder(vars(self), fresh=self.trainer is None)  # a trainer has called prepare_data
        corpora = zip(self.sources, find_sources(self.sources, find=find), strict=True)
        found = {source.name: self._load(source, *files) for source, files in corpora}
        parts = tuple(self._pack(train, None) for train, _ in found.values() if train is not None)
        trained = [source for source in self.sources if found[source.name][0] is not None]
        plan = BlendPlan.of(trained, [len(part) for part in parts], self.sequence_length)
        self.plan, self.train_set = plan, BlendDataset(plan, parts, self.seed)
        self.val_sets = {
            name: self._validation_set(val) for name, (_, val) in found.items() if val is not None
        }
        self.val_names = tuple(self.val_sets)

    def _load(
        self, source: Source, files: Corpus | None, held_out: Corpus | None
    ) -> tuple[Tokens | None, Tokens | None]:
        require_separator(files or held_out, vars(self))
        train, val = map_corpora(files, held_out, source.val_fraction, self.sequence_length)
        self._check_vocabulary(train, val)
        return train, val

    @override
    def _order(self, epoch: int, places: Iterator[int]) -> Iterator[int]:
        """Yield the rows of the blend as they are numbered: `BlendDataset` shuffles each source."""
        return places

    @override
    def _begin(self, number: int) -> tuple[int, int]:
        """Note that reading begins; see `PackedDataModule`.

        Raises:
            DataError: no whole global batch is left. Also: the run was resumed from a checkpoint
                without a position.
        """
        epoch, rows = super()._begin(number)
        assert self.train_set is not None, "setup() comes first"
        size = self.batches.at(rows)
        if rows + size > len(self.train_set):
            raise DataError(
                f"The blend has been read to its end: {rows} of its"
                f" {plural(len(self.train_set), 'row')} have been read, and a step takes {size}."
                " Let the sources repeat with data.sources.NAME.epochs, or set max_steps of the"
                " Trainer."
            )
        return epoch, rows

    @override
    def _start_of(self, number: int) -> tuple[int, int]:
        """Return (0, rows that were read): rows are numbered over the whole run. Their end ends an
        epoch of Lightning, but a longer blend continues there."""
        return (
            (0, self._begun.used)
            if self._begun is not None and number == self._begun.number
            else self._place()
        )

    @override
    def batches_in(self, number: int) -> int:
        """Return the number of batches that Lightning counts; at least 1, so that a blend without
        rows is refused where reading begins."""
        return max(1, super().batches_in(number))

    @override
    def _read_before(self, number: int) -> int:
        """Return 0: an epoch of Lightning that continues a blend has batches of its own."""
        return 0

    @override
    def _inside(self, epoch: int, samples: int, ended: bool = False) -> tuple[int, int]:
        return 0, samples

    @override
    def _span(self, epoch: int) -> tuple[int, int]:
        assert self.train_set is not None, "setup() comes first"
        return 0, self.batches.after(self.batches.count(0, len(self.train_set)))

    @override
    def _order_depends_on(self) -> dict[str, Any]:
        assert self.plan is not None, "setup() comes first"
        return {"sources": self.plan.describe()}

    @override
    def val_dataloader(self) -> list[DataLoader[dict[str, Tensor]]]:
        return [self._val_loader(samples) for samples in self.val_sets.values()]

    def validation_weights(self) -> dict[str, float]:
        """Weight of each validation set in `val_loss`: the share of its source in the blend; equal
        if only sources of weight 0 have one."""
        assert self.plan is not None, "setup() comes first"
        shares = {
            source.name: share
            for source, share in zip(self.plan.sources, self.plan.interleaving.shares, strict=True)
        }
        total = sum(shares.get(name, 0) for name in self.val_names)
        return {
            name: shares.get(name, 0) / total if total else 1 / len(self.val_names)
            for name in self.val_names
        }


class BlendDataset(Samples):
    """Rows of a blend: a pure function of the seed and the number of the row.

    Args:
        plan: the order of the sources.
        parts: samples of each source.
        seed: seed of the order in each source and epoch.
    """

    def __init__(self, plan: BlendPlan, parts: tuple[PackedDataset, ...], seed: int) -> None:
        self._plan, self._parts, self._seed = plan, parts, seed
        self._rows = plan.rows

    def __len__(self) -> int:
        return self._rows

    def place(self, row: int) -> tuple[int, int]:
        """Return (source, sample of it) of a row."""
        number, count = self._plan.interleaving.at(row)
        part = self._parts[number]
        epoch, index = divmod(count, len(part))
        return (
            number,
            Permutation(len(part), self._seed, epoch, self._plan.sources[number].name)[index],
        )

    @property
    @override
    def cache(self) -> PieceCache | None:
        return next((part.cache for part in self._parts if part.cache is not None), None)

    @override
    def pieces(self, row: int) -> list[Piece]:
        number, sample = self.place(row)
        return self._parts[number].pieces(sample)

    @override
    def __getitem__(self, row: int) -> dict[str, Tensor]:
        number, sample = self.place(row)
        return self._parts[number][sample]
