"""Every operator that torch has a CUDA kernel for, run by the CPU's kernel on the same memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from simulated_cuda import attention
from simulated_cuda.copies import copy_
from simulated_cuda.random_numbers import DRAWING, drawing, twin
from simulated_cuda.views import Accesses, access, launch, on_device, on_host

REAL = frozenset(
    (
        "empty.memory_format",
        "empty_strided",
        "as_strided",
        "view",
        "_reshape_alias",
        "unfold",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor",
        "set_",
        "resize_",
        "_local_scalar_dense",
        "record_stream",
        "is_set_to",
        "alias",
        "view_as_real",
        "view_as_complex",
        "_efficientzerotensor",
        "_sparse_coo_tensor_with_dims",
        "is_pinned",
        "_pin_memory",
        "_nested_view_from_buffer",
        "_resize_output_",
        "_unsafe_view",
        "empty_quantized",
        "_cslt_compress",
        "_to_copy",
        "_nested_tensor_size",
        "_conj_physical",
        "resize_as_",
        "copy_",
    )
)
"""Operators whose CUDA version handles memory or metadata only, or copies by cudaMemcpy: the real
ones run. `copy_` is in `copies`."""

TAKES_HOST_TENSORS = (
    "index",
    "_index_put",
    "_unsafe_index",
    "where",
    "masked_fill",
    "masked_scatter",
    "fill",
    "_foreach",
    "_fused",
    "_amp",
    "nextafter",
    "dropout",
)
"""Beginnings of operators that take tensors of the host beside the device's."""

NOT_SIMULATED = (
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)

_SPECIAL: dict[str, Callable[..., Any]] = {
    "_fused_sdp_choice": attention.choose_math,
    "_scaled_dot_product_flash_attention": attention.flash,
    "_scaled_dot_product_flash_attention_backward": attention.flash_backward,
}

_registered: list[torch.library.Library] = []


def register() -> None:
    """Replace the CUDA kernels of this process."""
    for name in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each replaced kernel would be one
        for full in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
            if full.startswith("aten::"):
                _register(library, full.removeprefix("aten::"))
        library.impl("copy_", copy_, "CUDA")
    _registered.append(library)


def _register(library: torch.library.Library, name: str) -> None:
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
    if op is None or name in REAL or base in REAL:
        return
    if base in _SPECIAL:
        kernel = _SPECIAL[base]
    elif base in NOT_SIMULATED:
        kernel = _refuse(name)
    elif base in DRAWING:
        kernel = drawing(op, _Kernel(op))
    elif base == "histc":
        kernel = _histc(_Kernel(op))
    else:
        kernel = _Kernel(op)
    library.impl(name, kernel, "CUDA")


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"aten::{name} is not simulated")

    return refuse


def _histc(plain: Callable[..., Any]) -> Callable[..., Any]:
    """CUDA has it for whole numbers too."""

    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (
            plain(tensor, *args, **kwargs)
            if tensor.is_floating_point()
            else plain(tensor.float(), *args, **kwargs).to(tensor.dtype)
        )

    return run


class _Kernel:
    """One operator: checks devices, waits for its stream, and runs the CPU's kernel on the bytes of
    the device."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self._op = op
        self._name = str(op)
        self._mixes = schema.name.removeprefix("aten::").startswith(TAKES_HOST_TENSORS)
        self._arguments = [argument.name for argument in schema.arguments]
        self._written = {
            argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        self._returned = [
            _argument_that_is(returned, schema.arguments) for returned in schema.returns
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._arguments, args, strict=False)) | kwargs
        device = self._device(given)
        launch(device, self._name, self._accesses(given))
        mirrors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def host(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                return mirrors.setdefault(id(value), (value, on_host(value)))[1]
            if isinstance(value, torch.device) and value.type == "cuda":
                return torch.device("cpu")
            if isinstance(value, torch.Generator) and value.device.type == "cuda":
                return twin(value)
            return value

        with torch._C._AutoDispatchBelowAutograd():
            result = self._op(
                *_mapped(args, host),
                **{name: _mapped(value, host) for name, value in kwargs.items()},
            )
        _follow_resizes(mirrors)
        results = [result] if len(self._returned) == 1 else list(result or ())
        found = [
            given[argument] if argument is not None else self._back(value, mirrors, device)
            for value, argument in zip(results, self._returned, strict=True)
        ]
        return None if not found else found[0] if len(found) == 1 else tuple(found)

    def _device(self, given: dict[str, Any]) -> torch.device:
        """The one device of an operator.

        Raises:
            RuntimeError: its tensors are on several, as the real one says.
        """
        tensors = list(_tensors(given.values()))
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if not devices:
            wanted = torch.device(given.get("device") or "cuda")
            return (
                torch.device("cuda", torch.cuda.current_device())
                if wanted.index is None
                else wanted
            )
        outside = {
            tensor.device
            for tensor in tensors
            if not tensor.is_cuda and not tensor.is_meta and tensor.ndim > 0 and not self._mixes
        }
        if len(devices | outside) > 1:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {self._name} got"
                f" {sorted(map(str, devices | outside))}"
            )
        return devices.pop()

    def _accesses(self, given: dict[str, Any]) -> Accesses:
        return [
            access(tensor, write=write)
            for name, value in given.items()
            for tensor in _tensors([value])
            if tensor.is_cuda
            for write in (
                (False, True)
                if name in self._written and name != "out"
                else (name in self._written,)
            )
        ]

    def _back(
        self,
        value: Any,
        mirrors: dict[int, tuple[torch.Tensor, torch.Tensor]],
        device: torch.device,
    ) -> Any:
        """A result of the CPU's kernel on the device: an argument, a view of one, or a new
        tensor."""
        if isinstance(value, list | tuple):
            return type(value)(self._back(item, mirrors, device) for item in value)
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        for original, mirror in mirrors.values():
            if value is mirror:
                return original
            if (
                value.numel()
                and value.untyped_storage().data_ptr() == mirror.untyped_storage().data_ptr()
            ):
                return torch.as_strided(
                    original, value.shape, value.stride(), value.storage_offset()
                )
        return on_device(value, device, self._name)


def _argument_that_is(returned: Any, arguments: list[Any]) -> str | None:
    """Name of the argument that an operator writes into and returns."""
    alias = returned.alias_info
    if alias is None or not alias.is_write:
        return None
    return next(
        (
            a.name
            for a in arguments
            if a.alias_info is not None and a.alias_info.before_set == alias.before_set
        ),
        None,
    )


def _follow_resizes(mirrors: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """An `out=` that the CPU's kernel has resized."""
    for original, mirror in list(mirrors.values()):
        if mirror.shape != original.shape:
            original.resize_(mirror.shape)
            if mirror.numel():
                on_host(original).copy_(mirror)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    return (
        type(value)(_mapped(item, change) for item in value)
        if isinstance(value, list | tuple)
        else change(value)
    )
