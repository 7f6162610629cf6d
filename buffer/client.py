"""Every failure of the server reaches a caller as BufferUnavailable, after retries up to one deadline.

The client that ``connect`` gives turns Redis errors into ours itself, so that no caller needs to. A command may reach
the server twice (its answer was lost and it was sent again): whoever sends one sees to it that this does no harm.
"""

import random
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.retry import Retry

from buffer.errors import BufferUnavailable, SpecError

T = TypeVar("T")

MINIMUM_VERSION = (7, 0)
SOCKET_SECONDS = 15.0  # one attempt; the deadline of a call spans several
CONNECT_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 1.0

_REFUSES_FOR_NOW = ("MISCONF", "NOREPLICAS", "BUSY", "LOADING")


def _is_passing(error: redis.RedisError) -> bool:
    """Whether the same command may succeed a little later."""
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return False
    if isinstance(
        error,
        redis.ConnectionError
        | redis.TimeoutError
        | redis.ReadOnlyError
        | redis.OutOfMemoryError
        | redis.exceptions.ClusterDownError
        | redis.exceptions.TryAgainError,
    ):
        return True
    return isinstance(error, redis.ResponseError) and str(error).startswith(_REFUSES_FOR_NOW)


def _explain(error: redis.RedisError, where: str, seconds: float) -> BufferUnavailable | None:
    """Our error for one of the server's state; None when it is about the command itself."""
    text = str(error)
    if isinstance(error, redis.AuthenticationError) or text.startswith(("WRONGPASS", "NOAUTH")):
        return BufferUnavailable(
            f"Redis refuses the password: {text}",
            where=where,
            cure="set the right password in the URL or in the variable that `buffer.password_env` names",
        )
    if isinstance(error, redis.exceptions.NoPermissionError | redis.exceptions.AuthorizationError):
        return BufferUnavailable(
            f"Redis does not permit this user to do that: {text}",
            where=where,
            cure="give the user's ACL the keys `forebay:*` and the commands that are named in docs/operations",
        )
    if isinstance(error, redis.OutOfMemoryError):
        return BufferUnavailable(
            f"Redis has reached its maxmemory and stayed there for {seconds:.0f} s",
            where=where,
            cure="raise the server's maxmemory above `buffer.budget_bytes` and its own overhead, or lower the budget",
        )
    if isinstance(error, redis.ReadOnlyError):
        return BufferUnavailable(
            "the server is a read-only replica", where=where, cure="give the address of the primary in `buffer.url`"
        )
    if isinstance(error, redis.exceptions.BusyLoadingError):
        return BufferUnavailable(
            f"Redis was still loading its data after {seconds:.0f} s",
            where=where,
            cure="wait until it has loaded, or raise `buffer.timeout_seconds`",
        )
    if text.startswith("MISCONF"):
        return BufferUnavailable(
            f"Redis cannot write to its disk: {text}", where=where, cure="free the server's disk, then go on or resume"
        )
    if _is_passing(error):
        return BufferUnavailable(
            f"Redis did not answer within {seconds:.0f} s: {text}",
            where=where,
            cure="see that the server runs and can be reached from here (`buffer.url`), then resume",
        )
    return None


def _call(attempt: Callable[[], T], *, where: str, seconds: float, release: Callable[[], None]) -> T:
    """The one place where Redis errors are retried and turned into ours."""
    started = time.monotonic()
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return attempt()
        except redis.RedisError as error:
            spent = time.monotonic() - started
            if not _is_passing(error) or spent + pause > seconds:
                explained = _explain(error, where, seconds)
                if explained is None:
                    raise
                raise explained from error
            if isinstance(error, redis.ReadOnlyError):
                release()  # after a failover the name leads to the new primary, an old connection does not
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * 2, LONGEST_PAUSE_SECONDS)


class _Pipeline(Pipeline):
    """A pipeline with the client's deadline."""

    where: str
    seconds: float

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        if self.watching:  # what was read under the watch is gone with the connection: the caller starts over
            return _call(
                lambda: super(_Pipeline, self).execute(raise_on_error), where=self.where, seconds=0, release=_no
            )
        commands = list(self.command_stack)

        def attempt() -> list[Any]:
            self.command_stack = list(commands)
            return super(_Pipeline, self).execute(raise_on_error)

        return _call(attempt, where=self.where, seconds=self.seconds, release=self.connection_pool.disconnect)


def _no() -> None:
    return None


class Client(redis.Redis):
    """A Redis client whose every command has a deadline and fails with BufferUnavailable."""

    where: str = "Redis"
    seconds: float = 30.0

    def execute_command(self, *args: Any, **options: Any) -> Any:
        return _call(
            lambda: super(Client, self).execute_command(*args, **options),  # type: ignore[no-untyped-call]
            where=self.where,
            seconds=self.seconds,
            release=self.connection_pool.disconnect,
        )

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Pipeline:
        pipeline = _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        pipeline.where, pipeline.seconds = self.where, self.seconds
        return pipeline


def address(url: str) -> str:
    """The URL's host and port: what may be shown to people, without the password."""
    parts = urlsplit(url)
    return f"{parts.hostname or 'localhost'}:{parts.port or 6379}"


def parse_version(text: str) -> tuple[int, int]:
    """Major and minor version of `redis_version` as INFO gives it; (0, 0) when it cannot be read."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_server(info: dict[str, Any], where: str) -> None:
    """Refuse a server that would lose data or lacks what scripts need, judged by its INFO."""
    version = str(info.get("redis_version", ""))
    if parse_version(version) < MINIMUM_VERSION:
        raise BufferUnavailable(
            f"the server's version is {version or 'unknown'}, at least 7.0 is needed",
            where=where,
            cure="use Redis 7.0 or newer, or any Valkey",
        )
    if info.get("role") != "master":
        raise BufferUnavailable(
            "the server is a read-only replica", where=where, cure="give the address of the primary in `buffer.url`"
        )
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        raise BufferUnavailable(
            f"the server evicts data when its memory is full (maxmemory-policy {policy}): groups would be lost",
            where=where,
            cure="set `maxmemory-policy noeviction`",
        )


def connect(
    url: str, *, password: str | None = None, tls_ca_file: str | None = None, timeout_seconds: float = 30.0
) -> "redis.Redis":
    """A checked client of the server at ``url``; raises BufferUnavailable with the cure.

    ``password`` counts when the URL has none. ``timeout_seconds`` is how long each call may retry.
    """
    options: dict[str, Any] = {}
    if tls_ca_file is not None:
        options["ssl_ca_certs"] = tls_ca_file
    try:
        if urlsplit(url).scheme not in ("redis", "rediss"):
            raise ValueError("it must start with redis:// or rediss://")
        where = address(url)
        client = Client.from_url(
            url,
            password=password,
            decode_responses=False,
            socket_timeout=min(SOCKET_SECONDS, timeout_seconds),
            socket_connect_timeout=min(CONNECT_SECONDS, timeout_seconds),
            socket_keepalive=True,
            health_check_interval=30,
            retry=Retry(NoBackoff(), 0),  # retries are ours: theirs count attempts, ours keep a deadline
            **(options if url.startswith("rediss") else {}),
        )
    except ValueError as error:
        raise SpecError(
            f"the buffer's URL cannot be read: {error}", where="buffer.url", cure="write redis://host:port/0"
        ) from error
    assert isinstance(client, Client)
    client.where, client.seconds = where, timeout_seconds
    information: dict[str, Any] = {}
    for section in ("server", "replication", "memory"):
        information.update(client.info(section))
    check_server(information, where)
    return client
