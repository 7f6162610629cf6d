"""Every rank makes the same division of a step: each sample is in exactly one micro-batch of exactly one rank.

Samples are dealt to ranks by tokens and packed, sorted by length and padded on the right, into micro-batches whose
tokens, padding included, stay within a bound. The weight of a token is fixed before the division, so the division
does not show in the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from buffer.errors import TrainingFailed
from buffer.records import Group, Sample, Sampling
from consumer.algorithms.grpo import group_advantages, token_weights
from consumer.settings import AlgorithmSettings

NO_TRUNCATION = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=1)


@dataclass(frozen=True)
class TrainingSample:
    """A sample with all that its loss needs."""

    index: int  # position in the step, over all groups
    tokens: NDArray[np.int32]  # prompt and completion
    prompt_length: int
    behaviour: NDArray[np.float32]  # per completion token
    versions: NDArray[np.int32]
    advantage: float
    weight: float  # of each of its tokens
    sampling: Sampling


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward pass. Per-token tensors are flat over the completion tokens, row after row."""

    indices: tuple[int, ...]  # of the samples, row by row
    lengths: tuple[int, ...]  # completion tokens, row by row
    input_ids: torch.Tensor  # (rows, width)
    attention_mask: torch.Tensor  # (rows, width)
    targets: torch.Tensor  # bool (rows, width): the token is of a completion
    behaviour: torch.Tensor
    versions: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    sampling: Sampling

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on another device."""
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return MicroBatch(**{**vars(self), **moved})


def split_updates(groups: Sequence[Group], updates: int) -> list[Sequence[Group]]:
    """The groups of each optimizer update of a step, in order: each group is in one of them, none trains twice."""
    if updates > len(groups):
        raise TrainingFailed(
            f"a step of {len(groups)} groups cannot be split over {updates} optimizer updates",
            where="algorithm.updates_per_step",
            cure="set updates_per_step to at most groups_per_step",
        )
    bounds = [len(groups) * i // updates for i in range(updates + 1)]
    return [groups[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def training_samples(groups: Sequence[Group], algorithm: AlgorithmSettings, first_index: int) -> list[TrainingSample]:
    """The samples of one optimizer update: scored, with at least one token; advantages are per group."""
    chosen: list[tuple[Group, Sample, float]] = []
    for group in groups:
        trained = group.trained_samples()
        advantages = group_advantages([s.reward for s in trained], normalise_by_std=algorithm.normalise_by_std)
        for sample, advantage in zip(trained, advantages, strict=True):
            if len(sample.tokens()):
                _refuse_unusable(group, sample, float(advantage))
                chosen.append((group, sample, float(advantage)))
    weights = token_weights([len(sample.tokens()) for _, sample, _ in chosen], algorithm.aggregation)
    return [
        TrainingSample(
            index=first_index + position,
            tokens=np.concatenate([group.prompt_tokens(), sample.tokens()]),
            prompt_length=len(group.prompt_tokens()),
            behaviour=sample.behaviour_log_probs(),
            versions=sample.token_versions(),
            advantage=advantage,
            weight=weight,
            sampling=group.sampling,
        )
        for position, ((group, sample, advantage), weight) in enumerate(zip(chosen, weights, strict=True))
    ]


def _refuse_unusable(group: Group, sample: Sample, advantage: float) -> None:
    where = f"group of prompt {group.prompt} (task {group.task}) from producer {group.producer}"
    length = len(sample.tokens())
    if not (length == len(sample.behaviour_log_probs()) == len(sample.token_versions())):
        raise TrainingFailed("a sample's tokens, log-probs and versions differ in number", where=where)
    if not len(group.prompt_tokens()):
        raise TrainingFailed("a group has an empty prompt: its first token has no log-prob", where=where)
    if not np.isfinite(sample.behaviour_log_probs()).all():
        raise TrainingFailed(
            "the engine's log-probs are not finite",
            where=where,
            cure="look for NaN in that producer's model",
        )
    if not np.isfinite(advantage):
        raise TrainingFailed("a reward is not finite", where=where, cure="a scorer must return a number or fail")


def deal(samples: Sequence[TrainingSample], ranks: int) -> list[list[TrainingSample]]:
    """Samples of each rank: longest first, each to the rank with the fewest tokens so far (the lowest such rank)."""
    loads = [0] * ranks
    dealt: list[list[TrainingSample]] = [[] for _ in range(ranks)]
    for sample in sorted(samples, key=lambda s: (-len(s.tokens), s.index)):
        rank = loads.index(min(loads))
        dealt[rank].append(sample)
        loads[rank] += len(sample.tokens)
    return dealt


def micro_batches(samples: Sequence[TrainingSample], max_tokens: int, pad_id: int) -> list[MicroBatch]:
    """Micro-batches of at most ``max_tokens`` tokens, padding included, each of one setting of sampling."""
    rows: list[TrainingSample] = []
    made: list[MicroBatch] = []
    for sample in sorted(samples, key=lambda s: (_sampling_key(s.sampling), -len(s.tokens), s.index)):
        if len(sample.tokens) > max_tokens:
            raise TrainingFailed(
                f"a sample of {len(sample.tokens)} tokens is over the bound of {max_tokens} of a micro-batch",
                where="trainer.micro_batch_tokens",
                cure="raise it to at least the longest prompt plus the longest completion",
            )
        # The rows are sorted, so the first is the widest.
        if rows and (rows[0].sampling != sample.sampling or len(rows[0].tokens) * (len(rows) + 1) > max_tokens):
            made.append(_stack(rows, pad_id))
            rows = []
        rows.append(sample)
    if rows:
        made.append(_stack(rows, pad_id))
    return made


def empty_micro_batch() -> MicroBatch:
    """For a rank without samples: one token of weight 0, so that it takes part in the reduction of gradients."""
    return _stack(
        [
            TrainingSample(
                index=-1,
                tokens=np.zeros(2, dtype=np.int32),
                prompt_length=1,
                behaviour=np.zeros(1, dtype=np.float32),
                versions=np.full(1, -1, dtype=np.int32),
                advantage=0.0,
                weight=0.0,
                sampling=NO_TRUNCATION,
            )
        ],
        pad_id=0,
    )


def _sampling_key(sampling: Sampling) -> tuple[float, float, int, float, int]:
    return (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.max_tokens)


def _stack(rows: Sequence[TrainingSample], pad_id: int) -> MicroBatch:
    width = max(len(row.tokens) for row in rows)
    input_ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.long)
    targets = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        length = len(row.tokens)
        input_ids[i, :length] = torch.from_numpy(row.tokens.astype(np.int64))
        attention_mask[i, :length] = 1
        targets[i, row.prompt_length : length] = True
    lengths = [len(row.tokens) - row.prompt_length for row in rows]
    repeat = torch.tensor(lengths)
    return MicroBatch(
        indices=tuple(row.index for row in rows),
        lengths=tuple(lengths),
        input_ids=input_ids,
        attention_mask=attention_mask,
        targets=targets,
        behaviour=torch.from_numpy(np.concatenate([row.behaviour for row in rows])),
        versions=torch.from_numpy(np.concatenate([row.versions for row in rows])),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32).repeat_interleave(repeat),
        weights=torch.tensor([row.weight for row in rows], dtype=torch.float32).repeat_interleave(repeat),
        sampling=rows[0].sampling,
    )
