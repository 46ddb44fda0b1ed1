"""Archives of one tensor, compared with those of `torch.save`, and read by `torch.load` and by
Python's zipfile."""

import io
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_3d.checkpoint import torch_archive as archive

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.uint16,
]
DTYPES += [torch.complex64, torch.float8_e4m3fn]
NAME = "archive/data/0"


def archived(tensor: Tensor) -> bytes:
    head, tail = archive.around(tuple(tensor.shape), tensor.dtype)
    return head + b"".join(archive.elements(tensor)) + tail


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 100).to(dtype)


def same(found: Tensor, tensor: Tensor) -> bool:
    bits = [value.contiguous().reshape(-1).view(torch.uint8) for value in (found, tensor)]
    return found.dtype == tensor.dtype and found.shape == tensor.shape and torch.equal(*bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (0, 4)], ids=str)
def test_torch_reads_it_and_writes_the_same_pickle(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor, saved = some(dtype, *shape), io.BytesIO()
    contents = archived(tensor)
    assert same(torch.load(io.BytesIO(contents), weights_only=True), tensor)
    torch.save(tensor, saved)
    with zipfile.ZipFile(io.BytesIO(contents)) as ours, zipfile.ZipFile(saved) as theirs:
        [pickled] = [name for name in theirs.namelist() if name.endswith("/data.pkl")]
        assert ours.read("archive/data.pkl") == theirs.read(pickled)
        assert {name.partition("/")[2] for name in ours.namelist()} <= {
            name.partition("/")[2] for name in theirs.namelist()
        }
        assert (
            ours.getinfo(NAME).file_size == tensor.nbytes
            and ours.getinfo("archive/version").file_size == 2
        )
    assert len(contents) - tensor.nbytes < 1100, "it may be much for a slice of a few elements"


@pytest.mark.parametrize("made_by", ["us", "torch"])
def test_where_the_elements_begin(made_by: str) -> None:
    tensor, saved = some(torch.float32, 300, 7), io.BytesIO()
    torch.save(tensor, saved)
    contents = archived(tensor) if made_by == "us" else saved.getvalue()
    start = archive.elements_at(contents[: archive.HEAD_BYTES])
    assert start % archive.ALIGNMENT == 0
    assert contents[start : start + tensor.nbytes] == tensor.numpy().tobytes()
    with pytest.raises(ValueError, match="not an archive"):
        archive.elements_at(contents[start : start + 1000])


def test_what_lies_otherwise_in_memory_is_copied_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_BLOCK_BYTES", 96)
    base = torch.arange(6 * 10 * 30, dtype=torch.float32).reshape(6, 10, 30)
    views = {"in order": base[2:4], "rows": base[:, 3:7], "columns": base[..., ::2]}
    views |= {"turned": base.mT, "expanded": base[:1].expand(4, -1, -1)}
    for name, view in views.items():
        blocks = list(archive.elements(view))
        assert max(map(len, blocks)) <= 96 and b"".join(blocks) == view.numpy().tobytes(), name
    base += 1
    assert b"".join(archive.elements(base[1])) == base[1].numpy().tobytes()
    held = next(archive.elements(base[1]))
    base[1] = 7
    assert torch.frombuffer(held, dtype=torch.float32).eq(7).all(), "what lies in order is no copy"


def test_views_with_a_sign_of_their_own_are_written_as_they_read() -> None:
    numbers = torch.arange(12, dtype=torch.float32).view(torch.complex64).reshape(2, 3)
    for view in (numbers.conj(), numbers.conj().imag, numbers.mH):
        assert same(
            torch.load(io.BytesIO(archived(view)), weights_only=True),
            view.clone().resolve_conj().resolve_neg(),
        )


@pytest.mark.full
def test_more_than_four_gigabytes(tmp_path: Path) -> None:
    tensor = torch.zeros(2**32 + 11, dtype=torch.uint8)
    tensor[-1] = 5
    head, tail = archive.around(tuple(tensor.shape), tensor.dtype)
    with (tmp_path / "a").open("wb") as file:
        for contents in (head, *archive.elements(tensor), tail):
            file.write(contents)
    loaded = torch.load(tmp_path / "a", weights_only=True, mmap=True)
    assert loaded.shape == tensor.shape and loaded[-1] == 5 and not loaded[:-1].any()
    assert archive.elements_at(head) == len(head)
