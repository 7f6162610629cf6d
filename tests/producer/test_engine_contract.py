"""Every engine keeps the contract of `Engine`, on tied and untied models, as transformers computes the same weights."""

import asyncio
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from buffer.errors import ForebayError, ProofFailed
from producer.engine.base import Completion
from producer.engine.errors import EngineFailed, EngineProducedNaN
from producer.engine.shadow_names import ShadowRefused
from producer.gate import Gate
from producer.requests import Requests
from producer.updates import Updates
from tests.producer.engine_bench import (
    EOS,
    Bench,
    Kind,
    changed,
    engine_for,
    self_test,
    shadow_with,
    tokens_of,
    write_model,
)
from tests.producer.scripted import ScriptedWeights
from weight_sync import proof
from weight_sync.manifest import Manifest
from weight_sync.settings import UpdateMode
from weight_sync.shadow import ShadowReference

pytestmark = pytest.mark.producer_env

BENCHES = [
    "transformers-tied",
    "transformers-untied",
    pytest.param("vllm-tied", marks=pytest.mark.slow),
    pytest.param("vllm-untied", marks=pytest.mark.slow),
]
KINDS = ["transformers", pytest.param("vllm", marks=pytest.mark.slow)]
LOADS = 5
DELAYS = (0.1, 0.3, 1.0, 3.0)  # seconds until a request is well under way: by how busy the machine is


def test_each_token_has_the_log_prob_that_transformers_gives_it(bench: Bench) -> None:
    prompts = [tokens_of(seed, 6 + seed % 5) for seed in range(64)]
    completions = bench.generate_all(
        [bench.request(prompt, seed=number, max_tokens=40) for number, prompt in enumerate(prompts)]
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        count = len(completion.token_ids)
        assert count == len(completion.log_probs) == len(completion.versions)
        wanted = bench.expected_of(prompt, completion.token_ids)
        assert torch.allclose(torch.tensor(completion.log_probs), wanted, atol=1e-4)
        # The end-of-sequence token is one of the completion's tokens, with a log-prob to train on.
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == EOS)
        assert (completion.finish_reason == "length") == (completion.token_ids[-1] != EOS and count == 40)
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}


def test_log_probs_of_a_completion_are_those_that_scoring_it_gives(bench: Bench) -> None:
    prompt = tokens_of(99, 6)
    completion = bench.generate(prompt, seed=5)
    scored = bench.run(bench.engine.log_probs([*prompt, *completion.token_ids]))[len(prompt) - 1 :]
    assert completion.log_probs == pytest.approx(scored, abs=1e-4)


def kept_tokens(log_probs: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """Tokens that truncation leaves of a distribution, by the definitions alone."""
    order = log_probs.argsort(descending=True).tolist()
    order = [token for token in order if log_probs[token].exp() >= min_p * log_probs[order[0]].exp()]
    order = order[: top_k or len(order)]
    probs = log_probs[order].softmax(-1)
    count = 1 + int((probs.cumsum(-1) < top_p).sum()) if top_p < 1 else len(order)
    return torch.tensor(order[:count])


@pytest.mark.parametrize(
    "truncation",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_log_probs_are_those_of_the_processed_distribution(bench: Bench, truncation: dict[str, Any]) -> None:
    prompts = [tokens_of(seed, 6) for seed in range(100, 106)]
    requests = [bench.request(p, temperature=0.7, max_tokens=10, seed=n, **truncation) for n, p in enumerate(prompts)]
    for prompt, completion in zip(prompts, bench.generate_all(requests), strict=True):
        ids = [*prompt, *completion.token_ids]
        logs = bench.expected(ids, temperature=0.7)[-len(completion.token_ids) :]
        for place, token in enumerate(completion.token_ids):
            kept = kept_tokens(logs[place], **truncation)
            assert token in kept
            wanted = logs[place, token] - logs[place, kept].logsumexp(-1)
            assert completion.log_probs[place] == pytest.approx(float(wanted), abs=1e-4)


def test_temperature_zero_is_transformers_greedy_generation(bench: Bench) -> None:
    prompts = [tokens_of(seed, 5 + seed % 4) for seed in range(110, 118)]
    asked = {"temperature": 0.0, "seed": None, "max_tokens": 20}
    # Whatever truncation says: the likeliest token is never cut.
    requests = [bench.request(prompt, **asked, top_p=0.5 if n % 2 else 1.0) for n, prompt in enumerate(prompts)]
    for prompt, completion in zip(prompts, bench.generate_all(requests), strict=True):
        tokens = torch.tensor([prompt])
        wanted = bench.reference.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=20, pad_token_id=0
        )[0, len(prompt) :].tolist()
        assert completion.token_ids == wanted
        assert torch.allclose(
            torch.tensor(completion.log_probs), bench.expected_of(prompt, completion.token_ids), atol=1e-4
        )


def test_tokens_follow_from_the_seed_alone_or_in_a_crowd(bench: Bench) -> None:
    prompt = tokens_of(101, 6)
    alone, other = (bench.generate(prompt, seed=seed).token_ids for seed in (7, 8))
    assert alone != other
    crowd = [bench.request(tokens_of(seed, 3 + seed % 9), seed=seed, top_k=50) for seed in range(400, 420)]
    requests = [*crowd[:10], bench.request(prompt, seed=7), bench.request(prompt, seed=8), *crowd[10:]]
    completions = bench.generate_all(requests)
    assert completions[10].token_ids == alone and completions[11].token_ids == other


def test_a_stop_text_ends_the_completion_and_is_in_it(bench: Bench) -> None:
    prompt = tokens_of(102, 6)
    free = bench.generate(prompt, seed=3, max_tokens=60)
    letters = [letter for letter in free.text[3:] if letter.isascii() and letter.isprintable()]
    stopped = bench.generate(prompt, seed=3, max_tokens=60, stop=("never there", letters[0]))
    assert stopped.finish_reason == "stop"
    assert stopped.text.endswith(letters[0]) and stopped.text.count(letters[0]) == 1
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) == len(stopped.log_probs) == len(stopped.versions)


def test_after_each_of_five_loads_the_engine_computes_with_the_new_weights(bench: Bench) -> None:
    tensors = bench.initial()
    for number in range(LOADS):
        tensors = changed(tensors, number)
        before = torch.tensor(bench.run(bench.engine.log_probs(tokens_of(200))))
        version = bench.run(bench.load(tensors))
        assert bench.difference(tokens_of(200)) < 1e-4
        assert (before - torch.tensor(bench.run(bench.engine.log_probs(tokens_of(200))))).abs().max() > 0.1
        assert set(bench.generate(tokens_of(201, 6)).versions) == {version}


def test_a_paused_engine_samples_nothing_and_then_goes_on(bench: Bench) -> None:
    async def over_a_pause() -> tuple[bool, Completion]:
        await bench.engine.pause()
        running = asyncio.create_task(bench.engine.generate(bench.request(tokens_of(202, 6), seed=3)))
        await asyncio.sleep(0.3)
        early = running.done()
        await bench.engine.resume()
        return early, await running

    early, completion = bench.run(over_a_pause())
    assert not early and completion.token_ids == bench.generate(tokens_of(202, 6), seed=3).token_ids


def test_a_request_that_runs_over_a_load_has_tokens_of_both_versions(bench: Bench) -> None:
    prompt = tokens_of(300, 6)

    async def over_a_load(delay: float) -> tuple[Completion, int, int]:
        await bench.load(bench.initial())
        old = bench.version
        # A seed whose completion does not end early.
        running = [
            asyncio.create_task(bench.engine.generate(bench.request(prompt, seed=seed, max_tokens=400)))
            for seed in range(6)
        ]
        await asyncio.sleep(delay)
        new = await bench.load(changed(bench.initial(), 1))
        completions = await asyncio.gather(*running)
        return max(completions, key=lambda completion: len(set(completion.versions))), old, new

    for delay in DELAYS:
        completion, old, new = bench.run(over_a_load(delay))
        if len(set(completion.versions)) == 2:
            break
    swap = completion.versions.index(new)
    assert 0 < swap < len(completion.versions)
    assert completion.versions == [old] * swap + [new] * (len(completion.versions) - swap)
    # The first tokens are the old weights' own.
    bench.compare_with(bench.initial())
    wanted = bench.expected_of(prompt, completion.token_ids[:swap])
    assert torch.allclose(torch.tensor(completion.log_probs[:swap]), wanted, atol=1e-4)


def test_a_prefix_computed_with_older_weights_is_never_used_by_a_new_request(bench: Bench) -> None:
    prompt = tokens_of(301, 300)  # longer than two blocks of vLLM's cache
    bench.run(bench.load(bench.initial()))
    for _ in range(2):  # an engine with a prefix cache answers the second from it
        bench.generate(prompt, max_tokens=4)
    for number in (5, 6):
        # The same version number twice, as in the self-test: what counts is what was loaded.
        bench.run(bench.load(changed(bench.initial(), number), version=40))
        completion = bench.generate(prompt, max_tokens=4)
        wanted = bench.expected_of(prompt, completion.token_ids)
        assert torch.allclose(torch.tensor(completion.log_probs), wanted, atol=1e-4)
        assert bench.difference(prompt) < 1e-4


def test_an_aborted_request_answers_with_what_it_has_and_the_others_go_on(bench: Bench) -> None:
    async def abort(delay: float) -> tuple[Completion, Completion]:
        request = bench.request(tokens_of(302, 6), max_tokens=900, seed=4)
        other = bench.request(tokens_of(302, 6), max_tokens=120, seed=7)
        running = asyncio.create_task(bench.engine.generate(request))
        beside = asyncio.create_task(bench.engine.generate(other))
        await asyncio.sleep(delay)
        await bench.engine.abort(request.id)
        return await running, await beside

    bench.run(bench.load(bench.initial()))
    for delay in DELAYS:
        aborted, other = bench.run(abort(delay))
        if aborted.finish_reason == "abort" and aborted.token_ids:
            break
    assert aborted.finish_reason == "abort" and other.finish_reason != "abort"
    assert 0 < len(aborted.token_ids) == len(aborted.log_probs) == len(aborted.versions) < 900
    wanted = bench.expected_of(tokens_of(302, 6), aborted.token_ids)
    assert torch.allclose(torch.tensor(aborted.log_probs), wanted, atol=1e-4)
    bench.run(bench.engine.abort("nobody"))


def test_digests_change_with_the_weights_and_come_back_with_them(bench: Bench) -> None:
    bench.run(bench.load(bench.initial()))
    original = dict(bench.run(bench.engine.digests()))

    def odd_after(tensors: dict[str, torch.Tensor]) -> set[str]:
        bench.run(bench.load(tensors))
        found = dict(bench.run(bench.engine.digests()))
        assert found.keys() == original.keys()
        return {name for name in original if found[name] != original[name]}

    assert len(odd_after(changed(bench.initial(), 9))) > 10
    assert not odd_after(bench.initial())
    one = bench.initial()
    one["model.layers.1.self_attn.k_proj.weight"][3, 5] += 1e-3
    (odd,) = odd_after(one)
    assert "layers.1.self_attn" in odd
    assert not odd_after(bench.initial())


def test_the_self_test_proves_the_load_path_and_gives_the_initial_weights_back(bench: Bench) -> None:
    bench.run(bench.load(bench.initial()))
    result = self_test(bench)
    assert result.difference < 1e-4 < 0.05 < result.change
    bench.compare_with(bench.initial())
    assert bench.difference(tokens_of(308)) < 1e-4


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(bench: Bench) -> None:
    bench.run(bench.load(bench.initial()))
    less = bench.initial()
    del less["model.layers.1.self_attn.k_proj.weight"]
    more = bench.initial() | {"model.layers.2.self_attn.k_proj.weight": torch.zeros(32, 64)}
    for tensors, name in ((less, "layers.1.self_attn.k_proj"), (more, "layers.2.self_attn.k_proj")):
        with pytest.raises(ShadowRefused, match=name):
            bench.run(bench.load(tensors))
    bench.compare_with(bench.initial())
    assert bench.difference(tokens_of(304)) < 1e-4
    bench.run(bench.engine.check())


def test_a_tied_head_may_be_named_or_not(bench: Bench) -> None:
    if bench.tied:
        tensors = changed(bench.initial(), 11)
        bench.run(bench.load(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
        assert bench.difference(tokens_of(309)) < 1e-4
        bench.run(bench.load(bench.initial()))
    assert bench.difference(tokens_of(309)) < 1e-4


def test_a_load_needs_a_paused_engine(bench: Bench) -> None:
    with pytest.raises(EngineFailed, match="paused"):
        bench.run(bench.engine.load(ShadowReference("nowhere", "{}"), 1))


def test_a_prompt_over_the_engines_limit_is_refused_and_a_completion_ends_at_it(bench: Bench) -> None:
    with pytest.raises(ForebayError, match="does not fit"):
        bench.generate(tokens_of(305, 1024))
    with pytest.raises(ForebayError, match="does not fit"):
        bench.generate([])
    with pytest.raises(ForebayError, match="1025 tokens"):
        bench.run(bench.engine.log_probs(tokens_of(305, 1025)))
    completion = bench.generate(tokens_of(305, 1020), seed=2)
    assert completion.finish_reason == "length" and len(completion.token_ids) == 4


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"])
def test_nan_is_an_error_and_the_next_weights_are_good_again(bench: Bench, name: str) -> None:
    broken = bench.initial()
    broken[name].view(-1)[0] = float("nan")
    version = bench.run(bench.load(broken))
    for sampling in ({}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        with pytest.raises(EngineProducedNaN, match="not numbers") as caught:
            bench.generate(tokens_of(306, 6), **sampling)
        assert f"version {version}" in caught.value.where
    ids = tokens_of(306)
    manifest = Manifest(
        version=version,
        step=0,
        fence=0,
        tensors=(),
        bucket_sizes=(),
        probe_token_ids=tuple(ids),
        probe_log_probs=(-1.0,) * (len(ids) - 1),
    )
    assert not bench.run(proof.probe(bench.engine, manifest, 1e9)).passed
    bench.run(bench.load(bench.initial()))
    assert bench.difference(ids) < 1e-4


class FollowedWeights(ScriptedWeights):
    """Looks at the engine's log-probs after each load, as the proof does."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(first=None)
        self.bench = bench
        self.proved: list[int] = []

    async def probe(self, engine: Any, manifest: Manifest) -> None:
        found = torch.tensor(await engine.log_probs(tokens_of(1)))
        difference = (found - self.bench.expected_of(tokens_of(1)[:1], tokens_of(1)[1:])).abs().max()
        if difference > 1e-4:
            raise ProofFailed(f"version {manifest.version} differs by {difference}")
        self.proved.append(manifest.version)


@pytest.mark.parametrize("mode", ["drain", "abort_resume"])
def test_on_a_real_engine_every_token_has_its_versions_log_prob(bench: Bench, mode: UpdateMode) -> None:
    versions = {number: changed(bench.initial(), 50 + number) for number in range(3)}

    async def run(delay: float) -> list[tuple[list[int], list[Completion]]]:
        requests = Requests(bench.engine, bench.decode)
        weights = FollowedWeights(bench)

        async def nothing(*_: object) -> None:
            pass

        updates = Updates(bench.engine, requests, mode, 20.0, weights, Gate(), nothing, nothing, nothing)

        async def group(number: int) -> tuple[list[int], list[Completion]]:
            prompt = tokens_of(600 + number, 5)
            asked = {"temperature": 0.9, "max_tokens": 100}
            return prompt, await requests.answer(
                [bench.request(prompt, seed=10 * number + sample, **asked) for sample in range(3)]
            )

        groups: list[asyncio.Task[tuple[list[int], list[Completion]]]] = []
        with ExitStack() as stack:
            for version, tensors in versions.items():
                shadow, manifest = stack.enter_context(shadow_with(tensors, version, bench.folder))
                bench.compare_with(tensors)
                updates.offer(manifest, shadow.reference(manifest))
                await updates.first(10)
                groups += [asyncio.create_task(group(4 * version + number)) for number in range(3)]
                await asyncio.sleep(delay)
            answers = list(await asyncio.gather(*groups))
        assert weights.proved == list(versions)
        return answers

    for delay in DELAYS:
        answers = bench.run(run(delay))
        per_group = [{version for completion in group for version in completion.versions} for _, group in answers]
        if mode == "drain" or max(map(len, per_group)) > 1:
            break
    assert all(len(found) == 1 for found in per_group) if mode == "drain" else max(map(len, per_group)) > 1
    assert set().union(*per_group) == set(versions)
    for version, tensors in versions.items():
        bench.compare_with(tensors)
        for prompt, group in answers:
            for completion in group:
                places = [place for place, found in enumerate(completion.versions) if found == version]
                if places:
                    logs = bench.expected([*prompt, *completion.token_ids], temperature=0.9)[len(prompt) - 1 :]
                    wanted = logs.gather(-1, torch.tensor(completion.token_ids)[:, None])[places, 0]
                    assert torch.allclose(torch.tensor(completion.log_probs)[places], wanted, atol=1e-4)
    assert all(completion.finish_reason in ("stop", "length") for _, group in answers for completion in group)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_model_folder_is_named(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(ForebayError, match="does not exist") as caught:
        asyncio.run(engine_for(kind, tmp_path / "nowhere", tmp_path).start())
    assert "nowhere" in caught.value.where


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_folder_that_contradicts_itself_fails_with_the_engines_own_words(kind: Kind, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", hidden=32, layers=1)
    shutil.copy(write_model(tmp_path / "other", hidden=64, layers=1) / "config.json", model / "config.json")
    with pytest.raises(EngineFailed, match="did not start") as caught:
        asyncio.run(engine_for(kind, model, tmp_path).start())
    assert str(model) in caught.value.where
    assert "Traceback" not in caught.value.what.splitlines()[0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_argument_that_the_engine_does_not_have_is_refused(kind: Kind, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", hidden=32, layers=1)
    with pytest.raises(ForebayError, match="max_model_length"):
        asyncio.run(engine_for(kind, model, tmp_path, args={"max_model_length": 9}).start())
