"""Each row of the batch attends to its own tokens alone, at their own positions, whoever joins or leaves.

The keys and values of all rows lie in one cache, each row's at its right end: what is left of them is masked padding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad


class Batch:
    """The cache of the sequences that are being continued; the caller knows their tokens."""

    def __init__(self, model: Any, device: str) -> None:
        self._model = model
        self._device = device
        self._cache: Any = None

    def add(self, prompt: Sequence[int], count: int) -> torch.Tensor:
        """Append ``count`` rows that begin with ``prompt``; logits of the next token, shape (vocabulary,), on the CPU.
        The prompt is computed alone, so without padding, and once."""
        from transformers import DynamicCache

        cache = DynamicCache()
        logits = self._forward(torch.tensor([list(prompt)]), cache)[0]
        cache.batch_repeat_interleave(count)
        if self._cache is None:
            self._cache = cache
        else:
            _append(self._cache, cache)
        return logits

    def step(self, tokens: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Append one token to each row; ``lengths``: tokens of the row before it. Logits, (rows, vocabulary)."""
        width = self._cache.get_seq_length() + 1
        held = torch.tensor(lengths)[:, None]
        mask = torch.arange(width)[None] >= width - 1 - held
        return self._forward(torch.tensor(tokens)[:, None], self._cache, attention_mask=mask.long(), position_ids=held)

    def keep(self, rows: Sequence[int], longest: int) -> None:
        """Drop all other rows; ``longest``: most tokens of one that stays."""
        if not rows:
            self._cache = None
            return
        index = torch.tensor(rows, device=self._device)
        for layer in self._cache.layers:
            layer.keys = layer.keys[index, :, -longest:]
            layer.values = layer.values[index, :, -longest:]

    def _forward(self, tokens: torch.Tensor, cache: Any, **inputs: torch.Tensor) -> torch.Tensor:
        inputs = {name: value.to(self._device) for name, value in (inputs | {"input_ids": tokens}).items()}
        with torch.inference_mode():
            found = self._model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = found.logits[:, -1].float().cpu()
        return logits


def _append(cache: Any, other: Any) -> None:
    for mine, its in zip(cache.layers, other.layers, strict=True):
        width = max(mine.keys.shape[2], its.keys.shape[2])
        for name in ("keys", "values"):
            parts = [pad(part, (0, 0, width - part.shape[2], 0)) for part in (getattr(mine, name), getattr(its, name))]
            setattr(mine, name, torch.cat(parts))
