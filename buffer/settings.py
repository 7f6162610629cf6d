"""Settings of the buffer: where it is and how much it may hold."""

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Base of every settings model: unknown keys are refused and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class BufferSettings(Settings):
    """The Redis-protocol server that everything meets in."""

    url: str | None = None
    """`redis://` or `rediss://` (TLS) address; none: an embedded server is started in the run folder."""
    password_env: str = "FOREBAY_REDIS_PASSWORD"
    """Name of the environment variable that holds the password, when the URL has none."""
    tls_ca_file: str | None = None
    """CA certificate file for `rediss://`."""
    budget_bytes: int = Field(default=1 << 30, gt=0)
    """Bytes of groups that may be stored or reserved; producers wait when they are used up."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """How long any call may retry before it fails and names the server, in seconds."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """How long a lease of a prompt lasts without a renewal, in seconds."""
    heartbeat_seconds: float = Field(default=2.0, gt=0)
    """How often members report that they are alive, in seconds; a member is dead after five missed reports."""
