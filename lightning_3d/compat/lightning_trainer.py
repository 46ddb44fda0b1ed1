"""Changes what every Trainer of this process gets and does, without a change of the user's
script."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def intercept_trainers(
    before: Callable[[dict[str, Any]], tuple[dict[str, Any], Any]],
    after: Callable[[Any, Any], None],
) -> None:
    """Call functions around `Trainer.__init__`, once however often this is called.

    `Trainer.__init__` (Lightning 2.6) takes keywords only, and calls itself with the defaults of
    environment variables. There is no public hook before it.

    Args:
        before: function that returns the arguments to use instead of those given, and a value for
            `after`.
        after: function that gets the Trainer and that value.
    """
    from lightning.pytorch import Trainer

    given_init = Trainer.__init__
    if hasattr(given_init, "intercepted"):
        return

    @wraps(given_init)
    def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
        arguments, kept = before(kwargs)
        given_init(trainer, *args, **arguments)
        after(trainer, kept)

    init.intercepted = True  # type: ignore[attr-defined]
    Trainer.__init__ = init  # type: ignore[method-assign, assignment]


def watch_samples() -> Callable[[Any, int], list[Any] | None]:
    """Note the indices of the samples that the DataLoaders of this process read from now on.

    `_BaseDataLoaderIter._next_index` (torch 2.11 to 2.15) draws them in this process, also for
    workers, and its `_index_sampler` is the loader's.

    Returns:
        A function (loader, n) -> indices of its n-th batch since the training began; None where the
        loader has none.
    """
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    read: dict[int, list[Any]] = {}
    next_index = getattr(
        _BaseDataLoaderIter._next_index, "unwatched", _BaseDataLoaderIter._next_index
    )

    def noting(iterator: Any) -> Any:
        indices = next_index(iterator)
        read.setdefault(id(iterator._index_sampler), []).append(indices)
        return indices

    noting.unwatched = next_index  # type: ignore[attr-defined]
    _BaseDataLoaderIter._next_index = noting  # type: ignore[method-assign]

    def of(loader: Any, batch: int) -> list[Any] | None:
        if not isinstance(loader, DataLoader):
            return None
        found = read.get(id(loader._index_sampler), [])
        return found[batch] if batch < len(found) and isinstance(found[batch], list) else None

    return of
