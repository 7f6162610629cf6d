"""Temperature and truncation enter the trainer's log-probs as they entered the engine's sampling."""

import pytest
import torch

from buffer.records import Sampling
from consumer.model import kept_tokens, token_scores

pytestmark = pytest.mark.consumer_env

LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.07, 0.03]]))


def sampling(**changes: float) -> Sampling:
    return Sampling(**({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 8} | changes))


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        (sampling(), 5),
        (sampling(top_k=2), 2),
        (sampling(top_p=0.9), 3),
        (sampling(top_p=0.76), 3),
        (sampling(top_p=0.74), 2),
        (sampling(top_p=0.01), 1),
        (sampling(min_p=0.2), 3),
        (sampling(min_p=0.2, top_k=2), 2),
        # after top-k the remaining 0.5 and 0.25 are renormalised: 2/3 reaches 0.6 alone
        (sampling(top_k=2, top_p=0.6), 1),
    ],
)
def test_the_filter_keeps_what_the_sampling_could_have_drawn(setting: Sampling, kept: int) -> None:
    assert kept_tokens(LOGITS, setting)[0].tolist() == [True] * kept + [False] * (5 - kept)


def test_log_probs_are_renormalised_over_the_filter_and_tokens_outside_are_marked() -> None:
    scores = token_scores(LOGITS.expand(3, 5), torch.tensor([0, 1, 2]), sampling(top_k=2))
    assert scores.inside.tolist() == [True, True, False]
    torch.testing.assert_close(scores.log_probs[:2].exp(), torch.tensor([2 / 3, 1 / 3]))
    torch.testing.assert_close(scores.entropy, torch.full((3,), 0.6365142))


def test_temperature_comes_before_truncation() -> None:
    scores = token_scores(LOGITS, torch.tensor([1]), sampling(temperature=0.5, top_k=3))
    weights = torch.tensor([0.25, 0.0625, 0.0225])
    torch.testing.assert_close(scores.log_probs.exp(), weights[1:2] / weights.sum())


def test_gradients_and_values_at_the_r1_zero_settings_are_those_of_an_explicit_softmax() -> None:
    setting = sampling(temperature=0.9, top_p=0.9, top_k=50, min_p=0.01)
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(40, 260, generator=generator)).requires_grad_()
    other = logits.detach().clone().requires_grad_()
    tokens = logits.argmax(-1)
    scores = token_scores(logits, tokens, setting)
    assert scores.inside.all()
    scores.log_probs.sum().backward()

    scaled = other / 0.9
    mask = kept_tokens(scaled.detach(), setting)
    assert 1 < mask.sum(-1).float().mean() < 50
    explicit = scaled.masked_fill(~mask, -1e30).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    explicit.sum().backward()
    torch.testing.assert_close(scores.log_probs, explicit)
    torch.testing.assert_close(logits.grad, other.grad)


def test_scores_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, tokens = torch.randn(10, 260), torch.arange(10)
    whole = token_scores(logits, tokens, sampling(top_p=0.8))
    monkeypatch.setattr("consumer.model.CHUNK_ELEMENTS", 3 * 260)
    chunked = token_scores(logits, tokens, sampling(top_p=0.8))
    assert torch.equal(whole.log_probs, chunked.log_probs)
    assert torch.equal(whole.inside, chunked.inside)
