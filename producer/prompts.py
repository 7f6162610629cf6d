"""A row becomes the same prompt tokens on every producer, is tokenised once, and is never cut.

What the prompt says is the template's matter alone: `chat` and a file of one's own write every special token
themselves, `raw` and `r1_zero` are plain text to which the tokenizer adds what it adds to any text.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from buffer.errors import SpecError
from producer.data import Row
from producer.settings import PromptSettings

TEMPLATES = ("chat", "raw", "r1_zero")

R1_ZERO = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. "
    "The Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. "
    "The reasoning process is enclosed within <think> </think> and the answer within <answer> </answer> tags, with the "
    "final answer in \\boxed{{}}, i.e., <think> reasoning process here </think> "
    "<answer> \\boxed{{final answer here}} </answer>.\nUser: {question}\nAssistant:"
)


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    chat_template: Any

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, Any]: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any: ...


def load_tokenizer(model_path: str) -> Tokenizer:
    """The tokenizer of the model's folder."""
    import transformers

    if not Path(model_path).is_dir():
        raise SpecError("the model folder does not exist", where=model_path, cure="check `model.path`")
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        return tokenizer
    except (OSError, ValueError, KeyError) as error:
        raise SpecError(
            f"the model folder has no readable tokenizer: {error}",
            where=model_path,
            cure="put tokenizer.json and tokenizer_config.json beside config.json",
        ) from error


class Renderer:
    """Renders rows with one template; made at start, so that a wrong template ends the producer before it leases."""

    def __init__(self, settings: PromptSettings, tokenizer: Tokenizer, model_path: str) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._file = None
        check_template(settings)
        if settings.template == "chat":
            if not tokenizer.chat_template:
                raise SpecError(
                    "the model has no chat template",
                    where=model_path,
                    cure="set `prompt.template` to r1_zero or raw (base models), or to a Jinja file",
                )
        elif settings.template not in TEMPLATES:
            self._file = _compile(Path(settings.template))

    def render(self, row: Row) -> list[int] | None:
        """The prompt's token ids, or None when it is longer than `prompt.max_tokens`."""
        text, add_special_tokens = self._text(row)
        tokens = [int(token) for token in self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]]
        if not tokens:
            raise SpecError(
                f"the prompt of row {row.number} has no tokens",
                where=f"template {self._settings.template}",
                cure="give a template that writes the question",
            )
        return tokens if len(tokens) <= self._settings.max_tokens else None

    def text(self, row: Row) -> str:
        """The prompt as text, for people."""
        return self._text(row)[0]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a completion's tokens, as engines give it: special ones are left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _text(self, row: Row) -> tuple[str, bool]:
        template = self._settings.template
        if template == "raw":
            return self._single_question(row), True
        if template == "r1_zero":
            return R1_ZERO.format(question=self._single_question(row)), True
        messages = self._messages(row)
        if template == "chat":
            return self._chat(row, messages), False
        return self._from_file(row, messages), False

    def _messages(self, row: Row) -> list[Mapping[str, Any]]:
        if not isinstance(row.question, str):
            messages = list(row.question)
        else:
            messages = [{"role": "user", "content": row.question}]
        if self._settings.system is not None:
            messages.insert(0, {"role": "system", "content": self._settings.system})
        return messages

    def _single_question(self, row: Row) -> str:
        if isinstance(row.question, str):
            return row.question
        if len(row.question) == 1:
            return str(row.question[0]["content"])
        raise SpecError(
            f"row {row.number} holds a conversation of {len(row.question)} messages",
            where=f"template {self._settings.template}",
            cure="use `prompt.template: chat`, or a Jinja file that writes `messages`",
        )

    def _chat(self, row: Row, messages: list[Mapping[str, Any]]) -> str:
        import jinja2

        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except jinja2.TemplateError as error:
            raise SpecError(
                f"the chat template refuses row {row.number}: {error}",
                where="template chat",
                cure="check the roles of the row's messages, and `prompt.system`",
            ) from error

    def _from_file(self, row: Row, messages: list[Mapping[str, Any]]) -> str:
        import jinja2

        assert self._file is not None
        question = row.question if isinstance(row.question, str) else str(row.question[-1]["content"])
        try:
            return str(self._file.render(question=question, messages=messages))
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise SpecError(
                f"the template fails on row {row.number}: {error}",
                where=self._settings.template,
                cure="a template is given `question` and `messages`, and may do nothing but write text",
            ) from error


def check_template(settings: PromptSettings) -> None:
    """Raise SpecError when the template is neither a known name nor a file; needs no model."""
    if settings.template not in TEMPLATES and not Path(settings.template).is_file():
        raise SpecError(
            f"there is no template `{settings.template}`",
            where="prompt.template",
            cure=f"use one of: {', '.join(TEMPLATES)}; or the path of a Jinja file",
        )
    if settings.system is not None and settings.template in ("raw", "r1_zero"):
        raise SpecError(
            f"the template `{settings.template}` has no place for a system message",
            where="prompt.system",
            cure="remove `prompt.system`, or use `prompt.template: chat`",
        )


def _compile(path: Path) -> Any:
    import jinja2
    import jinja2.sandbox

    # A template comes with a data set as often as from the run's author: it may write text and nothing else.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=False, trim_blocks=True, lstrip_blocks=True
    )
    try:
        return environment.from_string(path.read_text(encoding="utf-8"))
    except (jinja2.TemplateSyntaxError, UnicodeDecodeError) as error:
        line = f":{error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise SpecError(
            f"the template is not valid Jinja: {error}", where=f"{path}{line}", cure="correct the template"
        ) from error
