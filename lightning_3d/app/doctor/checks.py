"""The checks, in order: those that cannot hang in a collective come first."""

from __future__ import annotations

from lightning_3d.app.doctor import (
    collectives,
    compute,
    environment,
    file_system,
    gpus,
    host,
    links,
    versions,
)
from lightning_3d.app.doctor.check import Check

CHECKS: tuple[Check, ...] = (
    versions.CHECK,
    environment.CHECK,
    gpus.CHECK,
    host.CHECK,
    file_system.CHECK,
    links.CHECK,
    compute.CHECK,
    collectives.CHECK,
)
