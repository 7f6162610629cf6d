"""The division of a step over ranks and micro-batches, and the advantages that go with it."""

import msgspec
import numpy as np
import pytest

from buffer.errors import TrainingFailed
from buffer.records import Sampling
from consumer.algorithms.grpo import group_advantages, token_weights
from consumer.batching import deal, micro_batches, split_updates, training_samples
from consumer.settings import AlgorithmSettings
from tests.consumer.material import make_groups

pytestmark = pytest.mark.consumer_env

ALGORITHM = AlgorithmSettings()


def test_every_sample_is_in_one_micro_batch_of_one_rank_within_the_bound() -> None:
    samples = training_samples(make_groups(7), ALGORITHM, 0)
    dealt = deal(samples, 3)
    batches = [batch for rank in dealt for batch in micro_batches(rank, 50, pad_id=0)]
    assert sorted(i for batch in batches for i in batch.indices) == list(range(28))
    assert all(batch.input_ids.numel() <= 50 for batch in batches)
    assert sum(float(batch.weights.sum()) for batch in batches) == pytest.approx(1.0)


def test_ranks_get_equal_loads_of_tokens() -> None:
    dealt = deal(training_samples(make_groups(20), ALGORITHM, 0), 4)
    loads = [sum(len(sample.tokens) for sample in rank) for rank in dealt]
    assert max(loads) - min(loads) <= 8


def test_a_micro_batch_has_one_setting_of_sampling() -> None:
    warm = Sampling(temperature=1.2, top_p=1.0, top_k=0, min_p=0.0, max_tokens=16)
    groups = make_groups(2) + make_groups(2, sampling=warm)
    batches = micro_batches(training_samples(groups, ALGORITHM, 0), 10_000, pad_id=0)
    assert [batch.sampling.temperature for batch in batches] == [1.0, 1.2]


def test_a_sample_over_the_bound_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(TrainingFailed, match="over the bound of 5 ") as error:
        micro_batches(training_samples(make_groups(2), ALGORITHM, 0), 5, pad_id=0)
    assert "micro_batch_tokens" in error.value.where


def test_updates_of_a_step_share_its_groups_out() -> None:
    groups = make_groups(5)
    parts = split_updates(groups, 2)
    assert [group.prompt for part in parts for group in part] == [0, 1, 2, 3, 4]
    assert [len(part) for part in parts] == [2, 3]
    with pytest.raises(TrainingFailed, match="5 groups"):
        split_updates(groups, 6)


def test_samples_that_were_not_scored_do_not_train_and_do_not_count_in_the_advantage() -> None:
    group = make_groups(1)[0]
    broken = msgspec.structs.replace(group.samples[0], outcome="failed", reward=0.0)
    group = msgspec.structs.replace(group, samples=(broken, *group.samples[1:]))
    samples = training_samples([group], ALGORITHM, 0)
    assert len(samples) == 3
    assert [sample.advantage for sample in samples] == pytest.approx(
        group_advantages([s.reward for s in group.samples[1:]], normalise_by_std=True)
    )


def test_log_probs_that_are_not_finite_name_the_producer() -> None:
    group = make_groups(1)[0]
    bad = np.full(len(group.samples[0].tokens()), np.nan, dtype="<f4").tobytes()
    broken = msgspec.structs.replace(group.samples[0], log_probs=bad)
    group = msgspec.structs.replace(group, samples=(broken, *group.samples[1:]))
    with pytest.raises(TrainingFailed, match="log-probs are not finite") as error:
        training_samples([group], ALGORITHM, 0)
    assert "producer-0" in error.value.where


def test_advantages_are_normalised_by_the_sample_standard_deviation() -> None:
    rewards = [0.0, 1.0, 1.0, 0.0, 0.5]
    expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)
    assert group_advantages(rewards, normalise_by_std=True) == pytest.approx(expected)
    assert group_advantages(rewards, normalise_by_std=False) == pytest.approx(np.array(rewards) - 0.5)
    assert group_advantages([0.1] * 4, normalise_by_std=True).tolist() == [0.0] * 4
    assert group_advantages([1.0], normalise_by_std=True).tolist() == [0.0]


def test_weights_of_an_update_add_up_to_one() -> None:
    lengths = [1, 5, 2]
    assert token_weights(lengths, "token_mean") == [1 / 8] * 3
    assert sum(w * n for w, n in zip(token_weights(lengths, "sequence_mean"), lengths, strict=True)) == pytest.approx(1)
