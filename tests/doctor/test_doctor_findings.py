"""Words of findings, comparisons between ranks, and the table."""

from doctored import all_ranks, gathered, setup_of

from lightning_3d.app.doctor.examination import Report
from lightning_3d.app.doctor.findings import (
    OK,
    UNKNOWN,
    WARNING,
    WRONG,
    DoctorFinding,
    RankPlace,
    RankPlaces,
    alike,
    slow_ones,
)
from lightning_3d.app.doctor.table import WIDTH, show
from lightning_3d.errors import spans


def test_ranks_are_named_with_their_hosts() -> None:
    places = gathered(all_ranks(6)).places
    assert places.describe([3]) == "rank 3 (node1)"
    assert places.describe([5, 0, 1]) == "ranks 0-1 (node0) and 5 (node2)"
    assert places.describe(range(6)) == "all ranks"
    assert spans([0, 1, 2, 7]) == "0-2, 7"


def test_the_host_of_a_rank_that_never_answered_is_that_of_its_neighbors() -> None:
    places = RankPlaces([RankPlace(0, "a", 0), RankPlace(1, "a", 1), RankPlace(2, "b", 0)], 6, 2)
    assert places.describe([3]) == "rank 3 (b)"
    assert places.describe([5]) == "rank 5 (node 2)"


def test_the_odd_ones_out_are_named() -> None:
    places = gathered(all_ranks()).places
    same = alike("torch", dict.fromkeys(range(4), "2.13"), places)
    assert (same.verdict, same.measured) == (OK, "2.13")
    other = alike(
        "torch", {0: "2.13", 1: "2.13", 2: "2.13", 3: "2.12"}, places, advice="Install {usual}."
    )
    assert (other.verdict, other.measured, other.ranks) == (
        WRONG,
        "2.13, but 2.12 on rank 3 (node1)",
        (3,),
    )
    assert other.advice == "Install 2.13."
    none = alike("torch", {0: "2.13", 1: None, 2: "2.13", 3: "2.13"}, places)
    assert none.ranks == (1,) and "none on rank 1" in none.measured
    assert alike("torch", dict.fromkeys(range(4)), places).verdict == UNKNOWN


def test_slow_ones_are_far_below_the_median() -> None:
    rates = {0: 100.0, 1: 99.0, 2: 85.0, 3: 60.0, 4: 101.0}
    assert {rank: verdict for rank, (verdict, _) in slow_ones(rates, 0.9, 0.75).items()} == {
        2: WARNING,
        3: WRONG,
    }
    assert slow_ones({0: 1.0}, 0.9, 0.75) == {}


def test_the_table_has_the_worst_first_and_is_narrow() -> None:
    report = Report(setup_of(), gathered(all_ranks()).places)
    long = "a very long sentence about " + "many " * 40 + "ranks"
    bad = DoctorFinding("bad", WRONG, long, (1,), long)
    report.findings["GPUs"] = [
        DoctorFinding("fine", OK, "1"),
        bad,
        DoctorFinding("so so", WARNING, "2"),
    ]
    text = show(report)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.index("bad") < text.index("so so") < text.index("fine")
    assert "1 wrong, 1 warning, 0 unknown, 1 ok" in text and report.exit_code == 1
    report.findings["GPUs"] = [DoctorFinding("so so", WARNING, "2")]
    assert report.exit_code == 0, "warnings are not failures"
