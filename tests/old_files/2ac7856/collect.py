"""Print what later versions are compared with: losses of the runs of `make.sh`, keys and options of
`conf`, public names."""

import csv
import inspect
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

COLUMNS = ("loss", "grad_norm", "val_loss")
PUBLIC = {
    "lightning_3d": (
        "Layout",
        "Lightning3DStrategy",
        "initialize",
        "load_pretrained",
        "planned",
        "verify",
    ),
    "lightning_3d.strategy": ("Lightning3DStrategy",),
    "lightning_3d.layout": ("Layout",),
    "lightning_3d.errors": (
        "Lightning3DError",
        "LayoutError",
        "ConfigError",
        "PlanError",
        "DataError",
        "CheckpointError",
    ),
    "lightning_3d.checkpoint": ("load_full_state_dict",),
    "lightning_3d.cli": ("main", "entry_point"),
    "lightning_3d.training.callbacks": ("MetricsCSV", "ProgressBar", "Summary"),
    "lightning_3d.training.timeline": ("Timeline", "RunReport"),
    "lightning_3d.training.router_log": ("RouterLog",),
    "lightning_3d.training.wandb_logger": ("WandbLogger",),
    "hydra_plugins.lightning_3d_launcher.launcher": ("Lightning3DLauncher",),
    "hydra_plugins.lightning_3d_launcher.slurm": ("Lightning3DSlurmLauncher",),
}
"""What the documentation, the configuration and frozen runs name, by module."""


def rows(folder: str) -> dict[str, dict[str, float]]:
    """Losses and gradient norms of a run folder, by step."""
    with Path(folder, "metrics.csv").open() as file:
        return {
            row["step"]: {name: float(row[name]) for name in COLUMNS if row[name]}
            for row in csv.DictReader(file)
        }


def keys(value: Any, above: str = "") -> Iterator[str]:
    """Keys of a configuration that have a value, with dots."""
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from keys(inner, f"{above}{key}.")
        elif key != "defaults":
            yield f"{above}{key}"


def describe(module: str, name: str) -> dict[str, Any]:
    """Whether it is a class, an error or a function, and its parameters."""
    value = getattr(import_module(module), name)
    if inspect.isclass(value) and issubclass(value, Exception):
        return {"kind": "error", "parameters": []}
    return {
        "kind": "class" if inspect.isclass(value) else "function",
        "parameters": list(inspect.signature(value).parameters),
    }


def main() -> None:
    files = {
        path.relative_to("src").with_suffix("").as_posix(): path
        for path in Path("src").glob("[cr][oe]*/**/*.yaml")
    }
    content = {name: yaml.safe_load(path.read_text()) for name, path in sorted(files.items())}
    numbers = {
        "run": rows("whole"),
        "sweep/0": rows("sweep_whole/0"),
        "script": json.loads(Path("script/losses.json").read_text()),
        "plain": json.loads(Path("plain/losses.json").read_text()),
        "options": list(content),
        "keys": {
            name: list(keys(value))
            for name, value in content.items()
            if not name.startswith(("conf/model", "recipes"))
        },
        "public": {
            f"{module}.{name}": describe(module, name)
            for module, names in PUBLIC.items()
            for name in names
        },
    }
    print(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
