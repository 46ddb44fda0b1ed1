"""`lightning-3d train`: Hydra composes the configuration, this checks it and starts the ranks.

Before Hydra makes the run folder, `BeforeRun` refuses whatever the configuration alone shows to be wrong. torch is
imported after that.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hydra_plugins.lightning_3d_configs.search_path import Lightning3DSearchPath
from hydra_plugins.lightning_3d_configs.sources import ClusterSource, LayoutSource, RecipeSource
from lightning_3d.config import RunPlan, plan_run
from lightning_3d.config_files import conf_folder
from lightning_3d.errors import ConfigError, Lightning3DError
from lightning_3d.failures import FailureReporter, LocalBoard, StoreBoard, connect_board
from lightning_3d.hydra_errors import explain, is_composition_error
from lightning_3d.launch import OutsideRank, can_fork, cores, launch, outside_rank, set_master_address
from lightning_3d.run_folder import LOGS, RunFolder


def run(arguments: list[str], outside: OutsideRank | None) -> int:
    """Run Hydra's command line and return the exit code.

    Args:
        arguments: overrides and Hydra's own options.
        outside: this process as a rank that torchrun or SLURM started; None: the ranks are to be started here.
    """
    job = TrainJob(outside)
    try:
        _run_hydra(job, arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `--help | head`; Python would complain again when it flushes standard output at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        if is_composition_error(error):
            return refuse(explain(error), outside)
        traceback.print_exc()
        return 1
    return job.exit_code


def refuse(error: Lightning3DError, outside: OutsideRank | None = None) -> int:
    """Print why, once for all ranks, and return the exit code."""
    if outside is None or outside.rank == 0:
        print(f"lightning_3d: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def _run_hydra(job: TrainJob, arguments: list[str]) -> None:
    """`hydra.main` takes its arguments from `sys.argv`, and shortens tracebacks unless told otherwise, instead of
    raising.
    """
    # Hydra finds plugins by walking their folders, which it cannot where an editable install maps names instead.
    found = {plugin.__name__ for plugin in Plugins.instance().discover()}  # classes of modules that it loaded anew
    for plugin in (LayoutSource, ClusterSource, RecipeSource, Lightning3DSearchPath):
        if plugin.__name__ not in found:
            Plugins.instance().register(plugin)
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    installed = Path(sys.argv[0]).name == "lightning-3d"  # a shell completes for the name of the application
    sys.argv = [sys.argv[0] if installed else "train.py", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(job)()
    finally:
        sys.argv = before[0]
        os.environ.pop("HYDRA_FULL_ERROR") if before[1] is None else os.environ.update(HYDRA_FULL_ERROR=before[1])


class BeforeRun(Callback):
    """Hydra calls it with the composed configuration: here a run is refused before anything of it is on disk."""

    def __init__(self) -> None:
        self.outside = outside_rank()
        self.folder: RunFolder | None = None
        self.reporter: FailureReporter | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the configuration and decide on the folder. Ends the process where Hydra would swallow an exception."""
        try:
            plan = check(config, self.outside)
            if config.trainer.dry:
                _print_once(plan.describe(), self.outside)
                sys.exit(0)
            self._take_folder(config)
        except Lightning3DError as error:
            sys.exit(refuse(error, self.outside))
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        if self.outside is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """A sweep starts the ranks of each job itself."""
        if self.outside is not None:
            error = ConfigError(
                f"A sweep (-m) starts the ranks of each job, but {self.outside.launcher} already started"
                f" {self.outside.world_size}. Run it without {self.outside.launcher}."
            )
            sys.exit(refuse(error, self.outside))

    def on_job_start(self, config: DictConfig, *, task_function: Any, **kwargs: Any) -> None:
        """Hand over to the job what was decided."""
        task_function.folder, task_function.reporter = self.folder, self.reporter

    def _take_folder(self, config: DictConfig) -> None:
        given = any(line.startswith("hydra.run.dir=") for line in config.hydra.overrides.hydra)
        path = Path(config.hydra.run.dir)
        if self.outside is None:
            self.folder = RunFolder.claim(path, numbered=not given)
            place = self.folder.path
        else:
            place = self._agree(self.outside, path, numbered=not given)
        with read_write(config), open_dict(config):
            config.hydra.run.dir = str(place)
            if self.outside is not None and self.outside.rank > 0:  # rank 0 writes Hydra's files and the log
                config.hydra.output_subdir = None
                config.hydra.job_logging = {"version": 1, "root": {"level": "WARNING"}}

    def _agree(self, outside: OutsideRank, path: Path, *, numbered: bool) -> Path:
        """Rank 0 takes a folder and tells the others, whose clocks would have named another."""
        set_master_address(outside)
        board = connect_board(outside.rank, outside.world_size)
        self.reporter = FailureReporter(board, outside.rank, outside.world_size)
        told: dict[str, str] = {}
        if outside.rank == 0:
            try:
                self.folder = RunFolder.claim(path, numbered=numbered)
                told = {"folder": str(self.folder.path)}
            except ConfigError as error:
                told = {"refused": str(error)}
        if isinstance(board, StoreBoard):
            told = json.loads(board.tell_all("run_folder", json.dumps(told), outside.rank))
        if "refused" in told:
            raise ConfigError(told["refused"])
        return Path(told["folder"])


def check(config: DictConfig, outside: OutsideRank | None) -> RunPlan:
    """`plan_run`, and what only Hydra knows: a group that was given several names."""
    for override in OmegaConf.select(config, "hydra.overrides.task") or ():
        if override.startswith("parallelism=["):
            raise ConfigError(f"{override} names several layouts; a run has one. Use -m parallelism=A,B to run each.")
    return plan_run(config, outside)


class TrainJob:
    """What Hydra runs with the composed configuration, once, or once per job of a sweep."""

    def __init__(self, outside: OutsideRank | None) -> None:
        self.outside = outside
        self.folder: RunFolder | None = None
        self.reporter: FailureReporter | None = None
        self.exit_code = 0

    def __call__(self, config: DictConfig) -> int:
        code = self._run(config)
        self.exit_code = self.exit_code or code
        if code > 128:  # a signal ends a sweep, not one job of it
            sys.exit(code)
        self.folder = None
        return code

    def _run(self, config: DictConfig) -> int:
        try:
            plan = check(config, self.outside)
            if config.trainer.dry:
                _print_once(plan.describe(), self.outside)
                return 0
            if self.folder is None and (self.outside is None or self.outside.rank == 0):
                self.folder = RunFolder.claim(Path(HydraConfig.get().runtime.output_dir), numbered=False)
            frozen = plan.freeze(_plain(config))
        except Lightning3DError as error:
            return refuse(error, self.outside)
        for warning in plan.warnings:
            _print_once(f"lightning_3d: {warning}", self.outside, file=sys.stderr)
        if self.folder is not None:
            self.folder.write_config(OmegaConf.to_yaml(OmegaConf.create(frozen)))
            _print_once(f"{plan.describe()}\nrun folder: {self.folder.path}", self.outside)
        code = self._start_ranks(plan, frozen) if self.outside is None else self._be_rank(self.outside, frozen)
        if code == Lightning3DError.exit_code and self.folder is not None and not self.folder.holds_results():
            self.folder.discard()
        return code

    def _start_ranks(self, plan: RunPlan, frozen: dict[str, Any]) -> int:
        """Start the ranks on this machine and wait for them."""
        assert self.folder is not None
        count = plan.layout.world_size
        threads = None
        if plan.accelerator == "cpu":
            # Before torch is imported, by this process or by the ranks.
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // count)))
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            threads = int(os.environ["OMP_NUM_THREADS"])
        fork = _may_fork(frozen["trainer"]["start_method"], plan.accelerator)
        if fork:
            _quiet_imports()
            from lightning_3d.training.run import preload

            preload(frozen)
            fork = can_fork()
        outcome = launch(run_rank, (frozen,), count, logs=self.folder.path / LOGS, fork=fork, threads=threads)
        if outcome.message is not None:
            print(outcome.message, file=sys.stderr, flush=True)
            if outcome.exit_code != Lightning3DError.exit_code:
                print(f"lightning_3d: what the ranks printed is in {self.folder.path / LOGS}", file=sys.stderr)
        return outcome.exit_code

    def _be_rank(self, outside: OutsideRank, frozen: dict[str, Any]) -> int:
        """Run as the rank that torchrun or SLURM started."""
        reporter = self.reporter or FailureReporter(LocalBoard(), outside.rank, outside.world_size)
        reporter.watch()
        code = reporter.run(lambda: run_rank(frozen))
        reporter.close()
        return code


def run_rank(frozen: dict[str, Any]) -> None:
    """The job of every rank."""
    _quiet_imports()
    from lightning_3d.training.run import train

    train(frozen)


def _quiet_imports() -> None:
    """Transformers imports torchao where it is installed, which warns of extensions that do not load (0.18), itself and through torch."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _may_fork(start_method: str, accelerator: str) -> bool:
    if start_method == "auto":
        return accelerator == "cpu" and sys.platform == "linux"
    return start_method == "fork"


def _plain(config: DictConfig) -> dict[str, Any]:
    """The configuration without interpolations, as dicts and lists."""
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _print_once(text: str, outside: OutsideRank | None, file: Any = None) -> None:
    if outside is None or outside.rank == 0:
        print(text, file=file, flush=True)
