"""A manifest says where each byte lies, and is refused when it contradicts itself."""

import msgspec
import pytest

from weight_sync.manifest import (
    ALIGNMENT,
    Manifest,
    ManifestRefused,
    TensorEntry,
    decode,
    digest,
    encode,
    plan_layout,
)

TENSORS = [
    ("embed", "float32", (13, 7)),  # 364 bytes
    ("bias", "bfloat16", (3,)),  # 6
    ("scale", "float32", ()),  # 4
    ("none", "float32", (0, 5)),  # 0
    ("large", "bfloat16", (40, 31)),  # 2480: more than a bucket
    ("counts", "int64", (9,)),  # 72
]


def manifest(**changes: object) -> Manifest:
    layout = plan_layout(TENSORS, 1024)
    entries = tuple(msgspec.structs.replace(e, checksum=f"sum-{e.name}") for e in layout.tensors)
    made = Manifest(
        version=3,
        step=30,
        fence=2,
        tensors=entries,
        bucket_sizes=layout.bucket_sizes,
        probe_token_ids=(5, 6, 7),
        probe_log_probs=(-0.125, -7.1),
    )
    return msgspec.structs.replace(made, **changes)


def replaced(index: int, **changes: object) -> Manifest:
    entries = list(manifest().tensors)
    entries[index] = msgspec.structs.replace(entries[index], **changes)
    return manifest(tensors=tuple(entries))


def test_tensors_are_packed_in_order_aligned_and_a_large_one_alone() -> None:
    layout = plan_layout(TENSORS, 1024)
    assert [(e.name, e.bucket, e.offset, e.size) for e in layout.tensors] == [
        ("embed", 0, 0, 364),
        ("bias", 0, 384, 6),
        ("scale", 0, 448, 4),
        ("none", 0, 512, 0),
        ("large", 1, 0, 2480),
        ("counts", 2, 0, 72),
    ]
    assert layout.bucket_sizes == (512, 2480, 72)
    assert layout.total_bytes() == 3064
    assert all(entry.offset % ALIGNMENT == 0 for entry in layout.tensors)


def test_a_bucket_that_is_exactly_full_takes_no_more() -> None:
    layout = plan_layout([("a", "uint8", (64,)), ("b", "uint8", (64,)), ("c", "uint8", (1,))], 128)
    assert [entry.bucket for entry in layout.tensors] == [0, 0, 1]
    assert layout.bucket_sizes == (128, 1)


def test_a_model_without_tensors_has_no_buckets() -> None:
    assert plan_layout([], 1024).bucket_sizes == ()


def test_a_manifest_comes_back_as_it_was_and_so_does_its_layout() -> None:
    assert decode(encode(manifest())) == manifest()
    assert decode(encode(manifest()).decode()) == manifest()
    assert manifest().layout() == plan_layout(TENSORS, 1024)


def test_the_digest_is_of_everything_in_it() -> None:
    assert digest(manifest()) == digest(decode(encode(manifest())))
    others = [
        manifest(version=4),
        manifest(step=31),
        manifest(fence=3),
        manifest(probe_log_probs=(-0.125, -7.2)),
        replaced(0, checksum="other"),
        replaced(0, name="other"),
    ]
    assert len({digest(manifest()), *map(digest, others)}) == 1 + len(others)


def test_a_name_that_is_given_twice_is_refused() -> None:
    """A tied head has the embedding's name, or another one of its own: never the same one again."""
    with pytest.raises(ManifestRefused, match="'embed' is given twice"):
        plan_layout([*TENSORS, ("embed", "float32", (13, 7))], 1024)


def test_a_type_that_does_not_travel_is_refused_with_those_that_do() -> None:
    with pytest.raises(ManifestRefused, match="'complex64' do not travel\n.*bfloat16.*float32"):
        plan_layout([("a", "complex64", (1,))], 1024)


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (replaced(0, bucket=3), "'embed'"),
        (replaced(0, bucket=-1), "'embed'"),
        (replaced(0, offset=-64), "'embed'"),
        (replaced(0, offset=64), "'bias'"),  # over the tensor after it
        (replaced(1, offset=386), "'bias'"),  # not aligned
        (replaced(1, offset=320), "'bias'"),  # over the tensor before it
        (replaced(4, size=2478), "'large'"),
        (replaced(4, shape=(41, 31)), "'large'"),
        (replaced(4, shape=(-40, -31)), "'large'"),
        (replaced(4, dtype="float32"), "'large'"),
        (replaced(5, shape=(10,), size=80), "'counts'"),  # past the bucket's end
        (replaced(5, dtype="object"), "'object' do not travel"),
        (manifest(tensors=manifest().tensors[::-1]), "'large'"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused_by_name(broken: Manifest, what: str) -> None:
    with pytest.raises(ManifestRefused, match=what):
        decode(encode(broken))


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\xfe", b"[1]", encode(manifest())[:-9]])
def test_what_is_not_a_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestRefused, match="cannot be read"):
        decode(data)


def test_a_manifest_of_another_release_is_refused() -> None:
    with pytest.raises(ManifestRefused, match="schema version 2, this release reads 1"):
        decode(encode(manifest(schema_version=2)))


def test_entries_carry_the_checksum_only_in_a_version() -> None:
    assert all(entry.checksum == "" for entry in plan_layout(TENSORS, 1024).tensors)
    with pytest.raises(AttributeError):
        manifest().tensors[0].size = 1  # type: ignore[misc]
    assert isinstance(manifest().tensors[0], TensorEntry)
