"""The weights of one step are handed over only after those of the step before have arrived, or the run ends with why.

The hand-over copies them, so that training goes on while the publisher's thread sends. It happens on rank 0.
"""

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

import redis
import torch
from weight_sync.proof import make_reference
from weight_sync.publisher import Publication, Publisher

from buffer.ledger import Ledger
from buffer.members import Members
from consumer.model import raw_log_probs
from consumer.settings import ConsumerSettings
from consumer.training import Trainer
from weight_sync.registry import Registry


class Service(Protocol):
    """What publishing needs of the consumer's rank 0."""

    settings: ConsumerSettings
    trainer: Trainer
    client: "redis.Redis"
    ledger: Ledger
    members: Members


class Publications:
    """The publisher and the one publication that may be under way."""

    def __init__(self, service: Service, *, fence: int) -> None:
        self._service, self._fence = service, fence
        self._settings = service.settings
        self._version = service.ledger.next_version()
        self._pending: tuple[Publication, int, int] | None = None
        # Of the initial weights: the trainer has loaded no checkpoint yet.
        self._reference = make_reference(service.trainer.policy(), settings=self._settings)
        self._publisher = Publisher(
            service.client,
            self._settings.run,
            fence=fence,
            transports=list(self._settings.communicators),
            settings=self._settings.weight_sync,
            ledger=service.ledger,
            members=service.members,
        )

    def __enter__(self) -> "Publications":
        registry = Registry(self._service.client, self._settings.run)
        registry.write_reference(self._reference, self._fence)
        self._publisher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._publisher.stop()

    def hand_over(self, step: int) -> int:
        """Give the current weights to the publisher; the version that they will be."""
        token_ids = self._reference.token_ids
        log_probs = raw_log_probs(self._service.trainer.policy(), token_ids)
        publication = self._publisher.publish(step, self._tensors(), token_ids, log_probs)
        version, self._version = self._version, self._version + 1
        self._pending = (publication, version, step)
        return version

    def wait(self) -> tuple[int, int] | None:
        """Wait for the publication under way; its version and step, or None when there is none."""
        if self._pending is None:
            return None
        publication, version, step = self._pending
        # A lost member costs its deadlines once, then the version goes to the members of a new epoch.
        deadlines = self._settings.weight_sync
        publication.wait(2 * (deadlines.join_seconds + deadlines.transfer_seconds))
        self._pending = None
        return version, step

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        dtype = getattr(torch, self._settings.wire_dtype)
        for name, tensor in self._service.trainer.named_tensors():
            yield name, tensor.to(dtype)
