"""Private APIs of Lightning's `ModelSummary`: a table of the whole model, on a rank that has a part
of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.model_summary import ModelSummary as Table
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from typing_extensions import override


@dataclass(frozen=True)
class Sizes:
    """Numbers of a whole model and of one rank.

    Attributes:
        whole: returns the parameters of the module with a name in the whole model ("": all); with
            trained=True, those with gradients.
        share: returns the parameters of the module with a name that this rank keeps.
        types: class names of modules as the user wrote them.
        modes: numbers of modules in training and in evaluation mode.
        split: whether ranks keep less than the whole model.
    """

    whole: Callable[..., int]
    share: Callable[[str], int]
    types: Mapping[str, str]
    modes: Mapping[bool, int]
    split: bool


class WholeTable(Table):
    """Lightning's table with the numbers of the whole model. Where ranks keep a part, a column has
    this rank's share.

    Lightning counts the parameters that the module has on this rank (`ModelSummary`, 2.6). Its
    table for DeepSpeed has the further column, but counts by attributes that only DeepSpeed's
    parameters have.
    """

    def __init__(self, model: Any, max_depth: int, sizes: Sizes) -> None:
        self._sizes = sizes
        super().__init__(model, max_depth)

    @property
    @override
    def layer_types(self) -> list[str]:
        return [
            self._sizes.types.get(name, kind)
            for name, kind in zip(self.layer_names, super().layer_types, strict=True)
        ]

    @property
    @override
    def param_nums(self) -> list[int]:
        return [self._sizes.whole(name) for name in self.layer_names]

    @property
    @override
    def total_parameters(self) -> int:
        return self._sizes.whole()

    @property
    @override
    def trainable_parameters(self) -> int:
        return self._sizes.whole(trained=True)

    @property
    @override
    def total_training_modes(self) -> dict[str, int]:
        return {"train": self._sizes.modes.get(True, 0), "eval": self._sizes.modes.get(False, 0)}

    @override
    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        columns = super()._get_summary_data()
        if not self._sizes.split:
            return columns
        shares = [self._sizes.share(name) for name in self.layer_names]
        # Lightning added a row for parameters outside of the modules
        if len(columns[0][1]) > len(shares):
            shares.append(self._sizes.share("") - sum(shares))
        place = 1 + [name for name, _ in columns].index("Params")
        # `RichModelSummary` knows the column by this name.
        return [
            *columns[:place],
            ("Params per Device", [get_human_readable_count(share) for share in shares]),
            *columns[place:],
        ]


def summarize_whole(
    callback: Any, sizes: Callable[[Any], Sizes | None], describe: Callable[[Sizes], None]
) -> None:
    """Let a `ModelSummary` show the whole model.

    Args:
        callback: the callback, changed in place (`ModelSummary._summary`, Lightning 2.6; there is
            no public way to pass a table).
        sizes: function from a Trainer to the numbers of its model; None where the Trainer has
            another strategy.
        describe: called after the table was shown, where ranks keep a part.
    """
    table, show = callback._summary, callback.on_fit_start

    def summary(trainer: Any, module: Any) -> Any:
        found = sizes(trainer)
        return (
            table(trainer, module)
            if found is None
            else WholeTable(module, callback._max_depth, found)
        )

    def on_fit_start(trainer: Any, module: Any) -> None:
        show(trainer, module)
        found = sizes(trainer)
        if callback._max_depth and found is not None and found.split:
            describe(found)

    callback._summary, callback.on_fit_start = summary, on_fit_start
