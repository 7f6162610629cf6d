"""Every error that a person sees says what happened, where, and what to do about it.

Services end with the error's ``exit_code``; the command line prints the three parts and no traceback.
"""

from typing import ClassVar


class ForebayError(Exception):
    """An error whose cause and cure are known."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", cure: str = "") -> None:
        self.what = what
        self.where = where
        self.cure = cure
        super().__init__(what)

    def __str__(self) -> str:
        parts = [self.what]
        if self.where:
            parts.append(f"where: {self.where}")
        if self.cure:
            parts.append(f"cure: {self.cure}")
        return "\n  ".join(parts)


class SpecError(ForebayError):
    """The run spec, or something it names, is missing or malformed."""

    exit_code = 2


class BufferUnavailable(ForebayError):
    """Redis cannot be reached, refuses the credentials, is too old, read-only or out of memory."""

    exit_code = 3


class DeadlineExceeded(ForebayError):
    """A wait reached its deadline; ``what`` names whom it waited for."""

    exit_code = 4


class Fenced(ForebayError):
    """The caller was presumed dead and somebody else holds what it tried to change."""

    exit_code = 5


class ProofFailed(ForebayError):
    """A replica does not compute with the weights it was told to; it is quarantined."""

    exit_code = 6


class LedgerBroken(ForebayError):
    """The ledger's counts do not add up."""

    exit_code = 7


class TrainingFailed(ForebayError):
    """The training itself cannot go on (for example NaN in the loss)."""

    exit_code = 8
