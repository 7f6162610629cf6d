"""What lies in Redis about weights: fenced, versioned, and its history of proofs bounded."""

import msgspec
import pytest
import redis

from buffer.errors import Fenced, ForebayError
from weight_sync import registry
from weight_sync.manifest import Manifest, ManifestRefused
from weight_sync.registry import Current, Epoch, ProofRecord, ReceiverRecord, Registry, Seat, SelfTestReference


@pytest.fixture
def kept(client: "redis.Redis", request: pytest.FixtureRequest) -> Registry:
    """The registry of a run named for the test."""
    return Registry(client, request.node.name)


def manifest(fence: int, version: int = 0, **changes: int) -> Manifest:
    return Manifest(
        version=version,
        step=version,
        fence=fence,
        tensors=(),
        bucket_sizes=(),
        probe_token_ids=(1, 2),
        probe_log_probs=(-1.0,),
        **changes,  # type: ignore[arg-type]
    )


def epoch(fence: int, number: int = 1) -> Epoch:
    return Epoch(fence=fence, number=number, transport="gloo", phase="open", seats=(Seat("p0", 3),), rendezvous=b"\0x")


def current(fence: int, version: int = 0) -> Current:
    return Current(fence=fence, version=version, step=version, manifest="digest")


def reference() -> SelfTestReference:
    return SelfTestReference(
        seed=1, dtype="float32", scales={"w": 0.5}, token_ids=(1, 2), log_probs=(-1.5,), noisy_log_probs=(-2.5,)
    )


def proof(version: int, member: str = "p0") -> ProofRecord:
    return ProofRecord(member=member, incarnation=1, version=version, layout="l", checksums_ok=True, probe_max=version)


def test_what_the_publisher_writes_is_read_as_it_was(kept: Registry) -> None:
    assert (kept.epoch("gloo"), kept.manifest(), kept.current(), kept.reference()) == (None, None, None, None)
    kept.write_epoch(epoch(4))
    kept.write_manifest(manifest(4))
    kept.write_current(current(4))
    kept.write_reference(reference(), 4)
    assert kept.epoch("gloo") == epoch(4)
    assert kept.epoch("hccl") is None
    assert kept.manifest() == manifest(4)
    assert kept.current() == current(4)
    assert kept.reference() == reference()


def test_an_older_publisher_is_refused_and_changes_nothing(kept: Registry) -> None:
    kept.write_current(current(5, version=7))
    for write in (
        lambda: kept.write_epoch(epoch(4)),
        lambda: kept.write_manifest(manifest(4)),
        lambda: kept.write_current(current(4, version=8)),
        lambda: kept.write_reference(reference(), 4),
        lambda: kept.next_epoch(4),
        lambda: kept.check_fence(4),
    ):
        with pytest.raises(Fenced, match="its fence is 5, this one's 4"):
            write()
    assert kept.current() == current(5, version=7)
    assert (kept.epoch("gloo"), kept.manifest(), kept.reference()) == (None, None, None)


def test_the_same_publisher_and_a_newer_one_may_write(kept: Registry) -> None:
    kept.write_current(current(5, version=7))
    kept.write_current(current(5, version=8))
    kept.write_current(current(6, version=9))
    assert kept.current() == current(6, version=9)


def test_numbers_of_epochs_never_repeat_also_for_the_next_publisher(kept: Registry) -> None:
    numbers = [kept.next_epoch(1), kept.next_epoch(1), kept.next_epoch(2)]
    assert numbers == sorted(set(numbers))


def test_a_record_of_another_schema_version_is_refused(kept: Registry, client: "redis.Redis") -> None:
    kept.write_manifest(manifest(1, schema_version=2))
    with pytest.raises(ManifestRefused, match="schema version 2, this release reads 1"):
        kept.manifest()
    kept.write_epoch(msgspec.structs.replace(epoch(1), schema_version=2))
    with pytest.raises(ForebayError, match="Epoch in Redis has another schema version"):
        kept.epoch("gloo")
    kept.write_receiver(ReceiverRecord(schema_version=9, member="p0", incarnation=1, transport="gloo", beat=1))
    with pytest.raises(ForebayError, match="ReceiverRecord in Redis has another schema version"):
        kept.receivers()


def test_a_record_that_cannot_be_read_is_named(kept: Registry, client: "redis.Redis") -> None:
    client.set(kept._key("current"), b'{"version": "seven"}')
    with pytest.raises(ForebayError, match="a Current in Redis cannot be read"):
        kept.current()


def test_a_receiver_signs_out_only_as_itself(kept: Registry) -> None:
    record = ReceiverRecord(member="p0", incarnation=2, transport="gloo", beat=1)
    kept.write_receiver(record)
    kept.remove_receiver("p0", 1)
    assert kept.receivers() == {"p0": record}
    kept.remove_receiver("p0", 2)
    assert kept.receivers() == {}


def test_a_waiter_is_woken_by_a_write_and_sleeps_until_then(kept: Registry) -> None:
    seen = kept.last_change()
    assert kept.wait_change(seen, 0.05) == seen
    kept.write_current(current(1))
    woken = kept.wait_change(seen, 10)
    assert woken != seen
    assert kept.wait_change(woken, 0.05) == woken


def test_proofs_are_the_newest_of_each_replica_and_the_history_has_all_oldest_first(kept: Registry) -> None:
    for version, member in ((0, "p0"), (0, "p1"), (1, "p1"), (1, "p0")):
        kept.write_proof(proof(version, member))
    assert {member: record.version for member, record in kept.proofs().items()} == {"p0": 1, "p1": 1}
    history = kept.proof_history()
    assert [(record.version, record.member) for record in history] == [(0, "p0"), (0, "p1"), (1, "p1"), (1, "p0")]
    assert [record.time for record in history] == sorted(record.time for record in history)
    assert history[-1] == kept.proofs()["p0"]


def test_the_history_of_proofs_is_bounded_and_drops_the_oldest(kept: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept.proof_history() == []
    monkeypatch.setattr(registry, "PROOFS_KEPT", 5)
    for version in range(12):
        kept.write_proof(proof(version))
    assert [record.version for record in kept.proof_history()] == [7, 8, 9, 10, 11]
