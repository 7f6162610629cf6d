"""Settings of the controller; what its process is handed."""

from pydantic import Field

from buffer.settings import BufferSettings, Settings


class ControllerSettings(Settings):
    """The HTTP service that shows and steers a run."""

    host: str = "127.0.0.1"
    """Address to listen on; beyond this machine a token is required."""
    port: int | None = Field(default=None, gt=0, lt=65536)
    """Port to listen on; none: a free one, written to the run folder."""
    token_env: str = "FOREBAY_TOKEN"
    """Name of the environment variable with the bearer token; unset: one is made and kept in the run folder."""


class ControllerProcessSettings(Settings):
    """All that one controller process is handed; composed by `deploy` from the run spec."""

    run: str
    """Name of the run: the prefix of its keys."""
    folder: str
    """The run folder."""
    steps: int
    """Optimizer steps of the run."""
    host: str
    """Address to listen on."""
    port: int
    """Port to listen on."""
    token_env: str
    """Name of the environment variable with the bearer token."""
    buffer: BufferSettings
    redis_url: str
    """Where the buffer is, resolved."""
