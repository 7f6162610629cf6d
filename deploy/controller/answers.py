"""What the controller answers besides the status; read by its client, which needs no web framework for it."""

from deploy.status import Shown


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
