"""`lightning-3d plan`, `parallelism=auto`, and runs that are refused because they do not fit."""

import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import look
from command_line import Result, run_commands

pytestmark = pytest.mark.slow

LARGE = [
    "model=llama3_70b",
    "cluster=h100_32x8",
    "data.global_batch_size=1024",
    "data.sequence_length=8192",
]
TIGHT = [
    "model=mixtral_8x7b",
    "cluster=h100_4x8",
    "data.global_batch_size=512",
    "data.sequence_length=4096",
]
TIGHT_BY_HAND = [
    *TIGHT,
    "trainer.dry=true",
    "parallelism=pp4_dp8_ep8",
    "parallelism.micro_batch_size=1",
    "parallelism.zero_stage=1",
]
WIDE = [
    *(
        "model=llama3_1_8b",
        "cluster=h100_4x8",
        "data.global_batch_size=64",
        "data.sequence_length=4096",
        "trainer.dry=true",
    ),
    *("parallelism=tp16_dp2", "parallelism.micro_batch_size=1"),
]
SMALL = [
    "model=llama3_1_8b",
    "cluster=h100_1x8",
    "data.global_batch_size=64",
    "data.sequence_length=4096",
    "trainer.dry=true",
]


SHELL_WORDS = {
    "command": "lightning-3d train model=llama3_70b cluster=h100_32x8",
    "batch": "data.global_batch_size=1024 data.sequence_length=8192",
    "layout": " parallelism=tp",
    "micro-batch": " parallelism.micro_batch_size=",
    "ZeRO": " parallelism.zero_stage=1",
    "schedule": " parallelism.schedule=",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "short").mkdir()
    (folder / "tight").mkdir()
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Result]:
    lines = {
        # with a pipeline
        "large": [
            "plan",
            *LARGE,
            "parallelism=auto",
            "parallelism.zero_stage=1",
            "--out",
            str(folder),
        ],
        "auto": ["train", *SMALL, "parallelism=auto"],
        "auto, some set": [
            "train",
            *SMALL,
            "parallelism=auto",
            "parallelism.micro_batch_size=4",
            "parallelism.recompute=full",
        ],
        "tight": ["plan", *TIGHT, "--out", str(folder / "tight")],
        "tight by hand": ["train", *TIGHT_BY_HAND],
        "all reserved": ["plan", *SMALL, "plan.memory_risk=0.001", "cluster.memory=30e9"],
        "more than all reserved": ["train", *SMALL, "parallelism=dp8", "plan.memory_risk=1"],
        "wide": ["train", *WIDE],
        "too large": ["train", *SMALL, "parallelism=dp8", "parallelism.micro_batch_size=4"],
        "forced": [
            "train",
            *SMALL,
            "parallelism=dp8",
            "parallelism.micro_batch_size=4",
            "force=true",
        ],
        "too large for this machine": ["train", "model=llama3_70b"],
        "too large for this machine, dry": ["train", "model=llama3_70b", "trainer.dry=true"],
        "auto on what is not known": ["train", "parallelism=auto", "trainer.dry=true"],
        "no length": [
            "plan",
            "model=llama3_1_8b",
            "cluster=h100_1x8",
            "data.global_batch_size=64",
            "--out",
            str(folder / "short"),
        ],
        "nothing fits": [
            "plan",
            "model=llama3_70b",
            "cluster=h100_1x8",
            "data.global_batch_size=8",
            "data.sequence_length=4096",
        ],
        "no such model": ["plan", "model=llama9", "cluster=h100_1x8"],
        "no such option": ["plan", "--evalute", "x.csv"],
        "a script now": ["plan", "--evaluate", "x.csv"],
        "no such folder": ["plan", *LARGE, "--out", "/nowhere/at/all"],
        "stages of one layout": ["plan", *SMALL, "parallelism=pp2", "parallelism.stages=[16,16]"],
        "left open": ["train", *SMALL, "parallelism=dp8", "parallelism.zero_stage=null"],
        "help": ["plan", "--help"],
    }
    return dict(zip(lines, run_commands(list(lines.values())), strict=True))


def test_a_plan_is_printed_and_written(answers: dict[str, Result], folder: Path) -> None:
    answer = answers["large"]
    assert answer.code == 0 and not answer.torch and answer.left == []
    lines = answer.output.splitlines()
    assert lines[0] == "llama3_70b on h100_32x8: 1024 sequences of 8192 tokens a step"
    rows = [re.split(r" {2,}", line) for line in lines[3 : lines.index("", 3)]]
    assert 3 <= len(rows) <= 5
    seconds = [float(row[5]) for row in rows]
    assert seconds == sorted(seconds) and rows[0][-1] == "the fastest"
    assert len({name for name, word in SHELL_WORDS.items() if word in lines[-1]}) == len(
        SHELL_WORDS
    )
    for row in rows[1:]:
        time, memory, part = re.fullmatch(
            r"\+([0-9.]+)% time, ([+-][0-9.]+) GiB; [a-z ]+ \+([0-9.]+)%.*", row[-1]
        ).groups()
        assert float(time) == pytest.approx(100 * (float(row[5]) / seconds[0] - 1), abs=0.3), (
            "of the step of the first"
        )
        assert float(memory) == pytest.approx(int(row[8]) - int(rows[0][8]), abs=1)
        assert float(part) > 0, "each says what it loses by"
    content = json.loads((folder / "plan.json").read_text())
    assert [one["layout"] for one in content["best"]] == [row[0] for row in rows]
    assert content["simulated"] <= 30
    first = content["best"][0]
    assert sum(first["seconds_of"].values()) == pytest.approx(first["seconds"], rel=0.02)
    assert (
        sum(first["bytes_of"].values()) == pytest.approx(first["bytes"]) and first["bytes"] < 80e9
    )
    assert first["tokens_per_second"] == pytest.approx(1024 * 8192 / first["seconds"])


def test_the_page_is_whole_and_needs_nothing_else(answers: dict[str, Result], folder: Path) -> None:
    assert answers["large"].code == 0
    text = (folder / "plan.html").read_text()
    assert not re.search(r"(?:src|href)=|<script|url\(", text)
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(pictures) == 2, "memory against speed, and the pipeline"
    for picture in pictures:
        ElementTree.fromstring(picture)
    content = json.loads((folder / "plan.json").read_text())
    assert pictures[0].count("<circle") == len(content["seen"])
    assert "node 15" in text and "16 more nodes" in text


@pytest.mark.parametrize(
    ("width", "dark"), [(390, True), pytest.param(1280, False, marks=pytest.mark.full)]
)
def test_a_browser_shows_the_page(
    answers: dict[str, Result], folder: Path, width: int, dark: bool
) -> None:
    assert answers["large"].code == 0
    seen = look(folder / "plan.html", width=width, dark=dark)
    assert seen.errors == [] and seen.asked == [] and len(seen.picture) > 20_000
    assert seen.wide <= width, "nothing can be scrolled sideways but what is meant to"
    assert (seen.ground == "rgb(13, 18, 24)") is dark


def test_proposals_are_likely_to_fit_and_show_the_margin(
    answers: dict[str, Result], folder: Path
) -> None:
    """Without a limit of the risk the first would be pp2_dp8_cp2_ep8_vp2 with ZBVZeroBubble, at 85
    % of a GPU."""
    answer = answers["tight"]
    assert answer.code == 0, answer.output
    head, *rows = [re.split(r" {2,}", line) for line in answer.output.splitlines()[2:8]]
    shares = [int(row[head.index("of GPU")].rstrip("%")) for row in rows]
    free = [int(row[head.index("GiB free")]) for row in rows]
    assert len(shares) == 5 and max(shares) <= 85
    content = json.loads((folder / "tight" / "plan.json").read_text())
    assert content["memory_risk"] == 0.1
    assert all(one["bytes"] + one["bytes_free"] == pytest.approx(80e9) for one in content["seen"])
    assert all(one["fit_probability"] >= 0.9 for one in content["seen"])
    assert [round(100 * one["memory_share"]) for one in content["best"]] == shares
    assert [round(one["bytes_free"] / 2**30) for one in content["best"]] == free
    first = content["best"][0]
    margin = f"{first['memory_share']:.0%} of 74.5 GiB, {first['bytes_free'] / 2**30:.1f} GiB free"
    margin += f", fits with {first['fit_probability']:.0%}"
    page = (folder / "tight" / "plan.html").read_text()
    assert margin in answer.output and f"{margin}, fullest rank" in page and "fits with 90%" in page


def test_a_layout_of_ones_own_inside_the_reserve_is_warned_of(answers: dict[str, Result]) -> None:
    answer = answers["tight by hand"]
    assert answer.code == 0 and "pp4_dp8_ep8: 32 ranks on GPUs" in answer.output
    [warning] = [line for line in answer.output.splitlines() if "plan.memory_risk" in line]
    assert warning.startswith(
        "lightning_3d: pp4_dp8_ep8 is predicted to fill 98% of 74.5 GiB on its fullest rank."
    )
    advice = warning.partition(". Use ")[2].partition(" (")[0].split()
    (advised,) = run_commands([["train", *TIGHT_BY_HAND, *advice]])
    assert advice and advised.code == 0 and "plan.memory_risk" not in advised.output, (
        "what is advised is likely to fit"
    )


def test_a_plan_without_a_length_is_for_the_longest_sequences_of_the_model(
    answers: dict[str, Result],
) -> None:
    lines = answers["no length"].output.splitlines()
    assert lines[0].endswith(
        "131072 tokens a step (the longest that the model supports; for another length, set"
        " data.sequence_length)"
    )
    assert " data.sequence_length=131072 " in lines[-1], "the command trains what was planned"


def test_a_named_layout_whose_tensor_parallel_ranks_span_nodes_is_warned_of(
    answers: dict[str, Result],
) -> None:
    [warning] = [
        line for line in answers["wide"].output.splitlines() if "tensor-parallel ranks of" in line
    ]
    cost = re.search(
        r"tp16_dp2 are on 2 nodes. Communication .* is predicted to cost ([0-9.]+) s of each step"
        r" of ([0-9.]+) s",
        warning,
    )
    assert answers["wide"].code == 0 and cost and 0 < float(cost[1]) < float(cost[2])
    assert "tensor-parallel ranks of" not in answers["auto"].output


def test_what_a_plan_prints_runs(answers: dict[str, Result]) -> None:
    arguments = next(
        line
        for line in answers["large"].output.splitlines()
        if line.startswith("lightning-3d train")
    )
    assert arguments == answers["large"].output.splitlines()[-1], (
        "the last line, so that it can be copied"
    )
    (answer,) = run_commands([[*shlex.split(arguments)[1:], "trainer.dry=true"]])
    assert answer.code == 0, answer.output
    assert f"parallelism={answer.output.partition(':')[0]} " in arguments


def test_auto_chooses(answers: dict[str, Result]) -> None:
    assert answers["auto"].code == answers["auto, some set"].code == 0
    assert "8 ranks on GPUs" in answers["auto"].output and not answers["auto"].torch
    assert (
        "micro-batches of 4" in answers["auto, some set"].output
        and "full recomputation" in answers["auto, some set"].output
    )


def test_what_does_not_fit_is_refused(answers: dict[str, Result]) -> None:
    refused = answers["too large"]
    assert refused.code == 2 and not refused.torch and refused.left == []
    needed, there = map(float, re.findall(r"([0-9.]+) GiB", refused.output)[:2])
    assert needed > there == 74.5
    table = {
        name: float(size)
        for name, size in re.findall(
            r"^  (\w+) +([0-9.]+) GiB$", refused.output, flags=re.MULTILINE
        )
    }
    assert (
        table["all"]
        == needed
        == pytest.approx(sum(size for name, size in table.items() if name != "all"), abs=0.3)
    )
    assert table["weights"] == pytest.approx(2 * 8.03e9 / 2**30, abs=0.1)
    assert table["optimizer"] == pytest.approx(12 * 8.03e9 / 8 / 2**30, abs=0.1)
    assert "force=true" in refused.output and "parallelism=auto" in refused.output
    assert answers["forced"].code == 0
    advice = refused.output.partition("\nUse ")[2].partition(" (")[0].split()
    assert advice
    (advised,) = run_commands(
        [["train", *SMALL, "parallelism=dp8", "parallelism.micro_batch_size=4", *advice]]
    )
    assert advised.code == 0, "what is advised is accepted"


def test_f20_what_this_machine_cannot_hold_is_refused(answers: dict[str, Result]) -> None:
    refused = answers["too large for this machine"]
    assert (
        refused.code == 2
        and not refused.torch
        and refused.left == []
        and "Traceback" not in refused.output
    )
    needed, there = map(float, re.findall(r"([0-9.]+) GiB", refused.output)[:2])
    table = {
        name: float(size)
        for name, size in re.findall(
            r"^  (\w+) +([0-9.]+) GiB$", refused.output, flags=re.MULTILINE
        )
    }
    assert table["all"] == needed > there and table["weights"] == pytest.approx(
        4 * 70.55e9 * 2 / 2**30, rel=0.01
    ), "of both ranks"
    assert "its 8 ranks on this machine" in refused.output and "force=true" in refused.output


def test_a_dry_run_says_that_this_machine_is_too_small(answers: dict[str, Result]) -> None:
    answer = answers["too large for this machine, dry"]
    assert (
        answer.code == 0
        and not answer.torch
        and answer.output.startswith("tp2_pp2_dp2: 8 ranks on CPU")
    )
    assert re.search(
        r"^lightning_3d: tp2_pp2_dp2 needs about [0-9.]+ GiB for its 8 ranks on this machine",
        answer.output,
        re.MULTILINE,
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "auto on what is not known",
            "cannot plan for the cluster local, because its GPUs are unknown",
        ),
        (
            "nothing fits",
            (
                "No layout of a model with 70.6 billion parameters fits on 8 GPUs with 74.5 GiB (80"
                " GB) each"
            ),
        ),
        ("all reserved", "with a probability of at most 0.1% (plan.memory_risk=0.001), but"),
        (
            "more than all reserved",
            "plan.memory_risk must be a finite number between 0.001 and 0.5; got 1.0.",
        ),
        ("no such model", "llama9"),
        ("no such option", 'lightning-3d plan has no option --evalute. Did you mean "--evaluate"?'),
        (
            "a script now",
            (
                "--evaluate is now a script of the repository: python -m"
                " benchmarks.planner_accuracy FILE.csv"
            ),
        ),
        ("no such folder", "there is no folder /nowhere/at/all"),
        (
            "stages of one layout",
            (
                "stages belongs to one layout, but here the planner chooses the layout. Name a"
                " layout in train or dryrun"
            ),
        ),
        ("left open", "parallelism.zero_stage must be given"),
    ],
)
def test_refusals(answers: dict[str, Result], name: str, said: str) -> None:
    answer = answers[name]
    assert answer.code == 2 and said in answer.output and "Traceback" not in answer.output
    assert answer.left == [] and not answer.torch


def test_help(answers: dict[str, Result]) -> None:
    assert (
        answers["help"].code == 0
        and "benchmarks.planner_accuracy FILE.csv" in answers["help"].output
    )
