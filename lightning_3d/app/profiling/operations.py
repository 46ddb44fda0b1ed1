"""Measure a model's operations on this machine: matrix products, attention, operations bound by
memory, the optimizer, collectives, and a few of the model's blocks. Every rank measures at the same
time, as in training; `planner.profile_file` reads the result.

On a GPU an operation is timed between two CUDA events of its stream, on a CPU by the clock. Every
number is the median of some repetitions, or on a CPU the mean of all but the longest tenth, and
then the median of the ranks.
"""

from __future__ import annotations

import inspect
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.training.module import transformers_config
from lightning_3d.compat.torch import backward_input, backward_weight
from lightning_3d.errors import ConfigError
from lightning_3d.parallel import gloo_exchange as exchange
from lightning_3d.parallel import host_channel
from lightning_3d.parallel.collectives import all_gather_flat, all_reduce_flat, reduce_scatter_flat
from lightning_3d.ranks.progress import task
from lightning_3d.tracing.memory import SavedTensors
from lightning_3d.version import __version__

if TYPE_CHECKING:
    from lightning_3d.app.profiling.shapes import Shapes

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
_LONG_SECONDS = 0.5
"""Longer operations are measured once."""
_MORE_OF_WAITS = 5
"""Times as many repetitions for collectives of CPU ranks: how long ranks wait for each other varies
more than how long cores compute."""
_LOADED_SECONDS = 0.3
"""How long a GPU repeats an operation before it is measured: the first matrix products run faster
than the power limit allows in training. On an H200, 802 TFLOP/s were measured in the first
milliseconds, and 675 to 722 under load."""
_COPIED = {"cuda": (1 << 26, 1 << 29), "cpu": (1 << 22, 1 << 25)}
"""Bytes of copies, and of the largest collectives: more than caches hold."""
_STEPPED = {"cuda": (1 << 24, 1 << 27), "cpu": (1 << 21, 1 << 23)}
"""Parameters that an optimizer steps: their states are more than the caches of a core hold."""
_FEW_TOKENS = 16
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

Entry = dict[str, Any]


def profile_rank(shapes: Shapes, accelerator: str) -> dict[str, Any]:
    """Measure together with all other ranks, and return the same result on each."""
    local, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", local) if accelerator == "gpu" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        meter = _Meter(device, shapes.repeats)
        parts = {
            "matrix products": partial(_products, shapes, meter),
            "attention": partial(_attention, shapes, meter),
            "operations bound by memory": partial(_memory_bound, shapes, meter),
            "the optimizer": partial(_optimizer, meter),
            "blocks of the model": partial(_blocks, shapes, meter),
        }
        own: list[Entry] = []
        for what, measure in parts.items():
            with task(f"measuring {what}"):
                own += measure()
        with task("measuring collectives"):
            together = _collectives(shapes, meter)
        content = _about(device, ranks) | {
            "precision": shapes.precision,
            "operations": _middle([*own, *together]),
        }
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"The profile runs three blocks of the model with {shapes.micro_batch} x {shapes.seq}"
            f" tokens, which do not fit on one GPU ({torch.cuda.get_device_name(device)}). Use a"
            " smaller parallelism.micro_batch_size or data.sequence_length."
        ) from error
    finally:
        dist.destroy_process_group()
    return content


def _about(device: torch.device, ranks: int) -> dict[str, Any]:
    import transformers

    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    versions = {
        "lightning_3d": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if device.type == "cuda":
        free, memory = torch.cuda.mem_get_info(device)
        context = float(memory - free - torch.cuda.memory_reserved(device))
        name = torch.cuda.get_device_name(device)
        versions |= {
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node
        name, context = f"CPU, {torch.get_num_threads()} threads a rank", 0.0
    about = {
        "device": device.type,
        "name": name,
        "memory": memory,
        "context": context,
        "ranks": ranks,
        "ranks_per_node": per_node,
    }
    return {**about, "versions": versions}


class _Meter:
    """Timer of operations on a device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self._repeats = repeats

    def empty(self, *sizes: int, dtype: torch.dtype) -> Tensor:
        """Return random numbers: products of zeros need less power, and run faster, on some
        GPUs."""
        return torch.randn(sizes, device=self.device, dtype=dtype)

    def seconds(self, action: Callable[[], Any], before: Callable[[], Any] | None = None) -> float:
        """Time an action that all ranks run, after two warm-ups: on a CPU, the mean of the usual
        times of some repetitions; on a GPU, their median, under load.

        Args:
            before: on a CPU, what is run before each repetition and not timed.
        """
        action()
        self._wait()
        started = time.perf_counter()
        action()
        self._wait()
        once = torch.tensor(
            [time.perf_counter() - started], dtype=torch.float64, device=self.device
        )
        # ranks must run the same number of collectives, and start together
        dist.all_reduce(once, dist.ReduceOp.MAX)
        seconds = float(once)
        if self.device.type != "cuda":
            repeats = self._repeats * (1 if before is None else _MORE_OF_WAITS)
            return _usual_mean(
                self._clock(action, 1 if seconds > _LONG_SECONDS else repeats, before)
            )
        for _ in range(int(_LOADED_SECONDS / seconds)):
            action()
        return statistics.median(self._events(action))

    def _clock(
        self, action: Callable[[], Any], repeats: int, before: Callable[[], Any] | None
    ) -> Iterator[float]:
        for _ in range(repeats):
            if before is not None:
                before()
            started = time.perf_counter()
            action()
            yield time.perf_counter() - started

    def _events(self, action: Callable[[], Any]) -> Iterator[float]:
        """Enqueue all repetitions before waiting for the stream, so that the host's own time is not
        in between."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(self._repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            action()
            mark.record()
        self._wait()
        for before, after in zip(marks, marks[1:], strict=False):
            yield before.elapsed_time(after) / 1e3

    def host_seconds(self, action: Callable[[], Any]) -> float:
        """Time an action whose kernels are so short that the host determines the time."""
        action()
        self._wait()
        times = []
        for _ in range(self._repeats):
            started = time.perf_counter()
            action()
            self._wait()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _usual_mean(times: Iterable[float]) -> float:
    """Return the mean of all but the longest tenth: a step has short and long ones, but rarely one
    that something else has held up."""
    found = sorted(times)
    return statistics.fmean(found[: max(1, len(found) * 9 // 10)])


def _products(shapes: Shapes, meter: _Meter) -> list[Entry]:
    """Measure the matrix products of a block and of the output head, sharded by each degree, with a
    micro-batch of tokens and a quarter."""
    model, dtype = shapes.model, _DTYPES[shapes.precision]
    matrices = [
        *model.attention,
        *model.mlp(model.ffn or model.expert_ffn),
        *model.mlp(model.expert_ffn if model.ffn else 0),
    ]
    sizes = {
        tuple(int(size) for size in matrix.local(tp))
        for tp in shapes.degrees
        for matrix in matrices
    }
    sizes.add((model.vocab, model.hidden))
    found = []
    for outputs, inputs in sorted(size for size in sizes if min(size) >= 1):
        weight = meter.empty(outputs, inputs, dtype=dtype)
        for tokens in _token_counts(shapes):
            values = meter.empty(tokens, inputs, dtype=dtype)
            seconds = meter.seconds(partial(F.linear, values, weight))
            found.append(
                {
                    "kind": "matmul",
                    "tokens": tokens,
                    "outputs": outputs,
                    "inputs": inputs,
                    "seconds": seconds,
                }
            )
    return found


def _token_counts(shapes: Shapes) -> tuple[int, ...]:
    tokens = shapes.micro_batch * shapes.seq
    return tuple(sorted({max(1, tokens // 4), tokens}))


def _attention(shapes: Shapes, meter: _Meter) -> list[Entry]:
    """Measure fused causal attention, forward and backward, with the heads of each degree. `flops`
    as in `planner.block_costs`."""
    model, dtype = shapes.model, _DTYPES[shapes.precision]
    found = []
    for tp in shapes.degrees:
        heads, width = max(1, model.heads // tp), model.query_width // model.heads
        inputs = [
            meter.empty(shapes.micro_batch, heads, shapes.seq, width, dtype=dtype).requires_grad_()
            for _ in range(3)
        ]
        flops = 3.5 * 4.0 * shapes.micro_batch * shapes.seq * (shapes.seq / 2) * heads * width
        seconds = meter.seconds(partial(_attend, *inputs))
        found.append(
            {
                "kind": "attention",
                "heads": heads,
                "width": width,
                "flops": flops,
                "seconds": seconds,
            }
        )
    return found


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> None:
    F.scaled_dot_product_attention(queries, keys, values, is_causal=True).sum().backward()


def _memory_bound(shapes: Shapes, meter: _Meter) -> list[Entry]:
    """Measure copies and element-wise products; `bytes` are read and written."""
    model, dtype = shapes.model, _DTYPES[shapes.precision]
    found = []
    for size in _COPIED[meter.device.type]:
        source = torch.ones(size, dtype=torch.uint8, device=meter.device)
        target = torch.empty_like(source)
        seconds = meter.seconds(partial(target.copy_, source))
        found.append({"kind": "copy", "bytes": 2 * size, "seconds": seconds})
    large = _COPIED[meter.device.type][1] // dtype.itemsize
    for size in sorted({tokens * model.hidden for tokens in _token_counts(shapes)} | {large}):
        left, right = meter.empty(size, dtype=dtype), meter.empty(size, dtype=dtype)
        result = torch.empty_like(left)
        seconds = meter.seconds(partial(torch.mul, left, right, out=result))
        found.append(
            {"kind": "elementwise", "bytes": 3 * size * dtype.itemsize, "seconds": seconds}
        )
    return found


def _optimizer(meter: _Meter) -> list[Entry]:
    """Measure a step of AdamW on float32 master weights, with one kernel on GPUs, as runs have it
    (`optimizer.fused`)."""
    found = []
    for count in _STEPPED[meter.device.type]:
        weights = meter.empty(count, dtype=torch.float32).requires_grad_()
        weights.grad = torch.ones_like(weights)
        step = torch.optim.AdamW([weights], lr=1e-4, fused=meter.device.type == "cuda").step
        found.append({"kind": "optimizer", "parameters": count, "seconds": meter.seconds(step)})
    return found


def _blocks(shapes: Shapes, meter: _Meter) -> list[Entry]:
    """Measure the user's model with one and with three of its blocks: with a micro-batch, and for
    the host with few tokens; and the blocks that are left of it to each of several tensor-parallel
    ranks."""
    found = []
    for layers in (1, 3):
        config = with_layers(shapes.config, layers)
        found += _model(config, shapes, meter)
        model = _build(config, shapes, meter.device)
        found += (
            _norm(model, shapes, meter) if layers == 1 else _backward(model, config, shapes, meter)
        )
        few = min(_FEW_TOKENS, shapes.seq)
        seconds = meter.host_seconds(_step(model, 1, few, config["vocab_size"]))
        found.append(
            {"kind": "host", "config": config, "tokens": few, "seq": few, "seconds": seconds}
        )
        for tp in shapes.degrees:
            part = sharded_config(config, tp) if tp > 1 else None
            if part is not None:
                found += [{**one, "tp": tp} for one in _model(part, shapes, meter)]
    return found


def _model(config: Mapping[str, Any], shapes: Shapes, meter: _Meter) -> list[Entry]:
    """Measure a model with a micro-batch of tokens, and with a quarter of a sequence."""
    found, model = [], _build(config, shapes, meter.device)
    for rows, seq in dict.fromkeys(
        [(shapes.micro_batch, shapes.seq), (1, max(1, shapes.seq // 4))]
    ):
        step = _step(model, rows, seq, config["vocab_size"])
        entry = {
            "kind": "model",
            "config": config,
            "tokens": rows * seq,
            "seq": seq,
            "kept": _kept(model, step, meter.device),
        }
        found.append({**entry, "seconds": meter.seconds(step)})
    return found


def _norm(model: torch.nn.Module, shapes: Shapes, meter: _Meter) -> list[Entry]:
    """Measure the first norm of the model with a residual sum, forward and backward; nothing for a
    model without such a norm."""
    hidden = shapes.model.hidden
    sized = (one for one in model.modules() if "Norm" in type(one).__name__)
    norm = next(
        (
            one
            for one in sized
            if any(each.shape == (hidden,) for each in one.parameters(recurse=False))
        ),
        None,
    )
    if norm is None:
        return []
    found = []
    for tokens in _token_counts(shapes):
        values = meter.empty(1, tokens, hidden, dtype=_DTYPES[shapes.precision]).requires_grad_()
        gradient = torch.ones_like(values)
        seconds = meter.seconds(partial(_add_normed, norm, values, gradient))
        found.append({"kind": "norm", "tokens": tokens, "hidden": hidden, "seconds": seconds})
    return found


def _add_normed(norm: torch.nn.Module, values: Tensor, gradient: Tensor) -> None:
    torch.autograd.grad(values + norm(values), [values, *norm.parameters()], gradient)


def _backward(
    model: torch.nn.Module, config: Mapping[str, Any], shapes: Shapes, meter: _Meter
) -> list[Entry]:
    """Measure a step of a stage that has received hidden states, with a whole backward and with one
    in two halves (zero-bubble schedules); nothing for a model that takes no hidden states."""
    if "inputs_embeds" not in inspect.signature(model.forward).parameters:
        return []
    tokens = torch.randint(
        0, config["vocab_size"], (shapes.micro_batch, shapes.seq), device=meter.device
    )
    received = meter.empty(
        *tokens.shape, shapes.model.hidden, dtype=_DTYPES[shapes.precision]
    ).requires_grad_()
    inside = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def loss() -> Tensor:
        received.grad = None
        result: Tensor = model(inputs_embeds=received, labels=tokens).loss
        return result

    def halves() -> None:
        work = backward_input(loss(), None, received, inside)
        backward_weight(inside, work or [])

    entry = {"kind": "backward", "config": config, "tokens": tokens.numel(), "seq": shapes.seq}
    ways: dict[bool, Callable[[], Any]] = {False: lambda: loss().backward(), True: halves}
    return [
        {**entry, "split": split, "seconds": meter.seconds(step)} for split, step in ways.items()
    ]


def sharded_config(config: Mapping[str, Any], tp: int) -> dict[str, Any] | None:
    """Return a configuration whose attention and MLP are as wide as what one of `tp` ranks holds;
    None where its fields cannot say so."""
    whole, fields = (
        Architecture.from_config(config),
        ("num_attention_heads", "num_key_value_heads", "intermediate_size"),
    )
    narrow = {name: config[name] // tp for name in fields if config.get(name)}
    part = {**config, "head_dim": whole.query_width // whole.heads, **narrow}
    if whole.experts or whole.heads % tp or whole.kv_heads % tp or whole.ffn % tp:
        return None
    try:
        found = Architecture.from_config(part)
    except ConfigError:
        return None
    sizes = [
        (one.query_width, one.key_width, one.ffn, one.attention_size) for one in (whole, found)
    ]
    return part if sizes[0] == tuple(tp * size for size in sizes[1]) else None


def with_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a configuration with `layers` blocks, the first ones of the model where they
    differ."""
    key = next(name for name in _LAYER_KEYS if name in config)
    whole, layers = config[key], min(layers, config[key])
    by_layer = {
        name: value[:layers]
        for name, value in config.items()
        if isinstance(value, list) and len(value) == whole
    }
    return {**config, **by_layer, key: layers}


def _build(config: Mapping[str, Any], shapes: Shapes, device: torch.device) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with device:
        model = AutoModelForCausalLM.from_config(
            transformers_config(config),
            attn_implementation=shapes.attention,
            dtype=_DTYPES[shapes.precision],
        )
    for parameter in model.parameters():  # so that gradients do not count as memory of a step
        parameter.grad = torch.zeros_like(parameter)
    return model.train()


def _step(model: torch.nn.Module, rows: int, seq: int, vocabulary: int) -> Callable[[], None]:
    device = next(model.parameters()).device
    tokens = torch.randint(0, vocabulary, (rows, seq), device=device)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    return step


def _kept(model: torch.nn.Module, step: Callable[[], None], device: torch.device) -> float:
    """Return the peak bytes of a step without parameters and gradients: on a CPU those that the
    backward pass keeps."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return float(torch.cuda.max_memory_allocated(device) - before)
    saved = SavedTensors(parameter.untyped_storage().data_ptr() for parameter in model.parameters())
    with saved:
        step()
    return float(saved.peak)


def _collectives(shapes: Shapes, meter: _Meter) -> list[Entry]:
    """Measure all collectives in groups inside a node and in groups with one rank of each node,
    with small and large messages.

    On a CPU, each collective follows products, as in a block. Cores do not compute equally fast all
    the time, so ranks wait for each other, and caches hold other data: on two cores, an all-reduce
    of 1 MB takes 0.35 ms in a loop of its own, and 0.7 ms after products.
    """
    ranks, per_node = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = [list(range(first, first + per_node)) for first in range(0, ranks, per_node)]
    placed: dict[str, Sequence[list[int]]] = {
        "node": nodes,
        "between": [list(column) for column in zip(*nodes, strict=True)],
    }
    tokens = shapes.micro_batch * shapes.seq
    hidden = shapes.model.hidden * _DTYPES[shapes.precision].itemsize
    largest = _COPIED[meter.device.type][0]
    sizes = sorted({1 << 12, min(largest, tokens * hidden), largest})
    before = _few_products(shapes, meter) if meter.device.type == "cpu" else None
    found = []
    for placement, groups in placed.items():
        mine, _ = dist.new_subgroups_by_enumeration([list(group) for group in groups])
        count = dist.get_world_size(mine)
        if dist.get_backend() == "gloo":
            host_channel.share([mine], default_pg_timeout)
        for size in sizes if count > 1 else ():
            for name, action in _kinds(size, mine, meter).items():
                entry = {
                    "kind": "collective",
                    "name": name,
                    "placement": placement,
                    "ranks": count,
                    "bytes": size,
                }
                found.append(
                    {**entry, "seconds": meter.seconds(action, None if name == "send" else before)}
                )
    return found


def _few_products(shapes: Shapes, meter: _Meter) -> Callable[[], None]:
    """Return an action of as many products as a block has between two collectives of tensor
    parallelism."""
    model, dtype = shapes.model, _DTYPES[shapes.precision]
    width = model.ffn or model.expert_ffn
    inward, outward = (
        meter.empty(width, model.hidden, dtype=dtype),
        meter.empty(model.hidden, width, dtype=dtype),
    )
    values = meter.empty(shapes.micro_batch * shapes.seq, model.hidden, dtype=dtype)

    def multiply() -> None:
        F.linear(F.linear(values, inward), outward)

    return multiply


def _kinds(size: int, group: Any, meter: _Meter) -> dict[str, Callable[[], Any]]:
    """Return the collectives on `size` bytes in total, by name; `send`: half of the ranks send to
    the next one."""
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    part = max(1, size // 4 // count)
    whole, own = (
        meter.empty(part * count, dtype=torch.float32),
        meter.empty(part, dtype=torch.float32),
    )
    other = torch.empty_like(whole)
    ranks = dist.get_process_group_ranks(group)

    def send() -> None:
        if rank % 2 == 0 and rank + 1 < count:
            exchange.isend(whole, ranks[rank + 1], group).wait()
        elif rank % 2 == 1:
            exchange.irecv(other, ranks[rank - 1], group).wait()

    return {
        "all_gather": lambda: all_gather_flat(whole, own, group).wait(),
        "reduce_scatter": lambda: reduce_scatter_flat(own, whole, group).wait(),
        "all_reduce": lambda: all_reduce_flat(whole, group),
        "all_to_all": lambda: exchange.start_all_to_all(other, whole, None, None, group).wait(),
        "send": send,
    }


def _middle(own: list[Entry]) -> list[Entry]:
    """Replace the seconds of every entry by the median of all ranks."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, [entry["seconds"] for entry in own])
    return [
        {**entry, "seconds": statistics.median(times)}
        for entry, *times in zip(own, *everywhere, strict=True)
    ]
