"""The benchmarks compare equal work and count it right; the times themselves are nobody's test."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from command_line import REPOSITORY, environment
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_single
import gpu_single_worker
import peers
import peers_picotron
import peers_worker as worker
import tokenizing
import tokenizing_corpus
from load import Load, LoadMeter
from measure import Contender, cores
from peer_sources import Source, source_folder


def test_the_chain_of_layers_for_deepspeed_is_the_same_model() -> None:
    torch.manual_seed(0)
    model = worker.llama()
    chain = torch.nn.Sequential(
        *(kind(*arguments) for kind, arguments in worker.sequential_llama())
    )
    assert worker.count(chain) == worker.count(model)
    names = {
        "0.weight": "model.embed_tokens.weight",
        "9.norm.weight": "model.norm.weight",
        "9.linear.weight": "lm_head.weight",
    }
    weights = model.state_dict()
    chain.load_state_dict(
        {
            name: weights[names.get(name, f"model.layers.{int(name[0]) - 1}{name[1:]}")]
            for name in chain.state_dict()
        }
    )
    rows = next(worker.micro_batches(1))
    expected = model(input_ids=rows, labels=rows).loss
    torch.testing.assert_close(
        worker.next_token_loss(chain(rows), rows), expected, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_data_ranks_share_the_rows_of_every_step(dp: int) -> None:
    dealt = [
        torch.cat(list(worker.micro_batches(2, rank, dp))).split(worker.GLOBAL_BATCH // dp)
        for rank in range(dp)
    ]
    for step, expected in enumerate(worker.all_rows(2).split(worker.GLOBAL_BATCH)):
        together = torch.stack([rows[step] for rows in dealt], dim=1).flatten(0, 1)
        assert torch.equal(together, expected)


@pytest.mark.full
def test_a_contender_takes_one_step_when_it_is_told_to() -> None:
    with Contender("plain", "tp1", 1, steps=3) as contender:
        assert all(contender.step() > 0 for _ in range(2))
        with pytest.raises(RuntimeError, match="plain tp1: rank 0 waits"):
            contender.step(timeout=0)


def test_a_contender_that_fails_says_why() -> None:
    with (
        Contender("nobody", "tp1", 1, steps=3) as contender,
        pytest.raises(RuntimeError, match="invalid choice: 'nobody'"),
    ):
        contender.step()


def test_the_table_shows_the_median_of_the_ratios_within_rounds() -> None:
    race = peers.RACES[0]
    rounds = [
        {
            "plain tp1": [4.0],
            "deepspeed_pipeline pp2_dp2": [theirs],
            "ours pp2_dp2": [mine, mine, 99.0],
        }
        for theirs, mine in ((2.0, 1.8), (20.0, 16.0), (2.0, 2.2))
    ]
    row = peers.row(race, rounds, Load(0.95, 0.1)).split()
    assert row[:2] == ["pp2_dp2", "DeepSpeed"]
    fractions = [f"{4 / seconds / cores():.0%}" for seconds in (2.0, 2.2)]
    numbers = [
        "2.000",
        "2.200",
        "0.900",
        "0.800",
        "1.100",
        "0.95",
        *fractions,
        f"{4 / cores():.3f}",
    ]
    assert (
        row[4:13] == numbers
        and " ".join(row[13:]) == "cannot tell: the promise is within the spread"
    )


def test_a_promise_is_judged_where_the_machine_is_quiet_and_all_rounds_agree() -> None:
    quiet = Load(1.0, 0.0)
    assert peers.verdict([0.8, 0.9], 0.9, quiet) == "yes"
    assert peers.verdict([0.91, 0.95], 0.9, quiet) == "NO"
    assert peers.verdict([0.9, 0.91], 0.9, quiet) == "cannot tell: the promise is within the spread"
    busy = peers.verdict([0.5, 0.5], 0.9, Load(0.4, 3.0))
    assert (
        busy
        == "cannot tell: the machine is too busy (own share of the processor time 40%, 3.0 other"
        " processes in the run queue)"
    )
    assert peers.verdict([0.5, 0.5], 0.9, Load(1.0, 0.6)).startswith(
        "cannot tell: the machine is too busy"
    )


def test_the_load_is_what_other_processes_use(tmp_path: Path) -> None:
    def kernel_shows(busy: int, own: dict[int, int], running: int) -> None:
        """Half of the ticks of a process are those of children that ended."""
        (tmp_path / "stat").write_text(
            f"cpu {busy - 5} 1 1 {10**6} 7 1 1 1 0 0\ncpu0 1\nprocs_running {running}\n"
        )
        for process, ticks in own.items():
            (tmp_path / str(process)).mkdir(exist_ok=True)
            times = f"{ticks // 2 - 2} 2 {ticks - ticks // 2 - 1} 1"
            (tmp_path / str(process) / "stat").write_text(
                f"{process} (a (b) c) S 1 1 1 0 -1 0 0 0 0 0 {times} 20\n"
            )

    kernel_shows(1000, {os.getpid(): 10, 7: 100}, 1)
    meter = LoadMeter([7], tmp_path)
    for running in (1, 4):
        kernel_shows(1400, {os.getpid(): 20, 7: 290}, running)
        meter.look()
    assert meter.read() == Load(200 / 400, 1.5)


def test_a_source_comes_from_a_checkout_or_a_git_directory(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "peer").mkdir(parents=True)
    (checkout / "peer" / "model.py").write_text("first\n")
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    (checkout / "peer" / "model.py").write_text("second\n")
    source = Source("peer", "nowhere", commit)
    assert source_folder(source, checkout, tmp_path) == checkout
    made = source_folder(source, checkout / ".git", tmp_path)
    assert (made / "peer" / "model.py").read_text() == "first\n", "the named commit"
    (tmp_path / "other").mkdir()
    with pytest.raises(SystemExit, match="failed"):
        source_folder(Source("peer", "nowhere", "0" * 40), checkout / ".git", tmp_path / "other")


def test_the_batches_of_picotron_give_the_loss_of_the_others() -> None:
    torch.manual_seed(0)
    model = worker.llama().eval()
    rows = next(worker.micro_batches(1, 1, 2))
    batches = peers_picotron.Batches(1, 1, 2)
    batch = next(batches)
    loss = torch.nn.functional.cross_entropy(
        model(input_ids=batch["input_ids"]).logits.flatten(0, 1), batch["target_ids"].flatten()
    )
    torch.testing.assert_close(loss, model(input_ids=rows, labels=rows).loss)
    assert batches.grad_acc_steps == worker.GLOBAL_BATCH // worker.MICRO_BATCH // 2


# gpu_single

SETTINGS = gpu_single.Settings(
    config=yaml.safe_load(gpu_single.MODEL.read_text())["config"]
    | gpu_single.TINY
    | {"num_hidden_layers": 2},
    device="cpu",
    sequence=64,
    micro_batch=2,
    micro_batches=2,
    warmup=1,
    steps=3,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "peer"), [("ours", "plain"), ("ours full", "plain checkpointing")]
)
def test_one_device_peers_do_the_same_work(name: str, peer: str) -> None:
    mine, theirs = (
        run_ranks(gpu_single_worker.measure, 1, contender, SETTINGS)[0]
        for contender in (name, peer)
    )
    assert (
        len(mine["seconds"]) == len(theirs["seconds"]) == 3
        and mine["peak"] is theirs["peak"] is None
    )
    assert mine["losses"] == pytest.approx(theirs["losses"], rel=2e-3), (
        "bf16; the weights begin equal"
    )
    assert len(set(mine["losses"])) == 3, "it trains"


def test_a_contender_that_cannot_run_says_why() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchtitan", None)
        assert (
            "torchtitan 0.2 cannot be imported"
            in gpu_single_worker.measure("torchtitan", SETTINGS)["failed"]
        )


def test_layers_step_down_until_all_fit() -> None:
    tried = []

    def run(name: str, settings: gpu_single.Settings) -> dict:
        layers = settings.config["num_hidden_layers"]
        tried.append((name, layers))
        return (
            {"failed": gpu_single.OUT_OF_MEMORY}
            if layers > {"ours": 4, "plain": 3}[name]
            else {"seconds": [1.0]}
        )

    assert gpu_single.layers_that_fit(SETTINGS, 5, run, ("ours", "plain")) == 3
    assert tried == [("ours", 5), ("ours", 4), ("plain", 4), ("ours", 3), ("plain", 3)]


def test_predicted_memory_of_one_gpu() -> None:
    config = yaml.safe_load(gpu_single.MODEL.read_text())["config"]
    settings = gpu_single.Settings(config, "cuda", 4096, 2, 2, 3, 6)
    gib = 2**30
    layers = gpu_single.layers_that_should_fit(settings, 140 * gib)
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336 + 2 * 4096
    parameters = 2 * 128256 * 4096 + 4096 + layers * layer
    activations = 8192 * (layers * (20 * 4096 + 8 * 14336 + 4 * 1024) + 16 * 128256)
    fits = gpu_single.with_layers(settings, layers)
    predicted = gpu_single.predicted_bytes(gpu_single.read_spec(fits.config), fits)
    assert predicted == 20 * parameters + activations
    assert (
        predicted
        <= 0.92 * 140 * gib
        < predicted + 20 * layer + 8192 * (20 * 4096 + 8 * 14336 + 4 * 1024)
    )
    assert gpu_single.layers_that_should_fit(settings, 10**15) == 32
    assert gpu_single.layers_that_should_fit(settings, 1) == 1


def test_the_table_of_one_gpu() -> None:
    rounds = [
        {
            "plain": {"seconds": [2.0], "peak": 2**30},
            "ours": {"seconds": [1.0, 1.0, 9.0], "peak": 2**31},
        },
        {
            "ours": {"seconds": [4.0], "peak": 2**30},
            "ours compile": {"failed": gpu_single.OUT_OF_MEMORY},
        },
    ]
    lines = gpu_single.table(rounds, SETTINGS, peak_flops=1e9)
    rows = {
        cells[1]: cells[2:-1]
        for cells in ([cell.strip() for cell in line.split("|")] for line in lines[2:])
    }
    # the head and two blocks; norms multiply no matrices
    weights = 512 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192)
    flops = 6 * weights + 12 * 2 * 64 * 64
    assert list(rows) == ["plain", "ours", "ours compile"]
    assert rows["plain"] == ["2.000", "128", f"{128 * flops / 1e9:.1%}", "1.0", ""]
    assert rows["ours"] == [
        "2.500",
        "102",
        f"{256 / 2.5 * flops / 1e9:.1%}",
        "2.0",
        "plain: 2.000",
    ], "compared within a round"
    assert rows["ours compile"][0] == "out of memory"
    unknown = gpu_single.report(rounds, SETTINGS, gpu_single.Device("Voodoo 2", 1, "0"))
    assert "MFU is left out: the peak rate of Voodoo 2 is not known" in unknown


def test_contenders_take_turns_and_one_that_failed_is_not_tried_again() -> None:
    order = []

    def run(name: str, settings: gpu_single.Settings) -> dict:
        order.append(name)
        return {"failed": "no"} if name == "torchtitan" else {"seconds": [1.0], "peak": None}

    gpu_single.take_turns(("plain", "torchtitan", "ours"), SETTINGS, 2, run)
    assert order == ["plain", "torchtitan", "ours", "ours", "plain"]


def run_gpu_single(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, gpu_single.__file__, *arguments]
    return subprocess.run(
        command,
        env=environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


@pytest.mark.slow
def test_without_a_gpu_it_says_why_and_ends_well() -> None:
    done = run_gpu_single()
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout.startswith(f"gpu_single measured nothing: torch {torch.__version__} ")
        and done.stdout.count("\n") == 1
    )


@pytest.mark.full
def test_the_whole_comparison_on_a_cpu(tmp_path: Path) -> None:
    options = [
        "--device",
        "cpu",
        "--tiny",
        "--contenders",
        "plain",
        "ours",
        "--output",
        str(tmp_path / "table.md"),
    ]
    for rounds in (1, 2):
        done = run_gpu_single(*options, "--rounds", "1", "--raw", str(tmp_path / "raw.json"))
        assert done.returncode == 0, done.stderr
        assert len(json.loads((tmp_path / "raw.json").read_text())["rounds"]) == rounds, (
            "a second call adds to the first"
        )
    text = (tmp_path / "table.md").read_text()
    assert text in done.stdout and re.search(
        r"\| ours \| [\d.]+ \| [\d,]+ \|  \|  \| plain: [\d.]+ \|", text
    )
    done = run_gpu_single(*options, "--layers", "3", "--raw", str(tmp_path / "raw.json"))
    assert done.returncode == 1 and "other settings" in done.stderr


# What a strategy imports where only torch, Lightning and Transformers are installed

BARE = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        missing = name.partition(".")[0] in ("hydra", "omegaconf", "deepspeed", "wandb", "datasets", "torchao", "accelerate")
        return None if missing else super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
sys.path.insert(0, "benchmarks")
import gpu_single_worker as worker
settings = worker.Settings(**eval(sys.argv[1]))
result = worker.measure("ours", settings)
assert len(result["losses"]) == 3, result
assert not {"hydra", "omegaconf", "deepspeed", "wandb"} & set(sys.modules)
"""  # noqa: E501


@pytest.mark.slow
def test_the_strategy_trains_without_hydra_and_deepspeed() -> None:
    command = [sys.executable, "-c", BARE, repr(vars(SETTINGS))]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


def test_the_corpus_has_each_document_once_and_its_parts_are_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, scratch = tmp_path / "library", tmp_path / "scratch"
    (library / "site-packages").mkdir(parents=True)
    scratch.mkdir()
    for name, text in {
        "a.py": "first = 1\n",
        "b.py": "second = '\u00e9'\n",
        "empty.py": "",
        "site-packages/c.py": "third = 3\n",
    }.items():
        (library / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(tokenizing_corpus.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    corpus = tokenizing_corpus.write_corpus(scratch, 400, 3)
    lines = corpus.file.read_text().splitlines()
    assert corpus.bytes >= 400 and len(lines) == corpus.documents == len(set(lines))
    assert [json.loads(line)["text"] for line in lines[:3]] == [
        "first = 1\n",
        "second = '\u00e9'\n",
        "# copy 1\nfirst = 1\n",
    ]
    parts = [path.read_text() for path in sorted(corpus.parts.iterdir())]
    assert "".join(parts) == corpus.file.read_text()
    assert len(parts) == 3 and all(abs(len(part) - corpus.bytes / 3) < 60 for part in parts)


def test_a_tokenizer_of_other_tokens_is_not_compared() -> None:
    def runs(*seconds: float, sha256: str = "same") -> list[tokenizing.Tokenized]:
        return [tokenizing.Tokenized(each, 2 * each, 100.0, 6_000_000, sha256) for each in seconds]

    done = {
        tokenizing.OURS: runs(2.0, 3.0, 9.0),
        "peer": runs(4.0, 3.5, 10.0),
        "other": runs(4.0, 4.0, 10.0, sha256="another"),
    }
    quiet = Load(1.0, 0.0)
    peer = tokenizing.row("peer", done, 24_000_000, quiet).split()
    assert peer == [
        "peer",
        "4.0",
        "8.0",
        "6000000",
        "1500000",
        "6.00",
        "100",
        "0.857",
        "0.500",
        "0.900",
        "yes",
    ]
    assert tokenizing.row("other", done, 24_000_000, quiet).endswith(
        "cannot tell: other tokens than ours"
    )
    assert "too busy" in tokenizing.row("peer", done, 24_000_000, Load(0.5, 2.0))


def test_the_tokens_of_all_files_are_one_text_and_a_failed_command_says_why(tmp_path: Path) -> None:
    files = {"b.bin": b"34", "a.bin": b"12", "a.idx": b"5"}
    write = (
        "import pathlib, sys; [pathlib.Path(sys.argv[1], name).write_bytes(data) for name, data in"
        f" {files}.items()]"
    )
    done = tokenizing.Contender("writer", (sys.executable, "-c", write, "{out}")).run(tmp_path)
    assert (done.tokens, done.sha256) == (2, hashlib.sha256(b"1234").hexdigest())
    assert done.processor_seconds > 0 and done.largest_mib > 1 and not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match="breaker failed. It said:\nno memory"):
        tokenizing.Contender(
            "breaker", (sys.executable, "-c", "raise SystemExit('no memory')")
        ).run(tmp_path)
