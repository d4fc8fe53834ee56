"""The file of one node of kept prefixes: its tokens and the rows of all layers, in safetensors' format.

A file `KEY.safetensors` has the tensors

    tokens     int32 [n]: what the node stands for; the tokens of the sink first, if it is the first node of a sequence
    sink_rows  [layers, G, sink, 2, D]: rows of the sink, in files of first nodes alone
    rows       [layers, G, m, 2, D]: rows of the tokens behind the sink

and in its metadata the engine that wrote it, the keys of the node and of its parent, and the SHA-256 of all tensors. The key
is a hash of the parent's key and the tokens (tree.chained_key), so these need no checksum of their own.

Written and read here, not by the safetensors package, because the rows of an extent go from one buffer to the file and back
without further copies, and outside of Python's interpreter lock.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvseek.core.config import EXTENT_TOKENS, EngineConfig
from kvseek.core.private_files import PrivateFileError, open_own_file

from .tree import TOKEN_BYTES, chained_key

FORMAT = "kvseek prefix 1"
SUFFIX = ".safetensors"
HEADER_BYTES = 4096  # more than a file of ours has before its tensors
MOST_HEADER_BYTES = 1 << 16  # of a file that may be one
PIECE_BYTES = 1 << 20  # worked on without a pause, in about a millisecond
FILE_MODE = 0o600  # tokens are in the file
Part = tuple[str, str, tuple[int, ...], int]  # of a file: a tensor's name, dtype, shape and bytes
METADATA = ("format", "engine", "model", "method", "key", "parent", "sha256")
DTYPES = {"float32": "F32", "bfloat16": "BF16"}  # safetensors' names
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


class ForeignFileError(Exception):
    """A file that kvseek did not write, or another engine or version of it; the message names it."""


class DamagedFileError(Exception):
    """A file of a prefix whose contents are not what was written; the message names it."""


@dataclass(frozen=True)
class RowShape:
    """Sizes of an engine's rows; `row_bytes` are those of one key and one value."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    row_bytes: int
    sink: int

    @classmethod
    def of(cls, config: EngineConfig) -> RowShape:
        """Return the sizes of the rows of an engine."""
        model = config.model
        row_bytes = 2 * model.head_dim * ELEMENT_BYTES[config.dtype]
        return cls(
            len(model.row_layers), model.num_kv_heads, model.head_dim, config.dtype, row_bytes, config.cache.sink
        )

    @property
    def most_file_bytes(self) -> int:
        """Bytes of the largest file: of an extent, and of the sink before it."""
        return HEADER_BYTES + self.data_bytes(self.sink + EXTENT_TOKENS, first=True)

    def parts(self, tokens: int, first: bool) -> list[Part]:
        """List the tensors of a file of `tokens` tokens, in order."""
        sink = self.sink if first else 0
        listed: list[Part] = [("tokens", "I32", (tokens,), tokens * TOKEN_BYTES)]
        rows = [("sink_rows", sink)] * first + [("rows", tokens - sink)]
        for name, count in rows:
            shape = (self.layers, self.kv_heads, count, 2, self.head_dim)
            listed.append((name, DTYPES[self.dtype], shape, self.layers * self.kv_heads * count * self.row_bytes))
        return listed

    def data_bytes(self, tokens: int, first: bool) -> int:
        """Return the bytes of all tensors of a file."""
        return sum(size for *_, size in self.parts(tokens, first))


@dataclass(frozen=True)
class Origin:
    """Who writes files: a digest of all that an engine's rows depend on, and names that a person knows."""

    engine: str
    model: str
    method: str


@dataclass(frozen=True)
class Entry:
    """What is known of a file without its rows.

    Attributes
    ----------
    before : bytes
        Key of the node before it, or the root key of its salt.
    first : bool
        Whether it is the first node of a sequence.
    tokens : bytes
        Packed as tree.pack_tokens packs them.
    data_start, size : int
        Bytes before the tensors, and of the whole file.
    """

    path: Path
    origin: Origin
    key: bytes
    before: bytes
    first: bool
    tokens: bytes
    sha256: str
    data_start: int
    size: int

    @property
    def token_count(self) -> int:
        """Tokens that the node stands for."""
        return len(self.tokens) // TOKEN_BYTES


def file_name(key: bytes) -> str:
    """Return the name of a node's file."""
    return key.hex() + SUFFIX


def pieces(data: memoryview, pause: Callable[[], None]) -> Iterator[memoryview]:
    """Cut a buffer into pieces of PIECE_BYTES, and call `pause` after each of them has been worked on."""
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]
        pause()


def write_file(
    folder: Path,
    origin: Origin,
    shape: RowShape,
    before: bytes,
    first: bool,
    tokens: bytes,
    data: memoryview,
    pause: Callable[[], None],
) -> Entry:
    """Write the file of a node, whose tensors are in `data` one after the other; it appears whole or not at all.

    `pause` is called between pieces of the work, some milliseconds long.

    Nothing is flushed to the disk: a file that a power failure tears has another checksum, and costs no more than the time to
    read its tokens again. Raises OSError; then there is no file.
    """
    key = chained_key(before, tokens)
    hashed = hashlib.sha256()
    for piece in pieces(data, pause):
        hashed.update(piece)
    digest = hashed.hexdigest()
    values = (FORMAT, origin.engine, origin.model, origin.method, key.hex(), before.hex(), digest)
    header: dict[str, Any] = {"__metadata__": dict(zip(METADATA, values, strict=True))}
    start = 0
    for name, dtype, dimensions, size in shape.parts(len(tokens) // TOKEN_BYTES, first):
        header[name] = {"dtype": dtype, "shape": dimensions, "data_offsets": [start, start + size]}
        start += size
    assert start == len(data), "the buffer holds the tensors and nothing else"
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned in mapped files
    path = folder / file_name(key)
    new = folder / f".{key.hex()}.new"
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE), "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for piece in pieces(data, pause):
                file.write(piece)
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return Entry(path, origin, key, before, first, tokens, digest, 8 + len(text), 8 + len(text) + len(data))


def read_entry(path: Path) -> Entry:
    """Read all of a file but its rows.

    Raises
    ------
    ForeignFileError
        It is no file of a prefix, or one of another format version, a link, or another user's.
    DamagedFileError
        It has the name of one, but is cut short, or says what cannot be.
    OSError
    """
    if path.suffix != SUFFIX or len(path.stem) != 32 or not set(path.stem) <= set("0123456789abcdef"):
        raise ForeignFileError(f"{path} is no file of a prefix")
    try:
        descriptor = open_own_file(path)
    except PrivateFileError as error:
        raise ForeignFileError(str(error)) from None
    with open(descriptor, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        try:
            if length > MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
            metadata = header["__metadata__"]
            if not str(metadata.get("format")).startswith(FORMAT.rsplit(" ", 1)[0]):
                raise ForeignFileError(f"{path} is no file of a prefix, although it has the name of one")
            if metadata["format"] != FORMAT:
                raise ForeignFileError(f"{path} has the format {metadata['format']!r}: this kvseek reads {FORMAT!r}")
            return _entry(path, header, metadata, 8 + length, size, file.read(_end(header, "tokens")))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise DamagedFileError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _entry(
    path: Path, header: Mapping[str, Any], metadata: Mapping[str, str], data_start: int, size: int, tokens: bytes
) -> Entry:
    key, before = bytes.fromhex(metadata["key"]), bytes.fromhex(metadata["parent"])
    end = max(_end(header, name) for name in header if name != "__metadata__")
    if data_start + end != size:
        raise ValueError(f"its header speaks of {data_start + end} bytes, it has {size}")
    if chained_key(before, tokens) != key or path.stem != key.hex():
        raise ValueError("its key is not that of its tokens")
    origin = Origin(*(str(metadata[name]) for name in ("engine", "model", "method")))
    return Entry(path, origin, key, before, "sink_rows" in header, tokens, metadata["sha256"], data_start, size)


def _end(header: Mapping[str, Any], name: str) -> int:
    return int(header[name]["data_offsets"][1])


def read_data(entry: Entry, buffer: memoryview, pause: Callable[[], None]) -> None:
    """Read all tensors of a file into a buffer of their size; `pause` is called between pieces of the work.

    Raises
    ------
    DamagedFileError
        They are not what was written.
    OSError
    """
    hashed = hashlib.sha256()
    try:
        descriptor = open_own_file(entry.path)
    except PrivateFileError as error:
        raise DamagedFileError(str(error)) from None
    with open(descriptor, "rb") as file:
        file.seek(entry.data_start)
        for piece in pieces(buffer, pause):
            if file.readinto(piece) < len(piece):
                raise DamagedFileError(f"{entry.path} is damaged: it ends before {len(buffer)} bytes of tensors")
            hashed.update(piece)
    if (found := hashed.hexdigest()) != entry.sha256:
        raise DamagedFileError(f"{entry.path} is damaged: expected SHA-256 {entry.sha256}, found {found}")
