"""A communicator broadcasts buckets among the members of one epoch; what it cannot finish in time it reports, and is
then never used again.

Rank 0 is the publisher. The rendezvous is opaque bytes (a store's address for gloo, a root info for HCCL, a unique id
for NCCL) that the publisher makes and the members read from Redis.
"""

from typing import Protocol

import torch


class CommunicatorFailed(Exception):
    """A member was lost or a deadline passed; this epoch is over. The message names whom it waited for."""


class Communicator(Protocol):
    """Membership of one epoch."""

    def broadcast(self, bucket: torch.Tensor, seconds: float) -> None:
        """Send (rank 0) or receive (others) ``bucket``, uint8, shape (bytes,), contiguous, in host memory; raises
        CommunicatorFailed after ``seconds``."""

    def close(self) -> None:
        """Free the epoch's resources; never blocks longer than the transport's stated floor."""


class Transport(Protocol):
    """A kind of communicator: gloo, nccl, hccl."""

    name: str

    def create_rendezvous(self) -> bytes:
        """Called by the publisher for a new epoch; kept alive until the epoch's communicator is closed."""

    def connect(self, rendezvous: bytes, *, epoch: int, rank: int, size: int, seconds: float) -> Communicator:
        """Join the epoch; raises CommunicatorFailed when not all members joined within ``seconds``."""
