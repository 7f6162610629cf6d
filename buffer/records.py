"""Records that cross between services are typed, versioned data: they can be read by anyone and can run nothing.

Arrays travel as raw little-endian bytes (no per-element encoding): token ids and versions as int32, log-probs as
float32. A record of another ``schema_version`` is refused, never guessed at.
"""

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from buffer.errors import ForebayError

SCHEMA_VERSION = 1

Outcome = Literal["scored", "unscorable", "failed"]
FinishReason = Literal["stop", "length", "abort"]


class RecordRefused(ForebayError):
    """The bytes are not a record of this schema version."""


def pack_int32(values: "NDArray[np.int32] | list[int] | tuple[int, ...]") -> bytes:
    """Integers as raw little-endian int32."""
    return np.asarray(values, dtype="<i4").tobytes()


def pack_float32(values: "NDArray[np.float32] | list[float] | tuple[float, ...]") -> bytes:
    """Floats as raw little-endian float32."""
    return np.asarray(values, dtype="<f4").tobytes()


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of a prompt, as the engine gave it, with its reward.

    ``token_ids`` (int32), ``log_probs`` (float32, natural log, of the *processed* distribution that was sampled from)
    and ``versions`` (int32, the policy version that sampled each token) have one element per completion token.
    """

    token_ids: bytes
    log_probs: bytes
    versions: bytes
    finish_reason: FinishReason
    text: str
    outcome: Outcome
    reward: float = 0.0  # meaningful only when outcome == "scored"
    reward_parts: dict[str, float] = {}
    sampling_seed: int = 0

    def tokens(self) -> NDArray[np.int32]:
        """Completion token ids, shape (length,)."""
        return np.frombuffer(self.token_ids, dtype="<i4")

    def behaviour_log_probs(self) -> NDArray[np.float32]:
        """Log-probs of the behaviour policy, shape (length,)."""
        return np.frombuffer(self.log_probs, dtype="<f4")

    def token_versions(self) -> NDArray[np.int32]:
        """Policy version per token, shape (length,)."""
        return np.frombuffer(self.versions, dtype="<i4")


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters that a group was generated with; they enter the trainer's log-probs."""

    temperature: float
    top_p: float
    top_k: int  # 0: off
    min_p: float
    max_tokens: int


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The n samples of one prompt."""

    schema_version: int = SCHEMA_VERSION
    prompt: int  # the ledger's number of the prompt: pass * rows + position in the pass's order
    row: int  # row of the dataset
    pass_number: int
    task: str
    prompt_token_ids: bytes
    samples: tuple[Sample, ...]
    sampling: Sampling
    producer: str  # member id
    pool: str
    generation_seconds: float = 0.0
    scoring_seconds: float = 0.0

    def prompt_tokens(self) -> NDArray[np.int32]:
        """Prompt token ids, shape (length,)."""
        return np.frombuffer(self.prompt_token_ids, dtype="<i4")

    def oldest_version(self) -> int:
        """The version that the oldest token was sampled with; a group's staleness counts from it."""
        return min((int(s.token_versions().min()) for s in self.samples if s.versions), default=-1)

    def trained_samples(self) -> tuple[Sample, ...]:
        """Samples that may train: a failed or unscorable one never trains (as 0 or otherwise)."""
        return tuple(s for s in self.samples if s.outcome == "scored")


_encoder = msgspec.msgpack.Encoder()
_group_decoder = msgspec.msgpack.Decoder(Group)


def encode_group(group: Group) -> bytes:
    """The group as MessagePack."""
    return _encoder.encode(group)


def decode_group(data: bytes) -> Group:
    """The group in ``data``; raises RecordRefused for anything else."""
    try:
        group = _group_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise RecordRefused(f"a stored group cannot be read: {error}", cure="run producers of this release") from error
    if group.schema_version != SCHEMA_VERSION:
        raise RecordRefused(
            f"a stored group has schema version {group.schema_version}, this release reads {SCHEMA_VERSION}",
            cure="let the run finish with the release that started it",
        )
    return group
