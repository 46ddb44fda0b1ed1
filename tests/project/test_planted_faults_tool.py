"""The list of `tools/faults_to_plant.py` fits the code and the tests."""

import sys

from command_line import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tools"))

from faults_to_plant import FAULTS
from planted_faults import problems


def test_every_fault_fits_the_code_and_names_default_tests() -> None:
    assert list(problems(FAULTS, REPOSITORY)) == []
    assert len(FAULTS) >= 40
