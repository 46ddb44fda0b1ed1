"""`lightning-3d train`: Hydra composes the configuration; this module checks it and hands it to
`run_job`.

Before Hydra makes the run folder, `BeforeRun` makes every check that the configuration alone
allows. torch is imported after that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hydra_plugins.lightning_3d_launcher.launcher import Lightning3DLauncher
from hydra_plugins.lightning_3d_launcher.slurm import Lightning3DSlurmLauncher
from lightning_3d.app.config.compose import plain, register_sources
from lightning_3d.app.config.explain import explain, explain_sweep, is_composition_error
from lightning_3d.app.config.files import conf_folder
from lightning_3d.app.config.override_words import quoted
from lightning_3d.app.config.plan_run import RunPlan
from lightning_3d.app.config.secrets import check_secrets, check_words
from lightning_3d.app.config.typed import typed_words
from lightning_3d.app.runs.check import check_for
from lightning_3d.app.runs.ending import CommandLine
from lightning_3d.app.runs.folder import RunFolder
from lightning_3d.app.runs.resumed_keys import groups_of, require_resumable
from lightning_3d.app.runs.sweep.compose_job import JobFailed
from lightning_3d.app.runs.sweep.local_engine import Interrupted, interruptible
from lightning_3d.app.runs.sweep.sweep import Sweep
from lightning_3d.app.training.data.file_check import check_files
from lightning_3d.app.training.dry import show_plan
from lightning_3d.app.training.job import JobPlace, find_place, run_job
from lightning_3d.errors import ConfigError, Lightning3DError, is_full
from lightning_3d.ranks.environment import OutsideRank, outside_rank, print_once, refuse
from lightning_3d.ranks.output import survive_output

_NEW_FOLDER = (
    "trainer.auto_resume=true finds nothing to resume, because each start creates a new run folder."
    " Set hydra.run.dir=FOLDER to use the same folder every time."
)

_ELASTIC_FOLDER = (
    "An elastic run resumes in its folder each time that its ranks are started again, so it needs a"
    " fixed one. Set hydra.run.dir=FOLDER."
)


def run(arguments: list[str], outside: OutsideRank | None) -> int:
    """Run Hydra's command line and return the exit code.

    Args:
        arguments: overrides and Hydra's own options.
        outside: this process as a rank that torchrun or SLURM started; None: the ranks are started
            here.
    """
    arguments = [quoted(word) for word in arguments]
    job = TrainJob(outside, CommandLine.of_train(arguments))
    try:
        with job.signals:
            code = _run_guarded(job, arguments)
    except Interrupted as end:
        code = end.exit_code
    if job.sweep is not None:
        job.sweep.close()
        code = code or job.sweep.exit_code
    return code


def _run_guarded(job: TrainJob, arguments: list[str]) -> int:
    """Run Hydra, and translate every way in which it can end into an exit code."""
    try:
        _run_hydra(job, arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # `--help | head`; Python would complain again when it flushes standard output at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except JobFailed as failure:
        print(f"lightning_3d: the sweeper stopped: {failure}", file=sys.stderr)
        return 1
    except Exception as error:
        if is_composition_error(error):
            return refuse(explain_sweep(error, arguments), job.outside)
        if is_full(error):
            print_once(f"lightning_3d: {error}", job.outside, file=sys.stderr)
            return 1
        if (
            isinstance(error, ValueError)
            and job.sweep is not None
            and job.sweep.outcomes
            and not job.sweep.has_results
        ):
            # Optuna's sweeper asks for the best trial.
            print(
                "lightning_3d: no job of this sweep has finished with a result, so there is no best"
                " one.",
                file=sys.stderr,
            )
            return 0
        traceback.print_exc()
        return 1
    return job.exit_code


def register_plugins() -> None:
    """Register all Hydra plugins of this package: those that composing needs, and the launchers of
    sweeps."""
    register_sources((Lightning3DLauncher, Lightning3DSlurmLauncher))


def _run_hydra(job: TrainJob, arguments: list[str]) -> None:
    """Run `hydra.main`, which reads `sys.argv` and, without HYDRA_FULL_ERROR, prints a short
    traceback instead of raising."""
    register_plugins()
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    # a shell completes for the name of the application
    installed = Path(sys.argv[0]).name == "lightning-3d"
    # Hydra takes no override behind them otherwise
    flags_first = sorted(arguments, key=lambda word: word not in ("-m", "--multirun"))
    sys.argv = [sys.argv[0] if installed else "train.py", *flags_first]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(job)()
    finally:
        sys.argv = before[0]
        (
            os.environ.pop("HYDRA_FULL_ERROR")
            if before[1] is None
            else os.environ.update(HYDRA_FULL_ERROR=before[1])
        )


class BeforeRun(Callback):
    """Hydra callback that checks the composed configuration before anything of the run is on
    disk."""

    def __init__(self) -> None:
        self.outside = outside_rank()
        self.plan: RunPlan | None = None
        self.place: JobPlace | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the configuration and choose the folder. Ends the process itself, because Hydra
        swallows exceptions of callbacks."""
        try:
            _check_hydra_secrets(config)
            self.plan = plan = check_for(config, outside=self.outside)
            if config.trainer.dry:
                show_plan(plan, self.outside)
                sys.exit(0)
            if self.outside is None:
                check_files(config.data, config.trainer.max_steps)
            if plan.run.parallelism.elastic and not _is_given(config, "hydra.run.dir"):
                raise ConfigError(_ELASTIC_FOLDER)
            if config.trainer.auto_resume and not _is_given(config, "hydra.run.dir"):
                print_once(f"lightning_3d: {_NEW_FOLDER}", self.outside, file=sys.stderr)
            self._take_folder(config, plan)
        except Lightning3DError as error:
            sys.exit(refuse(error, self.outside))
        except Exception as error:
            if is_composition_error(error):
                sys.exit(refuse(explain(error), self.outside))
            traceback.print_exc()
            sys.exit(1)
        if self.outside is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse a sweep in a process that torchrun or SLURM started: a sweep starts the ranks of
        each job itself."""
        if self.outside is not None:
            error = ConfigError(
                f"A sweep (-m) starts the ranks of each job itself, but {self.outside.launcher}"
                f" already started this process as one of {self.outside.world_size}"
                f" rank{'s' * (self.outside.world_size > 1)}. Run the sweep without"
                f" {self.outside.launcher}."
            )
            sys.exit(refuse(error, self.outside))
        try:
            _check_hydra_secrets(config)
        except ConfigError as error:
            sys.exit(refuse(error, self.outside))
        # Between jobs and while Hydra composes them: exit in order, so that a sweep that has not
        # begun leaves no folder.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        if "max_failure_rate" in config.hydra.sweeper and not _is_given(
            config, "hydra.sweeper.max_failure_rate"
        ):
            with read_write(config):
                # Optuna's: a failed job does not stop the others
                config.hydra.sweeper.max_failure_rate = 1.0

    def on_job_start(self, config: DictConfig, *, task_function: Any, **kwargs: Any) -> None:
        """Hand the checked run and the chosen folder over to the job."""
        task_function.plan, task_function.place = self.plan, self.place

    def _take_folder(self, config: DictConfig, run_plan: RunPlan) -> None:
        given = _is_given(config, "hydra.run.dir")
        path = Path(config.hydra.run.dir)

        def take(earlier: Path | None) -> RunFolder:
            groups = groups_of(run_plan)
            # it resumes whenever ranks came or went
            groups["trainer"]["auto_resume"] |= bool(run_plan.run.parallelism.elastic)
            folder = RunFolder.take(
                path, groups, lambda: RunFolder.claim(path, numbered=not given), earlier
            )
            require_resumable(folder.resume, groups)
            return folder

        self.place = find_place(self.outside, run_plan, take)
        with read_write(config), open_dict(config):
            config.hydra.run.dir = str(self.place.path)
            # rank 0 writes Hydra's files and the log
            if self.outside is not None and self.outside.rank > 0:
                config.hydra.output_subdir = None
                config.hydra.job_logging = {"version": 1, "root": {"level": "WARNING"}}


def _check_hydra_secrets(config: DictConfig) -> None:
    """Refuse secrets in Hydra's part of a configuration and on the command line, both of which
    Hydra saves."""
    check_words(typed_words(config))
    parts = {
        name: OmegaConf.select(config, f"hydra.{name}")
        for name in ("callbacks", "launcher", "sweeper", "job.env_set")
    }
    check_secrets(
        {
            f"hydra.{name}": OmegaConf.to_container(part, resolve=False)
            for name, part in parts.items()
            if part is not None
        }
    )


def _is_given(config: DictConfig, key: str) -> bool:
    """Check whether the command line sets a key of Hydra."""
    return any(line.startswith(f"{key}=") for line in config.hydra.overrides.hydra)


class TrainJob:
    """The function that Hydra calls with the composed configuration: once, or once per job in a
    sweep with Hydra's own launcher."""

    def __init__(self, outside: OutsideRank | None, command: CommandLine) -> None:
        self.outside = outside
        self.command = command
        self.plan: RunPlan | None = None
        self.place: JobPlace | None = None
        self.exit_code = 0
        self.sweep: Sweep | None = None
        self.signals = contextlib.ExitStack()

    def begin_sweep(self, sweep: Sweep) -> None:
        """Remember the sweep of our launcher, whose jobs are separate processes. From now on a
        signal ends the sweep at any point."""
        self.sweep = sweep
        survive_output()
        self.signals.enter_context(interruptible())

    def __call__(self, config: DictConfig) -> int:
        code = self._run(config)
        self.exit_code = self.exit_code or code
        if code > 128:  # a signal ends a sweep, not one job of it
            sys.exit(code)
        self.plan = self.place = None
        return code

    def _run(self, config: DictConfig) -> int:
        try:
            plan = self.plan or check_for(config, outside=self.outside)
            if config.trainer.dry:
                show_plan(plan, self.outside)
                return 0
            if self.plan is None and self.outside is None:
                check_files(config.data, config.trainer.max_steps)
            path = Path(HydraConfig.get().runtime.output_dir)
            place = self.place or find_place(
                self.outside, plan, lambda earlier: RunFolder.claim(path, numbered=False)
            )
            content = plain(config)
        except Lightning3DError as error:
            return refuse(error, self.outside)
        # a job of a sweep is repeated from its folder
        command = self.command if self.place is not None else CommandLine.of_run()
        return run_job(content, plan, self.outside, place, command)
