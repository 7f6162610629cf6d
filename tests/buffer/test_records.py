"""Records are typed, versioned data: exact after a round trip, refused when they are anything else."""

import msgspec
import numpy as np
import pytest

from buffer.ledger import Lease
from buffer.records import RecordRefused, decode_group, encode_group
from tests.buffer.world import make_group

LEASE = Lease(prompt=7, ticket=1, token=1, row=3, pass_number=0, task="default", deadline_ms=0)


def test_a_group_is_the_same_after_a_round_trip() -> None:
    group = make_group(LEASE, version=5, length=4)
    again = decode_group(encode_group(group))
    assert again == group
    assert again.samples[0].tokens().tolist() == [0, 1, 2, 3]
    assert again.samples[0].behaviour_log_probs().dtype == np.float32
    assert again.oldest_version() == 5


def test_token_arrays_travel_as_raw_little_endian_bytes() -> None:
    group = make_group(LEASE, length=1000)
    assert len(group.samples[0].token_ids) == 4000
    assert len(encode_group(group)) < 2 * 3 * 4000 + 1000


def test_a_group_of_another_schema_version_is_refused() -> None:
    other = msgspec.structs.replace(make_group(LEASE), schema_version=2)
    with pytest.raises(RecordRefused, match="schema version 2"):
        decode_group(encode_group(other))


@pytest.mark.parametrize("data", [b"", b"\x80", b"no record", encode_group(make_group(LEASE))[:-5]])
def test_bytes_that_are_no_group_are_refused(data: bytes) -> None:
    with pytest.raises(RecordRefused):
        decode_group(data)


def test_only_scored_samples_may_train() -> None:
    group = make_group(LEASE)
    failed = msgspec.structs.replace(group.samples[0], outcome="failed")
    group = msgspec.structs.replace(group, samples=(failed, group.samples[1]))
    assert group.trained_samples() == (group.samples[1],)
