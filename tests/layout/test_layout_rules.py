"""What does not fit is refused, with the numbers and the nearest thing that works. f02: its number
among the faults."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.layout import Layout
from lightning_3d.layout.batch_rules import check_batch, check_micro_batches, few_micro_batches
from lightning_3d.layout.model_rules import ModelSizes, check_model
from lightning_3d.layout.resolve import resolve_available, resolve_layout
from lightning_3d.layout.schedules import SCHEDULES
from lightning_3d.layout.sizes import check_number, check_sizes

LLAMA_70B = {
    "heads": 64,
    "kv_heads": 8,
    "layers": 80,
    "vocab": 128256,
    "intermediate": 28672,
    "max_positions": 131072,
}
parse = Layout.parse


def refusal(function, *args, error=LayoutError, **options) -> str:
    with pytest.raises(error) as raised:
        function(*args, **options)
    return str(raised.value)


def check(layout: Layout, **options) -> None:
    """`check_model` with sizes of the model among the options."""
    sizes = {
        name: options.pop(name) for name in [*options] if name in ModelSizes.__dataclass_fields__
    }
    check_model(layout, ModelSizes(**sizes), **options)


def test_a_layout_that_fits_passes():
    check(
        parse("tp8_pp4_dp8"), **LLAMA_70B, sequence_length=8192, schedule="1F1B", micro_batches=16
    )
    check(parse("tp3_pp7"))


def test_f02_tp_does_not_divide_heads():
    message = refusal(check, parse("tp3"), heads=32, kv_heads=8)
    assert message.endswith("tp 3 does not divide 32 heads. Use tp 1, 2, 4, 8, 16 or 32.")


def test_f02_proposals_fit_all_sizes():
    assert refusal(check, parse("tp5"), heads=12, kv_heads=4, intermediate=24).endswith(
        "Use tp 1, 2, 4 or 12."
    )
    assert "feed-forward layers, 30. Use tp 1 or 2." in refusal(
        check, parse("tp4"), heads=8, intermediate=30
    )


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_f03_kv_heads_are_replicated_when_fewer_than_tp(tp: int):
    check(Layout(tp=tp), heads=32, kv_heads=4)


def test_f04_kv_heads_neither_multiple_nor_divisor_of_tp():
    message = refusal(check, parse("tp4"), heads=24, kv_heads=6)
    assert "neither a divisor nor a multiple of the model's 6 key/value heads" in message
    assert message.endswith("Use tp 1, 2, 3, 6, 12 or 24.")


def test_f05_layers_fewer_than_stages():
    message = refusal(check, parse("pp8"), layers=6)
    assert "8 stages (pp 8), but the model has only 6 layers" in message
    assert message.endswith("Use a pp of at most 6.")
    check(parse("pp4"), layers=6)


@pytest.mark.parametrize(
    ("name", "layers", "schedule", "repair"),
    [
        ("pp4_vp4", 9, "Interleaved1F1B", "Use a pp of at most 2, or a vp of at most 2."),
        ("pp4_vp2", 6, None, "Use a pp of at most 3, or vp 1."),
        (
            "pp4_vp2",
            6,
            "ZBVZeroBubble",
            "Use a pp of at most 3, or vp 1 with the schedule GPipe, 1F1B, ",
        ),
        ("pp4_vp2", 3, "LoopedBFS", "Use pp 1, or vp 1 and a pp of at most 3."),
        ("pp4_vp2", 1, "LoopedBFS", "Use vp 1 and a pp of at most 1."),
    ],
)
def test_f06_vp_larger_than_layers_per_rank(
    name: str, layers: int, schedule: str | None, repair: str
):
    message = refusal(check, parse(name), layers=layers, schedule=schedule)
    assert f"(pp 4 * vp {parse(name).vp}), but the model has only {layers} layer" in message
    assert repair in message


def test_f07_vp_without_pipeline():
    message = refusal(resolve_layout, "tp2_vp2")
    assert (
        message
        == "Layout tp2_vp2 has 2 stages on each pipeline rank (vp) but only one pipeline rank"
        " (pp 1)."
        " Use tp2, or a pp of at least 2."
    )
    assert "only one pipeline rank" in refusal(resolve_layout, "tp2", "1F1B", 2)


@pytest.mark.parametrize(
    ("schedule", "vp", "global_batch", "repair"),
    [
        (
            "1F1B",
            1,
            8,
            (
                "data.global_batch_size=16, parallelism.micro_batch_size=1 or the schedule GPipe,"
                " Interleaved1F1B, "
            ),
        ),
        (
            "DualPipeV",
            2,
            16,
            (
                "data.global_batch_size=32, parallelism.micro_batch_size=1 or the schedule"
                " Interleaved1F1B, "
            ),
        ),
    ],
)
def test_f08_micro_batches_too_few_for_the_schedule(
    schedule: str, vp: int, global_batch: int, repair: str
):
    message = refusal(check_batch, Layout(pp=4, dp=2, vp=vp), global_batch, 2, schedule)
    assert (
        f"at least as many micro-batches as stages, {4 * vp}, but a step has {global_batch // 4}"
        in message
    )
    assert repair in message


def test_f08_micro_batches_that_do_not_fill_rounds():
    message = refusal(check_micro_batches, parse("pp4_vp2"), "Interleaved1F1B", 9)
    assert (
        "runs 9 micro-batches over 4 pipeline ranks in 2 rounds, but 9 is not divisible by 2"
        in message
    )
    assert message.endswith(
        "Use 8 or 10 micro-batches or the schedule LoopedBFS, ZBVZeroBubble or DualPipeV."
    )
    assert check_batch(parse("pp4_vp2"), 10, 1, "Interleaved1F1B") == 10
    check(parse("pp4"), schedule="GPipe", micro_batches=1)
    refusal(check, parse("pp4"), schedule="1F1B", micro_batches=1)


def test_f08_few_micro_batches_are_warned_about():
    warning = few_micro_batches(parse("pp4"), "GPipe", 2)
    assert (
        warning
        == "A step has 2 micro-batches for 4 pipeline stages: with GPipe each rank is predicted to"
        " be idle for 60% of the step. With 16 micro-batches it would be 16%."
    )
    assert few_micro_batches(parse("pp4"), "GPipe", 4) is None
    assert few_micro_batches(parse("dp4"), "GPipe", 1) is None


@pytest.mark.parametrize(
    ("name", "global_batch", "micro_batch", "repair"),
    [
        (
            "dp2",
            10,
            4,
            "parallelism.micro_batch_size=4 * dp 2 = 8. The nearest values that work are 8 and 16.",
        ),
        ("dp2", 4, 4, "The nearest value that works is 8."),
        ("pp4_dp2", 17, 2, "The nearest values that work are 16 and 20."),
        ("pp4_dp2", 3, 2, "The nearest value that works is 16."),
    ],
)
def test_f09_global_batch_not_divisible(
    name: str, global_batch: int, micro_batch: int, repair: str
):
    message = refusal(check_batch, parse(name), global_batch, micro_batch, "1F1B")
    assert f"data.global_batch_size={global_batch} is not divisible" in message
    assert message.endswith(repair)


@given(
    st.sampled_from(list(SCHEDULES.values())),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 300),
    st.integers(1, 9),
)
def test_f09_proposed_global_batches_work(
    info, pp: int, dp: int, global_batch: int, micro_batch: int
):
    layout = Layout(pp=pp, dp=dp, vp=info.default_vp if pp > 1 else 1)
    try:
        count = check_batch(layout, global_batch, micro_batch, info.name)
    except LayoutError as error:
        proposed = re.search(
            r"(?:Use data.global_batch_size=|that works is |that work are )([0-9, andor]*)",
            str(error),
        )
        assert proposed is not None
        for batch in re.findall(r"[0-9]+", proposed[1]):
            assert check_batch(
                layout, int(batch), micro_batch, info.name
            ) * micro_batch * dp == int(batch)
    else:
        assert count * micro_batch * dp == global_batch


def test_f11_expert_parallelism_on_a_dense_model():
    assert "the model is dense" in refusal(check, parse("dp4_ep2"))


def test_f10_expert_parallelism_that_does_not_divide_the_experts():
    message = refusal(check, parse("dp12_ep12"), experts=8)
    assert "ep 12 in dp12_ep12 does not divide the model's 8 experts" in message
    assert message.endswith("Use dp12_ep4.")
    assert refusal(check, parse("dp6_ep3"), experts=8).endswith("Use dp6_ep2.")


@pytest.mark.parametrize(
    ("name", "relation", "instead"),
    [
        ("dp2_ep4", "is more than the 2", "dp2_ep2"),
        ("tp2_dp3_ep4", "does not divide the 6", "tp2_dp3_ep3 or tp2_dp3_ep6"),
    ],
)
def test_expert_groups_fill_the_ranks_of_a_stage(name: str, relation: str, instead: str):
    message = refusal(resolve_available, name, None, None, None)
    assert f"{relation} ranks of a stage of {name} (" in message and message.endswith(
        f"Use {instead}."
    )


@pytest.mark.parametrize("name", ["tp2_dp2", "pp4", "dp4_ep4", "tp2_ep2", "tp2_pp2_dp4_ep8"])
def test_a_mixture_of_experts_trains_on_every_axis(name: str):
    check(parse(name), experts=8)


def test_f13_sequence_that_tp_does_not_divide():
    message = refusal(check, parse("tp4"), sequence_length=1026, sequence_parallel=True)
    assert "tp 4 does not divide the 1026 tokens" in message
    assert message.endswith(
        "Use a sequence length of 1024 or 1028, or parallelism.sequence_parallel=false."
    )
    check(parse("tp4"), sequence_length=1024, sequence_parallel=True)
    check(parse("tp4"), sequence_length=1026, sequence_parallel=False)


def test_f12_a_sequence_that_context_parallel_ranks_cannot_share():
    message = refusal(check, parse("cp4"), sequence_length=100)
    assert (
        message
        == "cp 4 splits a sequence into 2 * cp = 8 equal chunks, but the sequence has 100 tokens."
        " Use a sequence length of 96 or 104."
    )
    assert refusal(check, parse("cp4"), sequence_length=5).endswith("Use a sequence length of 8.")
    check(parse("cp4"), sequence_length=104)


@pytest.mark.parametrize(
    ("name", "tokens", "says", "near"),
    [
        (
            "tp4_cp2",
            1028,
            (
                "tp 4 does not divide the 514 of 1028 tokens that each context-parallel rank has"
                " (cp 2)"
            ),
            "1024 or 1032",
        ),
        ("tp3_cp4", 1000, "tp 3 does not divide the 250 of 1000 tokens that", "984 or 1008"),
        ("tp8_cp2", 4, "tp 8 does not divide the 2 of 4 tokens that", "16"),
        (
            "tp4_cp2",
            1022,
            "2 * cp = 4 equal chunks, but the sequence has 1022 tokens",
            "1016 or 1024",
        ),
    ],
)
def test_f13_tensor_parallel_ranks_share_the_tokens_of_a_context_parallel_rank(
    name: str, tokens: int, says: str, near: str
):
    message = refusal(check, parse(name), sequence_length=tokens, sequence_parallel=True)
    assert says in message and f"Use a sequence length of {near}" in message
    for length in near.split(" or "):
        check(parse(name), sequence_length=int(length), sequence_parallel=True)
    check(
        parse(name), sequence_length=tokens - tokens % (2 * parse(name).cp), sequence_parallel=False
    )


def test_ulysses_needs_heads():
    message = refusal(check, parse("tp2_cp4"), heads=12, cp_kind="ulysses")
    assert "the tp * cp = 8 ranks" in message and message.endswith(
        "8 does not divide the model's 12 heads. Use cp_kind=ring."
    )
    check(parse("tp2_cp4"), heads=12)
    check(parse("tp2_cp2"), heads=12, cp_kind="ulysses")


def test_f14_sequence_longer_than_positions():
    message = refusal(check, Layout(), sequence_length=4097, max_positions=4096, error=ConfigError)
    assert "4097 tokens, but the model has only 4096 positions" in message
    assert message.endswith("at most 4096.")
    check(Layout(), sequence_length=4096, max_positions=4096)


@pytest.mark.parametrize("vocab", [7, 8, 50257, 65537])
def test_f16_vocabulary_need_not_be_divisible_by_tp(vocab: int):
    check(Layout(tp=7), vocab=vocab)


def test_f16_vocabulary_smaller_than_tp():
    assert refusal(check, Layout(tp=8), vocab=5).endswith(
        "some ranks would have none. Use a tp of at most 5."
    )
    assert refusal(check, Layout(tp=8), heads=8, vocab=5).endswith("Use tp 1, 2 or 4.")


@pytest.mark.parametrize("size", [0, -3, 2.5, "8", True, 2**60])
def test_f21_sizes_that_cannot_be(size: object):
    assert "heads" in refusal(check, Layout(), heads=size, error=ConfigError)
    assert "data.global_batch_size must" in refusal(
        check_batch, Layout(), size, 1, error=ConfigError
    )
    assert "parallelism.micro_batch_size must" in refusal(
        check_batch, Layout(), 8, size, error=ConfigError
    )
    assert "sequence_length" in refusal(check_sizes, sequence_length=size, error=ConfigError)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-3, "0.1", None, True])
def test_f21_numbers_that_cannot_be(value: object):
    message = refusal(check_number, "learning rate", value, error=ConfigError)
    assert message.startswith("learning rate ")
    assert "at least 0" in message
    check_number("learning rate", 3e-4)


def test_f21_numbers_out_of_range():
    assert "between 0 and 1" in refusal(check_number, "dropout", 1.5, most=1.0, error=ConfigError)


@pytest.mark.parametrize(
    ("layout", "schedule", "vp", "expected"),
    [
        ("pp4_dp2", None, None, ("pp4_dp2", "1F1B")),
        ("pp4_vp2", None, None, ("pp4_vp2", "Interleaved1F1B")),
        ("pp4", None, 3, ("pp4_vp3", "Interleaved1F1B")),
        ("pp4_vp3", None, 3, ("pp4_vp3", "Interleaved1F1B")),
        ("pp4", "zbvzerobubble", None, ("pp4_vp2", "ZBVZeroBubble")),
        ("pp4", "loopedbfs", None, ("pp4_vp2", "LoopedBFS")),
        ("pp4", "loopedbfs", 1, ("pp4", "LoopedBFS")),
        ("dp4", "dualpipev", None, ("dp4", "DualPipeV")),
        (Layout(pp=2), "gpipe", None, ("pp2", "GPipe")),
    ],
)
def test_vp_follows_from_layout_schedule_and_keyword(layout, schedule, vp, expected):
    resolved, name = resolve_layout(layout, schedule, vp)
    assert (resolved.name, name) == expected


def test_order_is_kept_or_set():
    order = ("tp", "cp", "dp", "pp")
    assert resolve_layout("pp2", order=order)[0].order == order
    assert resolve_layout(Layout(pp=2), order=order)[0].order == order
    assert resolve_layout(Layout(pp=2, order=order), "DualPipeV")[0].order == order


@pytest.mark.parametrize(
    ("layout", "schedule", "vp", "says"),
    [
        ("pp4_vp2", None, 4, "The layout pp4_vp2 has vp 2, but the option vp is 4. Set only one"),
        (
            "pp4_vp3",
            "ZBVZeroBubble",
            None,
            "exactly 2 stages on each pipeline rank, but the layout pp4_vp3 has vp 3.",
        ),
        (
            "pp4",
            "DualPipeV",
            1,
            "Use pp4_vp2 (vp 2), or keep vp 1 and use the schedule GPipe, 1F1B, ",
        ),
        (
            "pp4_vp2",
            "1F1B",
            None,
            "Use pp4 (vp 1), or keep vp 2 and use the schedule Interleaved1F1B, ",
        ),
        (
            "pp4",
            "GPipe",
            2,
            "runs one stage on each pipeline rank, but the layout pp4_vp2 has vp 2.",
        ),
        ("pp4", "GPipe", 0, "The degree of vp must be at least 1; got 0"),
    ],
)
def test_conflicts_about_vp_are_refused(
    layout: str, schedule: str | None, vp: int | None, says: str
):
    assert says in refusal(resolve_layout, layout, schedule, vp)
