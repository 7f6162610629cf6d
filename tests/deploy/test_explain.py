"""The reference says of every key what the settings say."""

from pathlib import Path

import pytest

from buffer.errors import SpecError
from deploy import explain


def test_the_reference_page_is_what_the_settings_say() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "reference.md"
    assert page.read_text() == explain.markdown(), "write it anew: forebay explain --markdown > docs/reference.md"


def test_a_key_is_explained_with_type_bounds_default_and_meaning() -> None:
    key = explain.explain("consumer.optimizer.learning_rate")[0]
    assert (key.kind, key.default, key.text) == ("number > 0", "1e-06", "Peak learning rate.")


def test_the_keys_below_a_key_are_explained_too_also_under_a_pools_own_name() -> None:
    names = [key.name for key in explain.explain("producers.fast.engine")]
    assert names[0] == "producers.NAME.engine"
    assert "producers.NAME.engine.kv_cache_gib" in names


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(SpecError, match="there is no key `consumer.speed`"):
        explain.explain("consumer.speed")
