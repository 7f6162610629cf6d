"""What the controller answers besides the status; read by its client, which needs no web framework for it."""

from pydantic import BaseModel, ConfigDict, Field

from deploy.pool_status import PoolDetail
from deploy.shown import Shown


class Health(Shown):
    """The controller answers, and so does its Redis."""

    status: str = "ok"
    """Always `ok`."""


class Order(Shown):
    """What was asked of the run."""

    asked: str
    """stop, pause, resume or checkpoint."""
    effect: str
    """What happens next."""


class Replicas(BaseModel):
    """What a pool is to have from now on."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    replicas: int = Field(ge=0, strict=True)
    """Number of replicas, up to the pool's `max_replicas`."""


class Scaled(Shown):
    """A pool's new size was noted."""

    pool: str
    """The pool."""
    before: int
    """Replicas that it was to have."""
    replicas: int
    """Replicas that it is to have."""
    effect: str
    """What happens next."""


class PoolList(Shown):
    """The pools of a run."""

    pools: list[PoolDetail]
    """By name."""
