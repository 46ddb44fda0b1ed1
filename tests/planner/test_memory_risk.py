"""How likely a layout fits."""

import pytest

from lightning_3d.app.planner.memory_risk import fit_probability, largest_share


def test_a_prediction_of_the_whole_memory_fits_every_second_time() -> None:
    assert fit_probability(80e9, 80e9) == pytest.approx(0.5)
    assert fit_probability(40e9, 80e9) > 0.999 and fit_probability(120e9, 80e9) < 0.002
    assert fit_probability(0.0, 80e9) == 1.0


@pytest.mark.parametrize("risk", [0.001, 0.1, 0.3, 0.5])
def test_the_largest_share_fits_with_the_rest_of_the_risk(risk: float) -> None:
    assert fit_probability(largest_share(risk) * 80e9, 80e9) == pytest.approx(1 - risk)
