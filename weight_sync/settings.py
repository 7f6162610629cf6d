"""Settings of weight_sync: deadlines, buckets and the bounds of the proof."""

from typing import Literal

from pydantic import Field

from buffer.settings import Settings

CommunicatorName = Literal["gloo", "nccl", "hccl"]
UpdateMode = Literal["in_flight", "drain", "abort_resume"]


class WeightSyncSettings(Settings):
    """How a policy version travels from the consumer to the producers and how it is proved there."""

    bucket_bytes: int = Field(default=64 << 20, ge=1 << 10)
    """Bytes of one bucket: tensors travel packed, one broadcast per bucket."""
    join_seconds: float = Field(default=30.0, gt=0)
    """How long the publisher waits for the members of a new epoch before it goes on without the missing ones."""
    transfer_seconds: float = Field(default=120.0, gt=0)
    """How long one broadcast of a version may take before the epoch is given up."""
    self_test_noise: float = Field(default=0.1, gt=0)
    """Load-path self-test: size of the noise added to each tensor, relative to the tensor's root mean square."""
    probe_tokens: int = Field(default=48, ge=8)
    """Tokens of the fixed sequence whose log-probs the trainer and every engine compare."""
    probe_tolerance_float32: float = Field(default=1e-3, gt=0)
    """Largest mean absolute difference of log-probs, trainer against engine, for a float32 model."""
    probe_tolerance_bfloat16: float = Field(default=0.15, gt=0)
    """The same for a bfloat16 model, whose kernels differ by design."""
