"""A shadow is whole or not there, is read by other processes without a copy, and leaves nothing behind."""

from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
import torch

from tests.weight_sync.material import Named, content, contents, weights
from tests.weight_sync.world import processes
from weight_sync import shadow as shadows
from weight_sync.manifest import Layout, Manifest, plan_layout
from weight_sync.shadow import Shadow, ShadowBroken, ShadowReference, checksum, create_shadow, open_shadow


def read_and_spoil(reference: ShadowReference, answers: Connection) -> None:
    """In another process: tell what is there, then overwrite it."""
    tensors = dict(open_shadow(reference))
    answers.send({name: content(tensor) for name, tensor in tensors.items()})
    for tensor in tensors.values():
        tensor.zero_()


def layout_for(tensors: Named) -> Layout:
    return plan_layout([(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors], 1024)


def manifest_of(shadow: Shadow) -> Manifest:
    entries = tuple(
        msgspec.structs.replace(entry, checksum=checksum(shadow.buckets, entry)) for entry in shadow.layout.tensors
    )
    return Manifest(
        version=7,
        step=1,
        fence=1,
        tensors=entries,
        bucket_sizes=shadow.layout.bucket_sizes,
        probe_token_ids=(),
        probe_log_probs=(),
    )


@pytest.fixture
def shadow(tmp_path: Path) -> Iterator[Shadow]:
    made = create_shadow(layout_for(weights()), tmp_path, "owner")
    yield made
    made.close()


def test_what_is_written_is_read_to_the_bit_and_in_order(shadow: Shadow) -> None:
    shadow.write(weights())
    found = list(open_shadow(shadow.reference(manifest_of(shadow))))
    assert [name for name, _ in found] == [name for name, _ in weights()]
    assert contents(found) == contents(weights())


def test_another_process_reads_the_same_bytes_and_cannot_change_them(shadow: Shadow) -> None:
    shadow.write(weights())
    reference = shadow.reference(manifest_of(shadow))
    here, there = processes.Pipe(duplex=False)
    reader = processes.Process(target=read_and_spoil, args=(reference, there), daemon=True)
    reader.start()
    assert here.poll(30)
    assert here.recv() == contents(weights())
    reader.join(10)
    assert reader.exitcode == 0
    shadow.verify(manifest_of(shadow))
    assert contents(list(open_shadow(reference))) == contents(weights())


def test_tensors_are_cast_to_the_layouts_type(tmp_path: Path) -> None:
    shadow = create_shadow(plan_layout([("w", "bfloat16", (3, 3))], 1024), tmp_path, "owner")
    tensor = torch.randn(3, 3)
    shadow.write([("w", tensor)])
    assert content(dict(open_shadow(shadow.reference(manifest_of(shadow))))["w"]) == content(tensor.bfloat16())
    shadow.close()


def test_a_changed_byte_is_refused_and_its_tensor_named(shadow: Shadow) -> None:
    shadow.write(weights())
    manifest = manifest_of(shadow)
    shadow.verify(manifest)
    for entry in manifest.tensors:
        if entry.size:
            shadow.buckets[entry.bucket][entry.offset + entry.size - 1] ^= 1
            with pytest.raises(ShadowBroken, match=f"'{entry.name}' of version 7 differ from the manifest"):
                shadow.verify(manifest)
            shadow.buckets[entry.bucket][entry.offset + entry.size - 1] ^= 1
    shadow.verify(manifest)


def test_a_shadow_that_is_not_filled_wholly_is_refused(shadow: Shadow) -> None:
    with pytest.raises(ShadowBroken, match="no bytes were given for lm_head.weight"):
        shadow.write(weights()[:-1])


def test_a_tensor_that_does_not_belong_is_refused(shadow: Shadow) -> None:
    with pytest.raises(ShadowBroken, match="'other' of shape .* has no place"):
        shadow.write([("other", torch.zeros(2))])
    with pytest.raises(
        ShadowBroken, match=r"shape \(37, 13\) has no place in the layout, which has the shape \(13, 37"
    ):
        shadow.write([("model.embed_tokens.weight", torch.zeros(37, 13))])
    with pytest.raises(ShadowBroken, match="'model.embed_tokens.weight' .* has no place"):
        shadow.write([weights()[0], weights()[0]])


def test_a_closed_shadow_is_gone_and_may_be_closed_again(shadow: Shadow) -> None:
    assert shadow.path.is_file()
    assert shadow.path.stat().st_mode & 0o777 == 0o600
    shadow.close()
    shadow.close()
    assert not shadow.path.exists()
    with pytest.raises(FileNotFoundError):
        list(open_shadow(shadow.reference(_empty())))


def _empty() -> Manifest:
    return Manifest(version=0, step=0, fence=0, tensors=(), bucket_sizes=(), probe_token_ids=(), probe_log_probs=())


def test_readers_keep_their_view_when_the_owner_removes_the_file(shadow: Shadow) -> None:
    shadow.write(weights())
    found = list(open_shadow(shadow.reference(manifest_of(shadow))))
    shadow.close()
    assert contents(found) == contents(weights())


def test_files_without_an_owner_are_removed_and_others_are_kept(
    shadow: Shadow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadows, "SHARED_MEMORY", tmp_path)
    left_behind, alive = tmp_path / "forebay-dead-1-x.shadow", tmp_path / "mine"
    for path in (left_behind, alive):
        path.write_bytes(b"x")
    first = create_shadow(layout_for(weights()), tmp_path, "first")
    second = create_shadow(layout_for(weights()), tmp_path, "second")
    assert not left_behind.exists()
    assert alive.exists() and first.path.exists() and second.path.exists()
    first.close()
    second.close()


def test_without_room_in_shared_memory_the_run_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadows, "SHARED_MEMORY", Path("/proc"))  # nobody can create files there
    shadow = create_shadow(layout_for(weights()), tmp_path / "new", "owner")
    assert shadow.path.parent == tmp_path / "new"
    shadow.close()
    assert list((tmp_path / "new").iterdir()) == []


def test_without_room_anywhere_the_error_says_how_much_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadows, "SHARED_MEMORY", tmp_path)
    huge = plan_layout([("w", "float32", (1 << 44,))], 1024)
    with pytest.raises(ShadowBroken, match="no room for 70368744177664 bytes"):
        create_shadow(huge, tmp_path, "owner")
    assert list(tmp_path.iterdir()) == []


def test_owners_names_cannot_leave_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadows, "SHARED_MEMORY", tmp_path)
    shadow = create_shadow(layout_for(weights()), tmp_path, "../a b/c")
    assert shadow.path.parent == tmp_path
    shadow.close()
