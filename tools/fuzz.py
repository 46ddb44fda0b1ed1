"""Feeds damaged and hostile input to everything that reads names, configurations and files, and
shows that it is refused in order.

    python tools/fuzz.py [--cases N] [--seed N] [--only KIND] [--first N]

Each case is made from a valid input by a few changes, which its number and the seed decide. It must
end in a result or in one message of this package (`Lightning3DError`): no other exception, no time
above `LIMIT_SECONDS`, no code that the input names, no flood of memory. Prints the first case of
each kind of error, with the command that repeats it, and exits with 1.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
LIMIT_SECONDS = 20
MOST_MEMORY = 16 * 2**30
SHARES = {
    "layout": 0.63,
    "configuration": 0.07,
    "file": 0.02,
    "checkpoint": 0.12,
    "pretrained": 0.08,
    "tokens": 0.08,
}
"""Part of the cases of each kind: those that take long are fewer."""

WORDS: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        3,
        2**31,
        2**63,
        10**400,
        -0.0,
        0.5,
        1e308,
        float("inf"),
        float("nan"),
    ),
    *(
        "",
        " ",
        "null",
        "auto",
        "true",
        "tp2",
        "dp0",
        "8",
        "-1",
        "1e5",
        "nan",
        "a" * 10_000,
        "\0",
        "\x1b[31m",
        "\u202e",
        "é",
        "\n",
    ),
    *(
        "../../etc/passwd",
        "/proc/self/mem",
        "/dev/zero",
        "file:///etc/passwd",
        "s3://",
        "http://localhost:1/x",
        "~root",
        "%s%n",
    ),
    *(
        "{0.__class__}",
        "${oc.env:HOME}",
        [],
        {},
        [[]],
        [None],
        {"": ""},
        {"_target_": "os.system", "command": "touch {canary}"},
    ),
    *([{"_target_": "builtins.eval"}], {"_target_": "lightning_3d.ranks.supervisor.launch"}),
)

INTERPOLATIONS = (
    *(
        "${oc.env:HOME}",
        "${oc.env:NO_SUCH_VARIABLE}",
        "${oc.env:NO_SUCH_VARIABLE,[1}",
        "${oc.env:${oc.env:HOME}}",
        "${${seed}}",
        "${seed}",
    ),
    *(
        "${model}",
        "${trainer.max_steps}",
        "${..seed}",
        "${callbacks}",
        "${logger}",
        "x${seed}y${model}",
        "${run_folder}/../x",
    ),
    *(
        "${no.such.key}",
        "${no_such_resolver:1}",
        "\\${seed}",
        "\\\\${seed}",
        "${",
        "${}",
        "${a b}",
        "${seed",
        "${hydra:run.dir}",
    ),
    *(
        "${oc.create:{_target_:os.system}}",
        "\\${oc.create:{_target_:os.system}}",
        "${oc.decode:'{a: [1'}",
        "${oc.select:model,1}",
    ),
    *("${now:%Y}", "${oc.dict.values:model}", "${oc.deprecated:seed}"),
)
"""Valid, unknown, nested, escaped and broken ones; a few of them lead to themselves, depending on
where they are put."""

TARGETS = (
    *(
        "lightning.pytorch.callbacks.Timer",
        "lightning.pytorch.callbacks.ModelCheckpoint",
        "lightning.pytorch.callbacks.EarlyStopping",
    ),
    *(
        "lightning.pytorch.loggers.TensorBoardLogger",
        "lightning.pytorch.loggers.CSVLogger",
        "lightning.pytorch.profilers.AdvancedProfiler",
    ),
    *(
        "lightning_3d.PeriodicCheckpoint",
        "lightning_3d.Lightning3DStrategy",
        "lightning_3d.MetricsCSV",
    ),
    *(
        "lightning_3d.no.such.Name",
        "lightning",
        "lightning.pytorch.callbacks",
        "torchmetrics.Metric",
        "os.system",
        "hydra.utils.call",
    ),
)

PIECES = (
    b"\xff" * 8,
    b"\0" * 8,
    b"{",
    b'"',
    b"\n- ",
    b": ",
    b"!!python/object/apply:os.system [true]",
    b"${oc.env:HOME}",
    b"&a *a",
)


class TooLong(BaseException):
    """A case used more processor time than `LIMIT_SECONDS`, or waited as long for something that
    does not come."""


class Limit:
    """The time of a case: processor time, because a busy machine must not fail it, and the clock,
    which sees one that waits forever."""

    def __init__(self) -> None:
        self.used = 0.0
        for number in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, self._rang)

    def start(self, seconds: float) -> None:
        """Start both timers; 0 stops them."""
        self.used = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)

    def _rang(self, number: int, frame: FrameType | None) -> None:
        before, self.used = self.used, time.process_time()
        # it waits, for example for the other end of a pipe
        if number == signal.SIGPROF or self.used - before < 0.001:
            raise TooLong


class Bomb:
    """An object whose pickle runs a command when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


class Fuzzer:
    """The inputs, and what reads them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed, self.canary, self.start = (
            folder,
            seed,
            folder / "canary",
            folder / "start",
        )
        self.limit = Limit()
        self.kinds: dict[str, Callable[[random.Random], None]] = {
            "layout": self.layout,
            "configuration": self.configuration,
            "file": self.file,
            "checkpoint": self.checkpoint,
            "pretrained": self.pretrained,
            "tokens": self.tokens,
        }
        self._seeds: dict[str, Any] = {}

    def prepare(self) -> None:
        """Import what takes long, so that no case is charged for it, and silence what a rank
        silences."""
        from lightning_3d.app.training.run import quiet

        quiet()

    def run(self, kind: str, number: int) -> str:
        """Run a case. Returns how it ended: "result", "refused", or what is wrong."""
        from lightning_3d.errors import Lightning3DError

        numbers = random.Random(f"{self.seed} {kind} {number}")
        self.limit.start(LIMIT_SECONDS)
        try:
            self.kinds[kind](numbers)
            ended = "result"
        except Lightning3DError as error:
            ended = "refused" if str(error).strip() else "an empty message"
        except TooLong:
            ended = f"longer than {LIMIT_SECONDS} s\n{traceback.format_exc()}"
        except Exception:
            ended = traceback.format_exc()
        finally:
            self.limit.start(0)
        if self.canary.exists():
            self.canary.unlink()
            return "code of the input was run"
        for path in self.start.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            return f"{path.name} was written into the folder in which the command started"
        return ended

    def _seed_of(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._seeds:
            self._seeds[name] = make()
        return self._seeds[name]

    # What is read

    def layout(self, numbers: random.Random) -> None:
        """Names of layouts, schedules and sizes of batches."""
        from lightning_3d.layout.batch_rules import check_batch
        from lightning_3d.layout.elastic import fitting_layout
        from lightning_3d.layout.resolve import check_expert_groups, resolve_layout

        axes = ("tp", "pp", "dp", "cp", "ep", "vp", "mp", "fsdp", "xp", "TP", "", "\u0661", "t p")
        degrees = (
            "1",
            "2",
            "3",
            "4",
            "8",
            "0",
            "-1",
            "01",
            "1e3",
            "\u0663",
            "99999999999999999999",
            "",
            "two",
            "2.0",
        )
        good = numbers.random() < 0.6
        chosen = (
            numbers.sample(axes[:6], numbers.randint(1, 4))
            if good
            else numbers.choices(axes, k=numbers.randint(1, 4))
        )
        name = "_".join(axis + numbers.choice(degrees[: 4 if good else None]) for axis in chosen)
        name = _spoiled_text(numbers, name) if numbers.random() < 0.2 else name
        schedule = numbers.choice(
            (None, None, "1F1B", "gpipe", "zbv", "DualPipeV", "Interleaved1F1B", "", "x" * 100)
        )
        layout, found = resolve_layout(name, schedule, numbers.choice((None, None, 1, 2, 3)))
        check_expert_groups(layout)
        batch, micro_batch = (
            numbers.choice((1, 7, 8, 64, 0, -3, 10**12)),
            numbers.choice((1, 2, 3, 0)),
        )
        if layout.world_size <= 4096:
            check_batch(layout, batch, micro_batch, found)
            fitting_layout(
                layout,
                ranks=numbers.randint(0, 64),
                global_batch_size=batch,
                micro_batch_size=micro_batch,
                schedule=found,
            )

    def configuration(self, numbers: random.Random) -> None:
        """Complete configurations with other values, keys that are missing and keys that are too
        many."""
        config = _spoiled(numbers, self._seed_of("configuration", self._configuration), self.canary)
        _plan_and_make(
            _composed(config if numbers.random() < 0.5 else _without_interpolations(config))
        )

    def file(self, numbers: random.Random) -> None:
        """Configurations as files, with bytes that are damaged."""
        from omegaconf import OmegaConf

        from lightning_3d.app.runs.frozen_config import frozen_text, read_frozen

        text = self._seed_of(
            "file", lambda: frozen_text(self._seed_of("configuration", self._configuration))
        )
        path = self.folder / "config.yaml"
        path.unlink(missing_ok=True)
        path.write_bytes(_spoiled_bytes(numbers, text.encode()))
        self._link(numbers, path)
        _plan_and_make(OmegaConf.create(read_frozen(path)))

    def checkpoint(self, numbers: random.Random) -> None:
        """Checkpoints with damaged files, of which some have a manifest that agrees with the
        damage."""
        from lightning_3d.checkpoint.folder import read_manifest, read_trainer_state, verify
        from lightning_3d.checkpoint.inspection import describe
        from lightning_3d.checkpoint.reading import TensorFolder

        folder = self._copy("checkpoint", self._checkpoint)
        self._damage(numbers, numbers.choice(_files_in(folder)))
        if numbers.random() < 0.7:
            _agree(numbers, folder)
        self._link(numbers, numbers.choice([folder, folder / "manifest.json", *_files_in(folder)]))
        manifest = read_manifest(folder)
        verify(folder, manifest)
        read_trainer_state(folder, manifest)
        list(describe(folder, tensors=True))
        tensors = TensorFolder(folder)
        for tensor in tensors.names(""):
            tensors.read(tensor)
        tensors.blobs("")

    def pretrained(self, numbers: random.Random) -> None:
        """Folders of Transformers, and checkpoints of others, which are pickles."""
        import torch

        from lightning_3d.checkpoint.conversion.convert import read_foreign
        from lightning_3d.models.safetensors_folder import find_folder, read_config, read_tensors

        if numbers.random() < 0.2:
            path = self.folder / "foreign.ckpt"
            state: dict[str, Any] = {
                "state_dict": {"a": torch.ones(2, 2)},
                "optimizer_states": [],
                "global_step": 3,
                "epoch": 0,
            }
            where = numbers.choice(["state_dict", "global_step", "hyper_parameters", "loops"])
            torch.save(
                state | {where: Bomb(self.canary)} if numbers.random() < 0.5 else state, path
            )
            path.write_bytes(
                _spoiled_bytes(numbers, path.read_bytes())
                if numbers.random() < 0.7
                else path.read_bytes()
            )
            read_foreign(path)
            return
        folder = self._copy("pretrained", self._pretrained)
        self._damage(numbers, numbers.choice(_files_in(folder)))
        self._link(numbers, numbers.choice([folder, *_files_in(folder)]))
        found = find_folder(folder)
        read_config(found)
        read_tensors(found)

    def tokens(self, numbers: random.Random) -> None:
        """Files of tokens and their descriptions."""
        from lightning_3d.app.training.data.tokens import TokenFiles

        folder = self._copy("tokens", self._tokens)
        self._damage(numbers, folder / numbers.choice(["a.bin", "a.json", "a.json"]))
        self._link(numbers, numbers.choice([folder, *_files_in(folder)]))
        given = {
            "sequence_length": 8,
            "global_batch_size": 2,
            "vocab_size": numbers.choice([100, 50, None]),
        }
        TokenFiles(
            train_path=str(folder / "a.bin"), val_path=str(folder / "a.bin"), **given
        ).setup()

    # Valid inputs

    def _configuration(self) -> dict[str, Any]:
        from lightning_3d.app.runs.check import check_shapes

        words = [
            "cluster=local_cpu",
            "model.config.hidden_size=32",
            "model.config.head_dim=4",
            "parallelism=dp1",
            "logger=csv",
        ]
        config = check_shapes(words)[0] | {"run_folder": str(self.folder / "run")}
        for entry in (*config["callbacks"].values(), *config["logger"].values()):
            for key in {"path", "dirpath", "save_dir"} & set(entry):
                entry[key] = config["run_folder"] + entry[key]
        config["trainer"]["extra"]["profiler"] = {
            "_target_": "lightning.pytorch.profilers.SimpleProfiler",
            "filename": "a",
        }
        return config

    def _checkpoint(self, folder: Path) -> None:
        import torch
        from lightning.pytorch import LightningModule, Trainer
        from torch.utils.data import DataLoader

        from lightning_3d import Lightning3DStrategy

        class Small(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(4, 4)

            def training_step(self, batch: torch.Tensor) -> torch.Tensor:
                return self.layer(batch).square().mean()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters())

        quiet: dict[str, Any] = dict.fromkeys(
            ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
        )
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=1,
            strategy=Lightning3DStrategy(),
            default_root_dir=self.folder,
            **quiet,
        )
        trainer.fit(Small(), DataLoader(torch.ones(4, 4), batch_size=4))  # type: ignore[arg-type]
        trainer.save_checkpoint(folder)

    def _pretrained(self, folder: Path) -> None:
        import torch
        from safetensors.torch import save_file

        folder.mkdir()
        (folder / "config.json").write_text(
            json.dumps(
                {"model_type": "llama", "hidden_size": 8, "architectures": ["LlamaForCausalLM"]}
            )
        )
        files = {
            f"model-0000{part}-of-00002.safetensors": {f"layer{part}.weight": torch.ones(2, 3)}
            for part in (1, 2)
        }
        for name, tensors in files.items():
            save_file(tensors, folder / name)
        places = {tensor: name for name, tensors in files.items() for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": 48}, "weight_map": places})
        )

    def _tokens(self, folder: Path) -> None:
        import numpy

        from lightning_3d.app.training.data.token_file import write_tokens

        folder.mkdir()
        write_tokens(
            folder / "a.bin",
            numpy.arange(200, dtype=numpy.uint16) % 100,
            vocab_size=100,
            document_separator=7,
        )

    # Changes

    def _copy(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return a fresh copy of a folder, which is made once."""

        def files() -> dict[str, bytes]:
            original = self.folder / f"{name}.original"
            make(original)
            return {
                str(path.relative_to(original)): path.read_bytes()
                for path in original.rglob("*")
                if path.is_file()
            }

        content = self._seed_of(name, files)
        folder = self.folder / name
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        for file, data in content.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(data)
        return folder

    def _link(self, numbers: random.Random, path: Path) -> None:
        """Put a link in the place of a file or folder in a tenth of the cases: to itself, outside,
        into a loop, to a device; or a pipe."""
        if numbers.random() > 0.1:
            return
        moved = self.folder / "moved"
        if moved.is_dir() and not moved.is_symlink():
            shutil.rmtree(moved)
        moved.unlink(missing_ok=True)
        if path.exists() or path.is_symlink():
            path.rename(moved)
        elsewhere = (
            "nowhere",
            "/",
            "/dev/null",
            "/dev/zero",
            "/etc/passwd",
            "..",
            "/proc/self/mem",
            "pipe",
        )
        target = numbers.choice([path, path.name, moved, *elsewhere])
        if target == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(target)

    def _damage(self, numbers: random.Random, path: Path) -> None:
        """Change, replace or remove a file."""
        how = numbers.random()
        if not path.is_file():
            return
        if how < 0.05:
            path.unlink()
        elif how < 0.1:
            path.unlink()
            path.symlink_to(
                numbers.choice(["/dev/null", "nowhere", path.name, "/etc/passwd", ".."])
            )
        elif how < 0.2:
            path.write_bytes(pickle.dumps(Bomb(self.canary)))
        elif how < 0.6 and path.suffix == ".json":
            path.write_text(
                json.dumps(_spoiled(numbers, json.loads(path.read_text()), self.canary))
            )
        elif how < 0.65 and path.suffix == ".json":
            path.write_text("[" * 100_000)
        else:
            path.write_bytes(_spoiled_bytes(numbers, path.read_bytes()))


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@contextmanager
def _explained() -> Iterator[None]:
    """Translate what composing and Hydra raise, as `lightning-3d train` does."""
    from lightning_3d.app.config.explain import explain, is_composition_error

    try:
        yield
    except Exception as error:
        if not is_composition_error(error):
            raise
        raise explain(error) from error


def _composed(config: Any) -> Any:
    from omegaconf import OmegaConf

    with _explained():
        return OmegaConf.create(config)


def _plan_and_make(config: Any) -> None:
    """Check a configuration, and make its data, as each rank of its run does. Its loggers and
    callbacks may write anywhere."""
    from omegaconf import DictConfig

    from lightning_3d.app.config.compose import plain
    from lightning_3d.app.config.plan_run import plan_run
    from lightning_3d.app.planner.advice import PlannerAdvice
    from lightning_3d.app.training.run import make_data
    from lightning_3d.errors import ConfigError

    if not isinstance(config, DictConfig):
        raise ConfigError("Hydra composes dicts only.")
    plan = plan_run(config, None, PlannerAdvice())
    with _explained():
        content = plan.freeze(plain(config))
    make_data(content)


def _spoiled(numbers: random.Random, content: Any, canary: Path) -> Any:
    """Return a copy of nested dicts and lists with one to three changes."""
    content = copy.deepcopy(content)
    for _ in range(numbers.randint(1, 3)):
        place, key = content, None
        while isinstance(place, (dict, list)) and place:
            inside, key = (
                place,
                numbers.choice(list(place) if isinstance(place, dict) else range(len(place))),
            )
            place = inside[key]
            if numbers.random() < 0.3:
                break
        if key is None:
            continue
        words = numbers.choice(
            (WORDS, WORDS, INTERPOLATIONS, TARGETS if key == "_target_" else WORDS)
        )
        word = copy.deepcopy(numbers.choice(words))
        if isinstance(word, dict) and "command" in word:
            word["command"] = f"touch {canary}"
        if numbers.random() < 0.15:
            del inside[key]
        elif numbers.random() < 0.15 and isinstance(inside, dict):
            inside[f"{key}{numbers.choice(['', '_', 's', '.x'])}x"] = word
        else:
            inside[key] = word
    return content


def _without_interpolations(value: Any) -> Any:
    """Replace what OmegaConf would read as an interpolation: half of the cases are about everything
    else."""
    if isinstance(value, dict):
        return {key: _without_interpolations(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_interpolations(entry) for entry in value]
    return value.replace("${", "$") if isinstance(value, str) else value


def _spoiled_text(numbers: random.Random, text: str) -> str:
    place = numbers.randint(0, len(text))
    return (
        text[:place]
        + numbers.choice(["_", "__", " ", "\n", "\0", "é", "[", "${x}", "tp2", "9" * 50])
        + text[place:]
    )


def _spoiled_bytes(numbers: random.Random, data: bytes) -> bytes:
    """Flip, cut, repeat or insert bytes."""
    for _ in range(numbers.randint(1, 4)):
        place, length = (
            numbers.randint(0, max(0, len(data) - 1)),
            numbers.choice([1, 1, 2, 8, 64, 1000]),
        )
        how = numbers.randint(0, 4)
        if how == 0:
            data = data[:place]
        elif how == 1:
            data = (
                data[:place]
                + bytes(numbers.randrange(256) for _ in range(min(length, 64)))
                + data[place + length :]
            )
        elif how == 2:
            data = data[:place] + data[place : place + length] * 2 + data[place + length :]
        elif how == 3:
            data = data[:place] + numbers.choice(PIECES) + data[place:]
        elif data:
            data = (
                data[:place]
                + bytes([data[place] ^ (1 << numbers.randrange(8))])
                + data[place + 1 :]
            )
    return data


def _agree(numbers: random.Random, folder: Path) -> None:
    """Let the manifest have the sizes and hashes of the damaged files, as one who damages them on
    purpose would."""
    import hashlib

    from lightning_3d.checkpoint import folder as format_

    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, known in manifest["files"].items():
            data = (folder / name).read_bytes()
            known |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if numbers.random() < 0.2:
            manifest["files"][numbers.choice(["../x", "/etc/passwd", "", ".."])] = {
                "bytes": 1,
                "sha256": "0" * 64,
            }
        if numbers.random() < 0.2:
            manifest["data"] = numbers.choice(["..", "/", "../..", 5, ["a"]])
        manifest.pop("sha256", None)
        manifest["sha256"] = format_._own_hash(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))
    except Exception:  # what is damaged may be the manifest
        return


def fuzz(cases: int, seed: int, kinds: Sequence[str], first: int = 0) -> set[str]:
    """Run cases and print what is wrong as soon as it is found, each kind of error once. Returns
    the kinds of errors."""
    errors: set[str] = set()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder, _inside(Path(folder) / "start"):
        fuzzer = Fuzzer(Path(folder), seed)
        fuzzer.prepare()
        for kind in kinds:
            count, ends = (
                max(1, round(cases * (SHARES[kind] if len(kinds) > 1 else 1))),
                Counter[str](),
            )
            for number in range(first, first + count):
                ended = fuzzer.run(kind, number)
                ends[ended if ended in ("result", "refused") else "wrong"] += 1
                error = "\n".join(ended.splitlines()[-6:])[-600:]
                if ended not in ("result", "refused") and error not in errors:
                    errors.add(error)
                    print(
                        f"{ended}\n  python tools/fuzz.py --only {kind} --seed {seed} --first"
                        f" {number} --cases 1",
                        flush=True,
                    )
                if ends.total() in (count, *range(0, count, 1000)):
                    counted = ", ".join(f"{many} {name}" for name, many in sorted(ends.items()))
                    print(
                        f"{kind:<14} {ends.total():>7} of {count} cases, {time.process_time():.0f}"
                        f" s: {counted}",
                        flush=True,
                    )
    return errors


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Work in a new folder, in which nothing should be written."""
    before = Path.cwd()
    folder.mkdir()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", type=int, default=100_000, help="of all kinds together (default: 100,000)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(SHARES))
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(arguments)
    kinds = [options.only] if options.only else list(SHARES)
    errors = fuzz(options.cases, options.seed, kinds, options.first)
    well = "each case ended in a result or in one message, and no code of an input was run"
    print(f"{len(errors)} kinds of errors" if errors else well)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
