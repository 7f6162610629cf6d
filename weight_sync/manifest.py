"""A manifest says all about one version's bytes before they travel: order, places, shapes, types, checksums, fence.

What it does not name is not part of the version; a receiver whose bytes differ from it has not received the version.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from buffer.errors import ForebayError

SCHEMA_VERSION = 1
ALIGNMENT = 64  # bytes: of a cache line, and of what any kernel asks of a pointer

ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes of one element, by torch's name of the type."""


class ManifestRefused(ForebayError):
    """The bytes are not a manifest that this release can trust."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor under its Hugging Face name."""

    name: str
    dtype: str  # torch's name without the prefix: "float32", "bfloat16"
    shape: tuple[int, ...]
    bucket: int
    offset: int  # bytes from the bucket's start, aligned to 64
    size: int  # bytes
    checksum: str = ""  # xxh3_128 of the bytes, hexadecimal; empty in a layout


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Where each tensor lies: a manifest before there is a version."""

    tensors: tuple[TensorEntry, ...]
    bucket_sizes: tuple[int, ...]  # bytes

    def total_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(self.bucket_sizes)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One policy version."""

    schema_version: int = SCHEMA_VERSION
    version: int
    step: int  # optimizer steps that made it
    fence: int  # fencing token of the publisher's incarnation
    tensors: tuple[TensorEntry, ...]
    bucket_sizes: tuple[int, ...]  # bytes
    probe_token_ids: tuple[int, ...]
    probe_log_probs: tuple[float, ...]  # the trainer's, raw, for tokens 1...

    def total_bytes(self) -> int:
        """Bytes that travel."""
        return sum(self.bucket_sizes)

    def layout(self) -> Layout:
        """The places without the checksums."""
        places = tuple(msgspec.structs.replace(entry, checksum="") for entry in self.tensors)
        return Layout(tensors=places, bucket_sizes=self.bucket_sizes)


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; raises ManifestRefused for a type that does not travel."""
    if dtype not in ITEM_BYTES:
        raise ManifestRefused(
            f"tensors of type {dtype!r} do not travel", cure=f"use one of {', '.join(sorted(ITEM_BYTES))}"
        )
    return math.prod(shape) * ITEM_BYTES[dtype]


def place(tensors: Iterable[tuple[str, str, Sequence[int]]], bucket_bytes: int) -> Iterator[TensorEntry]:
    """Pack (name, dtype, shape) in the given order; a tensor larger than a bucket gets one of its own."""
    names: set[str] = set()
    bucket, end = 0, 0
    for name, dtype, shape in tensors:
        if name in names:
            raise ManifestRefused(f"the tensor {name!r} is given twice", cure="publish each tensor under one name")
        names.add(name)
        size = tensor_bytes(dtype, shape)
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if end > 0 and offset + size > bucket_bytes:
            bucket, offset = bucket + 1, 0
        end = offset + size
        yield TensorEntry(name=name, dtype=dtype, shape=tuple(shape), bucket=bucket, offset=offset, size=size)


def plan_layout(tensors: Iterable[tuple[str, str, Sequence[int]]], bucket_bytes: int) -> Layout:
    """The layout of (name, dtype, shape), in the given order."""
    return layout_of(place(tensors, bucket_bytes))


def layout_of(entries: Iterable[TensorEntry]) -> Layout:
    """The layout that placed entries make; a bucket ends with its last tensor."""
    tensors = tuple(entries)
    sizes: list[int] = []
    for entry in tensors:
        if entry.bucket == len(sizes):
            sizes.append(0)
        sizes[entry.bucket] = entry.offset + entry.size
    return Layout(tensors=tensors, bucket_sizes=tuple(sizes))


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON."""
    return msgspec.json.encode(manifest)


def decode(data: bytes | str) -> Manifest:
    """A manifest from JSON; raises ManifestRefused when it is of another schema or contradicts itself."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise ManifestRefused(
            f"a manifest cannot be read: {error}", cure="run the same release of Forebay on both sides"
        ) from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise ManifestRefused(
            f"the manifest has schema version {manifest.schema_version}, this release reads {SCHEMA_VERSION}",
            cure="run the same release of Forebay on both sides",
        )
    _check_places(manifest)
    return manifest


def digest(manifest: Manifest) -> str:
    """What tells one manifest from any other, also of the same version after a failed publish."""
    return hashlib.blake2b(encode(manifest), digest_size=16).hexdigest()


def _check_places(manifest: Manifest) -> None:
    """Bytes outside a bucket, or two tensors on the same bytes, are never read."""
    end = (0, 0)
    for entry in manifest.tensors:
        inside = (
            0 <= entry.bucket < len(manifest.bucket_sizes)
            and min(entry.shape, default=0) >= 0
            and entry.size == tensor_bytes(entry.dtype, entry.shape)
            and entry.offset % ALIGNMENT == 0
            and entry.offset + entry.size <= manifest.bucket_sizes[entry.bucket]
        )
        if not inside or (entry.bucket, entry.offset) < end:
            raise ManifestRefused(
                f"the manifest's place of {entry.name!r} contradicts its shape, its bucket or the tensor before it",
                cure="run the same release of Forebay on both sides",
            )
        end = (entry.bucket, entry.offset + entry.size)
