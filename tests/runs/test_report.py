"""The pages that show a run and a sweep: what they say is what the files say, and a browser shows
them."""

import csv
import json
import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from browser import chromium, look
from command_line import run_commands
from ranks import run_ranks

from lightning_3d.app.runs.report.run import About, thinned, write_report
from lightning_3d.app.runs.report.sweep import write_sweep_report
from lightning_3d.app.runs.status import RunStatus
from lightning_3d.app.training.timeline import what_is_counted
from lightning_3d.engine.step.loss_weights import LossWeights, TokenMeanLoss
from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.tracing.chrome import write_timeline
from lightning_3d.tracing.trace import Event, Memory, RankTrace, StepTrace, work_of

COLUMNS = "step,loss,grad_norm,lr,tokens,tokens_per_second,step_seconds,val_loss,aux_loss,max_load,dropped,bubble,memory\n"  # noqa: E501
ACTIONS = ("forward", "backward", "input gradient", "weight gradient", "reduce")


class Page(HTMLParser):
    """What is in a page: texts by the id of their element, everything that names an address, the
    numbers that are drawn."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.text: dict[str, str] = {}
        self.words = ""
        self._open: list[str | None] = []
        self._script: str | None = None
        self.data: Any = None
        self.source = path.read_text("utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "action", "data", "poster", "srcset")
        ]
        if tag in ("meta", "link", "img", "input", "br"):
            return
        self._open.append(given.get("id"))
        self._script = given.get("id", "") if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script == "data":
            self.data = json.loads(data)
        if self._script is not None:
            return
        self.words += " " + " ".join(data.split())
        for name in filter(None, self._open):
            self.text[name] = f"{self.text.get(name, '')} {' '.join(data.split())}".strip()


def metrics(folder: Path, *rows: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.csv").write_text(COLUMNS + "".join(f"{row}\n" for row in rows))
    return folder


def assert_asks_nobody(page: Page) -> None:
    assert all(
        address == "data:," or not re.match(r"[a-z]+:|//", address) for address in page.addresses
    ), page.addresses
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(|WebSocket", page.source)


def test_numbers_are_those_of_the_files(traced: Any) -> None:
    folder, parts = traced
    page = Page(folder / "report.html")
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    curve = page.data["curve"]
    assert curve["steps"] == [int(row["step"]) for row in rows] == [1, 2, 3, 4]
    assert curve["loss"] == [float(row["loss"]) for row in rows]
    assert curve["tokens_per_second"] == [float(row["tokens_per_second"]) for row in rows]
    assert f"{float(rows[-1]['loss']):.4f}" in page.text["tile-loss"]
    assert [rank["total"] for rank in page.data["memory"]] == [
        each.memory.total for each in parts[0][0][3].ranks
    ]
    assert max(rank["total"] for rank in page.data["memory"]) == int(rows[-1]["memory"])
    assert "layout tp2_pp2_dp2" in page.words and "finished" in page.words and "1F1B" in page.words
    assert_asks_nobody(page)


def test_bubble_in_the_picture_is_that_of_the_metrics(traced: Any) -> None:
    folder, _ = traced
    page = Page(folder / "report.html")
    with (folder / "metrics.csv").open() as file:
        measured = float(list(csv.DictReader(file))[-1]["bubble"])
    assert page.text["bubble"] == f"{100 * measured:.1f} %"
    assert f"{100 * measured:.1f} %" in page.text["tile-bubble"]
    idle = total = 0.0
    for rank in page.data["timeline"]["ranks"]:
        length = sum(end - start for start, end in rank["windows"])
        busy = sum(
            end - start
            for kind, stage, _, _, start, end in rank["events"]
            if kind in ACTIONS and stage is not None
        )
        assert rank["idle"] == pytest.approx(1 - busy / length, abs=1e-3)
        idle, total = idle + length - busy, total + length
    assert idle / total == pytest.approx(measured, abs=1e-3), "what is drawn"


def test_ranks_stand_on_their_nodes(tmp_path: Path) -> None:
    metrics(tmp_path / "a", "1,5.5,1,1e-3,64,10,6.0,,,,,,")
    write_report(
        tmp_path / "a", About("m", "tp2_pp2_dp4", None, "1F1B", nodes=4, status="finished")
    )
    page = Page(tmp_path / "a" / "report.html")
    nodes = re.findall(r'<div class="node"><p>([^<]*)</p>(.*?)</div></div>', page.source, re.DOTALL)
    assert [name for name, _ in nodes] == [f"node {index}" for index in range(4)]
    layout = Layout.parse("tp2_pp2_dp4")
    for index, (_, content) in enumerate(nodes):
        ranks = [int(rank) for rank in re.findall(r"<b>(\d+)</b>", content)]
        assert ranks == list(range(4 * index, 4 * index + 4))
        places = re.findall(r'data-tip="rank \d+\n([^\n]*)\n', content)
        assert places == [
            " ".join(
                f"{axis}{i}"
                for axis, i in layout.coordinates(rank).items()
                if layout.size(axis) > 1
            )
            for rank in ranks
        ]


def test_a_loss_over_rows_has_rows_a_second(tmp_path: Path) -> None:
    metrics(tmp_path, "1,5.5,1,1e-3,64,10,6.0,,,,,,")
    page = Page(write_report(tmp_path, About("m", "dp2", counted="rows")))
    assert (
        "Rows/s" in page.text["tile-speed"]
        and "64 rows" in page.text["tile-step"]
        and "rows per second" in page.words
    )
    assert "oken" not in page.words
    ours, model = SimpleNamespace(last_step=None), torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert (what_is_counted(ours, model), what_is_counted(SimpleNamespace(), model)) == (
        "rows",
        "tokens",
    )
    model[0].loss_function = TokenMeanLoss(LossWeights())  # type: ignore[assignment]
    assert what_is_counted(ours, model) == "tokens"


def test_a_run_that_failed_says_so(tmp_path: Path) -> None:
    folder = metrics(tmp_path, "1,5.5,1,1e-3,64,10,6.0,,,,,,", "2,nan,1,1e-3,64,10,6.0,,,,,,")
    RunStatus.begun().after(1, "rank 1 of 2 failed:\nValueError: <b>no</b> & nothing").write(folder)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"parallelism": {"layout": "dp2"}, "model": {"name": "</script><script>x"}})
    )
    write_report(folder)
    page = Page(folder / "report.html")
    assert "This run failed after step 2, with exit code 1." in page.words
    assert "ValueError: <b>no</b> & nothing" in page.words, "text, not tags"
    assert "NaN or infinite in 1 step, first in step 2" in page.words
    assert page.data["curve"]["loss"] == [5.5, None]
    assert "<script>x" not in page.source and "</script><script>x" in page.words


def test_the_evaluation_and_the_sample_are_shown_as_text(tmp_path: Path) -> None:
    folder = metrics(tmp_path, "1,5.5,1,1e-3,64,10,6.0,,,,,,")
    assert "Evaluation" not in Page(write_report(folder, About("m", "dp2"))).words
    sample = {
        "prompt": "def ",
        "text": "f(x):\n    return x < 3 & <b>bold</b>\x1b[31m",
        "temperature": 0.5,
        "seed": 0,
    }
    losses, counts = {"web": 2.5, "a<b": 1.25}, {"tokens": 65017, "samples": 512}
    sets = {
        name: {"loss": loss, "perplexity": math.exp(loss), **counts}
        for name, loss in losses.items()
    }
    (folder / "evaluation.json").write_text(json.dumps({"step": 1, "sets": sets, "sample": sample}))
    page = Page(write_report(folder, About("m", "dp2")))
    said = page.text["evaluation"]
    assert (
        "Evaluation after step 1" in said
        and "web 2.5000 12.18 65,017 512" in said
        and "a<b 1.2500 3.49 65,017 512" in said
    )
    assert page.text["sample"] == "def f(x): return x < 3 & <b>bold</b>\ufffd[31m"
    assert "<b>bold" not in page.source and "\x1b" not in page.source
    (folder / "evaluation.json").write_text('{"step": 1, "sets": {"web": {}}')
    assert "Evaluation" not in Page(write_report(folder, About("m", "dp2"))).words, (
        "a damaged file does not stop the report"
    )


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    factors = [
        ("1", "a", 1.1),
        ("2", "<b>", 1.5),
        ("2", "<b>", 1.9),
        ("0", "a", 1.3),
        ("2", "<b>", 1.7),
    ]
    lines = [
        f"{step},5.5,64,10,6.0,{rank},{host},{factor}\n"
        for step, (rank, host, factor) in enumerate(factors, 1)
    ]
    names = "step,loss,tokens,tokens_per_second,step_seconds,slow_rank,slow_host,slow_factor\n"
    (tmp_path / "metrics.csv").write_text(names + "".join(lines))
    page = Page(write_report(tmp_path, About("m", "dp2")))
    assert (
        "rank 2 (<b>) was slow in 3 steps, first in step 2: it computed 1.70 times as long as its"
        " peers" in page.words
    )
    assert (
        " was slow in "
        not in Page(write_report(tmp_path, About("m", "dp2", slow_factor=2.0))).words
    )
    assert About.of_config({"trainer": {"slow_rank_factor": 1.5}}).slow_factor == 1.5


def fail(folder: str) -> None:
    """A fit in a Trainer of one's own, under another strategy, that fails after its second step."""
    from lightning.pytorch import Callback
    from parity import Module, Rows, quiet_trainer
    from reference import Recipe, data
    from torch.utils.data import DataLoader

    from lightning_3d.app.training.callbacks import MetricsCSV
    from lightning_3d.app.training.timeline import RunReport, Timeline

    class Fails(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                raise ArithmeticError("no third step")

    run, recipe = Path(folder), Recipe(steps=4)
    callbacks = [
        Fails(),
        MetricsCSV(run / "metrics.csv"),
        Timeline(run / "timeline.json"),
        RunReport(run),
    ]
    quiet_trainer(max_steps=4, callbacks=callbacks).fit(
        Module(recipe), DataLoader(Rows(data(recipe)), batch_size=4)
    )


def test_a_fit_of_ones_own_that_fails_has_a_report(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError, match="no third step"):
        run_ranks(fail, 1, str(tmp_path), process_group=False)
    page = Page(tmp_path / "report.html")
    assert (
        "This run failed after step 2." in page.words
        and "ArithmeticError: no third step" in page.words
    )
    assert page.data["curve"]["steps"] == [1, 2] and "Module" in page.words


def test_states_without_numbers_are_told(tmp_path: Path) -> None:
    write_report(metrics(tmp_path / "none"), About("m", "tp1", status="failed"))
    page = Page(tmp_path / "none" / "report.html")
    assert "No step has finished." in page.words and "before its first step ended" in page.words
    assert (
        "No step was traced." in page.words
        and page.data["timeline"] is None
        and page.data["memory"] == []
    )
    event = Event("forward", 0, 0, 0, 0.0, 1.0)
    trace = StepTrace(
        1,
        "tp1",
        ("tp", "cp", "pp", "dp"),
        "1F1B",
        (RankTrace(0, "h", Memory(8, 8, 16, None), work_of([event]), (event,)),),
    )
    one = metrics(tmp_path / "one", "1,5.5,1,1e-3,64,10,6.0,,,,,0.000000,32")
    write_timeline(one / "timeline.json", trace)
    write_report(one, About("m", status="finished"))
    page = Page(one / "report.html")
    assert page.text["bubble"] == "0.0 %" and "ideal" not in page.text["tile-bubble"], (
        "one rank has no pipeline"
    )
    assert (
        "32 B" in page.text["tile-memory"]
        and "without the activations of compiled blocks" in page.words
    )


def test_long_curves_keep_their_extremes() -> None:
    steps = [float(step) for step in range(100_000)]
    loss: list[float | None] = [3.0 + (step % 7) * 0.01 for step in range(100_000)]
    loss[54_321], loss[12_345], loss[77] = 9.0, 0.5, None
    kept, curve = thinned(steps, loss)
    assert len(kept) < 2000 and kept == sorted(kept) and kept[0] == 0 and kept[-1] == 99_999
    assert (54_321.0, 9.0) in zip(kept, curve, strict=True) and (12_345.0, 0.5) in zip(
        kept, curve, strict=True
    )
    assert thinned([1.0], [2.0]) == [[1.0], [2.0]]


SWEEP = """job,parallelism,layout,status,exit_code,reason,loss,val_loss,grad_norm,tokens_per_second,step_seconds,bubble,memory,seconds,\
folder
0,tp2_pp2,tp2_pp2,finished,0,,3.5,3.6,1,1000,0.5,0.25,2000000,12,{0}
1,pp4,pp4,finished,0,,3.5,3.6,1,1500,0.3,0.4,1000000,10,{1}
2,tp3,,skipped,2,"tp 3 does not divide, 8 heads",,,,,,,,,
3,dp4,dp4,failed,1,boom,,,,9000,0.1,,500000,3,{2}
"""  # noqa: E501


def sweep_of(folder: Path) -> Path:
    jobs = [metrics(folder / str(job), "1,5.5,1,1e-3,64,10,6.0,,,,,,") for job in (0, 1, 3)]
    (folder / "sweep.csv").write_text(SWEEP.format(*jobs))
    for job in jobs[:2]:
        write_report(job, About("m", status="finished"))
    write_sweep_report(folder)
    return folder


def test_a_sweep_has_a_row_for_each_job(tmp_path: Path) -> None:
    page = Page(sweep_of(tmp_path) / "sweep.html")
    jobs = page.data["jobs"]
    assert [job["layout"] for job in jobs] == ["tp2_pp2", "pp4", "tp3", "dp4"]
    assert [job["report"] for job in jobs] == [
        "0/report.html",
        "1/report.html",
        None,
        None,
    ], "links that lead somewhere"
    assert jobs[0]["numbers"] == {
        "tokens_per_second": 1000,
        "memory": 2e6,
        "bubble": 0.25,
        "loss": 3.5,
        "val_loss": 3.6,
        "step_seconds": 0.5,
        "seconds": 12,
    }
    assert jobs[2]["numbers"] == {} and jobs[2]["reason"] == "tp 3 does not divide, 8 heads"
    assert page.data["keys"] == [] and list(page.data["numbers"])[:2] == [
        "tokens_per_second",
        "memory",
    ]
    assert "2 finished" in page.words and "1 skipped" in page.words
    assert_asks_nobody(page)


def test_the_command_makes_reports_of_runs_and_sweeps(traced: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(traced[0], run)
    (run / "report.html").unlink()
    sweep = sweep_of(tmp_path / "sweep")
    for page in (sweep / "sweep.html", sweep / "0" / "report.html"):
        page.unlink()
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    lines = [
        ["report", str(run)],
        ["report", str(sweep)],
        ["report", str(nothing)],
        ["report", str(tmp_path / "nowhere")],
        ["report"],
    ]
    done = run_commands(lines)
    assert [each.code for each in done] == [0, 0, 2, 2, 2]
    assert (
        done[0].output == f"{run / 'report.html'}\n"
        and (run / "report.html").is_file()
        and not done[0].torch
    )
    assert done[1].output == f"{sweep / 'sweep.html'}\n" and (sweep / "0" / "report.html").is_file()
    assert (
        done[2].output
        == f"lightning_3d: {nothing} is not a run folder: it has neither metrics.csv nor"
        " config.yaml.\n"
    )
    assert (
        done[3].output
        == f"lightning_3d: There is no folder {tmp_path / 'nowhere'}. Give the folder of a run or"
        " of a sweep.\n"
    )
    assert not list(nothing.iterdir())


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    folder = metrics(tmp_path / "run")
    (folder / "report.html").mkdir()
    with pytest.raises(ConfigError, match="Cannot write the report into .*/run: Is a directory"):
        write_report(folder, About("m"))


# In a browser


LOOKS = [
    (1280, False),
    (390, True),
    *(pytest.param(*look, marks=pytest.mark.full) for look in ((1280, True), (390, False))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_a_browser_shows_the_report_of_a_run(traced: Any, width: int, dark: bool) -> None:
    folder, parts = traced
    seen = look(folder / "report.html", width=width, dark=dark)
    assert seen.errors == [] and seen.asked == []
    assert (seen.width, seen.dark) == (width, dark)
    assert len(seen.picture) > 20_000, "a picture with something on it"
    assert seen.wide <= width, "nothing can be scrolled sideways but what is meant to"
    assert (seen.ground == "rgb(13, 18, 24)") is dark
    events = [event for each in parts[0][0][3].ranks for event in each.events]
    for kind in ("forward", "backward"):
        drawn = re.findall(rf'<rect class="{kind}"', seen.document)
        assert len(drawn) == sum(event.kind == kind for event in events)
    assert seen.document.count('class="ranks"') == 1 and "optimizer state" in seen.document
    with (folder / "metrics.csv").open() as file:
        measured = float(list(csv.DictReader(file))[-1]["bubble"])
    drawn = re.findall(
        r'<rect class="([a-z]+)" x="[^"]*" y="[^"]*" width="([^"]*)"[^>]*? data-tip="([^"]*)"',
        seen.document,
    )
    whole = sum(float(wide) for kind, wide, _ in drawn if kind == "idle")
    # less by a gap
    busy = sum(float(wide) + 0.5 for kind, wide, tip in drawn if kind in ACTIONS and "stage" in tip)
    assert 1 - busy / whole == pytest.approx(measured, abs=0.03), "what is seen"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, pytest.param(390, marks=pytest.mark.full)])
def test_a_browser_shows_the_report_of_a_sweep(tmp_path: Path, width: int) -> None:
    seen = look(sweep_of(tmp_path) / "sweep.html", width=width, dark=width < 500)
    assert seen.errors == [] and seen.asked == [] and seen.wide <= width
    links = re.findall(
        r'<a aria-label="report of job \d" href="([^"]*)"|<a href="([^"]*)" aria-label="report of'
        r' job \d"',
        seen.document,
    )
    assert ["".join(link) for link in links] == ["./0/report.html", "./1/report.html"]
    body = seen.document.partition("<tbody>")[2].partition("</tbody>")[0]
    assert body.count("<tr") == 5 and "boom" in body, (
        "a row for each job, and one for the reason of one with numbers"
    )
    assert "1.5K" in body and "25.0 %" in body and "1.91 MiB" in body
    points = re.findall(r"<circle[^>]*fill: var\(--(\w+)\)[^>]*data-tip=\"job (\d)", seen.document)
    assert sorted(points, key=lambda point: point[1]) == [
        ("card", "0"),
        ("accent", "1"),
        ("card", "3"),
    ], "job 3 has failed"
    best = re.findall(r'<td class="number best">([^<]*)</td>', body)
    assert best == [
        "25.0 %",
        "1.5K",
        "977 KiB",
        "300 ms",
        "10 s",
    ], "nothing of the job that has failed, though it was faster"


def test_the_browser_would_tell(tmp_path: Path) -> None:
    """A page that does everything wrong."""
    chromium()
    page = tmp_path / "bad.html"
    page.write_text(
        "<html><head></head><body style='margin: 0'><div style='width: 2000px'>wide</div><img"
        " src='http://example.invalid/x.png'><script>console.error('said');"
        " undefinedFunction()</script></body></html>"
    )
    seen = look(page, width=390, dark=False)
    assert any("undefinedFunction" in error for error in seen.errors) and any(
        "said" in error for error in seen.errors
    )
    assert any("example.invalid" in asked for asked in seen.asked)
    assert seen.wide > 1900


HOSTILE = """</script><script>document.title="ran"</script><img src=x onerror="document.title='ran'">"'&{{7*7}}${`x`}"""  # noqa: E501


@pytest.mark.slow
def test_f22_hostile_names_run_nothing_in_a_report(tmp_path: Path) -> None:
    """Every text of a run and of a sweep that somebody chooses is HTML with scripts."""
    run = metrics(tmp_path / "0", "1,5.5,1,1e-3,64,10,6.0,,,,,,")
    names = {
        group: {"name": HOSTILE, "layout": HOSTILE, "schedule": HOSTILE}
        for group in ("model", "parallelism", "cluster", HOSTILE)
    }
    (run / "config.yaml").write_text(yaml.safe_dump(names))
    sample = {"prompt": HOSTILE, "text": f"\x1b[2J{HOSTILE}", "temperature": 0.8, "seed": 0}
    sets = {HOSTILE: {"loss": 1.0, "perplexity": None, "tokens": 1, "samples": 1}}
    (run / "evaluation.json").write_text(json.dumps({"step": 1, "sets": sets, "sample": sample}))
    begun = RunStatus.begun(HOSTILE)
    replace(begun, host=HOSTILE).after(1, HOSTILE).write(run)
    write_report(run)
    rows = [["job", "layout", "overrides", "status", "exit_code", "reason", "folder", HOSTILE]]
    rows += [["0", HOSTILE, HOSTILE, "finished", "0", HOSTILE, str(run), HOSTILE]]
    rows += [["1", HOSTILE, HOSTILE, HOSTILE, "1", HOSTILE, HOSTILE, HOSTILE]]
    with (tmp_path / "sweep.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    write_sweep_report(tmp_path)
    for page in (run / "report.html", tmp_path / "sweep.html"):
        seen = look(page, width=1280, dark=False)
        assert seen.errors == [] and seen.asked == []
        assert "<title>ran" not in seen.document and "<img" not in seen.document
        assert "&lt;img src=x" in seen.document, "it is shown as text"
