"""Each operation on a run's shared state is one Lua script, run atomically in the slot `{run}`.

The files are in ``buffer/lua``; each begins with its flags and gets the prelude put in front of its body.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import redis
from redis.commands.core import Script


def prefix(run: str) -> str:
    """What every key of a run begins with; the braces keep them in one slot of a cluster."""
    return f"forebay:{{{run}}}:"


def decode(value: Any) -> str:
    """A reply's string; "" for nil."""
    if value is None:
        return ""
    return value.decode() if isinstance(value, bytes) else str(value)


def pairs(reply: Any) -> dict[str, str]:
    """A hash, whether the reply is a map or a flat list."""
    if isinstance(reply, Mapping):
        return {decode(key): decode(value) for key, value in reply.items()}
    values = [decode(value) for value in reply]
    return dict(zip(values[::2], values[1::2], strict=True))


@cache
def source(operation: str) -> str:
    """The whole script of an operation."""
    folder = files("buffer") / "lua"
    flags, body = (folder / f"{operation}.lua").read_text().split("\n", 1)
    return f"{flags}\n{(folder / 'prelude.lua').read_text()}\n{body}"


class Scripts:
    """The operations of one run."""

    def __init__(self, client: "redis.Redis", run: str) -> None:
        self._client = client
        self.prefix = prefix(run)
        self._loaded: dict[str, Script] = {}

    def call(self, operation: str, *arguments: str | bytes) -> Any:
        """Run one operation; sent again by the client when its answer is lost."""
        script = self._loaded.get(operation)
        if script is None:
            script = self._loaded[operation] = self._client.register_script(source(operation))
        return script(keys=[self.prefix], args=arguments)
