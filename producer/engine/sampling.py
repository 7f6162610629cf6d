"""A token is drawn from exactly the distribution whose log-prob it is given: temperature, then min-p, top-k, top-p.

That is vLLM's order and its `processed_logprobs`. What is drawn follows from the logits and the request's generator.
"""

import torch

from producer.engine.base import Request

NEVER = float("-inf")


def processed(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """Log-probs, shape (vocabulary,), of what ``request`` samples from; of the raw distribution when it is greedy."""
    logits = logits.float()
    if request.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / request.temperature
    if request.min_p > 0:
        shares = logits.softmax(-1)
        logits = logits.masked_fill(shares < request.min_p * shares.max(), NEVER)
    if 0 < request.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(request.top_k).values[-1], NEVER)
    if request.top_p < 1:
        ascending, places = logits.sort()
        out = ascending.softmax(-1).cumsum(-1) <= 1 - request.top_p
        out[-1] = False
        logits = logits.index_fill(0, places[out], NEVER)
    return logits.log_softmax(-1)


def draw(log_probs: torch.Tensor, request: Request, generator: torch.Generator) -> int:
    """A token of that distribution; the likeliest one when the request is greedy."""
    if request.temperature == 0:
        return int(log_probs.argmax())
    # The least of exponential variables with these rates: one random number a token of the vocabulary, as vLLM does.
    noise = torch.empty_like(log_probs).exponential_(generator=generator)
    return int((log_probs - noise.log()).argmax())


def generator_of(request: Request) -> torch.Generator:
    """The source of a request's random numbers, shared with no other."""
    generator = torch.Generator()
    if request.seed is None:
        generator.seed()
    else:
        generator.manual_seed(request.seed)
    return generator
