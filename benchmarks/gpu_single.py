"""What one GPU does with its share of Llama 3.1 8B (as many layers as fit): tokens/s, MFU and peak
memory of each way to train it.

    python benchmarks/gpu_single.py --output benchmarks/gpu_single.md
    python benchmarks/gpu_single.py --contenders "plain compile" "ours compile" --raw runs.json
    python benchmarks/gpu_single.py --device cpu --tiny

Ours against the same model of Transformers in a plain PyTorch loop, and torchtitan's Llama where it
is installed. Every run of a contender is a process of its own, so its memory begins empty;
contenders take turns, and every other round goes backwards. A ratio is the median over the rounds
of the ratio of two median steps. Without a GPU it says so and ends with exit code 0.

With --raw the measurements are kept in a file, and a later call for the same model adds to them: a
machine that is lent for minutes can measure some contenders at a time. A ratio needs both in one
call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from gpu_single_worker import CONTENDERS, OUT_OF_MEMORY, Settings
from measure import machine, median_ratio, median_step

from lightning_3d.models.families import read_spec
from lightning_3d.models.spec import ModelSpec

REPOSITORY = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("gpu_single_worker.py")
MODEL = REPOSITORY / "conf" / "model" / "llama3_1_8b.yaml"
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_CONTENDERS = ("plain", "plain checkpointing", "torchtitan", "ours", "ours full")

PEAK_FLOPS = {
    # NVIDIA H200 Tensor Core GPU datasheet, SXM: 1,979 TFLOPS with sparsity, half of that without
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,  # NVIDIA H100 Tensor Core GPU datasheet, SXM: the same
    # NVIDIA A100 Tensor Core GPU datasheet: 312 TFLOPS without sparsity, all four
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
}
"""Floating-point operations in a second, dense bf16, by the name that the driver reports."""

PEERS = {
    "ours": ("plain", "torchtitan"),
    "ours compile": ("plain compile", "torchtitan compile"),
    "ours compile chunks": ("plain compile", "torchtitan compile"),
    "ours full": ("plain checkpointing",),
    "ours compile full": ("plain compile checkpointing",),
}
"""Who does the same arithmetic as a contender of ours."""

STATE_BYTES = 18
BACKWARD_BYTES = 2
FILL = 0.92
"""Of a GPU's memory; the allocator and the libraries need the rest."""

Result = dict[str, Any]
Run = Callable[[str, Settings], Result]


@dataclass(frozen=True)
class Device:
    """Attributes:
    name: as the driver reports it. memory: bytes. cuda: version that torch was built for.
    """

    name: str
    memory: int
    cuda: str


def predicted_bytes(spec: ModelSpec, settings: Settings) -> float:
    """What training needs at most at a time, without recomputation.

    18 bytes for each of N parameters (bf16 2, float32 gradient sum 4, float32 master weight 4, two
    states of AdamW 8), 2 more for the bf16 gradients of a backward; for each token of a micro-batch
    and layer 20 h + 8 I + 4 k bytes of activations (hidden size h, width of the MLP I, of keys k;
    two norms with float32 copies, fused attention, bf16), and 16 bytes for each of its logits
    (bf16, their float32 copy, the log-softmax, and gradients).
    """
    assert spec.parameters is not None
    tokens = settings.sequence * settings.micro_batch
    layer = 20 * spec.hidden + 8 * spec.intermediate + 4 * spec.kv_heads * spec.head_dim
    return (STATE_BYTES + BACKWARD_BYTES) * spec.parameters + tokens * (
        spec.layers * layer + 16 * spec.vocab
    )


def with_layers(settings: Settings, layers: int) -> Settings:
    return replace(settings, config={**settings.config, "num_hidden_layers": layers})


def layers_that_should_fit(settings: Settings, memory: int) -> int:
    """The most layers, at most those of the whole model, whose prediction is within `FILL` of the
    memory; at least 1."""
    for layers in range(settings.config["num_hidden_layers"], 1, -1):
        shortened = with_layers(settings, layers)
        if predicted_bytes(read_spec(shortened.config), shortened) <= FILL * memory:
            return layers
    return 1


def layers_that_fit(settings: Settings, first: int, run: Run, contenders: Sequence[str]) -> int:
    """Beginning with `first` layers, one less until each of the contenders has trained two steps.

    Raises:
        RuntimeError: not even one layer fits.
    """
    for layers in range(first, 0, -1):
        short = replace(with_layers(settings, layers), warmup=1, steps=1)
        if all(run(name, short).get("failed") != OUT_OF_MEMORY for name in contenders):
            return layers
        print(f"{layers} layers do not fit", flush=True)
    raise RuntimeError("Not even one layer fits: use a smaller --micro-batch or --sequence.")


def run(contender: str, settings: Settings) -> Result:
    """Measure one contender in a process of its own, see `gpu_single_worker.measure`."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
        ),
        # of all contenders: memory is no matter of luck with fragments
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # its name before torch 2.12
        "TOKENIZERS_PARALLELISM": "false",
    }
    if settings.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"  # a tiny model has no work for more
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [
            sys.executable,
            str(WORKER),
            contender,
            json.dumps(asdict(settings)),
            str(output),
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if output.exists():
            return json.loads(output.read_text())
    tail = (done.stdout + done.stderr).strip()[-3000:]
    print(
        f"{contender} ended with exit code {done.returncode}:\n{tail}", file=sys.stderr, flush=True
    )
    return {"failed": tail.splitlines()[-1] if tail else f"exit code {done.returncode}"}


def take_turns(
    contenders: Sequence[str], settings: Settings, rounds: int, run: Run
) -> list[dict[str, Result]]:
    """Of each round the results by contender. One that failed is not tried again."""
    measured: list[dict[str, Result]] = []
    failed: set[str] = set()
    for index in range(rounds):
        results: dict[str, Result] = {}
        for name in contenders if index % 2 == 0 else contenders[::-1]:
            if name in failed:
                continue
            results[name] = run(name, settings)
            failed |= {name} if "failed" in results[name] else set()
            shown = results[name].get("failed") or f"{median(results[name]['seconds']):.3f} s"
            print(f"round {index + 1}, {name}: {shown}", flush=True)
        measured.append(results)
    return measured


def table(
    rounds: Sequence[Mapping[str, Result]], settings: Settings, peak_flops: float | None
) -> list[str]:
    """Lines of a Markdown table, a row for each contender in the order of `CONTENDERS`."""
    flops = read_spec(settings.config).flops_per_token(settings.sequence)
    seconds = [
        {name: result["seconds"] for name, result in results.items() if "seconds" in result}
        for results in rounds
    ]
    lines = [
        "| contender | s a step | tokens/s | MFU | peak GiB | tokens/s against |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in CONTENDERS:
        results = [each[name] for each in rounds if name in each]
        if not results:
            continue
        if reason := next((result["failed"] for result in results if "failed" in result), None):
            lines.append(f"| {name} | {reason.replace('|', '/')} | | | | |")
            continue
        step = median_step([each for each in seconds if name in each], name)
        speed = settings.step_tokens / step
        mfu = f"{speed * flops / peak_flops:.1%}" if peak_flops else ""
        peaks = [result["peak"] for result in results]
        peak = f"{max(peaks) / 2**30:.1f}" if None not in peaks else ""
        against = []
        for peer in PEERS.get(name, ()):
            together = [each for each in seconds if name in each and peer in each]
            against += [f"{peer}: {median_ratio(together, peer, name):.3f}"] if together else []
        lines.append(
            f"| {name} | {step:.3f} | {speed:,.0f} | {mfu} | {peak} | {', '.join(against)} |"
        )
    return lines


def report(
    rounds: Sequence[Mapping[str, Result]], settings: Settings, device: Device | None
) -> str:
    """The table with the machine, the model and how each number was got."""
    spec = read_spec(settings.config)
    here = machine()
    name = device.name if device is not None else here["processor"]
    memory = (
        f"{device.memory / 2**30:.0f} GiB, CUDA {device.cuda}"
        if device is not None
        else f"{here['cores']} cores"
    )
    peak_flops = PEAK_FLOPS.get(name)
    libraries = ", ".join(
        f"{library} {version}"
        for library, version in here["libraries"].items()
        if version != "not installed"
    )
    # Rates of float8 products are higher; the measure stays the same so that rows compare.
    utilization = (
        f"MFU: tokens/s times operations of a token over {peak_flops / 1e12:.0f}e12 a second, the"
        " GPU's dense bf16 rate (its datasheet), for fp8 too. Operations of a token: 6 for each"
        " weight in a matrix product and 12 x layers x heads x head size x sequence for attention"
        " (arXiv:2204.02311, appendix B), here"
        f" {spec.flops_per_token(settings.sequence) / 1e9:.2f}e9; what is recomputed does not"
        " count."
        if peak_flops
        else f"MFU is left out: the peak rate of {name} is not known here."
    )
    lines = [
        f"# {name}",
        "",
        f"{name} ({memory}); {here['processor']}; Python {here['python']}, {libraries}.",
        "",
        (
            f"Llama with {spec.layers} layers, hidden size {spec.hidden}, vocabulary {spec.vocab}:"
            f" {spec.parameters:,} parameters in bf16, float32 sums of gradients, master weights"
            f" and AdamW. {settings.step_tokens} tokens a step: {settings.micro_batches}"
            f" micro-batches of {settings.micro_batch} rows of {settings.sequence} tokens. Median"
            f" of {settings.steps} steps after {settings.warmup}, of up to {len(rounds)} processes."
            f" Predicted without recomputation: {predicted_bytes(spec, settings) / 2**30:.1f} GiB."
        ),
        "",
        utilization,
        "",
        (
            "Peak: torch.cuda.max_memory_allocated after the warm-up. Plain: the same model of"
            " Transformers in a plain PyTorch loop with bf16 parameters and float32 master weights,"
            " compiled block by block, checkpointed by gradient_checkpointing_enable."
        ),
        "",
        *table(rounds, settings, peak_flops),
    ]
    return "\n".join(lines) + "\n"


def read_raw(file: Path | None, settings: Settings) -> list[dict[str, Result]]:
    """Rounds of earlier calls.

    Raises:
        SystemExit: the file is of another model or other steps.
    """
    if file is None or not file.exists():
        return []
    kept = json.loads(file.read_text())
    if kept["settings"] != json.loads(json.dumps(asdict(settings))):
        raise SystemExit(f"{file} holds measurements with other settings. Name another file.")
    return kept["rounds"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a model and sizes that a CPU trains in seconds"
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        metavar="NAME",
        help=f"of {', '.join(CONTENDERS)}",
    )
    parser.add_argument("--layers", type=int, help="instead of as many as fit")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--micro-batch", type=int, default=2, help="rows of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2, help="of an optimizer step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="timed steps in a round")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument(
        "--raw", type=Path, help="JSON file that measurements are kept in and added to"
    )
    parser.add_argument("--output", type=Path, help="Markdown file for the table")
    options = parser.parse_args()

    config = yaml.safe_load(MODEL.read_text())["config"]
    sizes = (options.sequence, options.micro_batch, options.micro_batches)
    steps = {"warmup": options.warmup, "steps": options.steps}
    if options.tiny:
        config, sizes, steps = config | TINY, (64, 2, 2), {"warmup": 1, "steps": 3}
    settings = Settings(config, options.device, *sizes, **steps)
    device = None
    if options.device == "cuda":
        found = run("device", settings)
        if reason := found.get("missing") or found.get("failed"):
            print(
                f"gpu_single measured nothing: {reason}. `--device cpu --tiny` shows that it works."
            )
            return
        device = Device(**found)
    contenders = options.contenders or (TINY_CONTENDERS if options.tiny else tuple(CONTENDERS))
    if options.layers or device is None:
        layers = options.layers or 2
    else:
        # Whoever keeps all activations needs most.
        layers = layers_that_fit(
            settings, layers_that_should_fit(settings, device.memory), run, ("ours", "plain")
        )
    settings = with_layers(settings, layers)
    rounds = read_raw(options.raw, settings) + take_turns(contenders, settings, options.rounds, run)
    if options.raw:
        options.raw.write_text(
            json.dumps({"settings": asdict(settings), "rounds": rounds}, indent=1)
        )
    text = report(rounds, settings, device)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
