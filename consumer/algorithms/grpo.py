"""GRPO: the loss of a step is one weighted sum over its tokens, so it is the same however the tokens are split.

Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), equations 3 and 4, with separate clip bounds below and above
(arXiv 2503.14476, equation 10) and, per token, a truncated importance weight that corrects for the engine having
sampled with slightly (kernels) or clearly (an older version) other probabilities than the trainer's:

    L = sum_t w_t * [ -c_t * min(r_t * A, clip(r_t, 1 - low, 1 + high) * A) + beta * k3_t ]

    r_t  = exp(log p_t - log p_t at the start of the step)
    c_t  = min(exp(log p_t at the start of the step - log p_t of the behaviour policy), cap), no gradient
    k3_t = exp(log ref_t - log p_t) - (log ref_t - log p_t) - 1
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from consumer.settings import AlgorithmSettings

STD_FLOOR = 1e-6  # added to the standard deviation; small beside any spread of real rewards


@dataclass(frozen=True)
class TokenLosses:
    """One element per token; only ``loss`` carries a gradient."""

    loss: torch.Tensor
    clipped: torch.Tensor  # bool: the clip took the gradient away
    importance: torch.Tensor  # c_t
    capped: torch.Tensor  # bool: c_t was cut at the cap
    reference_kl: torch.Tensor | None  # k3_t


def group_advantages(rewards: Sequence[float], *, normalise_by_std: bool) -> NDArray[np.float64]:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6) within a group (section 4.1.2 of the paper), with the *sample* standard
    deviation (n - 1). A group of one, or of equal rewards, has advantages of exactly 0."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.size < 2 or np.all(values == values[0]):
        return np.zeros_like(values)
    centred = values - values.mean()
    return centred / (values.std(ddof=1) + STD_FLOOR) if normalise_by_std else centred


def token_weights(lengths: Sequence[int], aggregation: str) -> list[float]:
    """w_t of each sequence's tokens; the weights of one optimizer update add up to 1 over all ranks.

    ``token_mean``: each token counts the same. ``sequence_mean``: each sequence does, and its tokens share its weight.
    Tokens that a sampling filter masks stay in the denominator: they are known only after the forward pass.
    """
    if aggregation == "token_mean":
        total = sum(lengths)
        return [1.0 / total if total else 0.0] * len(lengths)
    if aggregation == "sequence_mean":
        return [1.0 / (len(lengths) * length) if length else 0.0 for length in lengths]
    raise ValueError(f"unknown aggregation {aggregation}")


def token_losses(
    log_probs: torch.Tensor,
    *,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    reference: torch.Tensor | None,
    settings: AlgorithmSettings,
) -> TokenLosses:
    """The bracket of the equation above, for a flat run of tokens. ``proximal`` is log p_t at the step's start."""
    ratio = torch.exp(log_probs - proximal)
    clipped_ratio = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    plain, clipped = ratio * advantages, clipped_ratio * advantages
    raw_importance = torch.exp(proximal - behaviour).detach()
    importance = raw_importance.clamp(max=settings.importance_cap)
    loss = -importance * torch.minimum(plain, clipped)
    kl = None
    if reference is not None:
        difference = reference - log_probs
        kl = torch.exp(difference) - difference - 1.0
        loss = loss + settings.kl_coefficient * kl
    return TokenLosses(
        loss=loss,
        clipped=(clipped < plain).detach(),
        importance=importance,
        capped=raw_importance > settings.importance_cap,
        reference_kl=None if kl is None else kl.detach(),
    )
