"""A manifest says all about one version's bytes before they travel: order, places, shapes, types, checksums, fence.

What it does not name is not part of the version; a receiver whose bytes differ from it has not received the version.
"""

import msgspec


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor under its Hugging Face name."""

    name: str
    dtype: str  # torch's name without the prefix: "float32", "bfloat16"
    shape: tuple[int, ...]
    bucket: int
    offset: int  # bytes from the bucket's start, aligned to 64
    size: int  # bytes
    checksum: str  # xxh3_128 of the bytes, hexadecimal


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One policy version."""

    schema_version: int = 1
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
