"""Bad input ends with exit code 2 and one message, before anything is started, and leaves nothing
behind.

Every case is a command line; they run in a few processes (see command_line.py): what the
configuration alone shows, where torch must not be imported, and what data or model show, where
ranks are started, from a process that has torch already.
"""

import json
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
from command_line import REPOSITORY, Result, assert_refused, environment, run_commands

from lightning_3d.app.training.data.token_file import write_tokens
from lightning_3d.ranks.supervisor import _reserved_port

# for the test that is first, and so waits for all command lines
pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]

# id -> (overrides, what the message must say). The numbers are those of the and the fault
# list's cases.
CONFIGURATION: dict[str, tuple[list[str], list[str]]] = {
    "unknown_axis": (["parallelism=tp2_xp2"], ['unknown axis "xp"', "tp, pp, dp, cp, ep and vp"]),
    "no_layout_at_all": (["parallelism=fast"], ['The layout "fast"', "tp2_pp2_dp2"]),
    "repeated_axis": (
        ["parallelism=tp2_pp2_tp4"],
        ["gives tp twice, as 2 and as 4", 'Did you mean "tp4_pp2"'],
    ),
    "several_layouts": (["parallelism=[tp2,pp2]"], ["but a run uses one", "-m"]),
    "layout_that_is_a_number": (["parallelism=8"], ["got a number", "parallelism=dp8"]),
    "f21_zero_degree": (["parallelism=tp0_pp2"], ["degree of tp must be at least 1; got 0"]),
    "f21_negative_degree": (["parallelism=tp-2"], ["degree of tp must be at least 1; got -2"]),
    "f21_absurd_degree": (["parallelism=dp99999999"], ["99999999", "at most 1048576"]),
    "rank_order": (["parallelism.order=[tp,pp]"], ["[tp, pp]", "tp, cp, pp and dp"]),
    "elastic_value": (
        ["parallelism.elastic=maybe"],
        ["parallelism.elastic must be true or false", "maybe"],
    ),
    "elastic_folder": (["parallelism.elastic=true"], ["needs a fixed one", "hydra.run.dir=FOLDER"]),
    "f02_heads": (["parallelism=tp3"], ["tp 3 does not divide 8 heads", "Use tp 1, 2, 4 or 8"]),
    "f04_kv_heads": (
        [
            "parallelism=tp4",
            "model.config.num_key_value_heads=6",
            "model.config.num_attention_heads=12",
        ],
        ["tp 4 is neither a divisor nor a multiple", "6 key/value heads"],
    ),
    "vocabulary": (
        ["parallelism=tp8", "model.config.vocab_size=5"],
        ["vocabulary has 5 entries", "8 ranks"],
    ),
    "f05_layers": (["parallelism=pp8"], ["8 stages", "4 layers", "pp of at most 4"]),
    "f06_vp": (["parallelism=pp2_vp4"], ["8 stages (pp 2 * vp 4)", "4 layers"]),
    "f07_vp_without_pipeline": (["parallelism=dp2_vp2"], ["only one pipeline rank", "dp2"]),
    "vp_twice": (["parallelism=pp2_vp2", "parallelism.vp=3"], ["vp 2", "the option vp is 3"]),
    "schedule": (
        ["parallelism.schedule=gpip"],
        ['no pipeline schedule "gpip"', 'Did you mean "GPipe"'],
    ),
    "schedule_and_vp": (["parallelism=pp2_vp2", "parallelism.schedule=1f1b"], ["1F1B", "vp 2"]),
    "f08_micro_batches": (
        ["parallelism=pp4", "data.global_batch_size=4"],
        ["1F1B", "as stages, 4", "a step has 2", "data.global_batch_size=8"],
    ),
    "f09_global_batch": (
        ["data.global_batch_size=7"],
        ["data.global_batch_size=7", "parallelism.micro_batch_size=2 * dp 2 = 4", "is 8"],
    ),
    "f09_no_global_batch": (
        ["data.global_batch_size=null"],
        ["data.global_batch_size must be given"],
    ),
    "f10_ep_dense": (["parallelism=dp2_ep2"], ["ep 2", "dense", "dp2"]),
    "f12_sequence": (
        ["parallelism=cp2", "data.sequence_length=30"],
        ["cp 2", "30 tokens", "28 or 32"],
    ),
    "ulysses_heads": (
        ["parallelism=tp2_cp8", "parallelism.cp_kind=ulysses"],
        ["tp * cp = 16", "8 heads", "cp_kind=ring"],
    ),
    "cp_kind": (["parallelism.cp_kind=rings"], ['got "rings"', 'Did you mean "ring"']),
    "flex_attention_on_cpu": (
        ["model.attn_implementation=flex_attention", "cluster=local_cpu"],
        ["flex_attention has no backward on the CPU", "attn_implementation=sdpa"],
    ),
    "cp_dropout": (
        ["parallelism=cp2", "model.config.attention_dropout=0.1"],
        ["attention_dropout=0.1", "Set it to 0"],
    ),
    "f13_sequence": (
        ["parallelism=tp4", "data.sequence_length=250"],
        ["tp 4 does not divide the 250 tokens", "248 or 252", "sequence_parallel=false"],
    ),
    "f13_sequence_of_a_context_rank": (
        ["parallelism=tp4_cp2", "data.sequence_length=252"],
        [
            "tp 4 does not divide the 126 of 252 tokens",
            "(cp 2)",
            "248 or 256",
            "sequence_parallel=false",
        ],
    ),
    "f14_positions": (["data.sequence_length=5000"], ["5000 tokens", "only 1024 positions"]),
    "f10_ep_experts": (
        [
            "parallelism=dp8_ep8",
            "+model.config.num_local_experts=4",
            "+model.config.num_experts_per_tok=2",
        ],
        ["ep 8", "4 experts", "dp8_ep4"],
    ),
    "f10_ep_ranks": (
        [
            "parallelism=dp2_ep4",
            "+model.config.num_local_experts=4",
            "+model.config.num_experts_per_tok=2",
        ],
        ["ep 4", "more than the 2", "dp2_ep2"],
    ),
    "f10_ep_of_a_mixture": (
        ["model=mixtral_tiny", "parallelism=dp6_ep3"],
        ["ep 3", "8 experts", "dp6_ep2"],
    ),
    "f15_top_k_of_a_mixture": (
        ["model=mixtral_tiny", "model.config.num_experts_per_tok=9"],
        ["to 9 experts", "only 8"],
    ),
    "moe_dense": (["parallelism.moe_aux_loss=0.1"], ["moe_aux_loss", "dense"]),
    "moe_bias": (
        ["model=mixtral_tiny", "parallelism.moe_bias_update=0.01"],
        ["The routers of mixtral have none", "Use parallelism.moe_aux_loss"],
    ),
    "moe_capacity": (
        ["model=mixtral_tiny", "parallelism.moe_capacity_factor=-1"],
        ["=-1 would drop every token", "Use 1 or more"],
    ),
    "moe_negative": (
        ["model=mixtral_tiny", "parallelism.moe_z_loss=-1"],
        ["moe_z_loss", "at least 0"],
    ),
    "f15_top_k": (
        [
            "parallelism=dp2",
            "+model.config.num_local_experts=2",
            "+model.config.num_experts_per_tok=4",
        ],
        ["to 4 experts", "only 2"],
    ),
    "f17_fp8": (["precision=fp8"], ["fp8 needs NVIDIA GPUs", "CPU", "Use precision=bf16"]),
    "f17_fp16": (["precision=fp16"], ["float16 needs a loss scale", "Use precision=bf16"]),
    "f17_fp16_by_its_name": (
        ["precision.name=16-mixed"],
        ["float16 needs a loss scale", "Use precision=bf16"],
    ),
    "precision_option": (["precision=fp9"], ['no precision "fp9"', "bf16_mixed"]),
    "f18_zero_and_fp64": (["precision=fp64"], ["fp64", "parallelism.zero_stage=0"]),
    "zero_stage": (["parallelism.zero_stage=4"], ["zero_stage must be 0, 1, 2 or 3; got 4"]),
    "zero_reduce": (
        ["parallelism.zero_stage=2", "parallelism.zero_reduce=microbatch"],
        ["micro_batch"],
    ),
    "zero_gather": (
        [
            "parallelism=pp2_dp2",
            "parallelism.schedule=ZBVZeroBubble",
            "parallelism.zero_stage=3",
            "parallelism.zero_gather=micro_batch",
        ],
        ["ZBVZeroBubble", "Use zero_gather=step"],
    ),
    "zero_reduce_at_stage_1": (
        ["parallelism.zero_reduce=micro_batch"],
        ["zero_stage=1", "Use zero_stage=2"],
    ),
    "zero_shard_size": (
        ["parallelism=dp8", "parallelism.zero_shard_size=3"],
        ["must divide dp, which is 8; got 3", "Use 2, 4 or null"],
    ),
    "zero_shard_size_at_stage_0": (
        ["parallelism=dp8", "parallelism.zero_stage=0", "parallelism.zero_shard_size=2"],
        ["zero_shard_size=2 needs zero_stage=1, 2 or 3; got 0"],
    ),
    "f19_unknown_key": (
        ["trainer.max_step=5"],
        ['"trainer.max_step"', 'Did you mean "trainer.max_steps"'],
    ),
    "name_of_another_package": (
        ["trainer.eval_steps=5"],
        ['"trainer.eval_steps"', 'Here it is "trainer.evaluate_every"'],
    ),
    "f19_added_key": (["+trainer.max_epochs=5"], ['"trainer.max_epochs"', "trainer has"]),
    "f19_added_group": (["+wheels=4"], ['"wheels"', "A run has callbacks"]),
    "f19_data_key": (["+data.sequence_lenght=64"], ['Did you mean "data.sequence_length"']),
    "f19_model_key": (["+model.confg=4"], ['Did you mean "model.config"']),
    "f19_optimizer_key": (
        ["+optimizer.weight_decya=0"],
        ["weight_decya", 'Did you mean "weight_decay"'],
    ),
    "f19_group": (["modle=llama_tiny"], ['Did you mean "model"']),
    "f19_option": (
        ["model=llama_tinny"],
        ['There is no model "llama_tinny"', 'Did you mean "llama_tiny"'],
    ),
    "f19_recipe": (["recipe=llama3_70b"], ['no recipe "llama3_70b"', "llama3_70b_256xa100"]),
    "f19_group_removed": (["~trainer"], ["The group trainer must be given"]),
    "override_grammar": (
        ["trainer.max_steps=[1"],
        ['Cannot parse the override "trainer.max_steps=[1"'],
    ),
    "wrong_type": (["trainer.max_steps=many"], ["trainer.max_steps", "many", "Integer"]),
    "f21_steps": (["trainer.max_steps=0"], ["trainer.max_steps must be at least 1; got 0"]),
    "f21_trace": (
        ["trainer.trace_every_n_steps=0"],
        ["trainer.trace_every_n_steps must be at least 1; got 0"],
    ),
    "optimizer_group": (
        ['optimizer.groups=[{pattern:"*.q_prj.weight",lr_scale:0.1}]'],
        [
            "optimizer.groups[0]",
            "matches no trained parameter",
            "model.layers.0.self_attn.q_proj.weight",
        ],
    ),
    "optimizer_of_whole_tensors": (
        ["optimizer=torch", "optimizer._target_=torch.optim.Muon"],
        ["Muon", "which tp2 and zero_stage=1 would shard", "AdamW", "Or use optimizer=muon"],
    ),
    "muon_offloaded": (
        ["optimizer=muon", "parallelism.zero_offload=optimizer"],
        ["zero_offload moves the optimizer's step to host memory", "Use zero_offload=none"],
    ),
    "muon_pattern": (
        ["optimizer=muon", "optimizer.adamw=['*.q_prj.weight']"],
        [
            "optimizer.adamw",
            "matches no trained parameter",
            "model.layers.0.self_attn.q_proj.weight",
        ],
    ),
    "optimizer_with_closure": (
        ["optimizer=torch", "optimizer._target_=torch.optim.LBFGS"],
        ["LBFGS", "by a closure", "SGD"],
    ),
    "optimizer_twice": (
        ["+optimizer._target_=torch.optim.NAdam"],
        ["name=adamw and _target_=torch.optim.NAdam", "optimizer=torch"],
    ),
    "schedule_too_long": (
        ["optimizer=adamw_wsd", "trainer.max_steps=30"],
        ["warm-up of 20 steps and a cooldown of 20 steps", "30 steps"],
    ),
    "f21_learning_rate_nan": (
        ["optimizer.lr=nan"],
        ["optimizer.lr must be a number above 0", "got nan"],
    ),
    "f21_learning_rate_negative": (
        ["optimizer.lr=-1e-3"],
        ["optimizer.lr must be a number above 0", "got -0.001"],
    ),
    "f21_checkpoint_timeout": (
        ["parallelism.checkpoint_timeout_seconds=0"],
        ["checkpoint_timeout_seconds must be", "at least 1; got 0.0"],
    ),
    "seed": (["seed=-1"], ["seed must be a whole number from 0 to 4294967295; got -1"]),
    "strategy_of_lightning": (
        ["+trainer.extra.strategy=ddp"],
        ["trainer.extra.strategy would replace", "Use parallelism instead"],
    ),
    "workers": (["data.num_workers=-1"], ["data.num_workers must be at least 0", "got -1"]),
    "validation_sequences": (
        ["data.val_sequences=0"],
        ["data.val_sequences must be at least 1, or null", "got 0"],
    ),
    "block_of_few_bits": (
        [
            "optimizer=torch",
            "optimizer._target_=torchao.optim.AdamW8bit",
            "+optimizer.block_size=0",
        ],
        ["optimizer.block_size must be a whole number of at least 1, for example 256; got 0"],
    ),
    "f21_clip": (
        ["trainer.gradient_clip_val=-1"],
        ["trainer.gradient_clip_val must be a finite number of at least 0; got -1"],
    ),
    "f21_micro_batch": (
        ["parallelism.micro_batch_size=0"],
        ["parallelism.micro_batch_size must be at least 1; got 0"],
    ),
    "validation_interval": (
        ["trainer.max_steps=100", "trainer.val_check_interval=30"],
        ["does not divide", "nearest interval that does is 25"],
    ),
    "time_limit": (["trainer.max_time=soon"], ["DD:HH:MM:SS"]),
    "f28_resume": (["trainer.resume=runs/1/step_9.ckpt"], ["no checkpoint runs/1/step_9.ckpt"]),
    "start_method": (["trainer.start_method=vfork"], ["auto, fork or spawn"]),
    "precision_that_is_none": (["precision.name=fp9"], ['no precision "fp9"', "fp32"]),
    "callback_without_class": (
        ["+callbacks.mine.every=3"],
        ["callbacks.mine must have a _target_"],
    ),
    "data_without_path": (["data=tokens"], ["data.train_path must be given"]),
    "cluster_size": (["cluster=a100_32x8"], ["8 ranks", "256 GPUs", "Layouts for 256 ranks"]),
    "cluster_numbers": (["cluster=h100_0x8"], ["cluster.nodes must be at least 1; got 0"]),
    "cluster_kind": (["cluster=v100_4x8"], ['no cluster "v100"', "h100", "local_cpu", "h100_32x8"]),
    "cluster_key": (["+cluster.memroy=4"], ['Did you mean "cluster.memory"']),
    "cluster_out_of_reach": (
        ["recipe=llama3_70b_256xa100", "data.train_path=corpus.bin"],
        ["32 nodes", "torchrun --nnodes 32 --nproc-per-node 8"],
    ),
    "no_gpus": (
        ["cluster.accelerator=gpu"],
        ["8 ranks on this machine need 8 GPUs", "this machine has 0", "cluster=local_cpu"],
    ),
    "run_folder": (["hydra.run.dir=/proc/runs/1"], ["Cannot create the run folder /proc/runs/1"]),
    "command": ([], ['no command "trian"', 'Did you mean "train"']),
}


LIKE_ANOTHER = (
    # of Layout.parse, see test_layout.py
    *("no_layout_at_all", "repeated_axis", "f21_negative_degree", "f21_absurd_degree"),
    *(
        "f10_ep_experts",
        "f10_ep_of_a_mixture",
        "f13_sequence_of_a_context_rank",
        "f15_top_k_of_a_mixture",
        "f17_fp16_by_its_name",
    ),
    *(
        "moe_capacity",
        "moe_negative",
        "precision_that_is_none",
        "zero_reduce_at_stage_1",
        "zero_shard_size_at_stage_0",
    ),
    *("f19_added_key", "f19_data_key", "f19_optimizer_key", "f19_group", "f19_recipe"),
    *("optimizer_with_closure", "optimizer_twice", "schedule_too_long"),
    *("f21_trace", "f21_learning_rate_negative", "f21_clip", "f21_micro_batch"),
)
"""Cases in the long sweeps only: by default another one shows that the same check is reached from
the command line."""


def by_default_but(cases: Iterable[str], others: Collection[str]) -> list[Any]:
    return [
        pytest.param(case, marks=pytest.mark.full) if case in others else case for case in cases
    ]


def selected(request: pytest.FixtureRequest, test: str) -> list[str]:
    """The cases of a test of this file that this session runs."""
    mine = [
        item
        for item in request.session.items
        if item.path == request.path and item.name.startswith(f"{test}[")
    ]
    return [item.callspec.params["case"] for item in mine]


@pytest.fixture(scope="module")
def from_configuration(request: pytest.FixtureRequest) -> dict[str, Result]:
    cases = selected(request, "test_refused_before_torch")
    lines = [
        ["train", *CONFIGURATION[case][0]] if case != "command" else ["trian"] for case in cases
    ]
    half = len(lines) // 2
    with ThreadPoolExecutor(2) as pool:  # on two cores
        first, second = pool.map(partial(run_commands, timeout=600), (lines[:half], lines[half:]))
    return dict(zip(cases, first + second, strict=True))


@pytest.mark.parametrize("case", by_default_but(CONFIGURATION, LIKE_ANOTHER))
def test_refused_before_torch(case: str, from_configuration: dict[str, Result]) -> None:
    result = from_configuration[case]
    assert_refused(result, CONFIGURATION[case][1])
    assert len(result.output.splitlines()) == 1, "the message is all there is"
    assert not result.torch, "torch must not be imported for this"


def test_train_py_refuses(tmp_path: Path) -> None:
    """The script itself, in a process of its own."""
    command = [sys.executable, str(REPOSITORY / "train.py"), "parallelism=tp3"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert (
        done.stderr.startswith("lightning_3d: Tensor parallelism")
        and len(done.stderr.splitlines()) == 1
    )
    assert list(tmp_path.iterdir()) == []


# Ranks of torchrun and SLURM


def run_outside(
    tmp_path: Path,
    overrides: list[str],
    places: list[dict[str, str]],
    script: Sequence[str] = (str(REPOSITORY / "train.py"),),
) -> list[tuple[int, str]]:
    """(exit code, output) of `train.py`, or another script, in each of several ranks that somebody
    else started."""
    processes = [
        subprocess.Popen(
            [sys.executable, *script, *overrides],
            cwd=tmp_path,
            env=environment(**place),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for place in places
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    return [
        (process.returncode, output) for process, output in zip(processes, outputs, strict=True)
    ]


def torchrun_rank(rank: int, world_size: int) -> dict[str, str]:
    """What torchrun sets. Nothing listens at the port: a refusal must not need it."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
    }
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "9",
    }


def slurm_rank(rank: int, world_size: int) -> dict[str, str]:
    numbers = {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NTASKS": world_size,
        "SLURM_STEP_ID": 0,
    }
    return {name: str(number) for name, number in numbers.items()} | {"SLURM_JOB_NAME": "train"}


@pytest.mark.parametrize(
    "launcher", [torchrun_rank, pytest.param(slurm_rank, marks=pytest.mark.full)]
)
def test_f01_world_size(launcher, tmp_path: Path) -> None:
    ended = run_outside(tmp_path, ["parallelism=tp2_pp2"], [launcher(rank, 3) for rank in range(3)])
    assert [code for code, _ in ended] == [2, 2, 2]
    assert [bool(output) for _, output in ended] == [True, False, False], "rank 0 alone prints"
    message = ended[0][1]
    assert len(message.splitlines()) == 1
    assert "needs 4 ranks (tp 2 * pp 2), but 3 ranks were launched" in message
    assert "pp3" in message and "Or launch 4" in message, "the nearest layouts that fit"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_world_size_is_looked_at_first(tmp_path: Path) -> None:
    """A command line with two mistakes: the number of ranks comes before the number of heads."""
    ended = run_outside(
        tmp_path, ["parallelism=tp3"], [torchrun_rank(rank, 2) for rank in range(2)]
    )
    assert "2 ranks were launched" in ended[0][1]


@pytest.mark.parametrize(
    "overrides, says", [(["parallelism=dp2", "trainer.max_step=1"], '"trainer.max_step"')]
)
def test_configuration_is_refused_by_every_rank(
    overrides: list[str], says: str, tmp_path: Path
) -> None:
    ended = run_outside(tmp_path, overrides, [torchrun_rank(rank, 2) for rank in range(2)])
    assert [code for code, _ in ended] == [2, 2]
    assert says in ended[0][1] and ended[1][1] == ""
    assert list(tmp_path.iterdir()) == []


def test_sweep_under_a_launcher_is_refused(tmp_path: Path) -> None:
    ended = run_outside(tmp_path, ["-m", "seed=0,1"], [torchrun_rank(rank, 2) for rank in range(2)])
    assert [code for code, _ in ended] == [2, 2]
    assert "A sweep (-m) starts the ranks of each job" in ended[0][1]
    assert list(tmp_path.iterdir()) == []


def test_launcher_variables_that_are_no_numbers(tmp_path: Path) -> None:
    ((code, output),) = run_outside(tmp_path, [], [torchrun_rank(0, 1) | {"WORLD_SIZE": "many"}])
    assert code == 2 and "whole numbers" in output and len(output.splitlines()) == 1


def test_torchrun_shows_the_message_once(tmp_path: Path) -> None:
    """torchrun ends all ranks as soon as one has ended; rank 0 must still get to print."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "3",
        str(REPOSITORY / "train.py"),
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("lightning_3d: ") == 1
    assert "needs 8 ranks" in done.stderr
    assert "exitcode  : 2" in done.stderr, "torchrun's own summary names our exit code"
    assert list(tmp_path.iterdir()) == []


# What data or model show: ranks are started for these


@pytest.fixture(scope="module")
def token_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder / "good.bin", numpy.arange(4000, dtype=numpy.uint16) % 256, vocab_size=256)
    write_tokens(folder / "short.bin", numpy.arange(300, dtype=numpy.uint16) % 256, vocab_size=256)
    write_tokens(folder / "empty.bin", numpy.zeros(0, dtype=numpy.uint16), vocab_size=256)
    high = numpy.arange(4000, dtype=numpy.uint16) % 256
    high[1234] = 999
    write_tokens(folder / "high.bin", high, vocab_size=1000)
    write_tokens(folder / "cut.bin", numpy.arange(4000, dtype=numpy.uint16) % 256, vocab_size=256)
    (folder / "cut.bin").write_bytes((folder / "cut.bin").read_bytes()[:5000])
    write_tokens(folder / "lone.bin", numpy.arange(4000, dtype=numpy.uint16) % 256, vocab_size=256)
    (folder / "lone.json").unlink()
    write_tokens(folder / "typed.bin", numpy.arange(4000, dtype=numpy.uint16) % 256, vocab_size=256)
    index = json.loads((folder / "typed.json").read_text()) | {"dtype": "uint32"}
    (folder / "typed.json").write_text(json.dumps(index))
    return folder


SHARED = [
    "parallelism=dp2",
    "data.sequence_length=64",
    "data.global_batch_size=8",
    "data.val_sequences=4",
]
# Token files are named by {}; id -> (overrides, what the message must say)
NOT_IN_GPT2 = (
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "attention_dropout",
    "rope_parameters",
)
GPT2 = ["model.config.model_type=gpt2", *(f"~model.config.{name}" for name in NOT_IN_GPT2)]
STARTED: dict[str, tuple[list[str], list[str]]] = {
    "f23_short": (
        ["data=tokens", "data.train_path={}/short.bin"],
        ["fewer than data.global_batch_size=8"],
    ),
    "f23_empty": (["data=tokens", "data.train_path={}/empty.bin"], ["0"]),
    "f24_token_id": (
        ["data=tokens", "data.train_path={}/high.bin"],
        ["Token 999 at position 1234", "257"],
    ),
    "f25_truncated": (["data=tokens", "data.train_path={}/cut.bin"], ["5000 bytes", "4000 tokens"]),
    "f25_no_index": (["data=tokens", "data.train_path={}/lone.bin"], ["lone.json"]),
    "f25_dtype": (["data=tokens", "data.train_path={}/typed.bin"], ["uint32", "fits uint16"]),
    "no_file": (
        ["data=tokens", "data.train_path={}/god.bin"],
        ["There is no token file", "good.bin"],
    ),
    "no_sources": (["data.root={}"], ["no .py file"]),
    "model_type": (["model.config.model_type=lama"], ["lama"]),
    "no_plan": (
        [*GPT2, "parallelism=tp2", "parallelism.self_check=never"],
        ["declares no plan", "self_check"],
    ),
    "trainer_extra": (["+trainer.extra.no_such=1"], ["trainer.extra", "no_such"]),
    "callback_class": (
        ["+callbacks.mine._target_=lightning.pytorch.callbacks.Nothing"],
        ["callbacks.mine", "Nothing"],
    ),
}


IN_THE_READER = ("f23_empty", "f25_truncated", "f25_no_index", "f25_dtype", "no_file", "no_sources")
"""By default only the reader is asked, in test_data.py: two other cases show that its message comes
through."""


@pytest.fixture(scope="module")
def from_ranks(token_files: Path, request: pytest.FixtureRequest) -> dict[str, Result]:
    cases = selected(request, "test_refused_by_the_ranks")
    lines = []
    for overrides, _ in map(STARTED.__getitem__, cases):
        # Overrides of a case come last, so that they win.
        lines.append(
            [
                "train",
                *SHARED,
                *(override.replace("{}", str(token_files)) for override in overrides),
            ]
        )
    return dict(zip(cases, run_commands(lines, timeout=400, warm=True), strict=True))


@pytest.mark.parametrize("case", by_default_but(STARTED, IN_THE_READER))
def test_refused_by_the_ranks(case: str, from_ranks: dict[str, Result]) -> None:
    assert_refused(from_ranks[case], STARTED[case][1])


def test_run_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("of another run")
    (result,) = run_commands([["train", f"hydra.run.dir={tmp_path}"]])
    assert_refused(result, [f"{tmp_path} holds the files of another run"])
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.full
def test_refusal_under_torchrun_leaves_nothing(tmp_path: Path, token_files: Path) -> None:
    """What data show, found by ranks that torchrun started: told once, and the run folder is gone
    again."""
    overrides = [*SHARED, "data=tokens", f"data.train_path={token_files}/short.bin"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(REPOSITORY / "train.py"),
    ]
    started = time.monotonic()
    done = subprocess.run(
        [*command, *overrides],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert time.monotonic() - started < 200
    assert (done.stdout + done.stderr).count("lightning_3d: ") == 1, done.stderr
    assert "fewer than data.global_batch_size=8" in done.stderr
    assert list(tmp_path.iterdir()) == []


VECTOR_LOSS = """
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
import torch
from lightning_3d import Lightning3DStrategy

sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(**sizes))

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss.expand(2)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
strategy = Lightning3DStrategy("tp2", micro_batch_size=2)
trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=2, **quiet)
trainer.fit(Module(), DataLoader(rows, batch_size=4))
"""  # noqa: E501


@pytest.mark.full
def test_loss_that_is_no_scalar(tmp_path: Path) -> None:
    """In a user's own script: every rank ends with exit code 2, one of them says why."""
    with _reserved_port() as port:
        places = [torchrun_rank(rank, 2) | {"MASTER_PORT": str(port)} for rank in range(2)]
        ended = run_outside(tmp_path, [], places, script=["-W", "ignore", "-c", VECTOR_LOSS])
    assert [code for code, _ in ended] == [2, 2], ended
    output = "".join(output for _, output in ended)
    assert output.count("lightning_3d: ") == 1 and "Traceback" not in output, output
    assert "(2,)" in output and "single number" in output
