"""Whatever is wrong with the server is said in one sentence with a cure, within the deadline, without the password."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from buffer import server
from buffer.client import check_server, connect, parse_version
from buffer.errors import BufferUnavailable, SpecError
from tests.buffer.world import World

MASTER = {"redis_version": "7.2.4", "role": "master", "maxmemory_policy": "noeviction"}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.EmbeddedServer]:
    """A server whose settings the tests here may change."""
    running = server.start(tmp_path_factory.mktemp("own"))
    yield running
    running.stop()


@pytest.fixture
def admin(own: server.EmbeddedServer) -> Iterator["redis.Redis"]:
    """A plain client that sets what a test breaks, and sets it right again."""
    client = redis.Redis(port=own.port, password=own.password)
    yield client
    client.config_set("maxmemory", "0")
    client.config_set("maxmemory-policy", "noeviction")
    client.replicaof("NO", "ONE")


def test_a_wrong_password_fails_at_once_and_is_not_shown(own: server.EmbeddedServer) -> None:
    started = time.monotonic()
    for password in ("wrong-secret", None):
        with pytest.raises(BufferUnavailable, match="refuses the password") as refused:
            connect(own.url, password=password, tls_ca_file=None, timeout_seconds=20.0)
        assert refused.value.where == f"127.0.0.1:{own.port}"
        assert "wrong-secret" not in str(refused.value)
        assert "password_env" in refused.value.cure
    assert time.monotonic() - started < 5


def test_a_password_in_the_url_counts(own: server.EmbeddedServer) -> None:
    url = own.url.replace("redis://", f"redis://:{own.password}@")
    assert connect(url, password=None, tls_ca_file=None, timeout_seconds=5.0).ping()
    with pytest.raises(BufferUnavailable) as refused:
        connect(url.replace(str(own.port), "1"), password=None, tls_ca_file=None, timeout_seconds=0.2)
    assert own.password not in str(refused.value)


def test_nobody_listening_is_said_after_the_deadline() -> None:
    started = time.monotonic()
    with pytest.raises(BufferUnavailable, match="did not answer within 1 s") as refused:
        connect("redis://127.0.0.1:1/0", password=None, tls_ca_file=None, timeout_seconds=1.0)
    assert refused.value.where == "127.0.0.1:1"
    assert 0.3 < time.monotonic() - started < 3


def test_a_server_that_accepts_and_never_answers_does_not_hang_the_caller() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        started = time.monotonic()
        with pytest.raises(BufferUnavailable, match="did not answer"):
            connect(
                f"redis://127.0.0.1:{listener.getsockname()[1]}/0", password=None, tls_ca_file=None, timeout_seconds=1.0
            )
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("url", ["http://host", "host:6379", "redis://host:port/0"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(SpecError, match="URL cannot be read"):
        connect(url, password=None, tls_ca_file=None, timeout_seconds=1.0)


@pytest.mark.parametrize(
    ("text", "version"), [("7.2.4", (7, 2)), ("6.0.16", (6, 0)), ("10.1", (10, 1)), ("", (0, 0)), ("beta", (0, 0))]
)
def test_versions_are_read_as_numbers(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


def test_a_server_that_is_too_old_is_refused_with_the_cure() -> None:
    check_server(MASTER, "host:1")
    for old in ("6.2.14", "5.0.3", ""):
        with pytest.raises(BufferUnavailable, match="at least 7.0 is needed") as refused:
            check_server({**MASTER, "redis_version": old}, "host:1")
        assert "7.0 or newer" in refused.value.cure


def test_a_server_that_evicts_is_refused(own: server.EmbeddedServer, admin: "redis.Redis") -> None:
    admin.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(BufferUnavailable, match="allkeys-lru"):
        connect(own.url, password=own.password, tls_ca_file=None, timeout_seconds=5.0)


def test_a_replica_is_refused_and_one_that_becomes_one_is_named(
    own: server.EmbeddedServer, admin: "redis.Redis"
) -> None:
    client = connect(own.url, password=own.password, tls_ca_file=None, timeout_seconds=1.0)
    world = World(client, "replica").set_up()
    admin.replicaof("127.0.0.1", "1")
    with pytest.raises(BufferUnavailable, match="read-only replica"):
        connect(own.url, password=own.password, tls_ca_file=None, timeout_seconds=1.0)
    with pytest.raises(BufferUnavailable, match="read-only replica"):
        world.lease()
    admin.replicaof("NO", "ONE")
    assert world.lease().leases
    world.holds()


def test_a_full_server_stops_producers_with_a_cure_and_the_consumer_still_frees_it(
    own: server.EmbeddedServer, admin: "redis.Redis"
) -> None:
    client = connect(own.url, password=own.password, tls_ca_file=None, timeout_seconds=0.5)
    world = World(client, "full").set_up(per_step=3)
    world.generate(3)
    lease = world.lease().leases[0]
    admin.config_set("maxmemory", "1mb")
    with pytest.raises(BufferUnavailable, match="reached its maxmemory") as refused:
        world.commit(lease)
    assert "budget" in refused.value.cure
    with pytest.raises(BufferUnavailable, match="reached its maxmemory"):
        world.lease()
    assert world.ledger.renew([lease])
    world.train(1)
    world.publish(1)
    admin.config_set("maxmemory", "0")
    assert world.commit(lease)
    world.holds()


def test_every_command_of_a_pipeline_is_retried_as_one(folder: Path) -> None:
    running = server.start(folder)
    try:
        client = connect(running.url, password=running.password, tls_ca_file=None, timeout_seconds=0.5)
        pipeline = client.pipeline(transaction=True)
        pipeline.set("a", 1)
        pipeline.set("b", 2)
        running.process.kill()
        running.process.wait(10)
        with pytest.raises(BufferUnavailable, match="did not answer"):
            pipeline.execute()
    finally:
        running.stop()
