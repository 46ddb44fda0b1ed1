"""Tests of what only later versions of a package have. `make test-lowest` runs with the lowest
ones."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version


def since_transformers(version: str) -> pytest.MarkDecorator:
    """Skips a test with versions of Transformers before this one."""
    return pytest.mark.skipif(
        Version(transformers.__version__) < Version(version), reason=f"needs Transformers {version}"
    )
