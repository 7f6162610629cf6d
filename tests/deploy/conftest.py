"""One real server for the tests of what shows a run; each test has a run of its own on it."""

import itertools
from collections.abc import Iterator

import pytest
import redis

from buffer import server
from buffer.client import connect
from tests.buffer.world import World

_numbers = itertools.count()


@pytest.fixture(scope="session")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.EmbeddedServer]:
    running = server.start(tmp_path_factory.mktemp("server"))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def client(running_server: server.EmbeddedServer) -> "redis.Redis":
    return connect(running_server.url, password=running_server.password, timeout_seconds=10.0)


@pytest.fixture
def world(client: "redis.Redis") -> World:
    return World(client, f"shown-{next(_numbers)}")
