"""Find the parameter of each entry of a plain optimizer state, which has numbers instead of names.

`torch.optim` numbers the parameters of all groups one after the other, and users make groups of
`module.parameters()`, so each group has its parameters in the order of the module. Shapes then
nearly always identify each parameter. If they allow two answers, neither is used.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_3d.errors import CheckpointError

Shape = tuple[int, ...]
_PATHS = 20_000
"""Number of partial answers above which the order counts as undecidable."""


def find_names(
    parameters: Sequence[tuple[str, Shape]], groups: Sequence[Sequence[Shape | None]]
) -> list[list[str]]:
    """Find the names of each group's parameters.

    Args:
        parameters: names and shapes of the module's parameters, in its order. Frozen ones may be in
            no group.
        groups: shapes of each group's parameters, in order; None where the state does not contain a
            shape.

    Raises:
        CheckpointError: no order fits the shapes, or several do.
    """
    wanted = sum(map(len, groups))
    spare = len(parameters) - wanted
    # How far each group is -> in how many ways one gets there (2 is many), and the last step of one
    # of them.
    ways: dict[tuple[int, ...], int] = {(0,) * len(groups): 1}
    steps: list[dict[tuple[int, ...], int | None]] = []
    for index, (_, shape) in enumerate(parameters):
        following: dict[tuple[int, ...], int] = {}
        taken: dict[tuple[int, ...], int | None] = {}
        for done, count in ways.items():
            choices: list[tuple[tuple[int, ...], int | None]] = (
                [(done, None)] if index - sum(done) < spare else []
            )
            for group, shapes in enumerate(groups):
                if done[group] < len(shapes) and shapes[done[group]] in (None, shape):
                    choices.append(((*done[:group], done[group] + 1, *done[group + 1 :]), group))
            for reached, group_taken in choices:
                following[reached] = min(2, following.get(reached, 0) + count)
                taken[reached] = group_taken
        ways = following
        steps.append(taken)
        if len(ways) > _PATHS:
            raise CheckpointError(_undecided(groups, "too many assignments fit"))
    end = tuple(map(len, groups))
    if ways.get(end) != 1:
        why = (
            "several assignments fit"
            if end in ways
            else f"the {len(parameters)} parameters, in their order, do not fit"
        )
        raise CheckpointError(_undecided(groups, why))
    names: list[list[str]] = [[] for _ in groups]
    for (name, _), taken in zip(reversed(parameters), reversed(steps), strict=True):
        group_taken = taken[end]
        if group_taken is not None:
            names[group_taken].insert(0, name)
            end = (*end[:group_taken], end[group_taken] - 1, *end[group_taken + 1 :])
    return names


def _undecided(groups: Sequence[Sequence[Shape | None]], why: str) -> str:
    count = (
        f"{len(groups)} parameter groups with {', '.join(str(len(shapes)) for shapes in groups)}"
        " parameters"
    )
    return (
        f"It is unknown which parameters the optimizer's state belongs to ({count}): {why}. Pass"
        " their names with --groups FILE, a JSON file with a list for each group of"
        " configure_optimizers; or leave out the optimizer with --weights-only."
    )
