"""Text that the trained model writes at the end of a run: keys `sample`. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_3d.app.config.tokenizer import tokenizer_of
from lightning_3d.errors import ConfigError
from lightning_3d.layout.sizes import check_number, check_sizes

AUTO = "auto"


@dataclass(frozen=True)
class SampleOptions:
    """Keys `sample`.

    Attributes:
        prompt: text to continue; auto: that of the data, if they have one and the run is not short;
            None: no sample.
        max_new_tokens: largest number of new tokens.
        temperature: divides the logits; 0 always takes the most probable token.
    """

    prompt: str | None = AUTO
    max_new_tokens: int = 64
    temperature: float = 0.8

    def check(self, model: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Refuse options out of range, and a prompt that the run cannot continue.

        Raises:
            ConfigError: with the option. Also: there is no tokenizer for the prompt.
        """
        check_sizes(**{"sample.max_new_tokens": self.max_new_tokens})
        check_number("sample.temperature", self.temperature)
        if self.prompt is None or self.prompt == AUTO:
            return
        if not self.prompt:
            raise ConfigError(
                "sample.prompt must have at least one character, or be null for no sample; got an"
                " empty string."
            )
        if tokenizer_of(model, data) is None:
            raise ConfigError(
                f"sample.prompt needs the tokenizer of data={data.get('name')}, and no key names"
                " it. Set data.tokenizer to a folder or to a name on the Hugging Face hub, or"
                " remove sample.prompt."
            )
