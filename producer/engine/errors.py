"""What goes wrong in an engine is the same error whichever engine it is."""

import math
from collections.abc import Sequence

from buffer.errors import ForebayError


class EngineFailed(ForebayError):
    """The engine did not start, died, or holds weights of which nobody knows what they are."""

    exit_code = 9


class EngineProducedNaN(ForebayError):
    """The model's output is not a number."""

    exit_code = 8


def refuse_nan(log_probs: Sequence[float], *, version: int, request_id: str) -> None:
    """Raise EngineProducedNaN unless every log-prob is a number."""
    if not all(map(math.isfinite, log_probs)):
        raise EngineProducedNaN(
            "the model gives log-probs that are not numbers (NaN or infinite)",
            where=f"policy version {version}, request {request_id}",
            cure="resume from an earlier checkpoint with a lower learning rate, or compute in float32",
        )


def refuse_length(length: int, limit: int, *, request_id: str) -> None:
    """Raise ForebayError unless a prompt of ``length`` tokens leaves room for one more."""
    if not 0 < length < limit:
        raise ForebayError(
            f"a prompt of {length} tokens does not fit: prompt and completion may have {limit} together",
            where=f"request {request_id}",
            cure="lower `prompt.max_tokens`, or raise `max_model_len` in `producers.<pool>.engine.args`",
        )


def not_paused() -> EngineFailed:
    """A load was asked of an engine that steps."""
    return EngineFailed("weights can only be loaded into a paused engine", cure="pause it first")


def unusable(broken: str, model_path: str) -> EngineFailed:
    """A load did not end well: ``broken`` says how."""
    return EngineFailed(
        f"the engine's weights are not usable: {broken}",
        where=f"model {model_path}",
        cure="start trainer and producers from the same model folder, and restart this producer",
    )


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, in a line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
