"""Messages of the engine that the planner counts: how many, what they carry, and behind which work
they hide. Each test reads both."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import Any

import models
import pytest
import sharded
import torch
import torch.distributed as dist
from counting import recording
from ranks import run_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.planner.block_costs import _hidden_states, work_of
from lightning_3d.app.planner.constants import OURS
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import ONE, Efficiency, Machine, gather
from lightning_3d.app.planner.stack import Overlap
from lightning_3d.app.planner.step_time import step_of
from lightning_3d.app.planner.tables import data_traffic
from lightning_3d.layout import Layout
from lightning_3d.options.blocks import BlockOptions
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.parallel import gloo_exchange as exchange
from lightning_3d.parallel.blocks.wrap import process_blocks
from lightning_3d.parallel.collectives import all_gather_flat, reduce_scatter_flat
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import replicated
from lightning_3d.parallel.tensor.collectives import gather_tokens, scatter_tokens
from lightning_3d.parallel.zero import make_backend

GATHERS, SUMS = (
    ("all_gather_into_tensor", "broadcast"),
    ("all_reduce", "reduce", "reduce_scatter_tensor"),
)
WIDTH, BLOCKS = 64, 4


def machine(operations: float = inf) -> Machine:
    """Two GPUs on which only messages take time, and products with a finite rate of operations."""
    free = Efficiency(matmul=1.0, attention=inf, memory=1.0, link=1.0, kernel=0.0)
    return Machine(
        "",
        1,
        2,
        inf,
        inf,
        operations,
        operations,
        operations,
        1e9,
        inf,
        0.0,
        0.0,
        free,
        protocols=ONE,
    )


# Tensor parallelism


def hidden_states(name: str, sequence: bool, recompute: str, layers: int) -> list[float]:
    """Gathers of whole hidden states that (forward, backward) send; an all-reduce sends as much as
    two. Of the loss, one number or two of each token are sent: they do not count."""
    model, ids = sharded.build(name, layers=layers), sharded.batch(name)
    sharded.cut(model, sharded.user_plan(name), sequence=sequence)
    process_blocks(list(model.base_model.layers), BlockOptions(recompute=recompute))
    with recording() as forward:
        logits = sharded.logits_of(model, ids)
    loss = sharded.loss_of(logits, ids)
    with recording() as backward:
        loss.backward()
    whole = ids.numel() * model.config.hidden_size
    weights = {
        "all_reduce": 2.0,
        "reduce_scatter_tensor": 1.0,
        "all_gather_into_tensor": float(dist.get_world_size()),
    }
    large = [
        [call for call in each.calls if call.numel >= whole / dist.get_world_size()]
        for each in (forward, backward)
    ]
    return [sum(weights[call.name] * call.numel / whole for call in each) for each in large]


def predicted_hidden_states(
    name: str, sequence: bool, recompute: str, *, ends: bool = False
) -> list[float]:
    """The same of a block; with `ends`, of a model of one block."""
    prefix, fields = {**models.FAMILIES, **models.OTHERS}[name]
    config = {
        "num_hidden_layers": 1,
        **models.COMMON,
        **fields,
        "model_type": {"gemma3": "gemma3_text"}.get(name, name),
    }
    job = Job(
        Architecture.from_config(config),
        Layout(tp=2),
        models.SEQUENCE,
        3,
        3,
        recompute=recompute,
        stack=OURS,
    )
    job, two = replace(job, sequence_parallel=sequence), machine()
    work = work_of(job, two)
    part = work.blocks[0] + work.embedding + work.head if ends else work.blocks[0]
    once = gather(two, two.group(job.layout, ("tp",)), job.tokens * job.model.hidden * job.width)
    return [part.forward_communication / once, part.backward_communication / once]


CASES = [(name, sequence, "none") for name in ("llama", "gemma3") for sequence in (False, True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_block_sends_as_many_hidden_states_as_the_planner_counts(
    case: tuple[str, bool, str],
) -> None:
    many, few = (run_ranks(hidden_states, 2, *case, layers)[0] for layers in (3, 2))
    assert [more - less for more, less in zip(many, few, strict=True)] == pytest.approx(
        predicted_hidden_states(*case)
    )


@pytest.mark.parametrize("sequence", [False, True])
def test_the_ends_of_a_model_send_as_many_hidden_states_as_the_planner_counts(
    sequence: bool,
) -> None:
    whole = run_ranks(hidden_states, 2, "llama", sequence, "none", 1)[0]
    assert whole == pytest.approx(predicted_hidden_states("llama", sequence, "none", ends=True))


class Copies(TorchDispatchMode):
    """Counts the bytes that copies read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("clone", "cat", "contiguous"):
            self.bytes += 2 * result.nbytes
        return result


def copied_bytes(rows: int) -> list[int]:
    """Bytes that (gathering, scattering) the hidden states of so many sequences copies, in addition
    to the message."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    part, whole = torch.ones(rows, 8 // ranks, 16), torch.ones(rows, 8, 16)
    functions: list[Callable[[], Any]] = [
        lambda: gather_tokens(part, 8, group),
        lambda: scatter_tokens(whole, group),
        lambda: all_gather_flat(torch.empty_like(whole), part, group).wait(),
        lambda: reduce_scatter_flat(torch.empty_like(part), whole, group).wait(),
    ]
    counted = []
    for function in functions:
        with Copies() as copies:
            function()
        counted.append(copies.bytes)
    return [counted[0] - counted[2], counted[1] - counted[3]]


@pytest.mark.parametrize("rows", [1, 3])
def test_the_planner_counts_copies_of_gathered_sequences(rows: int) -> None:
    """A message puts the parts of the ranks one behind the other; in a batch of several rows they
    are side by side."""
    model = Architecture.plain(
        layers=1, hidden=16, heads=2, kv_heads=2, vocab=8, ffn=32, gated=False, tied=True
    )
    planned = Job(model, Layout(tp=2), 8, rows, rows, precision="fp32", stack=OURS)
    free, slow = machine(), replace(machine(), bandwidth=1.0)
    (_, *copied), (_, *sent) = _hidden_states(planned, slow), _hidden_states(planned, free)
    scattered, gathered = (a - b for a, b in zip(copied, sent, strict=True))
    assert run_ranks(copied_bytes, 2, rows)[0] == pytest.approx([gathered, scattered], abs=1e-3)
    assert (gathered > 0) == (rows > 1)


class Flights(TorchDispatchMode):
    """Notes which messages are under way while matrices are multiplied.

    Attributes:
        sent: for each message (function, elements, products between its start and the wait for it).
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[list[Any]] = []
        self._flying: list[list[Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
            for message in self._flying:
                message[2] += 1
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        names = {"all_gather_single": GATHERS[0], "all_gather_into_tensor": GATHERS[0]}
        names |= {name: name for name in ("broadcast", "all_reduce", "reduce")}
        own = {"all_reduce": "all_reduce", "all_gather": GATHERS[0], "reduce_scatter": SUMS[2]}
        own |= {
            "start_all_reduce": "all_reduce",
            "start_reduce": "reduce",
            "start_broadcast": "broadcast",
        }
        with pytest.MonkeyPatch.context() as patch, self:
            for place, chosen in ((dist, names), (exchange, own)):
                for name, called in chosen.items():
                    if hasattr(place, name):
                        patch.setattr(place, name, self._watched(called, getattr(place, name)))
            yield

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [
                value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)
            ]
            message = [name, max(tensor.numel() for tensor in tensors), 0]
            self.sent.append(message)
            work = function(*args, **kwargs)
            if work is None:
                return None
            self._flying.append(message)
            return _Watched(
                work, lambda: self._flying.remove(message) if message in self._flying else None
            )

        return call


class _Watched:
    """A message that tells when it is waited for."""

    def __init__(self, work: Any, landed: Callable[[], None]) -> None:
        self._work, self._landed = work, landed

    def wait(self) -> Any:
        self._landed()
        return self._work.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def hidden_share(sequence: bool, recompute: str) -> float:
    """Share of the elements of tensor-parallel messages that fly while matrices are multiplied."""
    model, ids = sharded.build("llama"), sharded.batch("llama")
    sharded.cut(model, sequence=sequence)
    process_blocks(list(model.base_model.layers), BlockOptions(recompute=recompute))
    flights = Flights()
    with flights.watching():
        sharded.loss_of(sharded.logits_of(model, ids), ids).backward()
    assert len(flights.sent) > 8
    return sum(size for _, size, products in flights.sent if products) / sum(
        size for _, size, _ in flights.sent
    )


@pytest.mark.parametrize("sequence", [False, True])
def test_all_tensor_parallel_messages_are_waited_for(sequence: bool) -> None:
    assert run_ranks(hidden_share, 2, sequence, "full") == [1 - OURS.overlap.layers] * 2


# ZeRO


def messages(zero: ZeroOptions) -> dict[str, list[tuple[str, int, int]]]:
    """(function, elements, products while it flies) of the messages that a step sends, by the part
    of the step that starts them. What still flies after the step meets the products of the next
    one."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))).to(
        torch.bfloat16
    )
    specs = {
        name: replicated(name, tuple(parameter.shape), 1)
        for name, parameter in module.named_parameters()
    }
    backend = make_backend(zero, Mesh(Layout(dp=dist.get_world_size())), specs, precision="bf16")
    backend.shard(module, [list(module)], torch.device("cpu"), lambda block: True)
    backend.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.1))
    flights, ends = Flights(), {}
    with flights.watching():
        for _ in range(2):
            with backend.gradient_scope(), backend.parameters_in_use():
                output = module(torch.randn(4, WIDTH, dtype=torch.bfloat16))
                ends.setdefault("forward", len(flights.sent))
                output.sum().backward()
                backend.after_backward(module.parameters())
                backend.reduce(0.5)
                ends.setdefault("backward", len(flights.sent))
            backend.step()
            ends.setdefault("step", len(flights.sent))
    backend.teardown()
    parts = zip(ends, [0, *ends.values()], ends.values(), strict=False)
    return {
        part: [
            (name, size, flown) for name, size, flown in flights.sent[start:stop] if size >= WIDTH
        ]
        for part, start, stop in parts
    }


def job(zero: ZeroOptions) -> Job:
    model = Architecture.plain(
        layers=BLOCKS, hidden=1024, heads=8, kv_heads=8, vocab=8, ffn=4096, gated=False, tied=True
    )
    options: dict[str, Any] = {
        "reduce": zero.reduce,
        "gather": zero.gather,
        "overlap_gather": zero.overlap_gather,
    }
    return Job(
        model,
        Layout(dp=2),
        4096,
        2,
        1,
        zero=zero.stage,
        reduce_scatter=bool(zero.reduce_scatter),
        stack=OURS,
        **options,
    )


MODES = [
    ZeroOptions(stage, "step" if stage < 2 else "micro_batch", None, scatters)
    for stage in (1, 2, 3)
    for scatters in (True, False)
]


@pytest.mark.parametrize("zero", MODES, ids=lambda zero: f"{zero.stage} {zero.reduce_scatter}")
def test_the_planner_counts_an_all_reduce_where_gradients_are_not_scattered(
    zero: ZeroOptions,
) -> None:
    """Half of them passes each of two ranks once in a reduce-scatter and twice in an all-reduce."""
    sent = [
        message
        for part in run_ranks(messages, 2, zero)[0].values()
        for message in part
        if message[0] in SUMS
    ]
    times = sum((2 if name == "all_reduce" else 1) * size for name, size, _ in sent) / (
        BLOCKS * WIDTH**2
    )
    # a buffer also says which gradients there are
    assert times == pytest.approx(1 if zero.reduce_scatter else 2, rel=1e-3)
    planned, times = job(zero), round(times)
    gathers = (2 if zero.stage == 3 else 1) * planned.width * planned.model.parameters
    assert data_traffic(planned, machine()).inside == pytest.approx(
        times * 4 * planned.model.parameters / 2 + gathers / 2
    )
    scattered = replace(planned, reduce_scatter=True, stack=OVERLAPS_NOTHING)
    slow = [
        step_of(replace(scattered, reduce="step", reduce_scatter=once), machine()).data
        for once in (True, zero.reduce_scatter)
    ]
    once = gather(machine(), machine().group(planned.layout, ("dp",)), 4 * planned.model.parameters)
    assert slow[1] - slow[0] == pytest.approx((times - 1) * once)


OVERLAPS_NOTHING = replace(OURS, overlap=Overlap(all_reduce=False, data=False, gather=False))


@pytest.mark.parametrize("ahead", [False, True])
def test_new_parameters_are_gathered_in_the_next_forward_only_if_asked_for(ahead: bool) -> None:
    zero = ZeroOptions(1, "step", reduce_scatter=True, overlap_gather=ahead)
    gathers = [
        products for name, _, products in run_ranks(messages, 2, zero)[0]["step"] if name in GATHERS
    ]
    assert gathers and any(gathers) == ahead
    # A forward that is long enough hides nine tenths of what flies in it.
    planned, two = job(zero), machine(operations=1e12)
    whole = gather(
        two, two.group(planned.layout, ("dp",)), planned.width * planned.model.parameters
    )
    plain = step_of(replace(planned, stack=OVERLAPS_NOTHING, overlap_gather=False), two).data
    as_planned = step_of(
        replace(
            planned, stack=replace(OVERLAPS_NOTHING, overlap=replace(OURS.overlap, data=False))
        ),
        two,
    ).data
    assert plain - as_planned == pytest.approx((0.9 if any(gathers) else 0.0) * whole)


def test_a_block_of_zero_3_is_gathered_while_the_one_before_it_runs() -> None:
    """All but the first one of each pass."""
    zero = ZeroOptions(3, "step", "micro_batch", reduce_scatter=True)
    found = run_ranks(messages, 2, zero)[0]
    ahead = []
    for part in ("forward", "backward"):
        gathers = [products for name, _, products in found[part] if name in GATHERS]
        ahead += [products > 0 for products in gathers]
    assert ahead == ([False] + [True] * (BLOCKS - 1)) * 2
    planned, two = job(zero), machine(operations=1e12)
    whole = gather(
        two,
        two.group(planned.layout, ("dp",)),
        planned.width * sum(planned.model.parameters_of_kinds[0]),
    )
    assert step_of(planned, two).communication == pytest.approx(
        2 * BLOCKS * (0.1 if all(ahead[1:BLOCKS]) else 1.0) * whole
    )
