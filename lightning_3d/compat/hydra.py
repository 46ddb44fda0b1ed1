"""Private symbols of Hydra. Imports no torch.

Tried with Hydra 1.3.8. `tests/compat/test_compat_hydra.py` shows that Hydra still calls what is replaced here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf


@contextmanager
def checked_compositions(
    check: Callable[[DictConfig, Sequence[str]], None], check_search_path: Callable[[Any], None]
) -> Iterator[None]:
    """Show every configuration that Hydra composes meanwhile to a check, before Hydra makes anything of it.

    Hydra has no hook so early: it creates callbacks, which are its hooks, from the configuration itself.

    Args:
        check: gets a configuration and the overrides of its command line; raises an error to refuse it.
        check_search_path: gets `hydra.searchpath` of the primary configuration, before Hydra imports the packages that it names.
    """
    compose, read_search_path = ConfigLoaderImpl.load_configuration, ConfigLoaderImpl._process_config_searchpath

    def checked(self: ConfigLoaderImpl, config_name: str | None, overrides: list[str], *rest: Any, **named: Any) -> DictConfig:
        config = compose(self, config_name, overrides, *rest, **named)
        check(config, overrides)
        return config

    def checked_search_path(self: ConfigLoaderImpl, config_name: str | None, parsed_overrides: Any, repo: Any) -> None:
        primary = None if config_name is None else repo.load_config(config_path=config_name)
        if primary is not None and OmegaConf.is_dict(primary.config):
            check_search_path(OmegaConf.select(primary.config, "hydra.searchpath"))
        read_search_path(self, config_name, parsed_overrides, repo)

    ConfigLoaderImpl.load_configuration = checked  # type: ignore[method-assign]
    ConfigLoaderImpl._process_config_searchpath = checked_search_path  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigLoaderImpl.load_configuration = compose  # type: ignore[method-assign]
        ConfigLoaderImpl._process_config_searchpath = read_search_path  # type: ignore[method-assign]
