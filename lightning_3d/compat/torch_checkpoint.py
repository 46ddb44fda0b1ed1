"""Private PyTorch APIs of checkpoints: `torch.distributed.checkpoint` metadata and the pickles of
`torch.save`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_3d.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from lightning_3d.storage.remote_path import Place


def read_dcp_metadata(path: Place) -> Any:
    """Read the table of contents of a torch.distributed.checkpoint folder, a `Metadata`.

    DCP (torch 2.11 to 2.13) stores it as a pickle and opens it with plain `pickle.load`, which runs
    any code that a file asks for. Here only the classes that DCP itself writes are allowed: those
    of `checkpoint.metadata`, `_StorageInfo`, sizes, dtypes, layouts and paths.

    Raises:
        CheckpointError: the file asks for any other class, or is damaged.
    """
    import pickle

    import torch

    metadata = (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    )
    storage = ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata")
    known = {("torch.distributed.checkpoint.metadata", name) for name in (*metadata, *storage)}
    known |= {
        (module, name)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    }
    known |= {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
    }

    class CheckpointReader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
            if (module, name) not in known and not is_dtype:
                raise CheckpointError(
                    f"{path} was not loaded: it contains {module}.{name}, which checkpoints of"
                    " lightning_3d never contain. Use another checkpoint."
                )
            return super().find_class(module, name)

    try:
        with path.open("rb") as file:
            return CheckpointReader(file).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"{path} is damaged and cannot be read: {error!r}. Use another checkpoint."
        ) from error


def dcp_place(file: str, offset: int, length: int) -> Any:
    """The place of a slice in a file, as the reader of torch.distributed.checkpoint expects it
    (`_StorageInfo`, torch 2.11 to 2.13)."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def dcp_metadata(tensors: dict[str, Any], notes: Any) -> Any:
    """Make a table of contents with the version number of torch.distributed.checkpoint (torch 2.11
    to 2.13; older ones had none)."""
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint.metadata import Metadata

    metadata = Metadata(tensors, planner_data=notes)
    metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    return metadata


def tensor_pickle(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """Make the pickle that `torch.save` (torch 2.11 to 2.13) writes for one tensor, whose elements
    are in the storage "0".

    There is no public way to get it: `torch.save` makes it only while it writes the elements.
    """
    import io
    import pickle

    import torch

    class Pickler(pickle.Pickler):
        def persistent_id(self, thing: Any) -> Any:
            if isinstance(thing, torch.storage.TypedStorage):
                return (
                    "storage",
                    getattr(torch, thing._pickle_storage_type()),
                    "0",
                    "cpu",
                    thing._size(),
                )
            if isinstance(thing, torch.UntypedStorage):
                return ("storage", torch.UntypedStorage, "0", "cpu", thing.nbytes())
            return None

    contents = io.BytesIO()
    Pickler(contents, protocol=2).dump(torch.empty(shape, dtype=dtype, device="cpu"))
    return contents.getvalue()
