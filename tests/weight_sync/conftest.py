"""One real server for all tests of weight_sync; each test has a run of its own on it."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import torch

from buffer import server
from buffer.client import connect
from tests.weight_sync.world import World

_numbers = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.EmbeddedServer]:
    running = server.start(tmp_path_factory.mktemp("server"))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def client(running_server: server.EmbeddedServer) -> "redis.Redis":
    return connect(running_server.url, password=running_server.password, timeout_seconds=10)


@pytest.fixture
def world(running_server: server.EmbeddedServer, client: "redis.Redis", tmp_path: Path) -> Iterator[World]:
    made = World(running_server, client, f"run-{os.getpid()}-{next(_numbers)}", tmp_path)
    yield made
    made.close()
