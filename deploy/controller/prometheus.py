"""Prometheus reads the same numbers as people: those of the status; a number that is not known has no sample."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deploy.status import Status

Samples = Iterable[tuple[tuple[str, ...], float | None]]


def exposition(status: Status) -> bytes:
    """The status in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(status))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        run = (status.run,)
        yield _gauge("step", "Last optimizer step trained.", (), [(run, status.step)])
        yield _gauge("steps", "Optimizer steps of the run.", (), [(run, status.steps)])
        yield _gauge("version", "Newest published policy version.", (), [(run, status.version)])
        yield _gauge("reward", "Mean reward of the newest step.", (), [(run, status.reward)])
        accuracy = status.accuracy.value if status.accuracy else None
        yield _gauge("accuracy", "Newest held-out accuracy.", (), [(run, accuracy)])
        yield _gauge(
            "response_length_tokens", "Mean completion of the newest step.", (), [(run, status.response_length)]
        )
        yield _gauge("staleness_versions", "Mean staleness of the newest step.", (), [(run, status.staleness)])
        yield _gauge(
            "mismatch", "Mean difference of trainer and engine log-probs, newest step.", (), [(run, status.mismatch)]
        )
        yield _gauge("eta_seconds", "Expected time until the last step.", (), [(run, status.eta_seconds)])
        counts, dropped = status.ledger.counts, status.ledger.dropped
        yield _gauge(
            "prompts", "Prompts by state.", ("state",), [((*run, state), count) for state, count in counts.items()]
        )
        yield _gauge(
            "prompts_dropped",
            "Dropped prompts by reason.",
            ("reason",),
            [((*run, reason), count) for reason, count in dropped.items()],
        )
        sizes = {
            "stored": status.ledger.stored_bytes,
            "reserved": status.ledger.reserved_bytes,
            "budget": status.ledger.budget_bytes,
        }
        yield _gauge(
            "buffer_bytes", "Bytes of groups.", ("kind",), [((*run, kind), size) for kind, size in sizes.items()]
        )
        producers = [((*run, producer.name, producer.pool), producer) for producer in status.producers]
        labels = ("producer", "pool")
        yield _gauge("producer_alive", "1: it reports.", labels, [(at, float(p.alive)) for at, p in producers])
        yield _gauge("producer_version", "Version it has proved.", labels, [(at, p.version) for at, p in producers])
        yield _gauge("producer_running", "Prompts in flight.", labels, [(at, p.running) for at, p in producers])
        yield _gauge(
            "producer_tokens_per_second",
            "Tokens generated per second.",
            labels,
            [(at, p.tokens_per_second) for at, p in producers],
        )
        pools = [((*run, pool.name), pool) for pool in status.pools]
        yield _gauge("pool_desired", "Replicas that it is to have.", ("pool",), [(at, p.desired) for at, p in pools])
        yield _gauge("pool_running", "Replicas that report and stay.", ("pool",), [(at, p.running) for at, p in pools])
        yield _gauge("pool_draining", "Replicas told to drain.", ("pool",), [(at, p.draining) for at, p in pools])
        yield _gauge(
            "pool_tokens_per_second",
            "Tokens generated per second.",
            ("pool",),
            [(at, p.tokens_per_second) for at, p in pools],
        )
        yield _gauge(
            "pool_staleness_versions",
            "Mean staleness of its newest planned groups.",
            ("pool",),
            [(at, p.staleness) for at, p in pools],
        )
        alive = float(status.consumer.alive) if status.consumer else None
        yield _gauge("consumer_alive", "1: it reports.", (), [(run, alive)])


def _gauge(name: str, help_text: str, labels: tuple[str, ...], samples: Samples) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"forebay_{name}", help_text, labels=("run", *labels))
    for values, number in samples:
        if number is not None:
            family.add_metric(values, number)
    return family
