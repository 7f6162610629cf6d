"""Settings: how a service reads its own, and those of the buffer: where it is and how much it may hold."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from buffer.errors import SpecError


class Settings(BaseModel):
    """Base of every settings model: unknown keys are refused and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


Model = TypeVar("Model", bound=Settings)


def read_settings(kind: type[Model], path: Path) -> Model:
    """The settings of a service in a JSON file, as `deploy` writes them; raises SpecError."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SpecError(
            f"the settings cannot be read: {error.strerror}", where=str(path), cure="check the path"
        ) from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}" for problem in error.errors()
        )
        raise SpecError(
            f"the settings are malformed: {problems}", where=str(path), cure="run `forebay check` on the run's spec"
        ) from error


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
