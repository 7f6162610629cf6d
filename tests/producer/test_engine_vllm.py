"""The real engine on tiny random models, tied and untied, against transformers on the same weights."""

import asyncio
import importlib.util
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
import torch

from buffer.errors import ForebayError, ProofFailed, SpecError
from producer.engine import platform
from producer.engine.base import Completion, Request
from producer.engine.shadow_names import ShadowRefused
from producer.engine.vllm import EngineFailed, EngineProducedNaN, VllmEngine
from producer.settings import ModelSettings, PoolSettings
from weight_sync import proof
from weight_sync.manifest import Manifest, plan_layout
from weight_sync.model_folder import read_tensors
from weight_sync.settings import WeightSyncSettings
from weight_sync.shadow import ShadowReference, checksum, create_shadow

pytestmark = [pytest.mark.slow, pytest.mark.producer_env]

ROOT = Path(__file__).resolve().parents[2]
EOS = 1
LOADS = 5
SHAPE = {"hidden": 64, "layers": 2, "std": 0.15}  # of the models: with so wide a spread log-probs tell weights apart
T = TypeVar("T")
Tensors = dict[str, torch.Tensor]


def write_model(folder: Path, **options: Any) -> Path:
    spec = importlib.util.spec_from_file_location("arithmetic_model", ROOT / "examples" / "arithmetic" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.write_model(folder, **options))


def engine_for(model: Path, folder: Path, *, args: Mapping[str, Any] | None = None, **options: Any) -> VllmEngine:
    settings = PoolSettings.model_validate({"engine": {"threads": 1, "args": args or {}}})
    return VllmEngine(ModelSettings(path=str(model), dtype="float32"), settings, folder, **options)


@dataclass
class Bench:
    """One running engine, its model, and transformers' idea of it."""

    tied: bool
    model: Path
    folder: Path
    engine: VllmEngine
    runner: asyncio.Runner
    reference: Any
    version: int = 0
    ids: Iterator[int] = field(default_factory=itertools.count)
    load_seconds: list[float] = field(default_factory=list)

    def run(self, action: Coroutine[Any, Any, T], seconds: float = 60.0) -> T:
        return self.runner.run(asyncio.wait_for(action, seconds))

    def request(self, prompt: Sequence[int], **changes: Any) -> Request:
        values: dict[str, Any] = {
            "id": f"r{next(self.ids)}",
            "prompt_token_ids": prompt,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "max_tokens": 24,
            "stop": (),
            "seed": 1,
        }
        return Request(**(values | changes))

    def generate(self, prompt: Sequence[int], **changes: Any) -> Completion:
        return self.run(self.engine.generate(self.request(prompt, **changes)))

    def initial(self) -> Tensors:
        return dict(read_tensors(self.model))

    async def load(self, tensors: Tensors, version: int | None = None) -> int:
        """Through a shadow, as the service does; also into the reference."""
        self.version = self.version + 1 if version is None else version
        places = [(name, str(value.dtype).removeprefix("torch."), value.shape) for name, value in tensors.items()]
        shadow = create_shadow(plan_layout(places, 1 << 16), self.folder / "shadows", "test")
        try:
            shadow.write(tensors.items())
            entries = tuple(
                msgspec.structs.replace(entry, checksum=checksum(shadow.buckets, entry))
                for entry in shadow.layout.tensors
            )
            manifest = Manifest(
                version=self.version,
                step=self.version,
                fence=0,
                tensors=entries,
                bucket_sizes=shadow.layout.bucket_sizes,
                probe_token_ids=(),
                probe_log_probs=(),
            )
            await self.engine.pause()
            started = time.monotonic()
            try:
                await self.engine.load(shadow.reference(manifest), self.version)
            finally:
                self.load_seconds.append(time.monotonic() - started)
                await self.engine.resume()
        finally:
            shadow.close()
        self.reference.load_state_dict(tensors, strict=False)
        return self.version

    def expected(self, token_ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """Transformers' log-probs of tokens 1..., shape (len - 1, vocabulary)."""
        with torch.no_grad():
            logits = self.reference(torch.tensor([list(token_ids)])).logits[0, :-1].float()
        return (logits / temperature).log_softmax(-1)

    def difference(self, token_ids: Sequence[int]) -> float:
        found = torch.tensor(self.run(self.engine.log_probs(token_ids)))
        wanted = self.expected(token_ids).gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        return float((found - wanted).abs().max())


def changed(tensors: Tensors, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: value + torch.randn(value.shape, generator=generator) * 0.02 for name, value in tensors.items()}


def tokens_of(seed: int, count: int = 40) -> list[int]:
    return torch.randint(4, 260, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=["tied", "untied"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    model = write_model(folder / "model", tied=request.param == "tied", **SHAPE)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    engine = engine_for(model, folder, worker_extension="tests.producer.corrupting_worker.CorruptingLoader")
    with asyncio.Runner() as runner:
        started = time.monotonic()
        runner.run(engine.start())
        print(f"\nengine started in {time.monotonic() - started:.1f} s: {engine.layout()}")
        bench = Bench(request.param == "tied", model, folder, engine, runner, reference)
        try:
            yield bench
        finally:
            if bench.load_seconds:
                print(f"\nloads took {', '.join(f'{seconds * 1000:.0f}' for seconds in bench.load_seconds)} ms")
            runner.run(engine.stop())
    assert not [child for child in psutil.Process().children() if "EngineCore" in child.name()]


@dataclass(frozen=True)
class Owner:
    """Another process with an engine on the weights of the tied model, as its own loader reads them."""

    process: "subprocess.Popen[str]"
    engine: list[psutil.Process]
    layout: str
    digests: dict[str, str]


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    folder = tmp_path_factory.mktemp("owner")
    model = write_model(folder / "model", tied=True, **SHAPE)
    command = [sys.executable, "-m", "tests.producer.engine_owner", str(model), str(folder)]
    with (folder / "err").open("w") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "err").read_text()
        told = json.loads(line)
        engine = [psutil.Process(pid) for pid in told["processes"]]
        assert engine
        yield Owner(process, engine, told["layout"], told["digests"])
    finally:
        process.kill()
        process.wait(10)


def test_each_token_has_the_log_prob_that_transformers_gives_it(bench: Bench) -> None:
    prompts = [tokens_of(seed, 6) for seed in range(64)]

    async def all_of_them() -> list[Completion]:
        requests = [bench.request(prompt, seed=number, max_tokens=40) for number, prompt in enumerate(prompts)]
        return list(await asyncio.gather(*(bench.engine.generate(request) for request in requests)))

    completions = bench.run(all_of_them())
    for prompt, completion in zip(prompts, completions, strict=True):
        count = len(completion.token_ids)
        assert count == len(completion.log_probs) == len(completion.versions)
        wanted = bench.expected([*prompt, *completion.token_ids])[-count:]
        wanted = wanted.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(completion.log_probs), wanted, atol=1e-4)
        # The end-of-sequence token is one of the completion's tokens, with a log-prob to train on.
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == EOS)
        assert (completion.finish_reason == "length") == (completion.token_ids[-1] != EOS and count == 40)
    assert any(completion.finish_reason == "stop" for completion in completions)


def test_log_probs_are_those_of_the_processed_distribution(bench: Bench) -> None:
    prompt = tokens_of(100, 6)
    completion = bench.generate(prompt, temperature=0.7, top_k=5, max_tokens=10)
    logs = bench.expected([*prompt, *completion.token_ids], temperature=0.7)[-len(completion.token_ids) :]
    kept = logs.topk(5, dim=-1)
    for place, token in enumerate(completion.token_ids):
        assert token in kept.indices[place]
        wanted = logs[place, token] - kept.values[place].logsumexp(-1)
        assert completion.log_probs[place] == pytest.approx(float(wanted), abs=1e-4)


def test_temperature_zero_is_greedy_and_a_seed_repeats(bench: Bench) -> None:
    prompt = tokens_of(101, 6)
    greedy = bench.generate(prompt, temperature=0.0, seed=None, max_tokens=12)
    best = bench.expected([*prompt, *greedy.token_ids])[-len(greedy.token_ids) :].argmax(-1)
    assert greedy.token_ids == best.tolist()
    once, again, other = (bench.generate(prompt, seed=seed).token_ids for seed in (7, 7, 8))
    assert once == again != other


def test_a_stop_text_ends_the_completion_and_is_in_it(bench: Bench) -> None:
    prompt = tokens_of(102, 6)
    free = bench.generate(prompt, seed=3, max_tokens=60)
    letters = [letter for letter in free.text[3:] if letter.isascii() and letter.isprintable()]
    stopped = bench.generate(prompt, seed=3, max_tokens=60, stop=(letters[0],))
    assert stopped.finish_reason == "stop"
    assert stopped.text.endswith(letters[0])
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) == len(stopped.log_probs) == len(stopped.versions)


def test_after_each_of_five_loads_the_engine_computes_with_the_new_weights(bench: Bench) -> None:
    tensors = bench.initial()
    for number in range(LOADS):
        tensors = changed(tensors, number)
        before = bench.run(bench.engine.log_probs(tokens_of(200)))
        version = bench.run(bench.load(tensors))
        assert bench.difference(tokens_of(200)) < 1e-4
        assert (
            max(abs(a - b) for a, b in zip(before, bench.run(bench.engine.log_probs(tokens_of(200))), strict=True))
            > 0.1
        )
        assert set(bench.generate(tokens_of(201, 6)).versions) == {version}


def test_a_request_that_runs_over_a_load_has_tokens_of_both_versions(bench: Bench) -> None:
    bench.run(bench.load(bench.initial()))
    prompt = tokens_of(300, 6)

    async def over_a_load() -> tuple[Completion, int, int]:
        old = bench.version
        # A seed whose completion does not end early.
        running = [
            asyncio.create_task(bench.engine.generate(bench.request(prompt, seed=seed, max_tokens=400)))
            for seed in range(6)
        ]
        await asyncio.sleep(0.25)
        new = await bench.load(changed(bench.initial(), 1))
        completions = await asyncio.gather(*running)
        return max(completions, key=lambda completion: len(set(completion.versions))), old, new

    completion, old, new = bench.run(over_a_load())
    swap = completion.versions.index(new)
    assert 0 < swap < len(completion.versions)
    assert completion.versions == [old] * swap + [new] * (len(completion.versions) - swap)
    # The first tokens are the old weights' own.
    bench.reference.load_state_dict(bench.initial(), strict=False)
    wanted = bench.expected([*prompt, *completion.token_ids[:swap]])[-swap:]
    wanted = wanted.gather(-1, torch.tensor(completion.token_ids[:swap])[:, None])[:, 0]
    assert torch.allclose(torch.tensor(completion.log_probs[:swap]), wanted, atol=1e-4)


def test_a_cached_prefix_of_an_older_version_is_never_used(bench: Bench) -> None:
    prompt = tokens_of(301, 300)  # longer than two blocks of the cache
    bench.run(bench.load(bench.initial()))
    for _ in range(2):  # the second is answered with the cached prefix
        bench.generate(prompt, max_tokens=4)
    for number in (5, 6):
        # The same version number twice, as in the self-test: what counts is what was loaded.
        bench.run(bench.load(changed(bench.initial(), number), version=40))
        completion = bench.generate(prompt, max_tokens=4)
        wanted = bench.expected([*prompt, *completion.token_ids])[-len(completion.token_ids) :]
        wanted = wanted.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(completion.log_probs), wanted, atol=1e-4)
        assert bench.difference(prompt) < 1e-4


def test_an_aborted_request_answers_with_what_it_has(bench: Bench) -> None:
    async def abort() -> Completion:
        request = bench.request(tokens_of(302, 6), max_tokens=900, seed=4)
        running = asyncio.create_task(bench.engine.generate(request))
        await asyncio.sleep(0.1)
        await bench.engine.abort(request.id)
        return await running

    bench.run(bench.load(bench.initial()))
    for _ in range(3):
        completion = bench.run(abort())
        if completion.finish_reason == "abort":
            break
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) == len(completion.log_probs) == len(completion.versions) < 900


def test_digests_are_of_what_computes(bench: Bench) -> None:
    first = dict(bench.run(bench.engine.digests()))
    bench.run(bench.load(changed(bench.initial(), 9)))
    other = dict(bench.run(bench.engine.digests()))
    bench.run(bench.load(bench.initial()))
    original = dict(bench.run(bench.engine.digests()))
    bench.run(bench.load(bench.initial()))
    assert original == bench.run(bench.engine.digests())
    assert original.keys() == other.keys() == first.keys()

    def odd(digests: Mapping[str, str]) -> set[str]:
        return {name for name in original if digests[name] != original[name]}

    moved = odd(other)
    assert {name for name in original if "(packed)" in name} <= moved
    # One layer that a load leaves stale is one that differs from where it was loaded.
    stale = bench.initial()
    stale["model.layers.1.self_attn.k_proj.weight"][3, 5] += 1e-3
    bench.run(bench.load(stale))
    assert odd(bench.run(bench.engine.digests())) == {"0:model.layers.1.self_attn.qkv_proj (packed)"}
    bench.run(bench.load(bench.initial()))
    # Only what the kernel reads is wrong, no parameter is.
    for layer in ("model.layers.0.mlp.down_proj", "lm_head"):
        bench.run(bench.engine._call("corrupt", layer))
        assert odd(bench.run(bench.engine.digests())) == {f"0:{layer} (packed)"}
        assert bench.difference(tokens_of(303)) > 1e-5
        bench.run(bench.load(bench.initial()))
        assert not odd(bench.run(bench.engine.digests()))


def test_two_engines_have_equal_digests_of_equal_weights_however_those_came(bench: Bench, owner: Owner) -> None:
    bench.run(bench.load(changed(bench.initial(), 10)))
    bench.run(bench.load(bench.initial()))
    mine = dict(bench.run(bench.engine.digests()))
    assert bench.engine.layout() == owner.layout
    assert mine.keys() - {"0:lm_head.weight"} == owner.digests.keys()  # a tied head has no weight of its own
    odd = {name for name in owner.digests if mine[name] != owner.digests[name]}
    # The untied model is the same but for its head.
    assert odd == (set() if bench.tied else {"0:lm_head (packed)"})


def self_test(bench: Bench, stale: str = "") -> proof.SelfTestResult:
    settings = WeightSyncSettings()

    def log_probs(tensors: Iterator[tuple[str, torch.Tensor]], token_ids: Sequence[int]) -> list[float]:
        bench.reference.load_state_dict(dict(tensors), strict=False)
        wanted = bench.expected(token_ids)
        return wanted.gather(-1, torch.tensor(list(token_ids))[1:, None])[:, 0].tolist()

    reference = proof.make_reference(
        log_probs,
        lambda: read_tensors(bench.model),
        noise=settings.self_test_noise,
        seed=3,
        dtype="float32",
        token_ids=proof.probe_sequence(260, settings.probe_tokens, 3),
    )
    bench.run(bench.load(bench.initial()))
    bench.run(bench.engine._call("leave_stale", stale))
    try:
        return bench.run(proof.self_test(bench.engine, bench.model, reference, bench.folder / "shadows", settings))
    finally:
        bench.run(bench.engine._call("leave_stale", ""))


def test_the_self_test_proves_the_load_path_and_gives_the_initial_weights_back(bench: Bench) -> None:
    result = self_test(bench)
    assert result.difference < 1e-4 < 0.05 < result.change
    bench.reference.load_state_dict(bench.initial(), strict=False)
    assert bench.difference(tokens_of(308)) < 1e-4


@pytest.mark.parametrize(
    "stale",
    [
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.qkv_proj",
        "model.layers.1.post_attention_layernorm",
        "lm_head",
    ],
)
def test_the_self_test_catches_one_stale_layer_and_a_stale_head(bench: Bench, stale: str) -> None:
    with pytest.raises(ProofFailed, match="the load leaves something stale"):
        self_test(bench, stale)


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(bench: Bench) -> None:
    bench.run(bench.load(bench.initial()))
    less = bench.initial()
    del less["model.layers.1.self_attn.k_proj.weight"]
    more = bench.initial() | {"model.layers.2.self_attn.k_proj.weight": torch.zeros(32, 64)}
    for tensors, name in ((less, "layers.1.self_attn.k_proj"), (more, "layers.2.self_attn.k_proj")):
        with pytest.raises(ShadowRefused, match=name):
            bench.run(bench.load(tensors))
    bench.reference.load_state_dict(bench.initial(), strict=False)
    assert bench.difference(tokens_of(304)) < 1e-4
    bench.run(bench.engine.check())


def test_a_load_needs_a_paused_engine(bench: Bench) -> None:
    with pytest.raises(EngineFailed, match="paused"):
        bench.run(bench.engine.load(ShadowReference("nowhere", "{}"), 1))


def test_a_prompt_over_the_engines_limit_is_refused(bench: Bench) -> None:
    with pytest.raises(ForebayError, match="does not fit"):
        bench.generate(tokens_of(305, 1024))


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"])
def test_nan_is_an_error_and_the_next_weights_are_good_again(bench: Bench, name: str) -> None:
    broken = bench.initial()
    broken[name].view(-1)[0] = float("nan")
    version = bench.run(bench.load(broken))
    for sampling in ({}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        with pytest.raises(EngineProducedNaN, match=f"not numbers(.|\n)*version {version}"):
            try:
                bench.generate(tokens_of(306, 6), **sampling)
            except EngineProducedNaN as error:
                raise EngineProducedNaN(str(error)) from error
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


def test_a_killed_engine_is_told_within_seconds_by_whatever_is_asked(bench: Bench) -> None:
    async def killed() -> None:
        request = bench.request(tokens_of(307, 6), max_tokens=900, temperature=1.5)
        running = asyncio.create_task(bench.engine.generate(request))
        await asyncio.sleep(0.05)
        if not bench.tied:  # the other model's engine is killed while it rests
            await bench.engine.pause()
        core = next(child for child in psutil.Process().children() if "EngineCore" in child.name())
        core.kill()
        before = time.monotonic()
        with pytest.raises(EngineFailed, match="died"):
            await running
        with pytest.raises(EngineFailed, match="died"):
            await bench.engine.check()
        with pytest.raises(EngineFailed, match="died"):
            await bench.engine.log_probs(tokens_of(307, 6))
        with pytest.raises(EngineFailed, match="died"):
            await bench.load(bench.initial())
        with pytest.raises(EngineFailed, match="died"):
            await bench.engine.generate(bench.request(tokens_of(307, 6)))
        assert time.monotonic() - before < 5

    bench.run(killed())


def test_an_engine_ends_with_its_owner_however_that_ends(owner: Owner) -> None:
    assert all(process.is_running() for process in owner.engine)
    owner.process.kill()
    owner.process.wait(10)
    _, alive = psutil.wait_procs(owner.engine, timeout=5)
    assert not alive


def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ForebayError, match="nowhere"):
        asyncio.run(engine_for(tmp_path / "nowhere", tmp_path).start())


def test_a_model_folder_that_contradicts_itself_fails_with_the_engines_own_words(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", hidden=32, layers=1)
    shutil.copy(write_model(tmp_path / "other", hidden=64, layers=1) / "config.json", model / "config.json")
    with pytest.raises(EngineFailed, match="did not start") as caught:
        asyncio.run(engine_for(model, tmp_path).start())
    assert str(model) in caught.value.where
    assert "Error" in caught.value.what
    assert "Traceback" not in caught.value.what.splitlines()[0]
    assert not [child for child in psutil.Process().children() if "EngineCore" in child.name()]


def test_arguments_that_are_forebays_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", hidden=32, layers=1)
    with pytest.raises(SpecError, match="logprobs_mode"):
        asyncio.run(engine_for(model, tmp_path, args={"logprobs_mode": "raw_logits"}).start())
    with pytest.raises(ForebayError, match="max_model_length"):
        asyncio.run(engine_for(model, tmp_path, args={"max_model_length": 9}).start())


def test_the_platform_is_the_one_that_is_installed() -> None:
    assert platform.choose("auto") == "cpu"
    with pytest.raises(SpecError, match="ascend"):
        platform.choose("ascend")


def test_the_environment_keeps_the_engine_off_the_network_and_within_its_threads() -> None:
    make: Callable[..., dict[str, str]] = platform.environment
    one = make("cpu", threads=3, kv_cache_gib=2, workers=1, start_seconds=60)
    assert one["HF_HUB_OFFLINE"] == one["VLLM_NO_USAGE_STATS"] == one["DO_NOT_TRACK"] == "1"
    assert (one["OMP_NUM_THREADS"], one["VLLM_CPU_KVCACHE_SPACE"]) == ("3", "2")
    assert one["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "OMP_NUM_THREADS" not in make("cuda", threads=3, kv_cache_gib=2, workers=1, start_seconds=60)
