"""What Forebay needs of an engine: completions with the log-probs and the version of each token, and new weights.

One ``generate`` is one completion (a group is n of them), so that one can be aborted. Weights are given as a *shadow*:
packed tensors in host memory under Hugging Face names (``weight_sync.shadow``); only ``load`` stops the engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from buffer.records import FinishReason
from weight_sync.shadow import ShadowReference


@dataclass(frozen=True)
class Request:
    """One completion to generate. ``temperature`` 0 is greedy (evaluation)."""

    id: str
    prompt_token_ids: Sequence[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    stop: Sequence[str]
    seed: int | None


@dataclass(frozen=True)
class Completion:
    """What came back. The three arrays have one element per completion token (natural log, processed distribution)."""

    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    text: str


class Engine(Protocol):
    """An engine in this process (which may own worker processes)."""

    async def start(self) -> None:
        """Load the model from its folder and be ready; raises ForebayError when it cannot within its deadline."""

    async def generate(self, request: Request) -> Completion:
        """Answer one prompt; on ``abort`` the completion has what was generated so far."""

    async def abort(self, request_id: str) -> None:
        """End a running request."""

    async def pause(self) -> None:
        """Stop stepping; running requests keep their state."""

    async def resume(self) -> None:
        """Go on stepping."""

    async def load(self, shadow: ShadowReference, version: int) -> None:
        """Replace every weight by the shadow's, through the engine's own load path; tokens sampled from now on carry
        ``version``. The engine must be paused."""

    async def digests(self) -> Mapping[str, str]:
        """Digest of each tensor that computes (after packing, fusing, sharding), by name and rank."""

    async def log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-prob of each token of a sequence given those before it (raw distribution), for tokens 1...; shape
        (len - 1,). Never answered from a cache of another version."""

    def layout(self) -> str:
        """What must be equal for digests to be comparable: engine, release, platform, dtype, parallel sizes."""

    async def check(self) -> None:
        """Raise ForebayError when the engine is dead."""

    async def stop(self) -> None:
        """End the engine and its processes."""
