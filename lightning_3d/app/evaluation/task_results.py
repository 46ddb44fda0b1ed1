"""Results of tasks, in the files that lm-eval writes. Imports lm-eval and torch."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.utils import make_table

from lightning_3d.app.evaluation.task_model import TaskLM

RESULTS = "results"


class TaskResults:
    """Results of tasks, as `lm_eval.simple_evaluate` returns them.

    Args:
        model: the model.
        about: model, layout and precision, for the file.
        manager: `TaskManager` of lm-eval that has the tasks.
        names: their names.
        options: further arguments of `simple_evaluate`: `num_fewshot`, `apply_chat_template`,
            `limit`, `log_samples`.
    """

    def __init__(
        self,
        model: TaskLM,
        about: Mapping[str, str],
        manager: Any,
        names: Sequence[str],
        options: Mapping[str, Any],
    ) -> None:
        self._tracker = EvaluationTracker()
        # it looks for the name there
        arguments = {
            ("pretrained" if key == "model" else key): value for key, value in about.items()
        }
        found = simple_evaluate(
            model,
            arguments,
            list(names),
            task_manager=manager,
            evaluation_tracker=self._tracker,
            **options,
        )
        self.content: dict[str, Any] = dict(found)
        self.samples: dict[str, Any] = self.content.pop("samples", None) or {}

    def table(self) -> str:
        """Return the table of lm-eval: of tasks, then of groups if there are some."""
        tables = [make_table(self.content)]
        if self.content.get("groups"):
            tables.append(make_table(self.content, "groups"))
        return "\n".join(table.rstrip() for table in tables)

    def write(self, folder: Path, file: Path | None) -> Path:
        """Write results and samples.

        Args:
            folder: folder for the files, with the date in their names; it is created.
            file: file for the results, if the user has named one.

        Returns:
            The file of the results.

        Raises:
            OSError: a file cannot be written.
        """
        # lm-eval only warns about files that it cannot write
        with tempfile.TemporaryDirectory(prefix="lightning_3d_") as draft:
            self._tracker.output_path = f"{draft}/{RESULTS}.json"
            self._tracker.save_results_aggregated(self.content, self.samples)
            for name, samples in self.samples.items():
                self._tracker.save_results_samples(name, samples)
            written = sorted(Path(draft).iterdir())
            (results,) = (path for path in written if path.suffix == ".json")
            folder.mkdir(parents=True, exist_ok=True)
            for path in written:
                shutil.move(
                    path, file if file is not None and path == results else folder / path.name
                )
        return file or folder / results.name
