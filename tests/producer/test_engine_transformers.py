"""What only the transformers engine has: its thread, its batch, its sampling."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from producer.engine.base import Completion, Request
from producer.engine.errors import EngineFailed
from producer.engine.sampling import draw, generator_of, processed
from producer.engine.stop_texts import cut_at_stop
from producer.service import real_engine
from producer.settings import ProducerSettings
from tests.producer.engine_bench import SHAPE, Bench, Kind, changed, engine_for, shadow_with, tokens_of, write_model
from weight_sync.model_folder import read_tensors

pytestmark = pytest.mark.producer_env
BENCHES = ["transformers-tied"]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "transformers engine"]


def test_tokens_come_as_often_as_the_distribution_says(bench: Bench) -> None:
    request = bench.request([5], temperature=0.8, top_k=4, seed=11)
    logits = torch.tensor([1.0, 0.5, -0.3, 2.0, -5.0, 0.9])
    log_probs, generator = processed(logits, request), generator_of(request)
    drawn = torch.tensor([draw(log_probs, request, generator) for _ in range(20_000)]).bincount(minlength=6) / 20_000
    assert torch.allclose(drawn, log_probs.exp(), atol=0.015)
    assert drawn[2] == drawn[4] == 0


def test_completions_wait_for_room_and_none_is_forgotten(bench: Bench) -> None:
    bench.engine._model._most_rows = 3
    try:
        requests = [bench.request(tokens_of(n % 4, 4 + n % 3), seed=n, max_tokens=3 + n) for n in range(12)]
        few = bench.generate_all(requests)
    finally:
        bench.engine._model._most_rows = 256
    assert [c.token_ids for c in few] == [c.token_ids for c in bench.generate_all(requests)]


def test_a_cancelled_request_leaves_the_batch(bench: Bench) -> None:
    async def cancel() -> None:
        running = asyncio.create_task(bench.engine.generate(bench.request(tokens_of(1), max_tokens=900, seed=4)))
        await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await bench.engine.digests()  # after it in the thread's queue
        assert not bench.engine._model.busy

    bench.run(cancel())


def test_a_stopped_engine_ends_its_thread_and_whoever_waits(tmp_path: Path) -> None:
    before = threads()
    model = write_model(tmp_path / "model", **SHAPE)
    engine = engine_for("transformers", model, tmp_path)
    request = Request("r", [5, 6], 1.0, 1.0, 0, 0.0, 900, (), 1)

    async def stop() -> None:
        await engine.start()
        await engine.pause()
        waiting = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0.05)
        await engine.stop()
        with pytest.raises(EngineFailed, match="stopped"):
            await waiting
        for asked in (engine.check(), engine.generate(request), engine.log_probs([1, 2]), engine.pause()):
            with pytest.raises(EngineFailed, match="stopped"):
                await asked

    asyncio.run(asyncio.wait_for(stop(), 60))
    assert threads() == before


def test_an_engine_whose_step_fails_is_told_by_whatever_is_asked(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", **SHAPE)
    engine: Any = engine_for("transformers", model, tmp_path)

    async def fail() -> None:
        await engine.start()
        request = Request("r", [5, 100_000], 1.0, 1.0, 0, 0.0, 9, (), 1)  # a token that the model does not have
        with pytest.raises(EngineFailed, match="has died: IndexError"):
            await engine.generate(request)
        with pytest.raises(EngineFailed, match="has died"):
            await engine.check()
        await engine.stop()

    asyncio.run(asyncio.wait_for(fail(), 60))


def test_a_load_that_fails_half_way_leaves_an_engine_that_says_so(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", **SHAPE)
    engine = engine_for("transformers", model, tmp_path)

    async def load() -> None:
        await engine.start()
        await engine.pause()
        wrong = dict(read_tensors(model))
        wrong["model.norm.weight"] = torch.ones(63)
        with shadow_with(wrong, 1, tmp_path) as (shadow, manifest):
            for _ in range(2):
                with pytest.raises(EngineFailed, match=r"not usable(.|\n)*model.norm.weight"):
                    await engine.load(shadow.reference(manifest), 1)
        await engine.resume()
        with pytest.raises(EngineFailed, match="not usable"):
            await engine.check()
        await engine.stop()

    asyncio.run(asyncio.wait_for(load(), 60))


def test_a_folder_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = write_model(tmp_path / "model", **SHAPE)
    tensors = dict(read_tensors(model))
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineFailed, match="model.norm.weight"):
        asyncio.run(engine_for("transformers", model, tmp_path).start())
    assert not threads() or all(thread.is_alive() for thread in threads())


def test_bfloat16_weights_are_computed_and_loaded_as_they_are(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = write_model(tmp_path / "model", **SHAPE)
    engine = engine_for("transformers", model, tmp_path, dtype="bfloat16")
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    tensors = {name: value.bfloat16() for name, value in changed(dict(read_tensors(model)), 3).items()}
    prompt = tokens_of(9, 7)

    async def answer() -> tuple[Completion, list[float]]:
        await engine.start()
        await engine.pause()
        with shadow_with(tensors, 4, tmp_path) as (shadow, manifest):
            await engine.load(shadow.reference(manifest), 4)
        await engine.resume()
        completion = await engine.generate(Request("r", prompt, 1.0, 1.0, 0, 0.0, 12, (), 1))
        scored = await engine.log_probs([*prompt, *completion.token_ids])
        await engine.stop()
        return completion, scored[len(prompt) - 1 :]

    completion, scored = asyncio.run(asyncio.wait_for(answer(), 60))
    assert set(completion.versions) == {4}
    reference.load_state_dict(tensors, strict=False)
    with torch.no_grad():
        logs = reference(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
    wanted = logs.float().log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert torch.equal(torch.tensor(scored), wanted)
    assert torch.allclose(torch.tensor(completion.log_probs), wanted, atol=0.05)


def test_a_pool_runs_the_engine_that_it_names(make_settings: Callable[..., ProducerSettings]) -> None:
    for kind in get_args(Kind):
        engine = real_engine(make_settings(settings={"engine": {"kind": kind}}))
        assert type(engine).__name__ == f"{kind.capitalize()}Engine"


def test_a_completion_is_cut_after_the_first_stop_text_in_it() -> None:
    assert cut_at_stop("one two three", ("three", "wo")) == "one two"
    assert cut_at_stop("one", ("two",)) is None and cut_at_stop("one", ()) is None
