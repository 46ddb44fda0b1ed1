"""What is not on a stage is NaN or an error at first use: plans in the wrong order, values that
cross stages beside the hidden states."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import OPTConfig, OPTForCausalLM, ZambaConfig, ZambaForCausalLM

from lightning_3d.errors import PlanError
from lightning_3d.layout import Layout
from lightning_3d.models.parallel_plan import read_plan
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.pipeline import (
    PipelineEngine,
    PipelineState,
    StageBoundary,
    assign_stages,
    keep_owned,
)
from lightning_3d.parallel.pipeline.boundary import Arrived, Boundary, Travels

ROWS, LENGTH, VOCABULARY, WIDTH, BLOCKS, MICRO_BATCHES = 2, 6, 32, 8, 5, 4


class Block(nn.Module):
    """Returns a side value behind the hidden states if it was given one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, hidden: Tensor, again: Tensor | None = None, inside: Any = None, *, side: bool = False
    ) -> Any:
        value = self.layer(hidden)
        mixed = hidden + torch.tanh(value if again is None else value + again)
        if inside is not None:
            mixed = mixed + inside()
        return (mixed, value) if side else mixed


class Toy(nn.Module):
    """A model that does what `how` says between its embedding and its head."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Tanh()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if how == "own parameters":
            self.shift, self.gain = (
                nn.Parameter(torch.randn(WIDTH)),
                nn.Parameter(torch.randn(VOCABULARY)),
            )

    def forward(self, tokens: Tensor) -> Tensor:
        how, first = self.how, self.embed(tokens)
        if how == "own parameters":
            first = first + self.shift
        if how == "two embeddings":
            first = first + self.embed(tokens.flip(1))
        if how == "norm first":
            first = self.norm(first)
        hidden = self._blocks(tokens, self.scale(first), first)
        if how == "embed last":
            hidden = hidden + self.embed(tokens)
        if how == "skip to the end":
            hidden = hidden + first
        logits = self.head(self.scale(hidden if how == "norm first" else self.norm(hidden)))
        if how == "own parameters":
            logits = logits * self.gain
        return logits + first.sum() if how == "skip to the logits" else logits

    def _blocks(self, tokens: Tensor, hidden: Tensor, first: Tensor) -> Tensor:
        how, side = self.how, None
        order = {
            "twice": [0, 1, 1, 2, 3, 4],
            "turned": [0, 2, 1, 3, 4],
            "skipped": [0, 1, 3, 4],
            "early exit": [0, 1, 2, 3],
        }
        for index in order.get(how, range(BLOCKS)):
            block = self.blocks[index]
            if how == "value residual":
                hidden, value = block(hidden, side, side=True)
                side = value if side is None else side
            elif how == "halved between":
                hidden = block(hidden) / 2
            elif how == "handed on":
                hidden, side = block(hidden, side, side=True)
            elif how == "recomputed":
                hidden = checkpoint(block, hidden, use_reentrant=False)
            elif how == "embedding again":
                hidden = block(hidden, first)
            elif how == "named":
                hidden = block(hidden, again=first)
            elif how == "skip between":
                hidden = block(hidden) + first
            elif how == "embed between" and index:
                hidden = block(hidden + self.embed(tokens))
            elif how == "embed inside":
                hidden = block(hidden, None, lambda: self.embed(tokens))
            else:
                hidden = block(hidden)
        return hidden


ORDER = ("embed", "scale", "blocks", "norm", "head")
OPT_ORDER = ("embed_tokens", "embed_positions", "layers", "final_layer_norm")


def opt() -> nn.Module:
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        ffn_dim=16,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        dropout=0.0,
        word_embed_proj_dim=WIDTH,
        max_position_embeddings=16,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return OPTForCausalLM(config)


def zamba() -> nn.Module:
    config = ZambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        num_key_value_heads=2,
        mamba_d_state=4,
        mamba_n_heads=2,
        attention_head_dim=WIDTH,
        attention_hidden_size=2 * WIDTH,
        use_cache=False,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba"],
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"  # float64
    return ZambaForCausalLM(config)


def build(how: str) -> nn.Module:
    torch.manual_seed(0)
    model = {"opt": opt, "zamba": zamba}.get(how, lambda: Toy(how))()
    return model.double()


class Step:
    """Plays the user's training step and what the strategy gives the engine."""

    def __init__(self, model: nn.Module, tokens: Tensor) -> None:
        self.model, self.tokens = model, tokens

    def enter(self, micro_batch: int) -> None:
        """Nothing random here."""

    def __call__(self, micro_batch: int) -> Tensor:
        rows = self.tokens[micro_batch]
        output = self.model(rows)
        logits = output if isinstance(output, Tensor) else output.logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows.flatten())


def errors(
    how: str, names: tuple[str, ...], vp: int, schedule: str, entries: dict[str, Any] | None = None
) -> float:
    """The largest error of a gradient on this rank, after an evaluation and a step."""
    mesh = Mesh(Layout(pp=2, vp=vp))
    mesh.warm_up()
    full = build(how)
    owner = nn.Module()
    owner.model = copy.deepcopy(full)
    plan = read_plan(owner.model, {"pp": dict.fromkeys(names) | (entries or {})})
    assignment = assign_stages(owner.model, plan, mesh.layout, schedule)
    state = PipelineState(SimpleNamespace(enabled=False, layer=lambda index: None))  # type: ignore[arg-type]
    chunks = keep_owned(owner, "model", plan, assignment, mesh.index("pp"), state)
    engine = PipelineEngine(
        mesh,
        assignment,
        {chunk.stage: list(owner.parameters()) for chunk in chunks},
        schedule=schedule,
        vp=vp,
        state=state,
        device=torch.device("cpu"),
        after_backward=lambda parameters, stage, last: None,
    )
    tokens = torch.randint(
        VOCABULARY, (MICRO_BATCHES, ROWS, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    step = Step(owner.model, tokens)
    engine.evaluate(MICRO_BATCHES, 0, step)
    engine.train(MICRO_BATCHES, 0, step)
    for micro_batch in range(MICRO_BATCHES):
        Step(full, tokens)(micro_batch).backward()
    expected = dict(full.named_parameters())
    return max(
        (p.grad - expected[name].grad).abs().max().item()
        for name, p in owner.model.named_parameters()
    )


def moved(name: str, place: int) -> tuple[str, ...]:
    rest = [other for other in ORDER if other != name]
    return (*rest[:place], name, *rest[place:])


EXACT: list[tuple[str, tuple[str, ...], int, str]] = [
    ("plain", ORDER, 1, "1F1B"),
    # without parameters it may be named, and run, anywhere
    ("plain", moved("scale", 4), 2, "ZBVZeroBubble"),
    ("two embeddings", ORDER, 2, "Interleaved1F1B"),
    ("recomputed", ORDER, 2, "ZBVZeroBubble"),
    ("norm first", ("embed", "norm", "blocks", "head"), 1, "1F1B"),
    ("own parameters", ("embed", "shift", "blocks", "norm", "head", "gain"), 1, "1F1B"),
    ("halved between", ORDER, 1, "1F1B"),
]


@pytest.mark.parametrize(
    ("how", "names", "vp", "schedule"), EXACT, ids=[f"{case[0]}-{case[3]}" for case in EXACT]
)
def test_legitimate_orders_stay_exact(
    how: str, names: tuple[str, ...], vp: int, schedule: str
) -> None:
    assert max(run_ranks(errors, 2, how, names, vp, schedule)) < 1e-13


SECOND = {"embed": (["tokens"], ["hidden", "first"]), "blocks": (["hidden", "first"], ["hidden"])}
SIDE = {"blocks": (["hidden", "value"], ["hidden", "value"])}
DECLARED = [
    ("embedding again", SECOND, 1, "1F1B"),
    ("named", SECOND, 2, "ZBVZeroBubble"),
    ("skip between", SECOND, 2, "Interleaved1F1B"),
    ("skip to the logits", SECOND, 1, "GPipe"),
    ("handed on", SIDE, 1, "1F1B"),
    ("handed on", SIDE, 2, "ZBVZeroBubble"),
]


@pytest.mark.parametrize(
    ("how", "entries", "vp", "schedule"),
    DECLARED,
    ids=[f"{case[0]}-{case[3]}" for case in DECLARED],
)
def test_declared_values_travel_with_the_hidden_states(
    how: str, entries: dict[str, Any], vp: int, schedule: str
) -> None:
    assert max(run_ranks(errors, 2, how, ORDER, vp, schedule, entries)) < 1e-13
    assert how == "handed on" or refusals(how, ORDER, vp), "without the declaration it is refused"


def test_tensors_of_several_types_travel_in_one_message() -> None:
    hidden, first, side = (
        torch.randn(2, 3, 4).bfloat16(),
        torch.randn(5, 2),
        torch.randn(2, 1).bfloat16(),
    )
    whole, travels = ((2, 3, 4), torch.bfloat16), Travels(("embed",), (1,))
    boundary = Boundary(
        whole, {"embed": [((5, 2), torch.float32)]}, (None, ((2, 1), torch.bfloat16)), 0, travels
    )
    packed = boundary.pack(Arrived(hidden, {"embed": [first]}, {1: side})).requires_grad_()
    found = boundary.unpack(packed)
    for sent, arrived in (
        (hidden, found.hidden),
        (first, found.inputs["embed"][0]),
        (side, found.sides[1]),
    ):
        assert torch.equal(sent, arrived) and sent.dtype == arrived.dtype
    (found.hidden.float().sum() + 2 * found.inputs["embed"][0].sum()).backward()
    assert packed.grad is not None and packed.grad.tolist() == [1.0] * 24 + [2.0] * 10 + [0.0] * 2


def test_a_value_of_another_shape_does_not_travel() -> None:
    boundary = Boundary(
        ((2, 3), torch.float32), {"embed": [((5, 2), torch.float32)]}, None, 0, Travels(("embed",))
    )
    with pytest.raises(PlanError, match=r"A stage sends the output of 'embed' of shape \(5, 3\)"):
        boundary.pack(Arrived(torch.zeros(2, 3), {"embed": [torch.zeros(5, 3)]}))


OPT = tuple(f"model.decoder.{name}" for name in OPT_ORDER)
WRONG: dict[str, tuple[str, tuple[str, ...], int, str]] = {
    "opt": (
        "opt",
        (*OPT[:2], OPT[3], OPT[2], "lm_head"),
        1,
        (
            "'model.decoder.final_layer_norm' runs after the blocks, but the plan names it before"
            f" them. Name it after 'model.decoder.layers'. The right order is: {', '.join(OPT)},"
            " lm_head."
        ),
    ),
    "norm before, V schedule": ("plain", moved("norm", 1), 2, "'norm' runs after the blocks"),
    "embed after": (
        "plain",
        moved("embed", 2),
        1,
        (
            "'embed' runs before the blocks, but the plan names it after them. Name it before"
            " 'blocks'. The right order is: embed, scale, blocks, norm, head."
        ),
    ),
    "norm after": ("norm first", ORDER, 1, "'norm' runs before the blocks"),
    "embed last": ("embed last", ORDER, 2, "'embed' runs after the blocks"),
    "embed between": (
        "embed between",
        ORDER,
        1,
        "'embed' of Toy runs between the blocks 'blocks.0' and 'blocks.1'",
    ),
    "embed inside": ("embed inside", ORDER, 1, "'embed' of Toy runs inside the block 'blocks."),
    "twice": ("twice", ORDER, 1, "calls block 'blocks.1' after 'blocks.1'"),
    "turned": ("turned", ORDER, 1, "calls block 'blocks.2' but skips 'blocks.1'"),
    "skipped": ("skipped", ORDER, 2, "calls block 'blocks.3' but skips 'blocks.2'"),
    "early exit": (
        "early exit",
        ORDER,
        1,
        "'norm' of Toy runs between the blocks 'blocks.3' and 'blocks.4'",
    ),
    "embedding again": (
        "embedding again",
        ORDER,
        1,
        "of Toy needs a value of an earlier stage (argument 2)",
    ),
    "by name": ("named", ORDER, 2, "of Toy needs a value of an earlier stage (argument 'again')"),
    "value residual": (
        "value residual",
        ORDER,
        1,
        "of Toy needs a value of an earlier stage (argument 2)",
    ),
    "skip between": (
        "skip between",
        ORDER,
        1,
        "adds a value of an earlier pipeline stage to the hidden states before 'norm'",
    ),
    "skip to the end": (
        "skip to the end",
        ORDER,
        1,
        "to the hidden states before 'norm' reads them",
    ),
    "skip to the logits": (
        "skip to the logits",
        ORDER,
        1,
        "to the hidden states before the step reads them",
    ),
    "zamba": (
        "zamba",
        ("model.embed_tokens", "model.layers", "model.final_layernorm", "lm_head"),
        1,
        "of ZambaForCausalLM needs a value of an earlier stage (argument 2)",
    ),
}


def refusals(how: str, names: tuple[str, ...], vp: int) -> list[str]:
    """What each stage that refuses its first forward says, in this process; stages receive random
    hidden states."""
    found = []
    schedule = "ZBVZeroBubble" if vp > 1 else "1F1B"
    for pp_rank in range(2):
        owner = nn.Module()
        owner.model = build(how)
        plan = read_plan(owner.model, {"pp": dict.fromkeys(names)})
        assignment = assign_stages(owner.model, plan, Layout(pp=2, vp=vp), schedule)
        state = PipelineState(SimpleNamespace(enabled=False, layer=lambda index: None))  # type: ignore[arg-type]
        for chunk in keep_owned(owner, "model", plan, assignment, pp_rank, state):
            received = (
                None if chunk.is_first else torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
            )
            if how == "value residual" and not chunk.is_first:
                whole = (ROWS, LENGTH, WIDTH), torch.float64
                state.boundaries = [Boundary(whole, {}, (whole,), 0, Travels())]
            try:
                with state.running(chunk, received, forward=True):
                    owner.model(torch.zeros(ROWS, LENGTH, dtype=torch.long))
            except StageBoundary:
                assert not chunk.is_last
            except PlanError as refused:
                found.append(str(refused))
    return found


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_on_a_stage_is_refused_at_first_use(case: str) -> None:
    how, names, vp, message = WRONG[case]
    found = refusals(how, names, vp)
    assert found and all(message in refusal for refusal in found)


def test_the_right_order_refuses_nothing() -> None:
    assert refusals("plain", ORDER, 2) == refusals("opt", (*OPT, "lm_head"), 1) == []
