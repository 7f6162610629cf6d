"""Communicators: how the bytes of a policy travel from the publisher to the receivers."""

from buffer.errors import ForebayError
from weight_sync.communicators.base import Transport
from weight_sync.communicators.gloo import GlooTransport


class TransportMissing(ForebayError):
    """The transport that was asked for is not part of this release."""

    exit_code = 2


_MISSING = {
    "nccl": "the NCCL communicator is not written yet, and this release never ran on a GPU",
    "hccl": "the binding to HCCL's C interface is not written yet, and this release never ran on an NPU",
}


def transport(name: str, *, host: str = "127.0.0.1") -> Transport:
    """The transport of that name; ``host`` is the address of this machine that the other members can reach."""
    if name == "gloo":
        return GlooTransport(host)
    raise TransportMissing(
        f"{name}: {_MISSING.get(name, 'there is no such communicator')}",
        where="producers.<pool>.communicator",
        cure="use `gloo`, which carries the weights through host memory on any hardware",
    )
