"""One lease becomes one group, or goes back, or ends with a reason: there is no fourth way out.

Sampling seeds follow from the run's seed, the prompt and the sample alone, whoever answers. A sample that was not
scored does not train; a group needs two that were, and rewards that differ when dynamic sampling is on.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from buffer.errors import SpecError, TrainingFailed
from buffer.ledger import Lease, Ledger
from buffer.records import Group, Sample, Sampling, pack_float32, pack_int32
from producer.activity import Activity
from producer.data import Dataset
from producer.engine.base import Completion, Engine, Request
from producer.gate import Gate
from producer.prompts import Renderer
from producer.requests import Requests
from producer.rewards.processes import Judged, ScorerProcesses
from producer.rewards.weighted import Reward
from producer.settings import ProducerSettings

log = structlog.get_logger()

FAILED_GROUPS = 4  # so many groups of failures, and not one score, end the producer
FEWEST_SCORED = 2  # an advantage is relative to the other samples of the group


class Aborted(Exception):
    """A request was ended, by the engine or for an update, without its answer; the prompt is to be given back."""


@dataclass(frozen=True)
class Workshop:
    """What answering a prompt takes."""

    settings: ProducerSettings
    engine: Engine
    requests: Requests
    scorers: ScorerProcesses
    renderer: Renderer
    dataset: Dataset
    ledger: Ledger
    gate: Gate
    activity: Activity


def sampling_seed(run_seed: int, prompt: int, sample: int) -> int:
    """The seed of one sample: 31 bits, which every engine takes."""
    return int(np.random.SeedSequence([run_seed, prompt, sample]).generate_state(1, np.uint32)[0]) >> 1


async def roll_out(shop: Workshop, lease: Lease) -> None:
    """Answer, score and commit one leased prompt. Raises Aborted or ProofFailed when it must be given back, Fenced when
    the lease was lost; a cancellation aborts its requests."""
    row = shop.dataset.rows[lease.row]
    tokens = shop.renderer.render(row)
    if tokens is None:
        await asyncio.to_thread(shop.ledger.drop, lease, "over-long prompt")
        shop.activity.count_dropped("over-long prompt")
        return
    started = time.monotonic()
    with shop.activity.generating():
        completions = await _generate(shop, lease, tokens)
    generated = time.monotonic()
    shop.activity.tokens += sum(len(completion.token_ids) for completion in completions)
    if any(completion.finish_reason == "abort" for completion in completions):
        raise Aborted(f"a request of prompt {lease.prompt} was aborted; the prompt is given back")
    _refuse_nan(completions)
    with shop.activity.scoring():
        rewards = await shop.scorers.score(
            row.for_scorers(), [Judged(completion.text, completion.finish_reason) for completion in completions]
        )
    _note_failures(shop, rewards)
    group = _group(
        shop.settings, lease, tokens, completions, rewards, generated - started, time.monotonic() - generated
    )
    newest = max((max(completion.versions, default=-1) for completion in completions), default=-1)
    await shop.gate.passed(newest, shop.settings.weight_sync.transfer_seconds)
    reason = unusable(group, dynamic_sampling=shop.settings.dynamic_sampling)
    await asyncio.to_thread(shop.ledger.commit, lease, group, usable=not reason, reason=reason)
    shop.activity.count_group(group, reason)
    _refuse_broken_rewards(shop)


def _note_failures(shop: Workshop, rewards: Sequence[Reward]) -> None:
    """People see why a reward fails in the member's record and in the log."""
    errors = {reward.error for reward in rewards if reward.error}
    for error in errors - {shop.activity.last_error}:
        shop.activity.last_error = error
        log.warning("a reward failed", error=error)


def _refuse_broken_rewards(shop: Workshop) -> None:
    """A reward that never gave a score is wrong, not unlucky: prompts must not be used up by it."""
    if shop.activity.scored == 0 and shop.activity.failed >= FAILED_GROUPS * shop.settings.group_size:
        raise SpecError(
            f"no completion could be scored, {shop.activity.failed} failed: {shop.activity.last_error}",
            where="rewards",
            cure="correct the reward: it is called as (completion, row, finish_reason, **options), see docs/rewards.md",
        )


def unusable(group: Group, *, dynamic_sampling: bool) -> str:
    """Why a group cannot train; "" when it can."""
    scored = group.trained_samples()
    if len(scored) < min(FEWEST_SCORED, len(group.samples)):
        failed = any(sample.outcome == "failed" for sample in group.samples)
        return "scorer failed" if failed else "unscorable"
    rewards = [sample.reward for sample in scored]
    if dynamic_sampling and max(rewards) - min(rewards) < 1e-9:
        return "no signal"
    return ""


async def _generate(shop: Workshop, lease: Lease, tokens: Sequence[int]) -> list[Completion]:
    sampling = shop.settings.sampling
    requests = [
        Request(
            id=f"{lease.prompt}-{lease.token}-{sample}",
            prompt_token_ids=tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
            seed=sampling_seed(shop.settings.seed, lease.prompt, sample),
        )
        for sample in range(shop.settings.group_size)
    ]
    return await shop.requests.answer(requests)


def _refuse_nan(completions: Sequence[Completion]) -> None:
    for completion in completions:
        if not all(math.isfinite(log_prob) for log_prob in completion.log_probs):
            raise TrainingFailed(
                "the model gives log-probs that are not numbers (NaN or infinite)",
                where=f"policy version {max(completion.versions, default=-1)}",
                cure="resume from an earlier checkpoint with a lower learning rate, or compute in float32",
            )


def _group(
    settings: ProducerSettings,
    lease: Lease,
    tokens: Sequence[int],
    completions: Sequence[Completion],
    rewards: Sequence[Reward],
    generation_seconds: float,
    scoring_seconds: float,
) -> Group:
    sampling = settings.sampling
    return Group(
        prompt=lease.prompt,
        row=lease.row,
        pass_number=lease.pass_number,
        task=lease.task,
        prompt_token_ids=pack_int32(list(tokens)),
        samples=tuple(
            Sample(
                token_ids=pack_int32(completion.token_ids),
                log_probs=pack_float32(completion.log_probs),
                versions=pack_int32(completion.versions),
                finish_reason=completion.finish_reason,
                text=completion.text,
                # Without a token there is nothing that a reward could train.
                outcome=reward.outcome if completion.token_ids else "unscorable",
                reward=reward.value,
                reward_parts=dict(reward.parts),
                sampling_seed=sampling_seed(settings.seed, lease.prompt, number),
            )
            for number, (completion, reward) in enumerate(zip(completions, rewards, strict=True))
        ),
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
        ),
        producer=settings.member,
        pool=settings.pool,
        generation_seconds=generation_seconds,
        scoring_seconds=scoring_seconds,
    )
