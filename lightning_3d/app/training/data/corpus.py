"""What a path of `data=tokens` names: a token file, an array of NumPy, a data set of Megatron,
files of nanotron, a folder of shards, or a glob of these, on the disk or at a URL. Reads no tokens.
NumPy only."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_3d.app.config.data_urls import data_place, path_list
from lightning_3d.app.training.data.array_file import read_array_header
from lightning_3d.app.training.data.concatenation import TokenPart
from lightning_3d.app.training.data.indexed_file import index_of, read_header
from lightning_3d.app.training.data.nanotron_file import (
    SUFFIX,
    ends_of,
    read_nanotron_file,
    same_name,
)
from lightning_3d.app.training.data.shard_manifest import (
    NAME,
    Manifest,
    TokenizerIdentity,
    check_shards,
    read_manifest,
)
from lightning_3d.app.training.data.token_file import index_path, require_size
from lightning_3d.errors import ConfigError, DataError
from lightning_3d.storage.remote_path import WEB, AnyPlace, Place
from lightning_3d.storage.steady_path import SteadyPath


@dataclass(frozen=True)
class Corpus:
    """Token files that are read as one sequence.

    Attributes:
        parts: the files, in order.
        name: what they are, for messages.
        separator: id after each document; None if the files do not say.
        tokenizer: tokenizer of all of them; None if the files do not say.
        largest: largest id; None if the files do not say.
        tokenizer_name: tokenizer of all of them, where they say no more of it than its name.
    """

    parts: tuple[TokenPart, ...]
    name: str
    separator: int | None = None
    tokenizer: TokenizerIdentity | None = None
    largest: int | None = None
    tokenizer_name: str | None = None

    @property
    def marks_documents(self) -> bool:
        """Whether the ends of documents are known: by a separator, or by an index of each file."""
        return self.separator is not None or all(part.ends is not None for part in self.parts)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(part.tokens for part in self.parts)


def find_corpus(path: Path, *, hashes: bool = False) -> Corpus:
    """Find the files of a path and check them by their sizes, manifests and indices.

    Args:
        path: a `.npy` (`array_file`), a `.bin` or `.ds` with a `.json` (`token_file`), a `.bin`
            with an `.idx` (`indexed_file`), the `.idx`, or the common path of such a pair without
            the suffix; a `.ds` (`nanotron_file`), or a folder of them; a folder of `lightning-3d
            tokenize`; or a glob of these.
        hashes: read the shards of folders and compare their hashes.

    Raises:
        DataError: nothing has this name; a file is missing, truncated or damaged; or the files are
            of several tokenizers.
    """
    manifests: dict[Place, Manifest | None] = {}
    matches = [path] if path.exists() else sorted(map(Path, glob.glob(str(path), recursive=True)))
    named = _data_files({match: match.is_dir() for match in matches}, path)
    found = [_one(match, folder, manifests, hashes) for match, folder in named.items()]
    if not found:
        pair = path.with_name(f"{path.name}.bin")
        found = [_of_file(pair if index_of(pair).is_file() else _ids_of(path), manifests, hashes)]
    return found[0] if len(found) == 1 else _joined(str(path), found)


def find_at_url(url: SteadyPath, *, hashes: bool = False) -> Corpus:
    """Find the files of a URL and check them, as `find_corpus` does.

    Raises:
        DataError: nothing is there, or as `find_corpus`. OSError: the URL cannot be read.
    """
    if url.is_pattern:
        return _of_pattern(url, hashes)
    if url.suffix not in _SUFFIXES and (url / NAME).is_file():
        return _of_manifest(url, read_manifest(url), None, hashes)
    if url.suffix not in _SUFFIXES and url.protocol not in WEB and (url / f"*{SUFFIX}").glob():
        return replace(_of_pattern(url / f"*{SUFFIX}", hashes), name=str(url))
    file = _ids_of(url) if url.suffix in _SUFFIXES else url.with_name(f"{url.name}.bin")
    if file.is_file() or url.suffix == ".idx" and url.is_file():
        return _of_file(file, {}, hashes)
    other = (
        "" if url.suffix in _SUFFIXES else f", neither a {NAME} below it nor {file.name} next to it"
    )
    raise DataError(
        f"There is no data at {url}{other}. Name a folder of lightning-3d tokenize, a .bin or a"
        " .npy file."
    )


def _of_pattern(url: SteadyPath, hashes: bool) -> Corpus:
    named = _data_files(url.glob())
    if not named:
        raise DataError(
            f"There is no data at {url}: no folder, .bin or .npy file matches this pattern."
        )
    with ThreadPoolExecutor(_REQUESTS) as pool:
        found = list(pool.map(lambda match: _one(match[0], match[1], {}, hashes), named.items()))
    return found[0] if len(found) == 1 else _joined(str(url), found)


_SUFFIXES = (".bin", ".ds", ".idx", ".npy")
_REQUESTS = 16
"""Files of a pattern of URLs that are checked at the same time."""


def _data_files(matches: dict[AnyPlace, bool], wanted: Path | None = None) -> dict[AnyPlace, bool]:
    """Keep what may be tokens, of what has a name; `.idx` and `.bin` are one.

    Args:
        matches: places, and whether each is a folder.
        wanted: place that is kept whatever its suffix is.
    """
    kept = {
        match: folder
        for match, folder in matches.items()
        if folder or match == wanted or match.suffix in _SUFFIXES
    }
    return {match if folder else _ids_of(match): folder for match, folder in kept.items()}


def _ids_of(path: AnyPlace) -> AnyPlace:
    """Return the file with the ids: the `.bin` of an `.idx`."""
    return path.with_suffix(".bin") if path.suffix == ".idx" else path


def _one(
    path: Place, folder: bool, manifests: dict[Place, Manifest | None], hashes: bool
) -> Corpus:
    if not folder:
        return _of_file(path, manifests, hashes)
    if (
        isinstance(path, Path)
        and not (path / NAME).is_file()
        and (files := sorted(path.glob(f"*{SUFFIX}")))
    ):
        return _joined(str(path), [_of_file(file, manifests, hashes) for file in files])
    return _of_manifest(path, read_manifest(path), None, hashes)


def _of_file(path: Place, manifests: dict[Place, Manifest | None], hashes: bool) -> Corpus:
    if path.suffix == ".npy":
        array = read_array_header(path)
        return Corpus((TokenPart(path, array.dtype, array.tokens, offset=array.offset),), str(path))
    if path.suffix == SUFFIX and not index_path(path).is_file():
        return _of_nanotron(path)
    if index_path(path).is_file() or not index_of(path).is_file():
        index = require_size(path)
        return Corpus(
            (TokenPart(path, index.dtype, index.tokens),), str(path), index.document_separator
        )
    folder = path.parent
    if folder not in manifests:
        manifests[folder] = read_manifest(folder) if (folder / NAME).is_file() else None
    manifest = manifests[folder]
    if manifest is not None and any(shard.name == path.stem for shard in manifest.shards):
        return _of_manifest(folder, manifest, path.stem, hashes)
    header = read_header(path)
    return Corpus((TokenPart(path, header.dtype, header.tokens),), str(path))


def _of_nanotron(path: Place) -> Corpus:
    file = read_nanotron_file(path)
    ends = None if file.documents is None else TokenPart(ends_of(path), "uint64", file.documents)
    return Corpus(
        (TokenPart(path, file.dtype, file.tokens, ends=ends),),
        str(path),
        tokenizer_name=file.tokenizer,
    )


def _of_manifest(folder: Place, manifest: Manifest, name: str | None, hashes: bool) -> Corpus:
    shards = [shard for shard in manifest.shards if name in (None, shard.name)]
    check_shards(folder, manifest, shards, hashes=hashes)
    parts = tuple(
        TokenPart(folder / f"{shard.name}.bin", manifest.dtype, shard.tokens, shard.bin_sha256)
        for shard in shards
    )
    named = folder if name is None else folder / f"{name}.bin"
    largest = max(shard.largest for shard in shards)
    return Corpus(
        parts, str(named), manifest.tokenizer.document_separator, manifest.tokenizer, largest
    )


def _joined(name: str, found: list[Corpus]) -> Corpus:
    first = found[0]
    named = next((corpus for corpus in found if corpus.tokenizer_name is not None), first)
    for other in found[1:]:
        require_same_tokenizer(first, other)
        _require_same_name(named, other)
    largest = [corpus.largest for corpus in found]
    return Corpus(
        tuple(part for corpus in found for part in corpus.parts),
        name,
        first.separator,
        first.tokenizer,
        None if None in largest else max(one for one in largest if one is not None),
        named.tokenizer_name,
    )


def require_same_tokenizer(first: Corpus, other: Corpus) -> None:
    """Refuse two corpora whose ids do not mean the same.

    Raises:
        DataError: their tokenizers differ, or the separators of their documents.
    """
    both = first.tokenizer, other.tokenizer
    if both[0] is not None and both[1] is not None and not both[0].same_ids(both[1]):
        raise DataError(
            f"{first.name} and {other.name} are of different tokenizers: {both[0]} and {both[1]}."
            " Use files of one tokenizer."
        )
    _require_same_name(first, other)
    if first.separator != other.separator:
        raise DataError(
            f"{first.name} and {other.name} do not end documents alike: {_ends(first)},"
            f" {_ends(other)}. Use files of one tokenizer."
        )


def _require_same_name(first: Corpus, other: Corpus) -> None:
    names = first.tokenizer_name, other.tokenizer_name
    if names[0] is not None and names[1] is not None and not same_name(names[0], names[1]):
        raise DataError(
            f"{first.name} and {other.name} are of different tokenizers: {names[0]} and {names[1]}."
            " Use files of one tokenizer."
        )


def _ends(corpus: Corpus) -> str:
    if corpus.separator is not None:
        return f"one has token {corpus.separator}"
    return (
        "one has an index of them"
        if corpus.marks_documents
        else "one does not say which token it has"
    )


def require_tokenizer(corpora: Iterable[Corpus], tokenizer: str) -> None:
    """Refuse corpora that another tokenizer made.

    Args:
        tokenizer: folder of a tokenizer of Transformers, or a name on the hub.

    Raises:
        DataError: a corpus is of another tokenizer, or does not say of which.
    """
    from lightning_3d.app.training.data.tokenization.encoding import load_tokenizer

    wanted = None
    for corpus in corpora:
        if corpus.tokenizer is None and corpus.tokenizer_name is not None:
            _require_name(corpus, tokenizer)
            continue
        wanted = wanted or load_tokenizer(tokenizer).identity
        if corpus.tokenizer is None:
            raise DataError(
                f"{corpus.name} has no {NAME}, so its tokenizer cannot be compared with"
                f" {tokenizer}. Leave data.tokenizer out, or tokenize again with lightning-3d"
                " tokenize."
            )
        if not corpus.tokenizer.same_ids(wanted):
            raise DataError(
                f"{corpus.name} is of another tokenizer than data.tokenizer: {corpus.tokenizer},"
                f" not {wanted}. Tokenize again, or use the model of that tokenizer."
            )


def _require_name(corpus: Corpus, tokenizer: str) -> None:
    """Refuse a corpus that says the name of another tokenizer: more than names cannot be
    compared."""
    if corpus.tokenizer_name is not None and not same_name(corpus.tokenizer_name, tokenizer):
        raise DataError(
            f"{corpus.name} is of another tokenizer than data.tokenizer={tokenizer}: its metadata"
            f" names {corpus.tokenizer_name}. Use data.tokenizer={corpus.tokenizer_name}, or leave"
            " it out if both are the same."
        )


def find_corpora(
    train_path: Any,
    val_path: Any = None,
    tokenizer: str | None = None,
    document_separator: int | None = None,
    check_hashes: bool | None = False,
    find: Callable[..., Corpus] = find_corpus,
) -> tuple[Corpus, Corpus | None]:
    """Find and check the files to train on and those held out; see `find_corpus` and `TokenFiles`.

    Args:
        find: `find_corpus`, or a function like it that finds URLs too.

    Raises:
        DataError: a file is missing, truncated or damaged, or of another tokenizer.
    """
    given = [path for path in (train_path, val_path) if path is not None]
    found = [
        _separated(_find_all(path, find, bool(check_hashes)), document_separator) for path in given
    ]
    if len(found) == 2:
        require_same_tokenizer(*found)
    if tokenizer is not None:
        require_tokenizer(found, tokenizer)
    return found[0], found[1] if len(found) == 2 else None


def _find_all(path: Any, find: Callable[..., Corpus], hashes: bool) -> Corpus:
    """Find a path, or the paths of a list one after the other."""
    found = [find(data_place(one), hashes=hashes) for one in path_list(path)]
    return (
        found[0]
        if len(found) == 1
        else _joined(f"{found[0].name} and {len(found) - 1} more", found)
    )


def _separated(corpus: Corpus, separator: int | None) -> Corpus:
    if separator is None or corpus.separator == separator:
        return corpus
    if corpus.separator is not None:
        raise DataError(
            f"data.document_separator={separator} contradicts {corpus.name}, whose documents end"
            f" with token {corpus.separator}. Leave it out."
        )
    return replace(corpus, separator=separator)


def require_separator(corpus: Corpus | None, options: Mapping[str, Any]) -> None:
    """Refuse files that do not say where documents end, where one of these options of a data module
    needs it. None has no files.

    Raises:
        ConfigError: names the option.
    """
    needs = "data.document_mask=true" if options.get("document_mask") else ""
    if options.get("predict_across_documents") is False and not needs:
        needs = "data.predict_across_documents=false"
    if needs and corpus is not None and not corpus.marks_documents:
        raise ConfigError(
            f"{needs} needs the token that ends a document, and {corpus.name} does not say it. Set"
            " data.document_separator to its id (of a source of a blend:"
            " data.sources.NAME.document_separator)."
        )
