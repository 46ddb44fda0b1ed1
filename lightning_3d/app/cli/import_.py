"""`lightning-3d import`: convert a checkpoint of Lightning or DeepSpeed. torch is imported after
all checks."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from lightning_3d.app.cli.options import Command
from lightning_3d.errors import ConfigError
from lightning_3d.ranks.progress import task
from lightning_3d.storage.numbers import show_bytes

COMMAND = Command(
    "import",
    "Convert a checkpoint of Lightning or DeepSpeed into one that any layout can load. Reads a"
    " checkpoint file of Lightning (one process, DDP, FSDP), a sharded folder of its FSDPStrategy,"
    " or a folder of DeepSpeed (ZeRO 0 to 3). Runs no code that the checkpoint contains. Converts"
    " the weights, the optimizer's state by parameter name, the step, the schedulers and the"
    " position in the data.",
    takes="",
    examples=["lightning_logs/version_0/checkpoints/last.ckpt --output imported.ckpt"],
)
COMMAND.argument("SOURCE", "the checkpoint of Lightning or DeepSpeed")
COMMAND.option(
    "--output", "FOLDER", "path or URL of the new checkpoint; must be given", required=True
)
COMMAND.flag("--weights-only", "leave the optimizer out")
COMMAND.flag(
    "--plain-only", "leave out entries that would need Python classes, instead of refusing the file"
)
COMMAND.option(
    "--groups",
    "FILE",
    "JSON file with one list of parameter names for each parameter group of the optimizer",
)
COMMAND.option(
    "--rename",
    "OLD=NEW",
    'replace the prefix OLD of names with NEW: "module.=" removes module., "=model." adds model. to'
    " all names",
)


def run(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    return COMMAND.run(arguments, lambda options, _: _convert(options))


def _convert(options: Namespace) -> int:
    old, equals, new = (options.rename or "").partition("=")
    if options.rename is not None and not equals:
        raise ConfigError(
            f'--rename must be OLD=NEW, for example "module.="; got "{options.rename}".'
        )
    groups = _read_groups(Path(options.groups)) if options.groups else None

    with task("importing torch"):
        from lightning_3d.checkpoint.conversion import convert

    found = convert(
        Path(options.source).expanduser().absolute(),
        options.output,
        groups=groups,
        optimizer=not options.weights_only,
        rename=(old, new) if options.rename is not None else None,
        plain_only=options.plain_only,
    )
    print(
        f"{options.output}: converted from {found.kind}, step {found.step}, {found.weights}"
        f" weights, {found.states} optimizer states,"
    )
    print(f"  {show_bytes(found.nbytes)}; any layout can load it")
    for sentence in found.lost:
        print(f"  {sentence}")
    return 0


def _read_groups(path: Path) -> list[list[str]]:
    try:
        groups = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--groups {path} cannot be read: {error}") from error
    if not isinstance(groups, list) or not all(
        isinstance(group, list) and all(isinstance(n, str) for n in group) for group in groups
    ):
        raise ConfigError(
            f"--groups {path} must hold a list with one list of parameter names for each parameter"
            " group."
        )
    return groups
