"""A run folder says how to reach its run, alive or ended; secrets lie in files that their owner alone reads.

run.json         how to reach the run (RunRecord)        checkpoints/  journal/   what a resume needs
token            the controller's bearer token           redis/        data and password of the embedded server
report.json      the result                              logs/  tensorboard/  settings/   per service
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pydantic
import redis

from buffer import server
from buffer.client import connect
from buffer.errors import ForebayError, SpecError
from buffer.secret_file import kept_secret
from buffer.settings import BufferSettings, Settings

RECORD_FILE, TOKEN_FILE, REPORT_FILE, LOCK_FILE = "run.json", "token", "report.json", "run.lock"
QUICK_SECONDS = 3.0  # a server on this machine answers in less, if it runs


class RunRecord(Settings):
    """How to reach a run."""

    run: str
    """Name of the run."""
    steps: int
    """Optimizer steps that it is to make."""
    buffer: BufferSettings
    """The buffer's settings."""
    redis_url: str
    """Where the buffer is, resolved; without the password."""
    controller_url: str
    """Where the controller listens."""
    token_env: str
    """Name of the environment variable with the controller's token; else the file `token` has it."""

    @property
    def embedded(self) -> bool:
        """Whether the server is the run folder's own."""
        return self.buffer.url is None


def read_record(folder: Path) -> RunRecord:
    """The record of a run folder; raises SpecError when it is none."""
    path = folder / RECORD_FILE
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SpecError(
            f"this is not a run folder: {RECORD_FILE} cannot be read ({error.strerror})",
            where=str(folder),
            cure="name the folder that `forebay run` printed (key `folder` of the spec)",
        ) from error
    except pydantic.ValidationError as error:
        raise SpecError(
            f"the run's record is of another release: {error.errors()[0]['msg']}",
            where=str(path),
            cure="use the release that started the run",
        ) from error


def write_record(folder: Path, record: RunRecord) -> None:
    """Replace the record in one step."""
    replace_file(folder / RECORD_FILE, record.model_dump_json(indent=2) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write a file that readers see whole, old or new."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text)
    temporary.replace(path)


def redis_password(folder: Path, record_buffer: BufferSettings) -> str | None:
    """The buffer's password: of the embedded server's file, or of the environment."""
    if record_buffer.url is None:
        path = folder / "redis" / server.PASSWORD_FILE
        return path.read_text().strip() if path.exists() else None
    return os.environ.get(record_buffer.password_env)


def controller_token(folder: Path, token_env: str) -> str:
    """The controller's bearer token: of the environment, else of the folder's file, which is made when missing."""
    if given := os.environ.get(token_env):
        return given
    return kept_secret(folder / TOKEN_FILE)


def connect_live(folder: Path, record: RunRecord, *, seconds: float) -> "redis.Redis":
    """A client of the run's server, which must be running."""
    return connect(
        record.redis_url,
        password=redis_password(folder, record.buffer),
        tls_ca_file=record.buffer.tls_ca_file,
        timeout_seconds=seconds,
    )


@contextmanager
def opened_buffer(folder: Path) -> Iterator[tuple["redis.Redis", RunRecord, bool]]:
    """The run's buffer, its record, and whether the run is alive. An ended run's embedded server is started for the
    time being."""
    record = read_record(folder)
    alive = is_running(folder)
    if not record.embedded or alive:
        yield connect_live(folder, record, seconds=10.0 if alive else QUICK_SECONDS), record, alive
        return
    started = server.start(folder / "redis")
    try:
        yield connect(started.url, password=started.password, timeout_seconds=10.0), record, False
    finally:
        started.stop()


def is_running(folder: Path) -> bool:
    """Whether a `forebay run` holds the folder."""
    try:
        with hold(folder, seconds=0.0):
            return False
    except RunFolderHeld:
        return True


class RunFolderHeld(ForebayError):
    """Another `forebay run` works in the folder."""


def make(folder: Path) -> None:
    """Make the folder of a run; raises SpecError when nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOCK_FILE).touch()
    except OSError as error:
        raise SpecError(
            f"the run folder cannot be written: {error.strerror}",
            where=str(folder),
            cure="choose another `folder`, or free this one (permissions, a file of that name, a full disk)",
        ) from error


@contextmanager
def hold(folder: Path, *, seconds: float = 1.0) -> Iterator[None]:
    """Keep other runs out of the folder; the kernel lets go of it however this process ends. ``seconds``: somebody who
    only asks whether a run is alive holds it too, for a moment."""
    if not folder.is_dir():
        raise SpecError("there is no such run folder", where=str(folder), cure="name the key `folder` of the spec")
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _locked(descriptor, seconds):
            raise RunFolderHeld(
                "another `forebay run` works in this folder",
                where=str(folder),
                cure="wait for it or stop it (Ctrl-C), or give this run another `folder`",
            )
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(0.02)
