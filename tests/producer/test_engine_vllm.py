"""What only vLLM has: packed weights, processes of its own, arguments and an environment."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from buffer.errors import ProofFailed, SpecError
from producer.engine import platform
from producer.engine.errors import EngineFailed
from tests.producer.engine_bench import ROOT, SHAPE, Bench, changed, engine_for, self_test, tokens_of, write_model

pytestmark = [pytest.mark.slow, pytest.mark.producer_env]

BENCHES = ["vllm-tied", "vllm-untied"]


@dataclass(frozen=True)
class Owner:
    """Another process with an engine on the weights of the tied model, as its own loader reads them."""

    process: "subprocess.Popen[str]"
    engine: list[psutil.Process]
    layout: str
    digests: dict[str, str]


@pytest.fixture(scope="session")
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


def test_digests_are_of_what_computes(bench: Bench) -> None:
    bench.run(bench.load(bench.initial()))
    original = dict(bench.run(bench.engine.digests()))

    def odd() -> set[str]:
        digests: Mapping[str, str] = bench.run(bench.engine.digests())
        return {name for name in original if digests[name] != original[name]}

    bench.run(bench.load(changed(bench.initial(), 9)))
    assert {name for name in original if "(packed)" in name} <= odd()
    # One layer that a load leaves stale is one that differs from where it was loaded.
    stale = bench.initial()
    stale["model.layers.1.self_attn.k_proj.weight"][3, 5] += 1e-3
    bench.run(bench.load(stale))
    assert odd() == {"0:model.layers.1.self_attn.qkv_proj (packed)"}
    bench.run(bench.load(bench.initial()))
    # Only what the kernel reads is wrong, no parameter is.
    for layer in ("model.layers.0.mlp.down_proj", "lm_head"):
        bench.run(bench.engine._call("corrupt", layer))
        assert odd() == {f"0:{layer} (packed)"}
        assert bench.difference(tokens_of(303)) > 1e-5
        bench.run(bench.load(bench.initial()))
        assert not odd()


def test_two_engines_have_equal_digests_of_equal_weights_however_those_came(bench: Bench, owner: Owner) -> None:
    bench.run(bench.load(changed(bench.initial(), 10)))
    bench.run(bench.load(bench.initial()))
    mine = dict(bench.run(bench.engine.digests()))
    assert bench.engine.layout() == owner.layout
    assert mine.keys() - {"0:lm_head.weight"} == owner.digests.keys()  # a tied head has no weight of its own
    odd = {name for name in owner.digests if mine[name] != owner.digests[name]}
    # The untied model is the same but for its head.
    assert odd == (set() if bench.tied else {"0:lm_head (packed)"})


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
    bench.run(bench.load(bench.initial()))
    bench.run(bench.engine._call("leave_stale", stale))
    try:
        with pytest.raises(ProofFailed, match="the load leaves something stale"):
            self_test(bench)
    finally:
        bench.run(bench.engine._call("leave_stale", ""))


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


def test_arguments_that_are_forebays_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", hidden=32, layers=1)
    with pytest.raises(SpecError, match="logprobs_mode"):
        asyncio.run(engine_for("vllm", model, tmp_path, args={"logprobs_mode": "raw_logits"}).start())


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
