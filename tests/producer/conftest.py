"""The real server, a tiny model's folder and settings for the producers' tests."""

import importlib.util
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from buffer import server
from buffer.client import connect
from buffer.server import EmbeddedServer
from producer.settings import ProducerSettings

ROOT = Path(__file__).resolve().parents[2]
_runs = itertools.count()


@pytest.fixture(scope="session")
def buffer_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    running = server.start(tmp_path_factory.mktemp("redis"))
    os.environ["FOREBAY_REDIS_PASSWORD"] = running.password
    yield running
    running.stop()


@pytest.fixture
def client(buffer_server: EmbeddedServer) -> "redis.Redis":
    return connect(buffer_server.url, password=buffer_server.password)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    spec = importlib.util.spec_from_file_location("arithmetic_model", ROOT / "examples" / "arithmetic" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.write_model(tmp_path_factory.mktemp("model"), hidden=32, layers=1))


@pytest.fixture
def make_settings(buffer_server: EmbeddedServer, model_path: str, tmp_path: Path) -> Callable[..., ProducerSettings]:
    """Settings of a producer in a run of its own; keyword arguments replace parts of them."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n}+1", "answer": "1"}) + "\n" for n in range(12)))
    run = f"test-{os.getpid()}-{next(_runs)}"

    def make(**changes: Any) -> ProducerSettings:
        values: dict[str, Any] = {
            "run": run,
            "seed": 7,
            "member": "producer-0",
            "pool": "producer",
            "folder": str(tmp_path / "run"),
            "model": {"path": model_path, "dtype": "float32"},
            "data": {"path": str(rows)},
            "prompt": {"max_tokens": 32},
            "sampling": {"max_tokens": 8},
            "rewards": [{"name": "exact"}],
            "settings": {"engine": {"concurrency": 4}, "drain_seconds": 5},
            "evaluation": None,
            "weight_sync": {},
            "buffer": {"heartbeat_seconds": 0.2, "lease_seconds": 3, "timeout_seconds": 3},
            "redis_url": buffer_server.url,
            "groups_per_step": 4,
            "group_size": 4,
            "max_staleness": 1,
            "dynamic_sampling": False,
            "passes": None,
        }
        return ProducerSettings.model_validate(values | changes)

    return make


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A file says in BENCHES on which engines its tests with a ``bench`` run; each engine starts once."""
    if "bench" in metafunc.fixturenames:
        metafunc.parametrize("bench", metafunc.module.BENCHES, indirect=True, scope="session")


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running engine: its kind, and whether its model's head is tied."""
    from tests.producer.engine_bench import running_bench

    kind, head = request.param.split("-")
    with running_bench(kind, head == "tied", tmp_path_factory.mktemp(request.param)) as running:
        yield running
    if kind == "vllm":
        assert not [child for child in psutil.Process().children() if "EngineCore" in child.name()]
