"""What checkpoints cost: the step after a save, the bytes on the disk, and the rate of saving and loading against `dd`.

    python benchmarks/checkpoint_stall.py                      one rank of one thread: a core is left for the writing
    python benchmarks/checkpoint_stall.py --ranks 2            as many ranks as cores: training and writing share them

A real fit of a Llama in float32 with AdamW saves every few steps. The step after a save is timed from the end of the step before, so that
it includes the call that saves. Where other programs use the same cores, steps are compared without the time in which the thread that
trains was ready and no core was free, which the kernel counts; with one rank that is what a machine with a core to spare would show.
Files are put out of the page cache before they are loaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

from measure import environments, machine

WARMUP = 3
DD_BLOCK = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel, with ZeRO-1 if there are several")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--between", type=int, default=5, help="steps from one save to the next")
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank in a step")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", help="on the disk that is measured; default: the one for temporary files")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    parser.add_argument("--synchronous", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        _fit(options)
        return
    print(json.dumps(machine(), indent=2))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for synchronous in (False, True):
            found = run(options, Path(folder), synchronous)
            print("\n".join(stall(found, "synchronous" if synchronous else "asynchronous")), flush=True)
        print("\n".join(throughput(found, Path(folder))))


def run(options: argparse.Namespace, folder: Path, synchronous: bool) -> list[dict[str, Any]]:
    """What each rank of a fit measured."""
    given = [f"--{name}={getattr(options, name)}" for name in ("ranks", "threads", "saves", "between", "tokens", "hidden", "layers")]
    command = [sys.executable, __file__, *given, f"--folder={folder}", *(["--synchronous"] if synchronous else [])]
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    ranks = []
    for rank, environment in enumerate(environments(options.ranks, options.threads)):
        ranks.append(subprocess.Popen([*command, f"--result={folder / f'{rank}.json'}"], env=environment))
    try:
        for process in ranks:
            if process.wait() != 0:
                raise RuntimeError("A rank failed, see above.")
    finally:
        for process in ranks:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(options.ranks)]


def stall(found: list[dict[str, Any]], kind: str) -> list[str]:
    """Lines about the steps after saves, of the rank that waits longest."""
    steps = found[0]["steps"]
    quiet = median(step["seconds"] for step in steps if step["quiet"])
    after = [max(rank["steps"][index]["seconds"] for rank in found) for index, step in enumerate(steps) if step["saved"]]
    calm = [step["seconds"] - step["no_core"] for step in steps if step["quiet"]]
    calm_after = [step["seconds"] - step["no_core"] for step in steps if step["saved"]]
    calls = [max(rank["steps"][index]["save_call"] for rank in found) for index, step in enumerate(steps) if step["saved"]]
    ratios = sorted(seconds / quiet for seconds in after)
    noise = sorted(step["seconds"] / quiet for step in steps if step["quiet"])
    busy = [step for step in steps if not step["quiet"]]
    extra = (sum(step["seconds"] for step in busy) - len(busy) * quiet) / len(after)
    return [
        f"{kind}: median step {quiet:.3f} s (others: {noise[0]:.3f} to {noise[-1]:.3f} of it)",
        f"{kind}: step after a save / median step: {median(ratios):.3f} (of {len(ratios)} saves: {ratios[0]:.3f} to {ratios[-1]:.3f});"
        f" of it the call that saves: {median(calls) / quiet:.3f} ({median(calls) * 1e3:.0f} ms)",
        f"{kind}: the same without waiting for a core: {median(calm_after) / median(calm):.3f} (others: {min(calm) / median(calm):.3f} to"
        f" {max(calm) / median(calm):.3f} of {median(calm):.3f} s)",
        f"{kind}: a save costs {extra:.3f} s of training in all, {extra / quiet:.3f} steps",
    ]


def throughput(found: list[dict[str, Any]], folder: Path) -> list[str]:
    """Lines about bytes and rates: medians of saves that were waited for, and one load."""
    path = max((folder / "checkpoints").glob("[!.]*"), key=lambda path: path.stat().st_mtime)
    files = [file for file in path.iterdir() if file.is_file()]
    written, unique = sum(file.stat().st_size for file in files), found[0]["state_bytes"]
    save = median(max(rank["steps"][index]["save_call"] for rank in found) for index, step in enumerate(found[0]["steps"]) if step["saved"])
    loads = {part: max(rank["load"][part] for rank in found) for part in found[0]["load"]}
    write, read = written / dd_write(folder, written), written / dd_read(files)
    digest = written / hashing(files)
    loaded = loads["verify"] + loads["read"]
    return [
        f"bytes on the disk / bytes of weights and optimizer state: {written} / {unique} = {written / unique:.4f}",
        f"dd: writes {write / 1e6:.0f} MB/s (conv=fsync), reads {read / 1e6:.0f} MB/s (iflag=direct); SHA-256 of one thread"
        f" {digest / 1e6:.0f} MB/s",
        f"save: {written / save / 1e6:.0f} MB/s, {written / save / write:.2f} of dd; hashing by one rank takes"
        f" {written / digest / save:.2f} of its time",
        f"load: {written / loaded / 1e6:.0f} MB/s, {written / loaded / read:.2f} of dd; of its {loaded:.2f} s comparing hashes takes"
        f" {loads['verify'] / loaded:.2f} (and reads what is then in the page cache)",
        f"load without comparing hashes: {written / loads['read_unverified'] / 1e6:.0f} MB/s,"
        f" {written / loads['read_unverified'] / read:.2f} of dd",
    ]


def dd_write(folder: Path, nbytes: int) -> float:
    """Seconds."""
    target = folder / "dd"
    command = ["dd", "if=/dev/zero", f"of={target}", f"bs={DD_BLOCK}", f"count={nbytes // DD_BLOCK}", "conv=fsync", "status=none"]
    seconds = median(_timed(command) for _ in range(3))
    target.unlink()
    return seconds


def dd_read(files: list[Path]) -> float:
    """Seconds for all of them."""
    return sum(_timed(["dd", f"if={file}", "of=/dev/null", f"bs={DD_BLOCK}", "iflag=direct", "status=none"]) for file in files)


def _timed(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - started


def hashing(files: list[Path]) -> float:
    """Seconds for the contents of all of them, in memory."""
    seconds = 0.0
    for file in files:
        contents = file.read_bytes()
        started = time.perf_counter()
        hashlib.sha256(contents)
        seconds += time.perf_counter() - started
    return seconds


def uncache(folder: Path) -> None:
    """What is read next comes from the disk."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# One rank


def no_core() -> float:
    """Seconds that this thread has waited for a core so far."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def _fit(options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightning_3d.strategy import Lightning3DStrategy

    torch.set_num_threads(options.threads)
    sizes = {"hidden_size": options.hidden, "intermediate_size": 11 * options.hidden // 4, "num_hidden_layers": options.layers}
    heads = {"num_attention_heads": options.hidden // 64, "num_key_value_heads": options.hidden // 64, "max_position_embeddings": 256}
    config = LlamaConfig(**sizes, **heads, vocab_size=16 * options.hidden, use_cache=False)
    checkpoints = Path(options.folder, "checkpoints")
    total = WARMUP + options.saves * options.between

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = LlamaForCausalLM(config)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.model(input_ids=batch[0], labels=batch[0]).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Watch(pl.Callback):
        """Times every step, and saves after some."""

        def __init__(self) -> None:
            self.steps: list[dict[str, Any]] = []
            self.last = time.perf_counter()
            self.waited = no_core()
            self.call = 0.0
            self.path: Path | None = None
            self.written = True

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            done, step, waited = time.perf_counter(), trainer.global_step, no_core()
            writing = self.path is not None and (self.call > 0 or not self.written)
            if step > WARMUP:
                taken = {"seconds": done - self.last, "no_core": waited - self.waited, "save_call": self.call}
                self.steps.append({**taken, "saved": self.call > 0, "quiet": not writing})
            self.written = self.path is not None and self.path.exists()
            self.last, self.waited, self.call = done, waited, 0.0
            if step >= WARMUP and step < total and (step - WARMUP) % options.between == 0:
                self.path = checkpoints / f"{step}.ckpt"
                trainer.save_checkpoint(self.path)
                self.call = time.perf_counter() - done

    class Timed(Lightning3DStrategy):
        """Says how long the parts of a load took."""

        seconds = {"verify": 0.0, "read": 0.0}

        def load_checkpoint(self, *args: Any, **given: Any) -> Any:
            return self._add("verify", super().load_checkpoint, *args, **given)

        def load_model_state_dict(self, *args: Any, **given: Any) -> Any:
            return self._add("read", super().load_model_state_dict, *args, **given)

        def load_optimizer_state_dict(self, *args: Any, **given: Any) -> Any:
            return self._add("read", super().load_optimizer_state_dict, *args, **given)

        def _add(self, part: str, load: Any, *args: Any, **given: Any) -> Any:
            torch.distributed.barrier()
            started = time.perf_counter()
            result = load(*args, **given)
            self.seconds[part] += time.perf_counter() - started
            return result

    rows = options.tokens // 256
    tokens = torch.randint(config.vocab_size, (total * rows * options.ranks, 256), generator=torch.Generator().manual_seed(1))

    def fit(steps: int, callbacks: list[pl.Callback], path: Path | None = None, **given: Any) -> tuple[Any, Timed]:
        strategy = Timed(f"dp{options.ranks}", micro_batch_size=1, zero_stage=int(options.ranks > 1), **given)
        Timed.seconds = {"verify": 0.0, "read": 0.0}
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            accelerator="cpu", devices=options.ranks, strategy=strategy, max_steps=steps, callbacks=callbacks, **quiet
        )
        module = Module()
        trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=rows), ckpt_path=path)
        return module, strategy

    watch = Watch()
    module, _ = fit(total, [watch], checkpoint_asynchronous=not options.synchronous)
    result: dict[str, Any] = {"steps": watch.steps, "state_bytes": 3 * 4 * sum(p.numel() for p in module.parameters())}
    if options.synchronous:
        assert watch.path is not None
        result["load"] = {}
        for verify in (True, False):
            uncache(watch.path)
            fit(total - options.between, [], watch.path, checkpoint_verify=verify)
            parts = dict(Timed.seconds)
            result["load"] |= parts if verify else {"read_unverified": parts["verify"] + parts["read"]}
    Path(options.result).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
