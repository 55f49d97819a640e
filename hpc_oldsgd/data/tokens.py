"""Token ids of a text, made once and kept in a file that all ranks map.

The cache is two files: NAME.npy (ids) and NAME.json (where articles start, vocabulary, SHA-256 over
both). NAME holds a hash of the text and the tokenizer, so a change of either makes a new
cache. A damaged cache fails its checksum and is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..files import lock, write_atomically
from .folders import cache_dirs, cache_places
from .partition import Ints
from .shard import Rows
from .text import encode, load_tokenizer

VERSION = b"1"
Stored = tuple[npt.NDArray[Any], Ints, int]
"""Ids, where articles start, vocabulary."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """A Source of sequences: sample j is tokens j seq ... (j+1) seq, the last one only a target.

    Every token but the first is predicted once; what is left after the last whole sequence is not
    used. The label of a sample is the article it starts in.
    """

    ids: npt.NDArray[Any]
    """Mapped, not read."""
    articles: Ints
    vocab: int
    seq: int
    key: str = ""
    """Of the text and the tokenizer."""

    def __post_init__(self) -> None:
        if self.seq < 1 or len(self.ids) <= self.seq:
            raise UserError(f"a text of {len(self.ids)} tokens has no sequence of {self.seq}")

    @cached_property
    def labels(self) -> Ints:
        starts = np.arange((len(self.ids) - 1) // self.seq) * self.seq
        return np.searchsorted(self.articles, starts, side="right") - 1

    def rows(self, indices: Ints) -> Rows:
        return (self.ids[indices[:, None] * self.seq + np.arange(self.seq + 1)],)


def tokens(
    text: Path,
    tokenizer: tuple[Path, ...],
    seq: int,
    cache: Path | None = None,
    data: Path | None = None,
) -> Tokens:
    """The tokens of a text file: from a cache, or made by the first process that asks.

    The cache is `cache`, or a folder beside `data`, or one in the user's home. A cache that cannot
    be written to can still be read.
    """
    content = text.read_bytes()
    key = _sha256(VERSION, content, *(file.read_bytes() for file in tokenizer))[:16]
    name, data = f"{text.stem}-{key}", data or text.parent
    places = (cache,) if cache is not None else cache_places(data)
    found = next((read for place in places if (read := _read(place / name))), None)
    if found is None:
        found = _make(name, content, tokenizer, [cache] if cache else cache_dirs(data))
    return Tokens(*found, seq, key)


def _make(name: str, content: bytes, files: tuple[Path, ...], folders: Sequence[Path]) -> Stored:
    """In the first folder that has room, by one process while the others wait."""
    full: list[str] = []
    for stem in (folder / name for folder in folders):
        try:
            with lock(stem.with_name(f".{name}.lock")):
                if _read(stem) is None:  # the process before us may have made it
                    _write(stem, content, files)
        except OSError as error:
            full.append(f"{stem}.npy: {error.strerror}")
            continue
        if found := _read(stem):
            return found
        raise UserError(f"the token cache {stem}.npy cannot be read back: delete {stem.parent}")
    raise UserError(
        f"the token cache cannot be written ({'; '.join(full)}): make room, or set XDG_CACHE_HOME "
        "to a disk that has some"
    )


def _write(stem: Path, content: bytes, files: tuple[Path, ...]) -> None:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"the text for {stem.name} is not UTF-8: {error}") from error
    tokenizer = load_tokenizer(files)
    ids, articles = encode(text, tokenizer)
    vocab = tokenizer.get_vocab_size()
    buffer = io.BytesIO()
    np.save(buffer, ids.astype(np.uint16 if vocab <= 1 << 16 else np.uint32), allow_pickle=False)
    meta = {"articles": articles.tolist(), "vocab": vocab}
    meta["sha256"] = _checksum(buffer.getvalue(), meta)
    array, about = _files(stem)
    write_atomically(array, buffer.getvalue(), sync=True)
    write_atomically(about, json.dumps(meta), sync=True)


def _read(stem: Path) -> Stored | None:
    """None if there is no whole cache under this name."""
    with contextlib.suppress(
        OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError
    ):
        array, about = _files(stem)
        meta = json.loads(about.read_bytes())
        if meta["sha256"] == _checksum(array.read_bytes(), meta):
            ids = np.load(array, mmap_mode="r", allow_pickle=False)
            return ids, np.array(meta["articles"], dtype=np.int64), meta["vocab"]
    return None


def _files(stem: Path) -> tuple[Path, Path]:
    """Not by with_suffix: wiki.train-HASH and wiki.test-HASH would both become wiki."""
    return stem.with_name(f"{stem.name}.npy"), stem.with_name(f"{stem.name}.json")


def _checksum(array: bytes, meta: dict[str, Any]) -> str:
    return _sha256(array, json.dumps([meta["articles"], meta["vocab"]]).encode())


def _sha256(*contents: bytes) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()
