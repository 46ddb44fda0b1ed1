"""Stores of the values of parameters: whole on every data-parallel rank, or sharded over them
(`sharded_parameters`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_3d.parallel.sharding import OptimizerShard
from lightning_3d.parallel.zero.trained import Trained, TrainedParameters


@dataclass(frozen=True)
class TrainedTensor:
    """Tensor of a parameter that the optimizer of this rank trains.

    Attributes:
        entry: the parameter.
        tensor: the parameter itself, or this rank's part of it, flattened.
        first: element of the flattened parameter that `tensor` begins with.
    """

    entry: Trained
    tensor: nn.Parameter
    first: int = 0


class ParameterStore(ABC):
    """Keeps the values of a rank's parameters. Its methods are those of `DataParallelBackend` by
    the same names, which explains them."""

    @abstractmethod
    def shard(
        self,
        module: nn.Module,
        models: Sequence[Sequence[nn.Module]],
        device: torch.device,
        is_active: Callable[[nn.Module], bool],
    ) -> None: ...

    @abstractmethod
    def parameters_in_use(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def weight_shards(self) -> list[OptimizerShard]: ...

    @abstractmethod
    def make_whole(self) -> None: ...

    @abstractmethod
    def abandon(self) -> bool: ...

    @abstractmethod
    def tensors_to_train(self, trained: TrainedParameters) -> list[TrainedTensor]:
        """Tensors that this rank's optimizer trains. Called once, by
        `DataParallelBackend.prepare`."""

    @abstractmethod
    def before_gradients_are_taken(self) -> None:
        """Refuse gradients that were computed from missing parameters. Called after a backward
        action, before its gradients are reduced."""

    @abstractmethod
    def after_backward(self) -> None:
        """Free parameters after a backward action and the reduction of its gradients."""

    @abstractmethod
    def held(self) -> list[Tensor]:
        """Tensors that are kept of parameters apart from the module's own."""


class WholeParameters(ParameterStore):
    """Every data-parallel rank keeps all parameters (stages 0 to 2)."""

    def shard(
        self,
        module: nn.Module,
        models: Sequence[Sequence[nn.Module]],
        device: torch.device,
        is_active: Callable[[nn.Module], bool],
    ) -> None:
        """Do nothing: parameters are not sharded."""

    def parameters_in_use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def weight_shards(self) -> list[OptimizerShard]:
        return []

    def make_whole(self) -> None:
        """Do nothing: parameters are whole already."""

    def abandon(self) -> bool:
        return False

    def tensors_to_train(self, trained: TrainedParameters) -> list[TrainedTensor]:
        return [TrainedTensor(entry, entry.parameter) for entry in trained.entries]

    def before_gradients_are_taken(self) -> None:
        """Do nothing: no parameter is ever missing."""

    def after_backward(self) -> None:
        """Do nothing: there is nothing to free."""

    def held(self) -> list[Tensor]:
        return []
