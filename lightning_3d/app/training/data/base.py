"""Base class of the data modules of packed text: loaders, checks and the position in the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_3d.app.config.keys import check_data_counts
from lightning_3d.app.training.data.entropy import Entropy, entropy
from lightning_3d.app.training.data.loaders import (
    GlobalBatchSampler,
    GlobalOrderSampler,
    Loader,
    SampleBatches,
    TrainLoader,
    read_ahead,
    rows_ahead,
)
from lightning_3d.app.training.data.packing import PackedDataset, Samples, Tokens, spread
from lightning_3d.app.training.data.permutation import Permutation
from lightning_3d.compat.lightning_data import (
    begin_after_ended_epoch,
    count_epoch_again,
    has_ended_epoch,
    trained_batches,
)
from lightning_3d.errors import ConfigError, DataError, plural
from lightning_3d.layout.batch_ramp import BatchRamp
from lightning_3d.layout.micro_batch_rows import MicroBatchRows

FULL_SCAN = 1 << 30
"""Bytes up to which all tokens are checked before training, and from which entropies are computed.
Each sample is also checked when it is read."""


ORDER = 2
"""Kind of the order of samples, as a saved position names it: that of `Permutation`."""


@dataclass(frozen=True)
class Reading:
    """Where this process began to read the epoch that it is in.

    Attributes:
        number: Lightning's number of the epoch.
        epoch: epoch of the order. It differs from `number` after a run that was saved when it had
            ended in the middle of an epoch: Lightning counts the rest of that epoch as another one.
        used: samples of the order that had been used.
        counted: batches that Lightning had already counted in this epoch.
        trained: batches that had been trained on in the whole run.
    """

    number: int
    epoch: int
    used: int
    counted: int
    trained: int


class PackedDataModule(LightningDataModule):
    """Training and held-out tokens, packed into samples of equal length.

    The number of data-parallel ranks comes from the trainer's strategy (`data_parallel_size`, or
    the number of replicas that it gives Lightning's samplers). Each reads `global_batch_size /
    ranks` rows a step. `train_dataloader` drops the last incomplete global batch of an epoch. The
    position in the data is part of Lightning's checkpoints, and a run that resumes without one is
    refused.

    Args:
        sequence_length: tokens per sample.
        global_batch_size: samples per step, over all ranks.
        batch_ramp: smaller batches at the start of the run: `from` and `step` in samples, and
            `tokens`, the tokens after which the batch has its full size; see `BatchRamp`. None: all
            batches are equal.
        val_sequences: number of held-out samples per validation, spread evenly over the split; None
            for all.
        seed: seed of the order of documents and samples.
        vocab_size: vocabulary size of the model; token ids are checked against it. None: no check.
        predict_across_documents, document_mask: see `PackedDataset`. `CausalLM` gives the positions
            of a document mask to the model.
        num_workers: processes per rank that read ahead; 0 reads in the rank itself, which is fast
            enough for memory-mapped tokens.
    """

    unit = "token"
    """Name of one token, for figures per token."""

    tokenizer: str | None = None
    """Tokenizer of the tokens, a folder, a name on the hub or "bytes"; None: not known."""

    sample_prompt: str | None = None
    """Text that a model of these data can continue, for a sample at the end of a run; None: no
    sample, unless the user gives a prompt."""

    val_names: tuple[str, ...] = ()
    """Names of the validation sets, in the order of their loaders; empty for one set without a
    name."""

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
                "data.sequence_length must be at least 2 (an input and its target); got"
                f" {sequence_length}."
            )
        if global_batch_size < 1:
            raise ConfigError(
                f"data.global_batch_size must be at least 1; got {global_batch_size}."
            )
        check_data_counts({"num_workers": num_workers, "val_sequences": val_sequences})
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
        self._restored: dict[str, Any] | None = None
        self._begun: Reading | None = None
        self._entropy: Entropy | None = None

    def load_tokens(self) -> tuple[Tokens, Tokens | None]:
        """Training tokens and held-out tokens (None: no validation). Called once per process."""
        raise NotImplementedError

    @override
    def setup(self, stage: str | None = None) -> None:
        """Read the tokens and check them.

        Raises:
            DataError: a token id is outside the vocabulary, or there are fewer samples to train on
                than one global batch.
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
        """Check the token ids of tokens that say their largest one, or that are few enough to be
        read."""
        for tokens in parts:
            if tokens is None or self.vocab_size is None:
                continue
            if tokens.largest is not None:
                tokens.check_largest(self.vocab_size)
            elif tokens.values.nbytes <= FULL_SCAN and tokens.cache is None:
                tokens.check_vocabulary(self.vocab_size)

    def _validation_set(self, val: Tokens) -> PackedDataset:
        samples = len(val) // self.sequence_length
        if samples == 0:
            raise DataError(
                f"The held-out part of {val.name} has {len(val)} tokens, fewer than one sample of"
                f" {self.sequence_length} tokens. Use a data.sequence_length of at most {len(val)},"
                " or hold out more tokens."
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
        works = f"Use data.global_batch_size={samples} or less," if samples else "Use more data"
        raise DataError(
            f"{tokens.name} has {len(tokens)} tokens to train on. That is {samples}"
            f" sample{'s' * (samples != 1)} of {self.sequence_length} tokens, fewer than"
            f" data.global_batch_size={self.global_batch_size}. {works} or a shorter"
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
                f"data.global_batch_size={self.global_batch_size} cannot be split evenly over"
                f" {replicas} data-parallel ranks. Use {near}."
            )
        return self.global_batch_size // replicas

    def _require_ramp(self, replicas: int) -> None:
        """Refuse a batch of the ramp that the ranks cannot share in whole micro-batches."""
        micro_batch = (
            getattr(self.trainer.strategy, "micro_batch_size", None)
            if self.trainer is not None
            else None
        )
        unit = replicas * (micro_batch or 1)
        wrong = next((size for size in self.batches.sizes if size % unit), None)
        if wrong is not None:
            raise ConfigError(
                f"The batch ramp {self.batches} has a global batch of {wrong}, which cannot be"
                f" split evenly over {plural(replicas, 'data-parallel rank')} with"
                f" parallelism.micro_batch_size={micro_batch or 1}. Use multiples of {unit}."
            )

    def _require_validation(self) -> None:
        """Refuse a validation after more batches of an epoch than its last epochs have: the ramp
        makes epochs shorter."""
        trainer = self.trainer
        interval = getattr(trainer, "val_check_interval", None)
        if (
            trainer is None
            or not isinstance(interval, int)
            or trainer.check_val_every_n_epoch is None
            or not trainer.limit_val_batches
        ):
            return
        _, rows = self._span(0)
        ends = [trainer.max_epochs - 1] if trainer.max_epochs not in (None, -1) else []
        ends += [self.batches.after(trainer.max_steps - 1) // rows] if trainer.max_steps > 0 else []
        # after the ramp, all epochs are equal
        last = max(0, min([-(-self.batches.rows // rows), *ends]))
        batches = self._batches_left(last)
        if interval > batches:
            raise ConfigError(
                f"The trainer validates after val_check_interval={interval}, but epoch {last} has"
                f" {batches} batch{'es' * (batches != 1)}. Use check_val_every_n_epoch=None (it"
                " then counts batches of the run), an interval of epochs, or a val_check_interval"
                f" of at most {batches}."
            )

    @override
    def train_dataloader(self) -> TrainLoader:
        assert self.train_set is not None, "setup() comes first"
        replicas, index = self._replicas()
        rows = (
            getattr(self.trainer.strategy, "micro_batch_rows", None)
            if self.trainer is not None
            else None
        )
        dealt = rows or MicroBatchRows(replicas, replicas)
        size = self._batch_size(replicas)
        order: dict[str, Any] = {
            "dataset": self.train_set,
            "begin": self._begin,
            "order": self._order_ahead,
            "rows": dealt,
            "rank": index,
            "on_epoch": self._begin_epoch,
        }
        # With a generator of its own, the loader does not advance the global one when its iterator
        # is made, in a resumed epoch too.
        options = {
            **self._loader_options(size),
            "generator": torch.Generator().manual_seed(self.seed),
        }
        if self.batches.rows:
            self._require_ramp(replicas)
            self._require_validation()
            ramped = GlobalBatchSampler(self._batches_of, **order)
            loader = TrainLoader(
                SampleBatches(self.train_set), sampler=ramped, **{**options, "batch_size": None}
            )
        else:
            loader = TrainLoader(
                self.train_set, sampler=GlobalOrderSampler(**order), drop_last=True, **options
            )
        loader.data_module = self
        return loader

    def _order_ahead(self, epoch: int, places: Iterator[int]) -> Iterator[int]:
        """Yield the samples at these places of the order of an epoch, and fetch remote ones
        ahead."""
        assert self.train_set is not None
        order, cache = self._order(epoch, places), self.train_set.cache
        if cache is None:
            return order
        ranks = int(getattr(self.trainer, "num_devices", 1))
        return read_ahead(
            self.train_set, order, rows_ahead(cache, self._batch_size(self._replicas()[0]), ranks)
        )

    def _order(self, epoch: int, places: Iterator[int]) -> Iterator[int]:
        """Yield the samples at these places of the order of an epoch."""
        assert self.train_set is not None
        return Permutation(len(self.train_set), self.seed, epoch).follow(places)

    def _begin(self, number: int) -> tuple[int, int]:
        """Note that reading begins in Lightning's epoch `number`. Return the epoch of the order,
        and the samples of it that were used.

        Raises:
            DataError: the run was resumed from a checkpoint without a position.
        """
        trainer = self.trainer
        if (
            self._restored is None
            and trainer is not None
            and trainer.global_step > 0
            and trainer.ckpt_path is not None
        ):
            raise DataError(
                f"The checkpoint {trainer.ckpt_path} is at step {trainer.global_step} but does not"
                " contain the position in the data, so training would repeat the first samples."
                " Resume with the data module that wrote it, or start a new run from its weights."
            )
        epoch, used = self._start_of(number)
        trained = 0 if trainer is None else trained_batches(trainer)[0]
        self._begun = Reading(number, epoch, used, self._counted(number), trained)
        return epoch, used

    @override
    def val_dataloader(self) -> DataLoader[dict[str, Tensor]] | list[Any]:
        if self.val_set is None:
            return []
        return self._val_loader(self.val_set)

    def _val_loader(self, samples: PackedDataset) -> DataLoader[dict[str, Tensor]]:
        return Loader(
            samples, shuffle=False, **self._loader_options(self._batch_size(self._replicas()[0]))
        )

    def _loader_options(self, batch_size: int) -> dict[str, Any]:
        return {
            "batch_size": batch_size,
            "num_workers": self.num_workers,
            "persistent_workers": self.num_workers > 0,
            "pin_memory": (
                self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
            ),
        }

    # For reports and checkpoints

    def entropy(self) -> Entropy | None:
        """Unigram and bigram entropy of the held-out split (its first GiB) in nats per token; None
        without one, and for one at a URL."""
        if self._entropy is None and self.val_set is not None and self.val_set.cache is None:
            values = self.val_set.tokens.values
            self._entropy = entropy(np.asarray(values[: FULL_SCAN // values.dtype.itemsize]))
        return self._entropy

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, for checkpoints; nothing if there are no samples to
        train on."""
        return {} if self.train_set is None else self.position_state()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position of a fit. Lightning restores that of a loader only if the checkpoint
        is from within an epoch."""
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self.resume_from(state_dict)

    def position_state(self) -> dict[str, Any]:
        """Position of training: epoch of the order and samples of it that were used, and what that
        order depends on."""
        epoch, samples = self._place()
        return {"epoch": epoch, "samples": samples, **self._same_order(), "order": ORDER}

    # The position in the data

    def _place(self) -> tuple[int, int]:
        """Return (epoch of the order, samples of it that were used) at the batch that is trained on
        next."""
        if self._begun is None:
            return (
                (0, 0)
                if self._restored is None
                else self._inside(self._restored["epoch"], int(self._restored["samples"]))
            )
        assert self.trainer is not None
        begun, (trained, _) = self._begun, trained_batches(self.trainer)
        start, end = self._span(begun.epoch)
        samples = min(self.batches.after(trained - begun.trained, start + begun.used), end) - start
        # limit_train_batches ends epochs early
        return self._inside(begun.epoch, samples, has_ended_epoch(self.trainer))

    def _inside(self, epoch: int, samples: int, ended: bool = False) -> tuple[int, int]:
        """Return a place at the end of an epoch as the start of the next one."""
        start, end = self._span(epoch)
        return (epoch + 1, 0) if ended or samples >= end - start else (epoch, samples)

    def _start_of(self, number: int) -> tuple[int, int]:
        """Return (epoch of the order, samples of it that were used) where Lightning's epoch
        `number` begins to read."""
        if self._begun is None:
            return (number, 0) if self._restored is None else self._place()
        same = number == self._begun.number
        return self._begun.epoch + number - self._begun.number, self._begun.used if same else 0

    def _counted(self, number: int) -> int:
        """Return the batches that Lightning has counted in its epoch `number` where that begins to
        read: above 0 if it continues it."""
        if self._begun is not None:
            return self._begun.counted if number == self._begun.number else 0
        if (
            self.trainer is None
            or not self.trainer.fit_loop.restarting
            or has_ended_epoch(self.trainer)
        ):
            return 0
        return trained_batches(self.trainer)[1]

    def batches_in(self, number: int) -> int:
        """Return the number of batches that Lightning counts in its epoch `number`, those before a
        resume included."""
        return self._counted(number) + self._batches_left(*self._start_of(number))

    def _batches_left(self, epoch: int, used: int = 0) -> int:
        """Return the number of global batches of an epoch of the order after the samples that were
        used. The last one may be shorter."""
        start, end = self._span(epoch)
        complete = self.batches.count(start + used, end)
        return complete + (self.batches.after(complete, start + used) < end)

    def _begin_epoch(self, number: int) -> None:
        """Give Lightning the number of batches of its epoch that begins: with a batch ramp and
        after a resume, epochs differ."""
        if self.trainer is not None:
            begin_after_ended_epoch(self.trainer)
            count_epoch_again(self.trainer, self._read_before(number))

    def _read_before(self, number: int) -> int:
        """Return the batches of the order's epoch that were read before Lightning's epoch `number`,
        which continues it."""
        epoch, used = self._start_of(number)
        start, _ = self._span(epoch)
        return self.batches.count(start, start + used) - self._counted(number)

    def _span(self, epoch: int) -> tuple[int, int]:
        """Return the first row of the run in the order of an epoch, and the row after its last
        one."""
        assert self.train_set is not None, "setup() comes first"
        rows = len(self.train_set) // self.global_batch_size * self.global_batch_size
        return epoch * rows, (epoch + 1) * rows

    def _batches_of(self, epoch: int, used: int) -> Iterator[range]:
        """Yield the places of each global batch in the order of an epoch, after those that were
        used. The last one may be shorter."""
        start, end = self._span(epoch)
        return (
            range(rows.start - start, rows.stop - start)
            for rows in self.batches.batches(start + used, end)
        )

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
        """Restore a position that `position_state` returned.

        Raises:
            DataError: this data module has a different order of samples.
        """
        present = self._same_order()
        different = [
            f"{key} was {state.get(key)} and is now {value}"
            for key, value in present.items()
            if state.get(key) != value
        ]
        if different:
            raise DataError(
                "The checkpoint's position in the data does not match this run:"
                f" {'; '.join(different)}. Use the checkpoint's values, or start a new run from the"
                " checkpoint's weights."
            )
        kind = state.get("order")
        if kind != ORDER:
            raise DataError(
                f"The checkpoint's order of samples is of kind {kind}, which this version of"
                " lightning_3d does not know. Resume with the version that wrote it, or start a"
                " new run from the checkpoint's weights."
            )
        self._restored, self._begun = dict(state), None
