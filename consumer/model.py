"""The trainer's log-probs are of the distribution that the engine sampled from: temperature and truncation included.

Weights are float32 masters. Dropout is off: it would make the ratio of two policies a matter of chance.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers.models.auto import AutoModelForCausalLM

from buffer.errors import SpecError
from buffer.records import Sampling
from consumer.batching import MicroBatch
from weight_sync.model_folder import check_config

CHUNK_ELEMENTS = 1 << 24  # logits in float32 at a time: 64 MiB


@dataclass(frozen=True)
class TokenScores:
    """Of the completion tokens of a micro-batch, flat."""

    log_probs: torch.Tensor
    entropy: torch.Tensor  # of the distribution at the token, no gradient
    inside: torch.Tensor  # bool: the token is inside the trainer's own sampling filter


def load_model(folder: str | Path) -> nn.Module:
    """The model of a folder, in float32, in evaluation mode (no dropout), without gradient checkpointing or cache."""
    check_config(Path(folder))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), torch_dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise SpecError(
            f"the model cannot be loaded: {str(error).splitlines()[0]}",
            where=str(folder),
            cure="give a folder with config.json and model.safetensors in Hugging Face format",
        ) from error
    model.config.use_cache = False
    return model.eval()


def score_tokens(model: nn.Module, batch: MicroBatch) -> TokenScores:
    """Run the model over a micro-batch; logits are made only from the first completion token on."""
    first = int(batch.targets.int().argmax(dim=1).min())  # the first column in which any row has a completion token
    width = batch.input_ids.shape[1]
    keep = torch.arange(first - 1, width - 1, device=batch.input_ids.device)
    logits = model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, logits_to_keep=keep, use_cache=False
    ).logits
    wanted = batch.targets[:, first:]
    return token_scores(logits[wanted], batch.input_ids[:, first:][wanted], batch.sampling)


def token_scores(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling) -> TokenScores:
    """Scores of ``tokens`` (n,) under ``logits`` (n, vocabulary), in chunks of tokens.

    log p = z - logsumexp(z over the kept tokens), z = logits / temperature. Where the sampling truncates, the kept
    tokens are those of the trainer's own filter; a sampled token outside of it has no meaningful probability there and
    is marked, so that the loss leaves it out.
    """
    chunk = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    parts = [
        _scores_of_chunk(part, ids, sampling)
        for part, ids in zip(torch.split(logits, chunk), torch.split(tokens, chunk), strict=True)
    ]
    return TokenScores(
        log_probs=torch.cat([p.log_probs for p in parts]),
        entropy=torch.cat([p.entropy for p in parts]),
        inside=torch.cat([p.inside for p in parts]),
    )


def _scores_of_chunk(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling) -> TokenScores:
    scaled = logits.float()
    if sampling.temperature != 1.0:
        scaled = scaled / sampling.temperature
    chosen = scaled.gather(-1, tokens[:, None]).squeeze(-1)
    if truncates(sampling):
        kept = kept_tokens(scaled.detach(), sampling)
        normaliser = scaled.masked_fill(~kept, float("-inf")).logsumexp(-1)
        inside = kept.gather(-1, tokens[:, None]).squeeze(-1)
        values = scaled.detach().masked_fill(~kept, 0.0)
        probabilities = torch.exp(scaled.detach() - normaliser.detach()[:, None]).masked_fill(~kept, 0.0)
    else:
        normaliser = scaled.logsumexp(-1)
        inside = torch.ones_like(tokens, dtype=torch.bool)
        values = scaled.detach()
        probabilities = torch.exp(values - normaliser.detach()[:, None])
    entropy = normaliser.detach() - (probabilities * values).sum(-1)
    return TokenScores(log_probs=chosen - normaliser, entropy=entropy, inside=inside)


def truncates(sampling: Sampling) -> bool:
    """Whether the sampling cuts off any token."""
    return sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0


def kept_tokens(scaled: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Mask (n, vocabulary) of the tokens that may be sampled; ``scaled`` are logits over temperature.

    In vLLM's order: min-p relative to the most likely token, then top-k, then the smallest set of the most likely of
    the remaining tokens whose probability reaches top-p. The most likely token is always kept.
    """
    kept = torch.ones_like(scaled, dtype=torch.bool)
    if sampling.min_p > 0.0:
        probabilities = scaled.softmax(-1)
        kept &= probabilities >= sampling.min_p * probabilities.amax(-1, keepdim=True)
    if 0 < sampling.top_k < scaled.shape[-1]:
        remaining = scaled.masked_fill(~kept, float("-inf"))
        kept &= remaining >= remaining.topk(sampling.top_k, dim=-1).values[:, -1:]
    if sampling.top_p < 1.0:
        remaining = scaled.masked_fill(~kept, float("-inf"))
        ascending, order = remaining.sort(dim=-1)
        below = ascending.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
        below[:, -1] = False
        kept &= ~torch.zeros_like(below).scatter(-1, order, below)
    return kept


@torch.no_grad()
def raw_log_probs(model: nn.Module, token_ids: list[int] | tuple[int, ...]) -> list[float]:
    """Log-probs (temperature 1) of the tokens after the first, for the probe of weight_sync."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(token_ids)], dtype=torch.long, device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    chosen = logits.gather(-1, ids[0, 1:, None]).squeeze(-1)
    return [float(x) for x in (chosen - logits.logsumexp(-1)).cpu()]
