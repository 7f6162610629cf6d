"""A row becomes the tokens that its template says; a wrong template ends the start with a cure."""

from pathlib import Path
from typing import Any

import pytest

from buffer.errors import SpecError
from producer.data import Row
from producer.prompts import Renderer, Tokenizer, load_tokenizer
from producer.settings import PromptSettings


@pytest.fixture(scope="module")
def tokenizer(model_path: str) -> Tokenizer:
    return load_tokenizer(model_path)


def row(question: Any = "12+30", number: int = 0) -> Row:
    return Row(number, question, "42", "default", {})


def renderer(tokenizer: Tokenizer, **settings: Any) -> Renderer:
    return Renderer(PromptSettings(**settings), tokenizer, "the-model")


def decoded(tokenizer: Any, tokens: list[int] | None) -> str:
    assert tokens is not None
    return str(tokenizer.decode(tokens))


def test_chat_is_the_models_own_template_with_an_optional_system_message(tokenizer: Tokenizer) -> None:
    assert decoded(tokenizer, renderer(tokenizer).render(row())) == "12+30="
    with_system = renderer(tokenizer, system="Add.")
    assert decoded(tokenizer, with_system.render(row())) == "Add.\n12+30="
    messages = (
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    )
    assert decoded(tokenizer, renderer(tokenizer).render(row(messages))) == "1+1=2<|endoftext|>3="


def test_raw_is_the_text_as_it_is(tokenizer: Tokenizer) -> None:
    assert decoded(tokenizer, renderer(tokenizer, template="raw").render(row(" 12+30 = {}"))) == " 12+30 = {}"


def test_r1_zero_asks_for_think_and_answer_tags_and_a_boxed_answer(tokenizer: Tokenizer) -> None:
    text = renderer(tokenizer, template="r1_zero").text(row("What is {x}?"))
    assert text.startswith("A conversation between User and Assistant.")
    assert all(part in text for part in ("<think>", "</think>", "<answer>", "</answer>", "\\boxed{}"))
    assert text.endswith("\nUser: What is {x}?\nAssistant:")


def test_a_jinja_file_is_given_question_and_messages(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("Q: {{ question }} ({{ messages | length }})\nA:")
    assert decoded(tokenizer, renderer(tokenizer, template=str(path)).render(row())) == "Q: 12+30 (1)\nA:"


@pytest.mark.parametrize(
    "text", ["{{ absent }}", "{{ question.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 // 0 }}"]
)
def test_a_jinja_file_may_only_write_text(tokenizer: Tokenizer, tmp_path: Path, text: str) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(text)
    with pytest.raises(SpecError, match="the template fails on row 7"):
        renderer(tokenizer, template=str(path)).render(row(number=7))


def test_a_malformed_jinja_file_is_refused_at_the_start(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("one\n{% if %}")
    with pytest.raises(SpecError, match="not valid Jinja") as caught:
        renderer(tokenizer, template=str(path))
    assert f"{path}:2" in str(caught.value)


def test_an_unknown_template_is_refused_with_the_known_ones(tokenizer: Tokenizer) -> None:
    with pytest.raises(SpecError, match="no template `r1-zero`") as caught:
        renderer(tokenizer, template="r1-zero")
    assert all(name in str(caught.value) for name in ("chat", "raw", "r1_zero", "Jinja"))


def test_a_model_without_a_chat_template_is_refused_with_a_cure(model_path: str) -> None:
    bare = load_tokenizer(model_path)
    bare.chat_template = None
    with pytest.raises(SpecError, match="no chat template") as caught:
        renderer(bare)
    assert "r1_zero" in str(caught.value) and "the-model" in str(caught.value)


def test_a_conversation_does_not_fit_a_template_for_one_question(tokenizer: Tokenizer) -> None:
    messages = ({"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"})
    for template in ("raw", "r1_zero"):
        with pytest.raises(SpecError, match="row 3 holds a conversation of 2 messages"):
            renderer(tokenizer, template=template).render(row(messages, 3))
    with pytest.raises(SpecError, match="no place for a system message"):
        renderer(tokenizer, template="raw", system="Add.")


def test_a_prompt_over_the_limit_is_told_and_not_cut(tokenizer: Tokenizer) -> None:
    limited = renderer(tokenizer, max_tokens=6)
    assert limited.render(row("12+30")) is not None
    assert limited.render(row("123+30")) is None


def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(SpecError, match="no readable tokenizer"):
        load_tokenizer(str(tmp_path))
