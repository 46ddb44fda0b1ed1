"""What Hydra makes of names and groups: layouts without files, recipes, other people's apps,
help."""

from pathlib import Path
from typing import Any

import pytest
from command_line import run_commands
from composed_configs import composed, options
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lightning_3d.app.config.compose import looks_like_layout
from lightning_3d.app.config.files import conf_folder
from lightning_3d.app.config.keys import data_options
from lightning_3d.app.config.machine import visible_gpus
from lightning_3d.app.config.plan_run import RunPlan, check_keys, plan_run
from lightning_3d.app.runs.folder import RunFolder
from lightning_3d.app.training.data import DATA_MODULES, _parameters
from lightning_3d.app.training.run import make_strategy
from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.layout import Layout
from lightning_3d.layout.layout import DEGREES
from lightning_3d.ranks.environment import OutsideRank
from lightning_3d.strategy import Lightning3DStrategy


def planned(*overrides: str) -> RunPlan:
    return plan_run(composed(*overrides))


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_main_job() -> None:
    plan = planned()
    assert plan.layout == Layout(tp=2, pp=2, dp=2)
    assert (plan.schedule, plan.zero.stage, plan.accelerator, plan.precision) == (
        "1F1B",
        1,
        "cpu",
        "fp32",
    )
    assert plan.warnings == ()


@pytest.mark.parametrize(
    "name", ["tp4_pp2_dp4_cp2", "tp8_pp4_dp8", "dp2_tp2", "tp1", "pp2_vp2_dp2", "dp8_ep4"]
)
def test_layout_names_compose_without_a_file(name: str) -> None:
    config = composed(f"parallelism={name}")
    assert config.parallelism.layout == name
    assert set(config.parallelism) == set(
        OmegaConf.load(conf_folder() / "parallelism" / "base.yaml")
    )


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.sampled_from(DEGREES), st.integers(1, 4096), min_size=1))
def test_every_layout_name_is_taken_by_the_source(degrees: dict[str, int]) -> None:
    assert looks_like_layout("_".join(f"{axis}{size}" for axis, size in degrees.items()))


@pytest.mark.parametrize("name", ["tp2_xp2", "tp0", "tp2_tp2", "tp-2"])
def test_wrong_layout_names_compose_and_are_refused_afterwards(name: str) -> None:
    config = composed(f"parallelism={name}")
    with pytest.raises(LayoutError):
        plan_run(config)


@pytest.mark.parametrize("name", ["base", "mine", "tp", "fast_tp2", "h100", "node8"])
def test_other_names_are_left_to_files(name: str) -> None:
    assert not looks_like_layout(name)


def test_options_of_a_layout_are_keys() -> None:
    plan = planned(
        "parallelism=pp2_dp2", "parallelism.schedule=zbvzerobubble", "parallelism.zero_stage=0"
    )
    assert (plan.schedule, plan.layout.vp, plan.zero.stage) == ("ZBVZeroBubble", 2, 0)


def test_vp_takes_the_interleaved_schedule() -> None:
    assert planned("parallelism=pp2", "parallelism.vp=2").schedule == "Interleaved1F1B"


def test_micro_batch_size_may_be_left_to_the_schedule() -> None:
    plan = planned(
        "parallelism=pp4_dp2", "parallelism.micro_batch_size=null", "data.global_batch_size=32"
    )
    assert (plan.micro_batch_size, plan.micro_batches) == (4, 4)


def test_rank_order() -> None:
    assert planned("parallelism.order=[tp,cp,dp,pp]").layout.order == ("tp", "cp", "dp", "pp")


def test_few_micro_batches_are_a_warning() -> None:
    plan = planned("parallelism=pp4", "parallelism.schedule=gpipe", "data.global_batch_size=4")
    assert len(plan.warnings) == 1 and "idle" in plan.warnings[0]


@pytest.mark.parametrize(
    ("steps", "warmup", "warned"),
    [(50, 50, False), (50, 51, True), (1, 4000, True), (1, 20, False)],
)
def test_a_warmup_that_never_ends_is_a_warning(steps: int, warmup: int, warned: bool) -> None:
    """The run may be a trial of a longer one, so it is not refused."""
    plan = planned(f"trainer.max_steps={steps}", f"optimizer.scheduler.warmup_steps={warmup}")
    expected = (
        f"optimizer.scheduler.warmup_steps={warmup} is above trainer.max_steps={steps}, so the"
        f" warm-up never ends: the learning rate reaches only {steps / warmup:.2g} of optimizer.lr."
        f" Use optimizer.scheduler.warmup_steps of at most {steps}, or more steps."
    )
    assert plan.warnings == ((expected,) if warned else ())


def test_a_warmup_longer_than_the_decay_is_refused() -> None:
    says = (
        "warmup_steps=30 is above optimizer.scheduler.decay_steps=20, .* Use"
        " optimizer.scheduler.decay_steps of at least 30, or"
    )
    with pytest.raises(ConfigError, match=says):
        planned("optimizer.scheduler.warmup_steps=30", "+optimizer.scheduler.decay_steps=20")


@pytest.mark.parametrize("model", [name for name in options("model") if name != "pretrained"])
def test_every_model_composes(model: str) -> None:
    assert planned(f"model={model}", "parallelism=dp2", "trainer.dry=true").layout.dp == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "group", ["optimizer", "precision", "logger", "callbacks", "trainer", "cluster"]
)
def test_every_option_of_a_group_composes(group: str) -> None:
    for option in options(group):
        more = ["parallelism.zero_stage=0"] if option == "fp64" else []
        more += ["parallelism=tp2_pp2"] if option == "gb200" else []  # a node has 4 GPUs
        more += ["cluster.accelerator=gpu"] if option == "fp8" else []
        planned(f"{group}={option}", "trainer.dry=true", *more)


def test_recipe_overrides_groups_and_values_and_the_command_line_overrides_it() -> None:
    recipe = "recipe=llama3_70b_256xa100"
    plan = planned(recipe, "trainer.dry=true")
    assert (plan.layout.name, plan.accelerator, plan.precision) == ("tp8_pp4_dp8", "gpu", "bf16")
    config = composed(recipe, "optimizer.lr=1e-5", "parallelism=tp8_pp8_dp4")
    assert (config.model.name, config.optimizer.lr, config.parallelism.layout) == (
        "llama3_70b",
        1e-5,
        "tp8_pp8_dp4",
    )


@pytest.mark.slow
def test_an_optimizer_for_host_memory_needs_its_weights_there() -> None:
    overrides = ["recipe=llama3_70b_256xa100", "trainer.dry=true", "optimizer.name=cpu_adamw"]
    with pytest.raises(
        ConfigError,
        match="cpu_adamw updates weights in host memory.* parallelism.zero_offload=optimizer",
    ):
        planned(*overrides)
    assert planned(*overrides, "parallelism.zero_offload=optimizer").zero.offload == "optimizer"


@pytest.mark.parametrize("name", sorted(DATA_MODULES))
def test_data_files_have_the_options_of_their_modules(name: str) -> None:
    """`data_options` reads the options from the file, because the modules import torch."""
    from lightning_3d.app.training import data

    module_name, class_name = data.DATA_MODULES[name].split(":")
    module: Any = getattr(data.import_module(module_name), class_name)
    given = {"global_batch_size", "batch_ramp", "seed", "vocab_size"}  # by other files
    assert {*data_options(name), *given} - {"name"} == set(_parameters(module))


@pytest.mark.parametrize("name", ["a" * 10_000, "../model/llama", {}, None])
def test_a_name_that_no_data_file_has_gives_no_options(name: object) -> None:
    assert data_options(name) == {}


def test_frozen_configuration_gives_the_same_plan() -> None:
    config = composed(
        "parallelism=pp2_dp2", "parallelism.schedule=dualpipev", "parallelism.micro_batch_size=null"
    )
    config.run_folder = "runs/1"
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    plan = plan_run(config)
    frozen = plan.freeze({str(key): value for key, value in plain.items()})
    assert plan_run(OmegaConf.create(frozen)) == plan


def test_run_folder_need_not_exist_for_the_check() -> None:
    assert check_keys(composed()).callbacks["metrics"]["path"] == "/run-folder/metrics.csv"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+model.bogus=1"], 'no configuration key "model.bogus"'),
        (["+data.sequence_len=1"], '"data.sequence_len". Did you mean "data.sequence_length"'),
        (
            ["data.sequence_length=abc"],
            "data.sequence_length must be a whole number, for example 128; got 'abc'",
        ),
        (["data.sequence_length=null"], "data.sequence_length must be given"),
        (
            ["data.val_fraction=some"],
            "data.val_fraction must be a number, for example .*; got 'some'",
        ),
        (
            ["data.predict_across_documents=3"],
            "data.predict_across_documents must be true or false, for example .*; got 3",
        ),
        (["+optimizer.momentum=1"], "optimizer has no option 'momentum'"),
        (["optimizer.betas=0.9"], "optimizer.betas must be two numbers, for example .*; got 0.9"),
        (
            ["optimizer.no_decay=norm"],
            "optimizer.no_decay must be a list, for example .*; got 'norm'",
        ),
        (
            ["optimizer.scheduler=cosine"],
            (
                "optimizer.scheduler must be a mapping; got 'cosine'. Use"
                " optimizer.scheduler.name=cosine"
            ),
        ),
        (
            ["+logger.mine=1"],
            r"logger.mine must have a _target_.*lightning.pytorch.loggers.CSVLogger",
        ),
        (["callbacks.progress=5"], r"callbacks.progress must have a _target_"),
        (["trainer.extra=5"], "trainer.extra: Cannot assign int to Dict"),
        (
            ["trainer.val_check_interval=null"],
            "must not be null. To turn validation off, set trainer.limit_val_batches=0",
        ),
        (["trainer.max_steps=null"], "trainer.max_steps must not be null.$"),
        (
            ["trainer.max_steps=many"],
            "trainer.max_steps: Value 'many' of type 'str' could not be converted to Integer.$",
        ),
        (
            ["+parallelism.zero=1"],
            (
                r'"parallelism.zero". Did you mean "parallelism.zero_\w+"\? parallelism has'
                r" .*compile, cp_kind, elastic"
            ),
        ),
        (["parallelism.order=tp"], "parallelism.order: "),
        (["+cluster.gpu_memory=1"], '"cluster.gpu_memory". Did you mean "cluster.memory"'),
        (["~optimizer"], "The group optimizer must be given"),
        (["~trainer"], "The group trainer must be given"),
        (["+lr=1"], 'There is no configuration key "lr"'),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_f19_unknown_keys_and_wrong_types_are_refused_in_every_group(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["~logger"],
        ["~callbacks.progress"],
        ["callbacks.progress=null"],
        ["data.val_sequences=null"],
    ],
)
def test_what_is_optional_can_be_taken_out(overrides: list[str]) -> None:
    assert planned(*overrides).layout.name == "tp2_pp2_dp2"


# Hardware


def test_gpus_are_counted_without_cuda(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == 3
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,2"}, tmp_path) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, tmp_path) == 1


def test_gpus_that_only_the_driver_knows_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-1)'\necho 'GPU 1: H200 (UUID: GPU-2)'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert visible_gpus({}, tmp_path / "no_devices") == 2


@pytest.mark.slow
def test_gpus_are_used_when_there_is_one_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_3d.app.config.machine.visible_gpus", lambda: 4)
    assert (planned("parallelism=tp4").accelerator, planned("parallelism=tp4").precision) == (
        "gpu",
        "bf16",
    )
    fewer = planned("parallelism=dp8")
    assert fewer.accelerator == "cpu" and fewer.warnings == (
        "This machine has 4 GPUs for 8 ranks, so the run uses the CPU.",
    )
    assert planned("parallelism=tp4", "cluster=local_cpu").accelerator == "cpu"
    with pytest.raises(LayoutError, match="Layouts for 4 GPUs: "):
        planned("parallelism=dp8", "cluster.accelerator=gpu")
    two_nodes = OutsideRank(
        rank=0, local_rank=0, world_size=8, local_world_size=4, launcher="torchrun"
    )
    assert (
        plan_run(composed("parallelism=dp8", "cluster.accelerator=gpu"), two_nodes).accelerator
        == "gpu"
    )


def test_a_sequence_that_tp_does_not_divide_stays_whole_on_cpu() -> None:
    """Ranks on CPU do not split sequences where it is left open; others do
    (tests/config/test_refusals.py)."""
    odd = ("parallelism=tp4", "cluster=local_cpu", "data.sequence_length=250")
    assert planned(*odd).run.parallelism.sequence_parallel is None
    with pytest.raises(LayoutError, match="tp 4 does not divide the 250 tokens"):
        planned(*odd, "parallelism.sequence_parallel=true")


# Other people's apps


def test_groups_appear_in_other_apps(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "defaults:\n  - parallelism: tp2_pp2\n  - model: mine\n  - _self_\nmine: 1\n"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("hidden: 3\n")
    config = composed("parallelism.schedule=gpipe", folder=tmp_path)
    assert config == {"mine": 1, "model": {"hidden": 3}, "parallelism": config.parallelism}
    assert (config.parallelism.layout, config.parallelism.schedule) == ("tp2_pp2", "gpipe")
    assert composed("model=llama_tiny", folder=tmp_path).model.name == "llama_tiny"


def test_files_of_the_app_come_before_ours(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("defaults:\n  - parallelism: tp2_pp2\n")
    (tmp_path / "parallelism").mkdir()
    (tmp_path / "parallelism" / "tp2_pp2.yaml").write_text("of: the app\n")
    assert composed(folder=tmp_path) == {"parallelism": {"of": "the app"}}


@pytest.mark.parametrize(
    "strategy", ["auto", "{_target_: lightning.pytorch.strategies.DDPStrategy, static_graph: true}"]
)
def test_a_layout_is_a_strategy_of_an_app_that_makes_its_trainer(
    tmp_path: Path, strategy: str
) -> None:
    """In the place of one that the app names, as a word or as an object."""
    (tmp_path / "config.yaml").write_text("defaults:\n  - trainer: default\n")
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "default.yaml").write_text(f"strategy: {strategy}\n")
    config = composed(
        "+parallelism@trainer.strategy=tp2_pp2", "trainer.strategy.schedule=gpipe", folder=tmp_path
    ).trainer.strategy
    assert (config._target_, config.layout, config.schedule) == (
        "lightning_3d.Lightning3DStrategy",
        "tp2_pp2",
        "gpipe",
    )


def test_keys_of_the_group_are_arguments_of_the_strategy() -> None:
    config = composed(
        "parallelism=pp2_dp2", "parallelism.order=[tp,cp,dp,pp]", "parallelism.recompute=selective"
    ).parallelism
    strategy = instantiate(config, recompute_keep=["mm"])
    assert type(strategy) is Lightning3DStrategy and strategy.layout == Layout(
        pp=2, dp=2, order=("tp", "cp", "dp", "pp")
    )
    assert (
        strategy.zero_stage,
        strategy.micro_batch_size,
        strategy.options.blocks.recompute_keep,
    ) == (1, 2, ("mm",))


class Mine(Lightning3DStrategy):
    """A strategy of the user."""


def test_the_strategy_may_be_a_class_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_3D_ALLOW_TARGETS", f"{__name__},nowhere,torch.nn")
    parallelism = {
        **OmegaConf.load(conf_folder() / "parallelism" / "base.yaml"),
        "_target_": f"{__name__}.Mine",
    }

    def strategy(**changes: Any) -> Lightning3DStrategy:
        return make_strategy(
            {
                "parallelism": {**parallelism, **changes},
                "precision": {"name": "fp32"},
                "trainer": {},
                "seed": 7,
            }
        )

    assert type(strategy(layout="dp2")) is Mine
    with pytest.raises(
        ConfigError,
        match="parallelism._target_ must be Lightning3DStrategy .*; got torch.nn.Identity",
    ):
        strategy(_target_="torch.nn.Identity")
    with pytest.raises(ConfigError, match=r"Cannot create parallelism \(nowhere.Strategy\)"):
        strategy(_target_="nowhere.Strategy")
    with pytest.raises(LayoutError, match="^micro_batch_size must be at least 1; got 0"):
        strategy(micro_batch_size=0)


# The command line


@pytest.mark.slow
def test_services_of_hydra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", "train.py cluster=h10")  # what bash asks to complete
    (tmp_path / "parallelism").mkdir()
    (tmp_path / "parallelism" / "mine.yaml").write_text(
        "defaults: [base, _self_]\nlayout: tp1\nmicro_batch_size: 4\n"
    )
    names = [
        "--info plugins",  # first: --info makes Hydra log to the screen ever after
        "--help",
        "--cfg job",
        "--info searchpath",
        "--hydra-help",
        "--cfg job --package trainer",
        "-sc query=bash",
        f"-cd {tmp_path} parallelism=mine trainer.dry=true",
    ]
    answers = dict(
        zip(names, run_commands([["train", *name.split()] for name in names]), strict=True)
    )
    assert [answer.left for answer in answers.values()] == [[]] * len(names), (
        "none of these makes a run folder"
    )
    help_text = answers["--help"].output
    assert all(
        f"\n{group}: " in help_text
        for group in ("model", "data", "parallelism", "cluster", "recipe", "trainer")
    )
    assert "tp2_pp2_dp2" in help_text and "llama3_70b_256xa100" in help_text
    assert "h100_32x8" in help_text and "llama3_1_8b_8xh100" in help_text
    assert "layout: tp2_pp2_dp2" in answers["--cfg job"].output
    assert answers["-sc query=bash"].output.split()[-3:] == [
        "cluster=h100",
        "cluster=h100_32x8",
        "cluster=h100_sxm",
    ]
    assert "layout://" in answers["--info searchpath"].output
    assert answers["--info plugins"].output.count("\t\tLayoutSource\n") == 1, (
        "found or registered, not both"
    )
    assert "--multirun" in answers["--hydra-help"].output
    assert answers["--cfg job --package trainer"].output.startswith(
        "# @package trainer\nmax_steps: 200\n"
    )
    assert answers[names[-1]].output.endswith(
        "tp1: 1 rank on CPU, 1F1B, ZeRO-1, fp32, 4 micro-batches of 4\n"
    )


@pytest.mark.slow
def test_files_of_a_user(tmp_path: Path) -> None:
    """Recipes of his own, recipes in his defaults list, a configuration of his own; as
    `experiment=` in other projects."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /parallelism: tp4_pp2\nparallelism:"
        " {zero_stage: 0}\n"
    )
    (tmp_path / "recipe" / "theirs.yaml").write_text(
        "# @package _global_\ndefaults:\n  - llama3_70b_256xa100\n  - override /parallelism:"
        " tp8_pp8_dp4\n"
    )
    (tmp_path / "recipe" / "local.yaml").write_text("seed: 3\n")
    (tmp_path / "whole.yaml").write_text(
        "defaults:\n  - config\n  - override recipe: llama3_70b_256xa100\n  - _self_\nseed: 3\n"
    )
    lines = {
        "recipe=mine": "tp4_pp2: 8 ranks on CPU, 1F1B, ZeRO-0",
        "recipe=mine parallelism=pp4_dp2": "pp4_dp2: 8 ranks on CPU, 1F1B, ZeRO-0",
        "recipe=theirs": "tp8_pp8_dp4: 256 ranks on GPUs",
        "-cn whole": "tp8_pp4_dp8: 256 ranks on GPUs",
        "-cn whole parallelism=tp8_pp8_dp4": "tp8_pp8_dp4: 256 ranks on GPUs",
        "recipe=local": "the first line of its file must be  # @package _global_",
        "-cn nothing": 'There is no configuration "nothing".',
        "-cp nothing": "--config-path must be an absolute path",
        "recipe=null": "To remove a group, use ~GROUP",
    }
    answers = run_commands(
        [["train", "-cd", str(tmp_path), *line.split(), "trainer.dry=true"] for line in lines]
    )
    for (line, said), answer in zip(lines.items(), answers, strict=True):
        assert (
            answer.output.removeprefix("lightning_3d: ").startswith(said) or said in answer.output
        ), f"{line}: {answer.output}"
        assert (answer.code, answer.left) == (0 if " ranks on " in said else 2, []), line
        assert answer.output.count("\n") == 1


# The run folder


def test_run_folder_is_made_and_removed(tmp_path: Path) -> None:
    folder = RunFolder.claim(tmp_path / "a" / "b", numbered=False)
    (folder.path / "logs").mkdir()
    folder.discard()
    assert list(tmp_path.iterdir()) == []


def test_run_folder_keeps_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    RunFolder.claim(tmp_path, numbered=False).discard()
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    folders = [RunFolder.claim(tmp_path / "12-00-00", numbered=True).path.name for _ in range(3)]
    assert folders == ["12-00-00", "12-00-00_1", "12-00-00_2"]


def test_f37_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    RunFolder.claim(tmp_path / "run", numbered=False)
    with pytest.raises(ConfigError, match="belongs to a run that is in progress"):
        RunFolder.claim(tmp_path / "run", numbered=False)
