"""A process that owns an engine and waits to be killed: ``python -m tests.producer.engine_owner MODEL FOLDER``."""

import asyncio
import sys
import time
from pathlib import Path

import psutil
from producer.engine.vllm import VllmEngine
from producer.settings import ModelSettings, PoolSettings


def main() -> None:
    engine = VllmEngine(
        ModelSettings(path=sys.argv[1], dtype="float32"),
        PoolSettings.model_validate({"engine": {"threads": 1}}),
        Path(sys.argv[2]),
    )
    asyncio.run(engine.start())
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    time.sleep(120)


if __name__ == "__main__":
    main()
