"""Settings of the consumer: algorithm, optimizer, batching, checkpoints; what each rank is handed."""

from typing import Literal

from pydantic import Field

from buffer.settings import BufferSettings, Settings
from weight_sync.settings import CommunicatorName, WeightSyncSettings


class AlgorithmSettings(Settings):
    """The reinforcement-learning algorithm."""

    name: Literal["grpo"] = "grpo"
    """`grpo`: group-normalised advantages, PPO clip (arXiv 2402.03300)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped at 1 + clip_high."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference policy (the initial model) in the loss; 0: no reference is kept."""
    normalise_by_std: bool = True
    """Divide advantages by the group's standard deviation."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over all tokens of a step, or over sequences of their token means."""
    updates_per_step: int = Field(default=1, gt=0)
    """Optimizer updates made from one plan; above 1, the ratio is to the policy at the step's start."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Truncated importance sampling: cap of trainer/engine probability ratio that corrects their mismatch."""


class OptimizerSettings(Settings):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient over all ranks."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine end at 0 at the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""


class CheckpointSettings(Settings):
    """Durable states of the training."""

    every: int = Field(default=20, gt=0)
    """Steps between checkpoints."""
    keep: int = Field(default=2, gt=0)
    """How many to keep; the journal is kept from the oldest on."""


class TrainerSettings(Settings):
    """The consumer pool."""

    ranks: int = Field(default=1, gt=0)
    """Data-parallel ranks."""
    platform: Literal["auto", "cpu", "cuda", "ascend"] = "auto"
    """Hardware of the trainer."""
    parallelism: Literal["ddp"] = "ddp"
    """ColossalAI's layout."""
    dtype: Literal["float32"] = "float32"
    """Type of the master weights and of the computation."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads of one rank; none: half of the cores, shared among the ranks of the machine."""
    micro_batch_tokens: int = Field(default=8192, gt=0)
    """Most tokens (padding included) of one micro-batch."""
    no_progress_seconds: float = Field(default=600.0, gt=0)
    """How long a step may wait for groups before the run stops and names whom it waited for."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """AdamW and its schedule."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Durable states of the training."""


class ConsumerSettings(Settings):
    """All that one consumer rank is handed; composed by `deploy` from the run spec."""

    run: str
    """Name of the run: the prefix of its keys."""
    seed: int
    """The run's seed."""
    folder: str
    """The run folder: checkpoints, journal and TensorBoard events go there."""
    model_path: str
    """Folder of the initial model."""
    wire_dtype: Literal["float32", "bfloat16"]
    """Type that weights travel in: that of the producers."""
    communicators: tuple[CommunicatorName, ...]
    """The kinds of communicator that the pools use."""
    steps: int
    """Optimizer steps of the run."""
    groups_per_step: int
    group_size: int
    max_staleness: int
    evaluation_every: int | None
    """Versions between evaluations; none: no evaluation."""
    resume: bool
    """Go on from the last checkpoint."""
    algorithm: AlgorithmSettings
    settings: TrainerSettings
    """The consumer's own part of the spec."""
    weight_sync: WeightSyncSettings
    buffer: BufferSettings
    redis_url: str
    """Where the buffer is, resolved."""
