"""The embedded server keeps its data over any end of itself and does not outlive whoever started it."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from buffer import server
from buffer.client import connect
from buffer.errors import BufferUnavailable
from tests.buffer.world import World

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def own(folder: Path) -> Iterator[list[server.EmbeddedServer]]:
    """Servers that a test starts itself; all are stopped."""
    started: list[server.EmbeddedServer] = []
    yield started
    for running in started:
        running.stop()


def a_client(running: server.EmbeddedServer, seconds: float = 10.0) -> "redis.Redis":
    return connect(running.url, password=running.password, tls_ca_file=None, timeout_seconds=seconds)


def half_way(world: World) -> None:
    """One step trained, one planned, one group more generated, two leased."""
    world.set_up(rows=20, per_step=2, staleness=2)
    world.generate(4)
    world.train(1)
    world.plan(2)
    world.generate(1)
    world.lease(count=1)


def test_everything_is_there_again_after_a_clean_stop(folder: Path, own: list[server.EmbeddedServer]) -> None:
    own.append(server.start(folder))
    before = World(a_client(own[0]), "r")
    half_way(before)
    summary = before.ledger.summary()
    own[0].stop()
    assert not own[0].alive()
    own.append(server.start(folder))
    after = World(a_client(own[1]), "r")
    after.holds()
    assert after.ledger.summary()["counts"] == summary["counts"]
    assert own[1].password == own[0].password


def test_everything_is_there_again_after_sigkill(folder: Path, own: list[server.EmbeddedServer]) -> None:
    own.append(server.start(folder))
    world = World(a_client(own[0]), "r")
    half_way(world)
    counts = world.counts()
    own[0].process.kill()
    own[0].process.wait(10)
    own.append(server.start(folder, port=own[0].port))
    assert world.counts() == counts  # the same client goes on
    world.holds()
    assert world.plan(2).prompts == (2, 3)
    assert world.ledger.current_version() == 0


def test_a_call_made_while_the_server_is_down_goes_on_when_it_is_back(
    folder: Path, own: list[server.EmbeddedServer]
) -> None:
    own.append(server.start(folder))
    world = World(a_client(own[0]), "r").set_up()
    lease = world.lease().leases[0]
    own[0].process.kill()
    own[0].process.wait(10)
    code = (
        "import sys, time; from buffer import server; time.sleep(0.5);"
        f"s = server.start({str(folder)!r}, port={own[0].port}); print('up', flush=True); sys.stdin.read(); s.stop()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as starter:
        assert world.commit(lease)
        world.holds()
        starter.communicate(timeout=30)


def test_the_server_dies_with_the_process_that_started_it(folder: Path) -> None:
    code = (
        "import time; from buffer import server;"
        f"s = server.start({str(folder)!r}); print(s.process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server outlived its parent by 10 s"
        time.sleep(0.05)


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    code = "from buffer.processes import die_with_parent; die_with_parent(1234567); print('still here')"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=30)
    assert result.returncode == 1
    assert result.stdout == b""


def test_the_password_is_readable_by_its_owner_only(folder: Path, own: list[server.EmbeddedServer]) -> None:
    own.append(server.start(folder))
    for name in (server.PASSWORD_FILE, "server.conf"):
        assert stat.S_IMODE(os.stat(folder / name).st_mode) == 0o600
    assert own[0].password not in " ".join(psutil.Process(own[0].process.pid).cmdline())
    assert own[0].password not in own[0].url


def test_a_used_port_is_refused_with_its_number(folder: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(BufferUnavailable, match=f"port {port} cannot be used") as refused:
            server.start(folder, port=port)
    assert refused.value.cure


def test_a_second_server_on_the_same_folder_is_refused(folder: Path, own: list[server.EmbeddedServer]) -> None:
    own.append(server.start(folder))
    with pytest.raises(BufferUnavailable, match="another embedded server runs on this folder"):
        server.start(folder)
    assert own[0].alive()


def test_a_damaged_append_only_file_is_named_with_its_log(folder: Path, own: list[server.EmbeddedServer]) -> None:
    own.append(server.start(folder))
    World(a_client(own[0]), "r").set_up()
    own[0].stop()
    files = [path for path in (folder / "appendonlydir").iterdir() if path.name.endswith(".incr.aof")]
    data = bytearray(files[0].read_bytes())
    data[40:60] = b"\0" * 20
    files[0].write_bytes(data)
    with pytest.raises(BufferUnavailable, match="ended with code 1") as refused:
        server.start(folder)
    assert refused.value.where.endswith("server.log")


def test_without_any_binary_the_debian_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BufferUnavailable) as refused:
        server.find_binary()
    assert "valkey-server" in refused.value.cure
