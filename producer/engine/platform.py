"""One process runs one platform, taken from what is installed; its environment is set before vLLM is first imported.

Nothing here reaches the network at run time: model folders are local, and usage statistics are off.
"""

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from buffer.errors import SpecError
from producer.engine.ownership import OWNER

Platform = Literal["ascend", "cuda", "cpu"]


def installed() -> Platform:
    """The platform that this environment and machine offer."""
    if find_spec("vllm_ascend") is not None:
        return "ascend"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def choose(wanted: Literal["auto", "cpu", "cuda", "ascend"]) -> Platform:
    """``wanted`` if it is what is installed; raises SpecError when the environment is for other hardware."""
    found = installed()
    if wanted not in ("auto", found):
        raise SpecError(
            f"the pool wants the platform {wanted!r}, this environment runs {found!r}",
            where="producers.<pool>.platform",
            cure=f"use the image (or environment) for {wanted}, or set the platform to `auto`",
        )
    return found


def cpu_threads(wanted: int | None) -> int:
    """``wanted``, or what OMP_NUM_THREADS says, or half of the cores."""
    return wanted or int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, len(os.sched_getaffinity(0)) // 2)


def environment(
    platform: Platform, *, threads: int | None, kv_cache_gib: int, workers: int, start_seconds: float
) -> dict[str, str]:
    """The variables that vLLM must find. ``workers``: processes that share the model (tensor times pipeline parallel);
    ``threads``: of one worker (none: see ``cpu_threads``)."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(start_seconds)),
        # A forked engine would inherit the locks of the service's other threads in whatever state they are.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        OWNER: str(os.getpid()),
    }
    if platform == "cpu":
        variables |= {
            "TORCHDYNAMO_DISABLE": "1",  # the compiler needs a C++ compiler at run time, and 20 s at the first batch
            "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
            # Bound threads would put every replica of a machine on the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(cpu_threads(threads)),
            # One process less: the worker computes in the engine's core, not behind a queue of its own.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if workers > 1 else "0",
        }
    return variables


def apply(variables: Mapping[str, str], log: Path) -> None:
    """Set the environment of this process and its children, and send vLLM's log of all of them to one file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    configuration = log.with_suffix(".logging.json")
    configuration.write_text(json.dumps(_logging(log, variables["VLLM_LOGGING_LEVEL"])), encoding="utf-8")
    os.environ.update(variables)
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(configuration)


def _logging(log: Path, level: str) -> dict[str, object]:
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(process)d %(name)s %(message)s"}},
        "handlers": {"file": {"class": "logging.FileHandler", "filename": str(log), "formatter": "line"}},
        "loggers": {"vllm": {"handlers": ["file"], "level": level, "propagate": False}},
    }
