"""A journalled step is whole or it is refused: what was trained is on disk, checked, before Redis forgets it.

One file per step lies beside the checkpoints: a magic word, the checksum of the content, the content as MessagePack.
It is written to a temporary name, flushed to the disk, renamed, and the folder flushed too. No Redis is needed to read.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from buffer.errors import ForebayError
from buffer.ledger import Plan
from buffer.records import SCHEMA_VERSION, Group

MAGIC = b"forebay1"
CHECKSUM_BYTES = 32
_NAME = re.compile(r"step-(\d{8,})\.msgpack")


class JournalBroken(ForebayError):
    """A journalled step cannot be read back as it was written."""

    exit_code = 7


class _Entry(msgspec.Struct, frozen=True):
    schema_version: int
    step: int
    prompts: tuple[int, ...]
    version: int
    final: bool
    checkpoint: bool
    groups: tuple[Group, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Entry)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.msgpack"


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=CHECKSUM_BYTES).digest()


def write(folder: str | Path, plan: Plan, groups: Sequence[Group]) -> Path:
    """Put a step's plan and groups on the disk; when it returns they survive a loss of power. Writing a step again
    replaces it whole."""
    numbers = tuple(group.prompt for group in groups)
    if numbers != plan.prompts:
        raise JournalBroken(f"step {plan.step} plans the prompts {plan.prompts}, the groups given are {numbers}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = _encoder.encode(
        _Entry(SCHEMA_VERSION, plan.step, plan.prompts, plan.version, plan.final, plan.checkpoint, tuple(groups))
    )
    path = _path(folder, plan.step)
    temporary = path.with_suffix(".partial")
    try:
        with temporary.open("wb") as file:
            file.write(MAGIC + _checksum(content) + content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        _flush_folder(folder)
    except OSError as error:
        raise JournalBroken(
            f"step {plan.step} cannot be journalled: {error.strerror}", where=str(path), cure="free the disk and resume"
        ) from error
    return path


def read(folder: str | Path, step: int) -> tuple[Plan, list[Group]]:
    """The plan and the groups of a step, in the plan's order; raises JournalBroken when they are not whole."""
    path = _path(Path(folder), step)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise JournalBroken(
            f"step {step} is not in the journal", where=str(path), cure="resume from an earlier checkpoint"
        ) from error
    start = len(MAGIC) + CHECKSUM_BYTES
    content = data[start:]
    if data[: len(MAGIC)] != MAGIC or data[len(MAGIC) : start] != _checksum(content):
        raise JournalBroken(
            f"the journal of step {step} is torn or damaged ({len(data)} bytes)",
            where=str(path),
            cure="restore the file from a backup, or resume from a checkpoint after this step",
        )
    try:
        entry = _decoder.decode(content)
    except msgspec.DecodeError as error:
        raise JournalBroken(
            f"the journal of step {step} is of another release: {error}",
            where=str(path),
            cure="resume with the release that started the run",
        ) from error
    if entry.schema_version != SCHEMA_VERSION or entry.step != step:
        raise JournalBroken(
            f"the file holds step {entry.step} in schema version {entry.schema_version}, "
            f"asked for was step {step} in {SCHEMA_VERSION}",
            where=str(path),
            cure="resume with the release that started the run",
        )
    plan = Plan(step=step, prompts=entry.prompts, version=entry.version, final=entry.final, checkpoint=entry.checkpoint)
    return plan, list(entry.groups)


def steps(folder: str | Path) -> list[int]:
    """The journalled steps, in order."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(int(found[1]) for path in folder.iterdir() if (found := _NAME.fullmatch(path.name)))


def prune(folder: str | Path, before_step: int) -> int:
    """Remove the steps below ``before_step`` (a checkpoint holds what they did) and remains of broken writes."""
    folder = Path(folder)
    old = [_path(folder, step) for step in steps(folder) if step < before_step]
    remains = list(folder.glob("step-*.partial")) if folder.is_dir() else []
    for path in [*old, *remains]:
        path.unlink(missing_ok=True)
    if old or remains:
        _flush_folder(folder)
    return len(old)


def _flush_folder(folder: Path) -> None:
    """A rename is durable once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
