"""One rank of an evaluation: builds the module in the layout, loads its weights, and works with
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
from typing_extensions import override

from lightning_3d.app.evaluation.engine import longest_row, padding_unit
from lightning_3d.app.evaluation.losses import SetLoss, SetLosses
from lightning_3d.app.evaluation.prompt import max_length, require_known_ids
from lightning_3d.app.training.module import CausalLM
from lightning_3d.app.training.run import make_data, make_trainer, prepare
from lightning_3d.checkpoint import PART
from lightning_3d.errors import ConfigError, plural
from lightning_3d.layout.layout import Layout
from lightning_3d.strategy.exponential_average import ExponentialAverage

T = TypeVar("T")


class Session:
    """The model of a configuration on this rank. Its methods are collective.

    Args:
        config: complete configuration, from `RunPlan.freeze`.
        checkpoint: checkpoint with the weights; None where the model reads them from
            `model.pretrained`.
        average: whether to read the average of the weights instead.
    """

    def __init__(
        self, config: dict[str, Any], checkpoint: str | None, *, average: bool = False
    ) -> None:
        prepare(config)
        self.config = config
        self.module = _TrainedModel(config["model"])
        self._losses, self._work = SetLosses(), _Work()
        self.trainer: pl.Trainer = make_trainer(
            config, [self._losses, self._work, *([ExponentialAverage()] if average else [])]
        )
        self._checkpoint = checkpoint

    def losses(self) -> Sequence[SetLoss]:
        """Compute the loss of every validation set of the configuration's data.

        Raises:
            DataError: there is none.
        """
        self.trainer.validate(
            self.module,
            datamodule=make_data(self.config),
            ckpt_path=self._take_checkpoint(),
            verbose=False,
        )
        return self._losses.require_results()

    def work(self, function: Callable[[pl.Trainer], T]) -> T:
        """Call a function while the model is in place on all ranks, in evaluation mode and without
        gradients."""
        self._work.function = function
        self.trainer.predict(
            self.module,
            dataloaders=_NoBatches(),
            ckpt_path=self._take_checkpoint(),
            return_predictions=False,
        )
        return self._work.result

    @property
    def max_length(self) -> int | None:
        """Tokens that the model takes; None if its configuration does not say it."""
        return max_length(self.module.config)

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the model."""
        return int(
            self.config["model"]["config"].get("vocab_size") or self.module.config.vocab_size
        )

    def require_fits(self, prompt: Sequence[int], more: int) -> None:
        """Refuse a prompt that the model cannot continue by so many tokens.

        Raises:
            ConfigError: with the numbers.
        """
        require_known_ids(prompt, self.vocabulary, "--tokenizer FOLDER")
        longest, why = self._longest()
        if longest is not None and len(prompt) + more > longest:
            raise ConfigError(
                f"The prompt has {plural(len(prompt), 'token')}, so {more} new ones are more than"
                f" the {longest} that the model takes{why}. Use --max-new-tokens"
                f" {max(1, longest - len(prompt))} or fewer, or a shorter prompt."
            )

    def require_length(self, length: int) -> None:
        """Refuse rows that are longer than the model takes.

        Args:
            length: tokens of the longest row.

        Raises:
            ConfigError: with the numbers.
        """
        longest, why = self._longest()
        if longest is not None and length > longest:
            raise ConfigError(
                f"Rows of {plural(length, 'token')} are longer than the {longest} that the model"
                f" takes{why}. Use --max-length {longest}."
            )

    def _longest(self) -> tuple[int | None, str]:
        """Return the longest row whose padded length has positions, which may be a table, and why
        it is shorter than `max_length`."""
        if self.max_length is None:
            return None, ""
        unit = padding_unit(Layout.parse(self.config["parallelism"]["layout"]))
        longest = longest_row(self.max_length, unit)
        why = (
            f" (its {self.max_length} positions, in multiples of {unit}, because this layout splits"
            " rows)"
        )
        return longest, why if longest < self.max_length else ""

    def _take_checkpoint(self) -> str | None:
        """Return the checkpoint for the first use of the module; afterwards it has the weights."""
        path, self._checkpoint = self._checkpoint, None
        return path


class _TrainedModel(CausalLM):
    """The trained model of a checkpoint, which may also have a frozen one: the reference of DPO, or
    a teacher."""

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[PART] = "model."


class _NoBatches:
    """A loader without batches whose length is not known: Lightning skips loops over loaders of
    length 0, with all their hooks."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Work(pl.Callback):
    """Calls a function when Lightning begins to predict: then strategy, device, mode and precision
    are set up."""

    def __init__(self) -> None:
        self.function: Callable[[pl.Trainer], Any] | None = None
        self.result: Any = None

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self.function is not None
        self.result = self.function(trainer)
