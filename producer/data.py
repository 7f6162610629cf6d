"""The same file gives every producer the same rows, digest and order; a row that cannot be used is named, not skipped.

The digest covers what training depends on (question, answer, task, further columns that rewards may read), so that
producers with different data are refused by the ledger.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from buffer.errors import SpecError
from producer.settings import DataSettings

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One row of a dataset under the names that the key map gives it."""

    number: int
    question: str | tuple[Message, ...]
    answer: Any  # None when the data has no reference answers
    task: str
    columns: Mapping[str, Any]

    def for_scorers(self) -> dict[str, Any]:
        """All columns as they are in the file, and `question`, `answer` and `task` as mapped."""
        return {**self.columns, "question": self.question, "answer": self.answer, "task": self.task}


@dataclass(frozen=True)
class Dataset:
    """All rows of a set of prompts."""

    rows: tuple[Row, ...]
    digest: str
    source: str

    def tasks(self) -> list[str]:
        """The task of each row."""
        return [row.task for row in self.rows]


def load_dataset(settings: DataSettings) -> Dataset:
    """Read and check every row; raises SpecError naming the file and the row."""
    rows: list[Row] = []
    digest = hashlib.blake2b(digest_size=16)
    for number, (place, columns) in enumerate(_columns_of(settings)):
        if settings.limit is not None and number >= settings.limit:
            break
        row = _mapped(settings, number, place, columns)
        rows.append(row)
        digest.update(msgspec.json.encode(row.for_scorers(), enc_hook=str, order="sorted"))
        digest.update(b"\n")
    if not rows:
        raise SpecError("the dataset has no rows", where=settings.path, cure="give a file with at least one row")
    return Dataset(tuple(rows), digest.hexdigest(), settings.path)


def pass_order(rows: int, seed: int, pass_number: int) -> list[int]:
    """The rows' order in a pass: a permutation that follows from the run's seed and the pass alone."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, pass_number])))
    return [int(row) for row in generator.permutation(rows)]


def _columns_of(settings: DataSettings) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row's place (for people) and columns."""
    path = Path(settings.path)
    if not path.exists():
        raise SpecError("the dataset does not exist", where=settings.path, cure="check `path` of the data")
    if path.is_dir():
        return _folder_rows(path, settings.split)
    if settings.split is not None:
        raise SpecError(
            f"a file has no splits, but split `{settings.split}` was asked for",
            where=settings.path,
            cure="remove `split`, or give a folder written by datasets.save_to_disk",
        )
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return _jsonl_rows(path)
    if path.suffix in (".parquet", ".pq"):
        return _parquet_rows(path)
    raise SpecError(
        f"files ending in `{path.suffix}` are not read",
        where=settings.path,
        cure="give .jsonl, .parquet, or a folder written by datasets.save_to_disk",
    )


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    with path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                columns = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise SpecError(
                    f"line {line_number} is not a JSON object: {error}",
                    where=f"{path}:{line_number}",
                    cure="write one JSON object per line",
                ) from error
            yield f"{path}:{line_number}", columns


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches():
            for columns in batch.to_pylist():
                yield f"{path}, row {number}", columns
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise SpecError(
            f"the Parquet file cannot be read: {error}", where=str(path), cure="write the file anew"
        ) from error


def _folder_rows(path: Path, split: str | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError, OSError) as error:
        raise SpecError(
            f"the folder is not a Hugging Face dataset: {error}",
            where=str(path),
            cure="write it with datasets.save_to_disk, or give a .jsonl or .parquet file",
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        known = ", ".join(sorted(loaded))
        if split is None:
            raise SpecError("the dataset holds several splits", where=str(path), cure=f"set `split` to one of: {known}")
        if split not in loaded:
            raise SpecError(f"there is no split `{split}`", where=str(path), cure=f"the splits are: {known}")
        loaded = loaded[split]
    elif split is not None and str(loaded.split) != split:
        raise SpecError(f"there is no split `{split}`", where=str(path), cure="remove `split`: the folder holds one")
    for number, columns in enumerate(loaded):
        yield f"{path}, row {number}", columns


def _mapped(settings: DataSettings, number: int, place: str, columns: Mapping[str, Any]) -> Row:
    question = _column(columns, "prompt_key", settings.prompt_key, number, place)
    answer = None
    if settings.answer_key is not None:
        answer = _column(columns, "answer_key", settings.answer_key, number, place)
    task: Any = "default"
    if settings.task_key is not None:
        task = _column(columns, "task_key", settings.task_key, number, place)
        if not isinstance(task, str) or not task:
            raise SpecError(
                f"the task of row {number} is {task!r}", where=place, cure=f"`{settings.task_key}` must hold names"
            )
    return Row(number, _question(question, settings.prompt_key, number, place), answer, task, columns)


def _column(columns: Mapping[str, Any], setting: str, key: str, number: int, place: str) -> Any:
    if columns.get(key) is None:
        raise SpecError(
            f"row {number} has no `{key}`",
            where=place,
            cure=f"set `{setting}` to the right column; this row has: {', '.join(sorted(columns)) or 'none'}",
        )
    return columns[key]


def _question(value: Any, key: str, number: int, place: str) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return tuple(value)
    raise SpecError(
        f"`{key}` of row {number} is neither a text nor a list of chat messages: {str(value)[:80]!r}",
        where=place,
        cure='give a non-empty text, or messages such as {"role": "user", "content": "..."}',
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
