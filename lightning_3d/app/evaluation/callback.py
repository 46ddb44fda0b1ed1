"""Evaluation of a run in the layout that trains it: losses of the last validation, and a sample of
text at the end of the fit."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import RunningStage
from typing_extensions import override

from lightning_3d.app.config.sample import AUTO
from lightning_3d.app.evaluation.engine import EvaluationEngine
from lightning_3d.app.evaluation.generation import Sampling, generate
from lightning_3d.app.evaluation.losses import SetLosses
from lightning_3d.app.evaluation.prompt import max_length, require_known_ids
from lightning_3d.app.evaluation.table import losses_table, write_json
from lightning_3d.app.evaluation.text import Text, open_text
from lightning_3d.app.runs.evaluation_file import printable
from lightning_3d.app.training.module import CausalLM
from lightning_3d.app.training.preference import PreferenceLM
from lightning_3d.errors import ConfigError, plural
from lightning_3d.storage.surviving import Surviving
from lightning_3d.strategy.exponential_average import showing_average
from lightning_3d.strategy.strategy import Lightning3DStrategy

_LEAST_STEPS = 100
"""Steps of a run from which `prompt="auto"` writes a sample: after fewer, a model writes noise."""


class Evaluation(SetLosses):
    """Callback that writes loss and perplexity of each validation set, and a sample of text, to a
    file when a fit ends, and prints them.

    The losses are those of the last validation of the fit, summed as `lightning-3d evaluate` sums
    them, so they cost no further pass. The sample is what `lightning-3d generate` writes: all ranks
    take part, in the layout that has trained. Of a module that trains against a second model, both
    are those of the trained model; DPO has no losses here, because its loss is one of pairs. The
    callback does nothing for modules other than `CausalLM`, and with other strategies.

    Args:
        path: file to write, see `runs.evaluation_file`; None only prints.
        prompt: text to continue; "auto": that of the data module, if it has one and the fit has at
            least 100 steps; None: no sample.
        max_new_tokens: largest number of new tokens, fewer where the model takes fewer.
        temperature: see `Sampling`.
        seed: seed of the choice of tokens.
        tokenizer: folder or name of the tokenizer, or "bytes"; None: that of the data module, else
            of the pretrained model.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        prompt: str | None = AUTO,
        max_new_tokens: int = 64,
        temperature: float = 0.8,
        seed: int = 0,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        self._path = None if path is None else Path(path)
        # a configuration may have a number there
        self._wanted = None if prompt is None else str(prompt)
        self._tokenizer = tokenizer
        self._options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        self._text: Text | None = None
        self._prompt: list[int] = []
        self._evaluates = self._sums_losses = False
        self._step = 0
        self._found: dict[str, Any] | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the prompt and its tokens before training, so that a wrong one is refused now and
        not at the end.

        Raises:
            ConfigError: there is no tokenizer, or the model cannot continue the prompt.
        """
        self._evaluates = isinstance(pl_module, CausalLM) and isinstance(
            trainer.strategy, Lightning3DStrategy
        )
        self._sums_losses = self._evaluates and not isinstance(pl_module, PreferenceLM)
        self._text = self._found = None
        self.results = []
        given = self._given(trainer)
        if given is not None and isinstance(pl_module, CausalLM) and self._evaluates:
            self._text, self._prompt = self._encoded(given, trainer, pl_module)

    def _given(self, trainer: pl.Trainer) -> str | None:
        """Return the prompt of this fit; None: no sample."""
        if self._wanted != AUTO:
            return self._wanted
        long = trainer.max_steps == -1 or trainer.max_steps >= _LEAST_STEPS
        return getattr(_data(trainer), "sample_prompt", None) if long else None

    def _encoded(
        self, prompt: str, trainer: pl.Trainer, module: CausalLM
    ) -> tuple[Text, list[int]]:
        name = (
            self._tokenizer
            or getattr(_data(trainer), "tokenizer", None)
            or module.model_config.get("pretrained")
        )
        if name is None:
            raise ConfigError(
                "A prompt needs the tokenizer of the data. Set data.tokenizer, or remove the prompt"
                " (sample.prompt)."
            )
        text = open_text(str(name), ())
        tokens = text.encode(prompt)
        require_known_ids(tokens, module.config.vocab_size, "data.tokenizer=FOLDER")
        limit = EvaluationEngine(trainer, max_length(module.config)).longest
        if limit is not None and len(tokens) >= limit:
            raise ConfigError(
                f"sample.prompt has {plural(len(tokens), 'token')}, and the model takes at most"
                f" {limit} with its continuation. Use a shorter prompt."
            )
        return text, tokens

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._sums_losses:
            super().on_validation_epoch_start(trainer, pl_module)

    @override
    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._sums_losses:
            super().on_validation_batch_end(*args, **kwargs)

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._sums_losses:
            super().on_validation_epoch_end(trainer, pl_module)
            self._step = trainer.global_step

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Generate the sample, and write the file. All ranks take part."""
        if not self.results and self._text is None:
            return
        sample = None if self._text is None else self._sample(trainer, pl_module, self._text)
        sets = {entry.name: entry.numbers() for entry in self.results}
        self._found = {
            "step": self._step if self.results else trainer.global_step,
            "sets": sets,
            "sample": sample,
        }
        if trainer.is_global_zero and self._path is not None:
            with Surviving(self._path):
                write_json(self._path, self._found)

    def _sample(
        self, trainer: pl.Trainer, module: pl.LightningModule, text: Text
    ) -> dict[str, Any]:
        engine = EvaluationEngine(trainer, max_length(module.config))
        wanted = self._options["max_new_tokens"]
        room = wanted if engine.longest is None else min(wanted, engine.longest - len(self._prompt))
        with showing_average(trainer), _predicting(trainer, module):
            (new,) = generate(
                engine,
                [self._prompt],
                Sampling(**{**self._options, "max_new_tokens": room}, stop=text.stop),
            )
        return {"prompt": text.decode(self._prompt), "text": text.decode(new), **self._options}

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the results, below the table of `Summary` if that is an earlier callback."""
        if self._found is None or not trainer.is_global_zero:
            return
        if self._found["sets"]:
            print("\n" + losses_table(self._found["sets"]))
        if sample := self._found["sample"]:
            words = printable(sample["prompt"] + sample["text"], sys.stdout.encoding or "utf-8")
            print(f"\nsample of text (temperature {sample['temperature']:g}):\n{words}")
        sys.stdout.flush()


def _data(trainer: pl.Trainer) -> object:
    return getattr(trainer, "datamodule", None)


@contextmanager
def _predicting(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """Put a trainer that fits into the stage of prediction, with the module in evaluation mode and
    without gradients."""
    stage, training = trainer.state.stage, [part for part in module.modules() if part.training]
    trainer.state.stage = RunningStage.PREDICTING
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        trainer.state.stage = stage
        for part in training:
            part.training = True
