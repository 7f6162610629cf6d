"""A shadow is loaded only if it has the tensors of the model folder, no fewer and no others."""

from collections.abc import Iterable

from buffer.errors import ForebayError

TIED_HEAD = "lm_head.weight"  # a folder or a trainer may or may not name a tied head; its tensor is the embedding


class ShadowRefused(ForebayError):
    """The shadow is not one of this model."""


def check_names(given: Iterable[str], expected: Iterable[str], where: str) -> None:
    """Raise ShadowRefused when names differ, saying which; the engine keeps what it has."""
    named, wanted = set(given), set(expected)
    free = {TIED_HEAD}
    for names, what in ((wanted - named - free, "the shadow lacks"), (named - wanted - free, "the model lacks")):
        if names:
            raise ShadowRefused(
                f"the weights that came are not those of this model: {what} {some(sorted(names))}",
                where=where,
                cure="start trainer and producers from the same model folder",
            )


def some(names: list[str]) -> str:
    """The first few names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
