"""What the consumer's tests train on: a tiny model, settings, and groups with made-up completions."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from buffer.records import Group, Sample, Sampling, pack_float32, pack_int32
from buffer.settings import BufferSettings
from consumer.settings import (
    AlgorithmSettings,
    CheckpointSettings,
    ConsumerSettings,
    OptimizerSettings,
    TrainerSettings,
)
from weight_sync.settings import WeightSyncSettings

VOCAB = 260


def make_settings(
    model: Path,
    folder: Path,
    *,
    algorithm: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    **other: Any,
) -> ConsumerSettings:
    """Settings of a small run."""
    values: dict[str, Any] = {
        "run": "test",
        "seed": 1,
        "folder": str(folder),
        "model_path": str(model),
        "wire_dtype": "float32",
        "communicators": ("gloo",),
        "steps": 4,
        "groups_per_step": 3,
        "group_size": 4,
        "max_staleness": 1,
        "evaluation_every": None,
        "resume": False,
        "weight_sync": WeightSyncSettings(),
        "buffer": BufferSettings(heartbeat_seconds=1.0),
        "redis_url": "redis://127.0.0.1:1/0",
        "algorithm": AlgorithmSettings(**(algorithm or {})),
        "settings": TrainerSettings(
            threads=1,
            platform="cpu",
            optimizer=OptimizerSettings(**{"learning_rate": 1e-3, **(optimizer or {})}),
            checkpoint=CheckpointSettings(**(checkpoint or {})),
            **(trainer or {}),
        ),
    }
    return ConsumerSettings(**(values | other))


def make_groups(
    count: int, *, size: int = 4, seed: int = 0, sampling: Sampling | None = None, version: int = 0, first: int = 0
) -> list[Group]:
    """Groups of random completions of unlike lengths, rewards 0 and 1, behaviour log-probs near those of the model."""
    random = np.random.default_rng(seed)
    sampling = sampling or Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=16)
    groups = []
    for number in range(count):
        samples = []
        for position in range(size):
            length = int(random.integers(1, 12))
            samples.append(
                Sample(
                    token_ids=pack_int32(random.integers(4, VOCAB, length).tolist()),
                    log_probs=pack_float32((-5.5 + 0.3 * random.standard_normal(length)).tolist()),
                    versions=pack_int32([version] * length),
                    finish_reason="stop" if length < 11 else "length",
                    text="",
                    outcome="scored",
                    reward=float(position % 2 if position else random.integers(0, 2)),
                    reward_parts={"exact": 1.0},
                )
            )
        groups.append(
            Group(
                prompt=first + number,
                row=first + number,
                pass_number=0,
                task="default",
                prompt_token_ids=pack_int32(random.integers(4, VOCAB, int(random.integers(2, 9))).tolist()),
                samples=tuple(samples),
                sampling=sampling,
                producer="producer-0",
                pool="producer",
            )
        )
    return groups


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients by name."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
