"""A text that ends a completion is kept, and nothing after it is."""

from collections.abc import Sequence


def cut_at_stop(text: str, stop: Sequence[str]) -> str | None:
    """The text up to the end of the first stop text in it; None when there is none."""
    ends = [place + len(one) for one in stop if (place := text.find(one)) >= 0]
    return text[: min(ends)] if ends else None
