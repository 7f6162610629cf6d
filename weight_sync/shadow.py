"""A shadow holds one whole policy version in host memory, in buckets; it is either whole and checked or unusable.

A shadow lives in one memory-mapped file (in shared memory where there is room), so that the process that receives and
the processes that compute see the same bytes without a copy. Its owner holds a lock on the file as long as it lives:
a file without one was left behind and is removed by the next owner in the same folder.
"""

import fcntl
import mmap
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from buffer.errors import ForebayError
from weight_sync.manifest import Layout, Manifest, TensorEntry, decode, encode

SHARED_MEMORY = Path("/dev/shm")
PREFIX, SUFFIX = "forebay-", ".shadow"
PAGE = mmap.PAGESIZE


class ShadowBroken(ForebayError):
    """The bytes of a version are not those of its manifest."""


@dataclass(frozen=True)
class ShadowReference:
    """Names a filled, verified shadow to another process on this machine."""

    path: str
    """The mapped file."""
    manifest: str
    """The manifest of its content, as JSON (weight_sync.manifest)."""


class Shadow:
    """A file of its owner, mapped; other processes open it by a ShadowReference."""

    def __init__(self, path: Path, descriptor: int, layout: Layout) -> None:
        self.path = path
        self.layout = layout
        self._descriptor = descriptor
        self._buckets = _map_buckets(descriptor, layout.bucket_sizes, mmap.ACCESS_WRITE)

    @property
    def buckets(self) -> Sequence[torch.Tensor]:
        """One uint8 tensor, shape (bytes,), for each bucket, over the file's memory."""
        return self._buckets

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors to their places, cast to the layout's types."""
        places = {entry.name: entry for entry in self.layout.tensors}
        for name, tensor in tensors:
            write_tensor(self._buckets, places.pop(name, None), name, tensor)
        if places:
            raise ShadowBroken(f"no bytes were given for {_some(places)}", cure="publish every tensor of the layout")

    def verify(self, manifest: Manifest) -> None:
        """Raise ShadowBroken, naming the tensor, when bytes differ from the manifest's checksums."""
        for entry in manifest.tensors:
            verify_tensor(self._buckets, entry, manifest.version)

    def reference(self, manifest: Manifest) -> ShadowReference:
        """What another process needs to open this shadow."""
        return ShadowReference(path=str(self.path), manifest=encode(manifest).decode())

    def close(self) -> None:
        """Remove the file; processes that have it mapped keep their view."""
        if self._descriptor >= 0:
            self._buckets = []
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def create_shadow(layout: Layout, folder: str | Path, owner: str) -> Shadow:
    """A shadow for ``layout`` in shared memory, or in ``folder`` where shared memory has no room for it."""
    size = sum(_padded(size) for size in layout.bucket_sizes)
    failed: list[str] = []
    for place in (SHARED_MEMORY, Path(folder)):
        if place == Path(folder):
            place.mkdir(parents=True, exist_ok=True)
        if not place.is_dir():
            continue
        remove_stale(place)
        try:
            return Shadow(*_create_file(place, owner, size), layout)
        except OSError as error:
            failed.append(f"{place}: {error.strerror}")
    raise ShadowBroken(
        f"there is no room for {size} bytes of weights ({'; '.join(failed)})",
        where=str(folder),
        cure="give the container more shared memory (/dev/shm), or the run folder more space",
    )


def open_shadow(reference: ShadowReference) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a shadow under their names, in order, as views of the mapped file. What a reader writes into
    them stays its own."""
    manifest = decode(reference.manifest)
    descriptor = os.open(reference.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        buckets = _map_buckets(descriptor, manifest.bucket_sizes, mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    for entry in manifest.tensors:
        yield entry.name, view(buckets, entry)


def view(buckets: Sequence[torch.Tensor], entry: TensorEntry) -> torch.Tensor:
    """The entry's tensor, on the bucket's memory."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return buckets[entry.bucket][entry.offset : entry.offset + entry.size].view(dtype).reshape(entry.shape)


def write_tensor(buckets: Sequence[torch.Tensor], entry: TensorEntry | None, name: str, tensor: torch.Tensor) -> None:
    """Copy one tensor to its place; raises ShadowBroken when it is not the one that belongs there."""
    if entry is None or tuple(tensor.shape) != entry.shape:
        raise ShadowBroken(
            f"the tensor {name!r} of shape {tuple(tensor.shape)} has no place in the layout"
            + (f", which has the shape {entry.shape} for it" if entry else ""),
            cure="publish the same tensors, once each, at every step",
        )
    view(buckets, entry).copy_(tensor.detach())


def checksum(buckets: Sequence[torch.Tensor], entry: TensorEntry) -> str:
    """xxh3_128 of the entry's bytes, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(
        memoryview(buckets[entry.bucket].numpy())[entry.offset : entry.offset + entry.size]
    )


def verify_tensor(buckets: Sequence[torch.Tensor], entry: TensorEntry, version: int) -> None:
    """Raise ShadowBroken when the entry's bytes differ from its checksum."""
    found = checksum(buckets, entry)
    if found != entry.checksum:
        raise ShadowBroken(
            f"the bytes of {entry.name!r} of version {version} differ from the manifest: "
            f"xxh3_128 is {found}, {entry.checksum} was announced",
            cure="the version is sent again; if this repeats, look for a broken network card or memory",
        )


def remove_stale(folder: Path) -> None:
    """Remove shadows that no living process owns."""
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another user's, or gone by now
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)


def _create_file(folder: Path, owner: str, size: int) -> tuple[Path, int]:
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in owner)
    while True:
        path = folder / f"{PREFIX}{plain}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if size:
                # Reserves the memory: without it, a full /dev/shm would kill the writer later.
                os.posix_fallocate(descriptor, 0, size)
            if path.exists():  # else another owner took it for a stale one before it was locked
                return path, descriptor
        except BlockingIOError:
            pass
        except OSError:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)


def _map_buckets(descriptor: int, sizes: Sequence[int], access: int) -> list[torch.Tensor]:
    """A tensor over each bucket's part of the file; buckets begin at pages."""
    tensors: list[torch.Tensor] = []
    start = 0
    for size in sizes:
        if size == 0:
            tensors.append(torch.empty(0, dtype=torch.uint8))
            continue
        tensors.append(torch.frombuffer(mmap.mmap(descriptor, size, access=access, offset=start), dtype=torch.uint8))
        start += _padded(size)
    return tensors


def _padded(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
