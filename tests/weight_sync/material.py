"""Small weights of every awkward kind, and what tells two tensors apart to the bit."""

from collections.abc import Iterator

import torch
import xxhash

Named = list[tuple[str, torch.Tensor]]


def weights(seed: int = 0) -> Named:
    """About 24 KB: float32 and bfloat16, odd sizes, no elements, one element, integers, NaN, -0 and a transposed view;
    the largest has more bytes than a bucket of the tests."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    special = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45, 3.4e38])
    return [
        ("model.embed_tokens.weight", normal(13, 37)),
        ("model.layers.0.q.weight", normal(33, 65).to(torch.bfloat16)),
        ("model.layers.0.q.bias", normal(3)),
        ("model.layers.0.scale", normal()),
        ("model.layers.0.none", torch.empty(0, 5)),
        ("model.layers.0.special", special),
        ("model.layers.0.counts", torch.randint(-(2**40), 2**40, (7,), generator=random)),
        ("model.layers.1.mlp.weight", normal(40, 31).t()),
        ("model.layers.1.mlp.bias", normal(1001).to(torch.bfloat16)),
        ("lm_head.weight", normal(51, 37)),
    ]


def content(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    """Type, shape and digest of the bytes."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0).byte()
    return str(tensor.dtype), tuple(tensor.shape), xxhash.xxh3_64_hexdigest(raw.numpy())


def contents(tensors: Named) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """The same of each tensor, by name."""
    return {name: content(tensor) for name, tensor in tensors}


class Tiny(torch.nn.Module):
    """Two layers over an embedding and a head, tied or not: the smallest language model with something to forget."""

    def __init__(self, *, tied: bool, vocabulary: int = 50, width: int = 16, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))
        self.lm_head = torch.nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(ids).cumsum(0)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.lm_head(hidden)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A tied head appears once, as the embedding."""
        for name, parameter in self.named_parameters():
            yield name, parameter.detach().clone()
