"""The command `lightning-3d`: `main` finds the command, and each command has a file of its name."""

from lightning_3d.app.cli.main import entry_point, main

__all__ = ["entry_point", "main"]
