"""The weights of one step are handed over only after those of the step before have arrived, or the run ends with why.

The hand-over copies them, so that training goes on while the publisher's thread sends. It happens on rank 0.
"""

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

import redis
import torch

from buffer.ledger import Ledger
from buffer.members import Members
from consumer.model import load_model, raw_log_probs
from consumer.settings import ConsumerSettings
from consumer.training import Trainer
from weight_sync.proof import make_reference, probe_sequence
from weight_sync.publisher import Publication, Publisher
from weight_sync.registry import Registry, SelfTestReference


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
        self._pending: Publication | None = None
        self._reference = reference_of_initial_weights(self._settings)
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
        self._pending = publication
        return version

    @property
    def next_version(self) -> int:
        """The version that the next hand-over makes."""
        return self._version

    def wait(self) -> None:
        """Wait for the publication under way, if there is one."""
        if self._pending is None:
            return
        # A lost member costs its deadlines once, then the version goes to the members of a new epoch.
        deadlines = self._settings.weight_sync
        self._pending.wait(2 * (deadlines.join_seconds + deadlines.transfer_seconds))
        self._pending = None

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        dtype = getattr(torch, self._settings.wire_dtype)
        for name, tensor in self._service.trainer.named_tensors():
            yield name, tensor.to(dtype)


def reference_of_initial_weights(settings: ConsumerSettings) -> SelfTestReference:
    """What every engine's load-path self-test is judged by; computed by a model of its own, which is dropped again, so
    that it is the same after a resume."""
    model = load_model(settings.model_path)
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def log_probs(tensors: Iterable[tuple[str, torch.Tensor]], token_ids: Sequence[int]) -> list[float]:
        with torch.no_grad():
            for name, tensor in tensors:
                model.get_parameter(name).copy_(tensor)
        return raw_log_probs(model, list(token_ids))

    return make_reference(
        log_probs,
        initial.items,
        noise=settings.weight_sync.self_test_noise,
        seed=settings.seed,
        dtype=settings.wire_dtype,
        token_ids=probe_sequence(model.config.vocab_size, settings.weight_sync.probe_tokens, settings.seed),
    )
