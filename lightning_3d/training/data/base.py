"""Base class of the data modules of packed text: samplers, loaders, checks and the position in the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate
from typing_extensions import override

from lightning_3d.errors import ConfigError, DataError, Lightning3DError, plural
from lightning_3d.layout.batch_ramp import BatchRamp
from lightning_3d.layout.micro_batch_rows import MicroBatchRows
from lightning_3d.training.data.entropy import Entropy, entropy
from lightning_3d.training.data.packing import PackedDataset, Samples, Tokens, spread
from lightning_3d.training.data.permutation import Permutation
from lightning_3d.training.data.read_ahead import read_ahead, rows_ahead

_FULL_SCAN = 1 << 30
"""Bytes up to which all tokens are checked before training, and from which entropies are computed. Each sample is also checked when it is
read."""


LISTED, KEYED = 1, 2
"""Kinds of order, as a saved position names them: torch's permutation of a list, which older versions used, and a `Permutation`."""


class GlobalOrderSampler(DistributedSampler[Any]):
    """Order of samples that depends only on the seed and the epoch, not on the number of data-parallel ranks.

    The samples of a step are the next global batch of one shuffled order; this rank reads every `num_replicas`-th of
    them. A resumed epoch skips the samples that were already used. Memory and the time to the first sample do not depend on the number of
    samples.

    Args:
        dataset: the samples.
        used: function epoch -> samples that were already used in its order; called when an epoch starts.
        order: function (epoch, places in the order) -> indices of samples; called when an epoch starts.
        rows: how the rows of a global batch are dealt to ranks.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        used: Callable[[int], int],
        order: Callable[[int, Iterator[int]], Iterator[int]],
        rows: MicroBatchRows,
        *,
        rank: int,
    ) -> None:
        super().__init__(dataset, rows.dp, rank, shuffle=True, drop_last=True)
        self._used = used
        self._order = order
        self._rows = rows

    @override
    def __iter__(self) -> Iterator[Any]:
        skip = self._used(self.epoch) // self.num_replicas
        return self._order(self.epoch, self._rows.of_rank(self.rank, range(self.total_size), skip))


class GlobalBatchSampler(GlobalOrderSampler):
    """The same order in batches of different sizes: yields the samples of one step of this rank as a list.

    Args:
        batches: function (epoch, samples already used) -> places of each following global batch in the order of that epoch, a multiple of
            the ranks.
        count: function epoch -> number of its batches.
        **kwargs: see `GlobalOrderSampler`.
    """

    def __init__(self, batches: Callable[[int, int], Iterator[range]], count: Callable[[int], int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._batches, self._count = batches, count

    @override
    def __iter__(self) -> Iterator[list[int]]:
        used = self._used(self.epoch)
        of_rank = (self._rows.of_rank(self.rank, places) for places in self._batches(self.epoch, used))
        order = self._order(self.epoch, chain.from_iterable(of_rank))
        return (list(islice(order, len(places) // self.num_replicas)) for places in self._batches(self.epoch, used))

    @override
    def __len__(self) -> int:
        return self._count(self.epoch)


class Batches(Dataset[dict[str, Tensor]]):
    """Batches of samples: an index is the list of the samples of a batch."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    @override
    def __getitem__(self, indices: list[int]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = default_collate(self._samples.__getitems__(indices))
        return batch


class Loader(DataLoader[dict[str, Tensor]]):
    """A loader that reports an error of a worker process as that process raised it."""

    @override
    def __iter__(self) -> Any:
        """Start to read when the first batch is asked for. Lightning makes the iterator of a resumed epoch before it says which epoch it
        is, and worker processes would read ahead in another one."""
        try:
            yield from super().__iter__()
        except Lightning3DError as error:
            if not str(error).startswith("Caught "):
                raise
            # torch has put the traceback of the worker into the message
            raise type(error)(str(error).rstrip().rpartition(f"{type(error).__name__}: ")[2]) from None


class TrainLoader(Loader):
    """A loader whose position Lightning saves and restores, by these two methods."""

    data_module: PackedDataModule

    def state_dict(self) -> dict[str, Any]:
        return self.data_module.position_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data_module.resume_from(state_dict)
        self.sampler.set_epoch(state_dict["epoch"])  # type: ignore[attr-defined]


class PackedDataModule(LightningDataModule):
    """Training and held-out tokens, packed into samples of equal length.

    The number of data-parallel ranks comes from the trainer's strategy (`data_parallel_size`, or the number of
    replicas that it gives Lightning's samplers). Each reads `global_batch_size / ranks` rows a step. `train_dataloader` drops the last
    incomplete global batch of an epoch. The position in the data is part of Lightning's checkpoints, and a run that
    resumes without one is refused.

    Args:
        sequence_length: tokens per sample.
        global_batch_size: samples per step, over all ranks.
        batch_ramp: smaller batches at the start of the run: `from` and `step` in samples, and `tokens`, the tokens after which the batch
            has its full size; see `BatchRamp`. None: all batches are equal.
        val_sequences: number of held-out samples per validation, spread evenly over the split; None for all.
        seed: seed of the order of documents and samples.
        vocab_size: vocabulary size of the model; token ids are checked against it. None: no check.
        predict_across_documents, document_mask: see `PackedDataset`. `CausalLM` gives the positions of a document mask to the model.
        num_workers: processes per rank that read ahead; 0 reads in the rank itself, which is fast enough for
            memory-mapped tokens.
    """

    unit = "token"
    """Name of one token, for figures per token."""

    tokenizer: str | None = None
    """Tokenizer of the tokens, a folder, a name on the hub or "bytes"; None: not known."""

    sample_prompt: str | None = None
    """Text that a model of these data can continue, for a sample at the end of a run; None: no sample, unless the user gives a prompt."""

    val_names: tuple[str, ...] = ()
    """Names of the validation sets, in the order of their loaders; empty for one set without a name."""

    def __init__(
        self,
        *,
        sequence_length: int,
        global_batch_size: int,
        batch_ramp: dict[str, Any] | None = None,
        val_sequences: int | None = None,
        seed: int = 0,
        vocab_size: int | None = None,
        predict_across_documents: bool = True,
        document_mask: bool = False,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if sequence_length < 2:
            raise ConfigError(
                f"data.sequence_length must be at least 2 (an input and its target); got {sequence_length}."
            )
        if global_batch_size < 1:
            raise ConfigError(f"data.global_batch_size must be at least 1; got {global_batch_size}.")
        if val_sequences is not None and val_sequences < 1:
            raise ConfigError(
                f"data.val_sequences must be at least 1, or null for the whole split; got {val_sequences}."
            )
        self.sequence_length = sequence_length
        self.global_batch_size = global_batch_size
        self.batches = BatchRamp.read(batch_ramp, global_batch_size, sequence_length)
        self.val_sequences = val_sequences
        self.seed = seed
        self.vocab_size = vocab_size
        self.predict_across_documents = predict_across_documents
        self.document_mask = document_mask
        self.num_workers = num_workers
        self.train_set: Samples | None = None
        self.val_set: PackedDataset | None = None
        self._order_kind = KEYED
        self._restored: dict[str, Any] | None = None
        self._entropy: Entropy | None = None

    def load_tokens(self) -> tuple[Tokens, Tokens | None]:
        """Training tokens and held-out tokens (None: no validation). Called once per process."""
        raise NotImplementedError

    @override
    def setup(self, stage: str | None = None) -> None:
        """Read the tokens and check them.

        Raises:
            DataError: a token id is outside the vocabulary, or there are fewer samples to train on than one global batch.
        """
        if self.train_set is None:
            train, val = self.load_tokens()
            self._check_vocabulary(train, val)
            self.train_set = self._pack(train, None)
            if stage != "validate":
                self._require_global_batch()
            self.val_set = None if val is None else self._validation_set(val)
        elif stage != "validate":
            self._require_global_batch()

    def _check_vocabulary(self, *parts: Tokens | None) -> None:
        """Check the token ids of tokens that say their largest one, or that are few enough to be read."""
        for tokens in parts:
            if tokens is None or self.vocab_size is None:
                continue
            if tokens.largest is not None:
                tokens.check_largest(self.vocab_size)
            elif tokens.values.nbytes <= _FULL_SCAN and tokens.cache is None:
                tokens.check_vocabulary(self.vocab_size)

    def _validation_set(self, val: Tokens) -> PackedDataset:
        samples = len(val) // self.sequence_length
        if samples == 0:
            raise DataError(
                f"The held-out part of {val.name} has {len(val)} tokens, fewer than one sample of"
                f" {self.sequence_length} tokens. Use a data.sequence_length of at most {len(val)}, or hold out more tokens."
            )
        return self._pack(val, self.val_sequences)

    def _pack(self, tokens: Tokens, wanted: int | None) -> PackedDataset:
        return PackedDataset(
            tokens,
            self.sequence_length,
            vocab_size=self.vocab_size,
            predict_across_documents=self.predict_across_documents,
            document_mask=self.document_mask,
            samples=spread(len(tokens) // self.sequence_length, wanted),
        )

    def _require_global_batch(self) -> None:
        assert isinstance(self.train_set, PackedDataset), "setup() comes first"
        tokens, samples = self.train_set.tokens, len(self.train_set)
        if samples >= self.global_batch_size:
            return
        works = f"Use a global batch of at most {samples}" if samples else "Use more data"
        raise DataError(
            f"{tokens.name} has {len(tokens)} tokens to train on. That is {samples} sample{'s' * (samples != 1)} of"
            f" {self.sequence_length} tokens, fewer than one global batch of {self.global_batch_size}. {works} or a shorter"
            " data.sequence_length."
        )

    # Loaders

    def _replicas(self) -> tuple[int, int]:
        """Return (number of data-parallel ranks, index of this one)."""
        if self.trainer is None:
            return 1, 0
        kwargs = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        replicas = int(getattr(self.trainer.strategy, "data_parallel_size", kwargs["num_replicas"]))
        return replicas, int(kwargs["rank"])

    def _batch_size(self, replicas: int) -> int:
        """Rows that each data-parallel rank reads per step."""
        if self.global_batch_size % replicas:
            lower = self.global_batch_size // replicas * replicas
            near = " or ".join(str(size) for size in (lower, lower + replicas) if size)
            raise ConfigError(
                f"A global batch of {self.global_batch_size} cannot be split evenly over {replicas} data-parallel ranks."
                f" Use {near}."
            )
        return self.global_batch_size // replicas

    def _require_ramp(self, replicas: int) -> None:
        """Refuse a batch of the ramp that the ranks cannot share in whole micro-batches."""
        micro_batch = getattr(self.trainer.strategy, "micro_batch_size", None) if self.trainer is not None else None
        unit = replicas * (micro_batch or 1)
        wrong = next((size for size in self.batches.sizes if size % unit), None)
        if wrong is not None:
            raise ConfigError(
                f"The batch ramp {self.batches} has a global batch of {wrong}, which cannot be split evenly over"
                f" {plural(replicas, 'data-parallel rank')} with micro-batches of {micro_batch or 1}. Use multiples of {unit}."
            )

    @override
    def train_dataloader(self) -> TrainLoader:
        assert self.train_set is not None, "setup() comes first"
        replicas, index = self._replicas()
        rows = getattr(self.trainer.strategy, "micro_batch_rows", None) if self.trainer is not None else None
        dealt = rows or MicroBatchRows(replicas, replicas)
        size = self._batch_size(replicas)
        order: dict[str, Any] = {"dataset": self.train_set, "used": self._used, "order": self._order_ahead, "rows": dealt, "rank": index}
        # With a generator of its own, the loader does not advance the global one when its iterator is made, in a resumed epoch too.
        options = {**self._loader_options(size), "generator": torch.Generator().manual_seed(self.seed)}
        if self.batches.rows:
            self._require_ramp(replicas)
            ramped = GlobalBatchSampler(self._batches_of, self._batches_in, **order)
            loader = TrainLoader(Batches(self.train_set), sampler=ramped, **{**options, "batch_size": None})
        else:
            loader = TrainLoader(self.train_set, sampler=GlobalOrderSampler(**order), drop_last=True, **options)
        loader.data_module = self
        return loader

    def _order_ahead(self, epoch: int, places: Iterator[int]) -> Iterator[int]:
        """Yield the samples at these places of the order of an epoch, and fetch remote ones ahead."""
        assert self.train_set is not None
        order, cache = self._order(epoch, places), self.train_set.cache
        if cache is None:
            return order
        ranks = int(getattr(self.trainer, "num_devices", 1))
        return read_ahead(self.train_set, order, rows_ahead(cache, self._batch_size(self._replicas()[0]), ranks))

    def _order(self, epoch: int, places: Iterator[int]) -> Iterator[int]:
        """Yield the samples at these places of the order of an epoch."""
        assert self.train_set is not None
        if self._order_kind == KEYED:
            return Permutation(len(self.train_set), self.seed, epoch).follow(places)
        listed = torch.randperm(len(self.train_set), generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
        return (listed[place] for place in places)

    def _used(self, epoch: int) -> int:
        """Return the samples that were used in the order of an epoch before this process reads from it.

        Raises:
            DataError: the run was resumed from a checkpoint without a position.
        """
        if self._restored is not None:
            return int(self._restored["samples"]) if self._restored["epoch"] == epoch else 0
        if self.trainer is not None and self.trainer.global_step > 0 and self.trainer.ckpt_path is not None:
            raise DataError(
                f"The checkpoint {self.trainer.ckpt_path} is at step {self.trainer.global_step} but does not contain the position"
                " in the data, so training would repeat the first samples. Resume with the data module that"
                " wrote it, or start a new run from its weights."
            )
        return 0

    @override
    def val_dataloader(self) -> DataLoader[dict[str, Tensor]] | list[Any]:
        if self.val_set is None:
            return []
        return self._val_loader(self.val_set)

    def _val_loader(self, samples: PackedDataset) -> DataLoader[dict[str, Tensor]]:
        return Loader(samples, shuffle=False, **self._loader_options(self._batch_size(self._replicas()[0])))

    def _loader_options(self, batch_size: int) -> dict[str, Any]:
        return {
            "batch_size": batch_size,
            "num_workers": self.num_workers,
            "persistent_workers": self.num_workers > 0,
            "pin_memory": self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        }

    # For reports and checkpoints

    def entropy(self) -> Entropy | None:
        """Unigram and bigram entropy of the held-out split (its first GiB) in nats per token; None without one, and for one at a URL."""
        if self._entropy is None and self.val_set is not None and self.val_set.cache is None:
            values = self.val_set.tokens.values
            self._entropy = entropy(np.asarray(values[: _FULL_SCAN // values.dtype.itemsize]))
        return self._entropy

    def position_state(self) -> dict[str, Any]:
        """Position of training: samples used in the order of this epoch, and what that order depends on."""
        assert self.trainer is not None
        return {
            "epoch": self.trainer.current_epoch,
            "samples": self._rows_read(),
            **self._same_order(),
            "order": self._order_kind,
        }

    def _rows_read(self) -> int:
        """Rows that were read in the order of this epoch."""
        assert self.trainer is not None
        start, end = self._span(self.trainer.current_epoch)
        batches = int(self.trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        return min(self.batches.after(batches, start), end) - start

    def _span(self, epoch: int) -> tuple[int, int]:
        """Return the first row of the run in the order of an epoch, and the row after its last one."""
        assert self.train_set is not None, "setup() comes first"
        rows = len(self.train_set) // self.global_batch_size * self.global_batch_size
        return epoch * rows, (epoch + 1) * rows

    def _batches_of(self, epoch: int, used: int) -> Iterator[range]:
        """Yield the places of each global batch in the order of an epoch, after those that were used. The last one may be shorter."""
        start, end = self._span(epoch)
        return (range(rows.start - start, rows.stop - start) for rows in self.batches.batches(start + used, end))

    def _batches_in(self, epoch: int) -> int:
        """Number of global batches of an epoch."""
        start, end = self._span(epoch)
        complete = self.batches.count(start, end)
        return complete + (self.batches.after(complete, start) < end)

    def _same_order(self) -> dict[str, Any]:
        """Everything that the order of samples depends on, besides its kind."""
        return {
            "global_batch_size": self.global_batch_size,
            "batch_ramp": str(self.batches) if self.batches.rows else None,
            "seed": self.seed,
            "sequence_length": self.sequence_length,
            **self._order_depends_on(),
        }

    def _order_depends_on(self) -> dict[str, Any]:
        """What the order of samples depends on in the data."""
        assert self.train_set is not None, "setup() comes first"
        return {"train_samples": len(self.train_set)}

    def resume_from(self, state: dict[str, Any]) -> None:
        """Restore a position that `position_state` returned. A run that began with a listed order keeps it in all its epochs.

        Raises:
            DataError: this data module has a different order of samples.
        """
        present = self._same_order()
        different = [f"{key} was {state.get(key)} and is now {value}" for key, value in present.items() if state.get(key) != value]
        if different:
            raise DataError(
                f"The checkpoint's position in the data does not match this run: {'; '.join(different)}. Use the checkpoint's values,"
                " or start a new run from the checkpoint's weights."
            )
        kind = state.get("order", LISTED)
        if kind not in (LISTED, KEYED):
            raise DataError(
                f"The checkpoint's order of samples is of kind {kind}, which this version of lightning_3d does not know. Resume with the"
                " version that wrote it, or start a new run from the checkpoint's weights."
            )
        self._order_kind = kind
        self._restored = dict(state)
