"""The final answer of a completion, and of a reference, is found by one rule that all scorers share.

Completion: the text of the last <answer> tag, and the last \\boxed{} in it (without a tag: in all of the completion).
Reference: what follows the last `####` (GSM8K), else the last \\boxed{}, else all of it.
"""

import re
from typing import Any

ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """The content of the last complete \\boxed{...} (or \\fbox{...}), braces balanced."""
    for start in reversed([match.end() for match in re.finditer(r"\\f?boxed\s*\{", text)]):
        depth = 1
        for position in range(start, len(text)):
            character = text[position]
            if character in "{}" and text[position - 1] != "\\":
                depth += 1 if character == "{" else -1
                if depth == 0:
                    return text[start:position].strip()
    return None


def last_tag(text: str) -> str | None:
    """The text of the last <answer>...</answer>."""
    found = ANSWER_TAG.findall(text)
    return found[-1].strip() if found else None


def reference_text(answer: Any) -> str | None:
    """The reference answer as text; None when there is none."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return None
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))  # a column of numbers holds 43.0 where people write 43
    text = str(answer).strip()
    if "####" in text:
        text = text.rsplit("####", 1)[1].strip()
    else:
        boxed = last_boxed(text)
        text = text if boxed is None else boxed
    return text or None
