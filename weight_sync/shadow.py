"""A shadow holds one whole policy version in host memory, packed in buckets; it is either whole and checked or unusable.

A shadow lives in one memory-mapped file (in shared memory where there is room), so that the process that receives and
the processes that compute see the same bytes without a copy.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ShadowReference:
    """Names a filled, verified shadow to another process on this machine."""

    path: str
    """The mapped file."""
    manifest: str
    """The manifest of its content, as JSON (weight_sync.manifest)."""
