"""Layouts: names, ranks, groups, and what is refused."""

import re
import subprocess
import sys
from itertools import combinations
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_3d
from lightning_3d.errors import LayoutError, Lightning3DError
from lightning_3d.layout import Layout
from lightning_3d.layout.layout import AXES, DEGREES, divisors, nearest_layouts

degrees = st.integers(1, 4)
layouts = st.builds(
    Layout,
    tp=degrees,
    pp=degrees,
    dp=degrees,
    cp=st.integers(1, 2),
    ep=degrees,
    vp=degrees,
    order=st.permutations(AXES),
)
axes_of_group = st.lists(st.sampled_from(AXES), unique=True)


@given(layouts)
def test_a_name_round_trips(layout: Layout):
    assert Layout.parse(layout.name, order=layout.order) == layout


@given(layouts, st.randoms())
def test_a_name_may_have_any_order(layout: Layout, random):
    parts = layout.name.split("_")
    random.shuffle(parts)
    assert Layout.parse("_".join(parts), order=layout.order) == layout


@given(layouts)
def test_every_rank_has_its_own_coordinates(layout: Layout):
    assert layout.world_size == prod(layout.size(axis) for axis in AXES)
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len({tuple(place.values()) for place in places}) == layout.world_size
    assert [layout.rank(**place) for place in places] == list(range(layout.world_size))


@given(layouts, axes_of_group)
def test_every_rank_is_in_exactly_one_group_of_each_kind(layout: Layout, axes: list[str]):
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {prod(layout.size(axis) for axis in axes)}
    for group in groups:
        assert list(group) == sorted(group)
        assert all(layout.group_of(rank, *axes) == group for rank in group)
        fixed = [axis for axis in AXES if axis not in axes]
        assert len({tuple(layout.coordinates(rank)[axis] for axis in fixed) for rank in group}) == 1


@given(layouts, st.sampled_from(AXES))
def test_a_group_of_one_axis_stands_in_the_order_of_its_index(layout: Layout, axis: str):
    for group in layout.groups(axis):
        assert [layout.coordinates(rank)[axis] for rank in group] == list(range(layout.size(axis)))


@given(layouts)
def test_the_first_axis_of_the_order_is_innermost(layout: Layout):
    strides = dict.fromkeys(AXES, 0)
    stride = 1
    for axis in layout.order:
        strides[axis] = stride
        stride *= layout.size(axis)
    for axis in AXES:
        for group in layout.groups(axis):
            assert {later - earlier for earlier, later in zip(group, group[1:], strict=False)} <= {
                strides[axis]
            }


@given(layouts, st.permutations(AXES))
def test_another_order_permutes_ranks(layout: Layout, order: list[str]):
    other = Layout.parse(layout.name, order=order)
    moved = [other.rank(**layout.coordinates(rank)) for rank in range(layout.world_size)]
    assert sorted(moved) == list(range(layout.world_size))
    for axis in AXES:
        before = {frozenset(moved[rank] for rank in group) for group in layout.groups(axis)}
        assert before == {frozenset(group) for group in other.groups(axis)}


def test_default_order_puts_tensor_parallel_innermost_and_data_parallel_outermost():
    layout = Layout.parse("tp2_pp2_dp2")
    assert layout.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.groups("tp", "pp") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert layout.groups() == [(rank,) for rank in range(8)]


def test_megatron_order():
    layout = Layout.parse("tp2_pp2_dp2", order=("tp", "cp", "dp", "pp"))
    assert layout.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_canonical_name_leaves_out_ones():
    assert Layout().name == "tp1"
    assert Layout.parse("dp1_tp1").name == "tp1"
    assert (
        Layout.parse("vp2_dp8_pp4_tp8_cp2").name
        == str(Layout(8, 4, 8, 2, 1, 2))
        == "tp8_pp4_dp8_cp2_vp2"
    )
    assert Layout.parse("tp1_ep8_dp8").world_size == 8


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", 'empty. Use for example "tp2_pp2_dp2"'),
        ("tp2_qq3", 'unknown axis "qq". The axes are tp, pp, dp, cp, ep and vp'),
        ("tp2_pd2", 'Did you mean "tp2_dp2"?'),
        ("fsdp8_tp2", 'Did you mean "tp2_dp8"?'),
        ("TP2_PP4", 'Did you mean "tp2_pp4"?'),
        ("tp2-pp2", 'Did you mean "tp2_pp2"?'),
        ("tp2__pp2", 'Did you mean "tp2_pp2"?'),
        ("tp2.5", "not an axis followed by a whole number"),
        ("tp2_pp", 'no degree for "pp"'),
        ("8", 'Use for example "tp2_pp2_dp2"'),
        (
            "tp2_dp2_tp4",
            (
                "gives tp twice, as 2 and as 4. Each axis may appear only once. Did you mean"
                ' "tp4_dp2"?'
            ),
        ),
        ("tp2_tp2", "gives tp twice"),
        ("xx" * 500, "a part of 1000 characters"),
    ],
)
def test_a_name_that_is_not_understood_is_refused(name: str, says: str):
    with pytest.raises(LayoutError) as refusal:
        Layout.parse(name)
    assert says in str(refusal.value)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("value", [None, 8, ["tp2"], "   "])
def test_what_is_no_name_is_refused(value: object):
    with pytest.raises(LayoutError, match="layout name"):
        Layout.parse(value)  # type: ignore[arg-type]


@given(st.text(alphabet="tpdcev0123456789_-. x", max_size=14))
@settings(max_examples=300)
def test_any_text_is_a_layout_or_a_refusal_whose_proposal_works(text: str):
    try:
        assert Layout.parse(Layout.parse(text).name) is not None
    except LayoutError as refusal:
        proposal = re.search(r'Did you mean "(.*)"\?', str(refusal))
        if proposal is not None:
            Layout.parse(proposal[1])


@pytest.mark.parametrize("axis", DEGREES)
@pytest.mark.parametrize(
    ("degree", "says"),
    [
        ("0", "at least 1; got 0"),
        ("-2", "at least 1; got -2"),
        ("99999999999", "at most 1048576; got 99999999999"),
    ],
)
def test_f21_zero_negative_and_absurd_degrees(axis: str, degree: str, says: str):
    with pytest.raises(LayoutError, match=f"degree of {axis} must be .*; got {degree}") as refusal:
        Layout.parse(f"{axis}{degree}")
    assert says in str(refusal.value)
    with pytest.raises(LayoutError, match=f"degree of {axis} must be .*; got {degree}"):
        Layout(**{axis: int(degree)})


@pytest.mark.parametrize("degree", [2.0, "2", None, True])
def test_f21_degrees_that_are_no_whole_numbers(degree: object):
    with pytest.raises(LayoutError, match="whole number"):
        Layout(tp=degree)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "order", [("tp", "pp", "dp"), ("tp", "tp", "cp", "dp"), ("tp", "cp", "pp", "ep"), "tp"]
)
def test_an_order_must_contain_each_axis_once(order: tuple[str, ...]):
    with pytest.raises(LayoutError, match="exactly once, innermost first"):
        Layout(order=order)


def test_order_may_be_a_list():
    assert hash(Layout(order=["tp", "cp", "dp", "pp"]))  # type: ignore[arg-type]


def test_places_outside_the_layout_are_refused():
    layout = Layout.parse("tp2_dp2")
    for place in (
        lambda: layout.coordinates(4),
        lambda: layout.coordinates(-1),
        lambda: layout.group_of(4, "tp"),
    ):
        with pytest.raises(LayoutError, match="ranks are 0 to 3"):
            place()
    with pytest.raises(LayoutError, match="no tp index 2"):
        layout.rank(tp=2)
    for wrong in (
        lambda: layout.groups("vp"),
        lambda: layout.rank(ep=0),
        lambda: layout.group_of(0, "x"),
    ):
        with pytest.raises(LayoutError, match="not an axis with ranks"):
            wrong()


@pytest.mark.parametrize(
    ("name", "launched", "near"),
    [
        ("tp2_pp2_dp2", 4, "Layouts for 4 ranks: tp2_pp2, tp2_dp2 or pp2_dp2. Or launch 8."),
        ("tp2_pp2_dp2", 16, "Layouts for 16 ranks: tp2_pp2_dp4, "),
        ("tp8_pp4_dp8", 128, "Layouts for 128 ranks: tp8_pp4_dp4, "),
        ("tp1", 8, "Layouts for 8 ranks: dp8, "),
        ("tp3", 1, "Layouts for 1 rank: tp1. Or launch 3."),
        ("tp2_pp2_vp2", 1, "Layouts for 1 rank: tp1. Or launch 4."),
    ],
)
def test_f01_launched_ranks_differ(name: str, launched: int, near: str):
    layout = Layout.parse(name)
    with pytest.raises(LayoutError) as refusal:
        layout.require_world_size(launched)
    assert str(refusal.value).startswith(f"Layout {name} needs {layout.world_size} rank")
    assert f"but {launched} rank" in str(refusal.value)
    assert near in str(refusal.value)
    layout.require_world_size(layout.world_size)


@given(layouts, st.integers(1, 64))
def test_f01_nearest_layouts_fit(layout: Layout, launched: int):
    near = nearest_layouts(layout, launched)
    assert near or layout.ep > 1
    for other in near:
        assert other.world_size == launched
        assert other.order == layout.order
        assert other.vp == 1 or other.pp > 1


@given(st.integers(1, 5000))
def test_divisors(number: int):
    assert divisors(number) == [
        candidate for candidate in range(1, number + 1) if number % candidate == 0
    ]


def test_errors_are_the_users_to_repair():
    assert Lightning3DError.exit_code == LayoutError.exit_code == 2


PURE = [
    "",
    ".layout.model_rules",
    ".layout.schedules",
    ".layout.balance",
    ".errors",
    ".app.cli.dryrun",
    ".app.cli.verify",
]


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_neither_torch_nor_lightning(module: str):
    code = (
        f"import sys, lightning_3d{module}; sys.exit(any(name in sys.modules for name in ('torch',"
        " 'lightning')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_package_is_lazy():
    assert lightning_3d.Layout is Layout
    assert {"Layout", "Lightning3DStrategy", "initialize", "__version__"} <= set(dir(lightning_3d))
    with pytest.raises(AttributeError, match="no attribute 'Layouts'"):
        _ = lightning_3d.Layouts


def test_all_pairs_of_axes_partition_the_world_as_products():
    layout = Layout.parse("tp2_pp2_dp3_cp2")
    for first, second in combinations(AXES, 2):
        for group in layout.groups(first, second):
            assert len(group) == layout.size(first) * layout.size(second)


def test_expert_groups_are_the_innermost_ranks_of_a_stage() -> None:
    """Counted with tp innermost, then cp, then dp, whatever the order of ranks; equal places in
    them have the same experts."""
    layout = Layout.parse("tp2_dp4_ep4")
    assert layout.expert_groups() == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert layout.expert_data_groups() == [(0, 4), (1, 5), (2, 6), (3, 7)]
    across = Layout.parse("tp4_ep2")
    assert across.expert_groups() == [(0, 1), (2, 3)] and across.expert_data_groups() == [
        (0, 2),
        (1, 3),
    ]
    staged = Layout.parse("pp2_dp2_ep2")
    assert staged.expert_groups() == [(0, 2), (1, 3)] and staged.expert_data_groups() == [
        (0,),
        (1,),
        (2,),
        (3,),
    ]
    turned = Layout.parse("tp2_dp2_ep2", order=("dp", "tp", "cp", "pp"))
    assert turned.expert_groups() == [(0, 2), (1, 3)] and turned.expert_data_groups() == [
        (0, 1),
        (2, 3),
    ]
