"""A process that owns an engine, tells of it and waits to be killed.

``python -m tests.producer.engine_owner MODEL FOLDER`` prints as JSON the engine's processes, layout and digests.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import psutil

from producer.engine.vllm import VllmEngine
from producer.settings import ModelSettings, PoolSettings

LIFETIME = 240.0  # seconds, should nobody kill it


async def start() -> None:
    engine = VllmEngine(
        ModelSettings(path=sys.argv[1], dtype="float32"),
        PoolSettings.model_validate({"engine": {"threads": 1}}),
        Path(sys.argv[2]),
    )
    await engine.start()
    processes = [child.pid for child in psutil.Process().children(recursive=True)]
    told = {"processes": processes, "layout": engine.layout(), "digests": dict(await engine.digests())}
    print(json.dumps(told), flush=True)
    await asyncio.to_thread(time.sleep, LIFETIME)


if __name__ == "__main__":
    asyncio.run(start())
