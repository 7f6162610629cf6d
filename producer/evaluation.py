"""An evaluation is greedy, of one policy version from first token to last, and counts what could be judged only.

While it runs, no new version is loaded; generation for training goes on.
"""

import asyncio
import time
from collections.abc import Sequence

import structlog

from producer.data import Dataset
from producer.engine.base import Completion, Engine, Request
from producer.prompts import Renderer
from producer.rewards.processes import Judged, ScorerProcesses
from producer.rewards.weighted import Reward
from producer.settings import ProducerSettings, RewardSettings

JUDGES = ("exact", "math")  # rewards that say right or wrong

log = structlog.get_logger()


async def evaluate(
    settings: ProducerSettings,
    *,
    engine: Engine,
    scorers: ScorerProcesses,
    renderer: Renderer,
    dataset: Dataset,
    name: str,
) -> dict[str, float]:
    """Answer and judge every held-out prompt; the numbers that are recorded. An over-long prompt is counted apart."""
    assert settings.evaluation is not None
    longest = settings.evaluation.max_tokens
    started = time.monotonic()
    # As many at once as training has: the engine has room for them, and training keeps its share.
    room = asyncio.Semaphore(settings.settings.engine.concurrency * settings.group_size)

    async def answer(number: int, tokens: Sequence[int]) -> tuple[Completion, Reward]:
        async with room:
            request = Request(
                id=f"evaluation-{name}-{number}",
                prompt_token_ids=tokens,
                temperature=0.0,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                max_tokens=longest,
                stop=settings.sampling.stop,
                seed=None,
            )
            completion = await engine.generate(request)
        row = dataset.rows[number].for_scorers()
        (reward,) = await scorers.score(row, [Judged(completion.text, completion.finish_reason)])
        return completion, reward

    prompts = [(row.number, renderer.render(row)) for row in dataset.rows]
    tasks = [asyncio.create_task(answer(number, tokens)) for number, tokens in prompts if tokens is not None]
    try:
        answers = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    values = summarise(settings.rewards, answers)
    over_long = sum(tokens is None for _, tokens in prompts)
    if over_long:
        log.warning("held-out prompts are over-long", count=over_long, limit=settings.prompt.max_tokens)
    return values | {"over_long": float(over_long), "seconds": time.monotonic() - started}


def summarise(rewards: Sequence[RewardSettings], answers: Sequence[tuple[Completion, Reward]]) -> dict[str, float]:
    """Accuracy by the first reward that says right or wrong (else the first one), mean reward and length, and what
    could not be judged, which is in no mean."""
    judge = next((reward.name for reward in rewards if reward.name in JUDGES), rewards[0].name)
    scored = [reward for _, reward in answers if reward.outcome == "scored"]
    judged = [reward.parts[judge] for _, reward in answers if judge in reward.parts]
    values = {
        "problems": float(len(answers)),
        "accuracy": _mean(judged),
        "mean_reward": _mean([reward.value for reward in scored]),
        "mean_length": _mean([float(len(completion.token_ids)) for completion, _ in answers]),
        "truncated": _mean([float(completion.finish_reason == "length") for completion, _ in answers]),
        "failed": float(sum(reward.outcome == "failed" for _, reward in answers)),
        "unscorable": float(sum(reward.outcome == "unscorable" for _, reward in answers)),
    }
    for part in rewards:
        found = [reward.parts[part.name] for _, reward in answers if part.name in reward.parts]
        values[f"reward/{part.name}"] = _mean(found)
    return values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
