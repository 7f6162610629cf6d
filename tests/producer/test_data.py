"""Every producer reads the same rows in the same order; bad data is named by file and row."""

import json
from pathlib import Path
from typing import Any

import pytest

from buffer.errors import SpecError
from producer.data import load_dataset, pass_order
from producer.settings import DataSettings

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
ROWS: list[dict[str, Any]] = [{"question": f"{n}+1", "answer": n + 1, "level": n} for n in range(5)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refused(**settings: Any) -> str:
    with pytest.raises(SpecError) as caught:
        load_dataset(DataSettings(**settings))
    return str(caught.value)


def test_jsonl_parquet_and_dataset_folder_give_the_same_rows_and_digest(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "folder"))
    datasets.DatasetDict({"train": table, "test": table.select(range(2))}).save_to_disk(str(tmp_path / "splits"))
    sets = [
        load_dataset(DataSettings(path=str(write_jsonl(tmp_path / "rows.jsonl", ROWS)))),
        load_dataset(DataSettings(path=str(tmp_path / "rows.parquet"))),
        load_dataset(DataSettings(path=str(tmp_path / "folder"))),
        load_dataset(DataSettings(path=str(tmp_path / "splits"), split="train")),
    ]
    assert [row.question for row in sets[0].rows] == ["0+1", "1+1", "2+1", "3+1", "4+1"]
    assert [row.answer for row in sets[0].rows] == [1, 2, 3, 4, 5]
    assert all(other.rows == sets[0].rows and other.digest == sets[0].digest for other in sets)
    assert len(load_dataset(DataSettings(path=str(tmp_path / "splits"), split="test")).rows) == 2
    assert "one of: test, train" in refused(path=str(tmp_path / "splits"))
    assert "no split `dev`" in refused(path=str(tmp_path / "splits"), split="dev")
    assert "no split `dev`" in refused(path=str(tmp_path / "folder"), split="dev")


def test_the_key_map_names_question_answer_and_task_and_keeps_the_other_columns(tmp_path: Path) -> None:
    rows = [{"input": "2+2", "target": 4.0, "kind": "sum", "answer": "unused"}]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    settings = DataSettings(path=path, prompt_key="input", answer_key="target", task_key="kind")
    dataset = load_dataset(settings)
    (row,) = dataset.rows
    assert (row.question, row.answer, row.task) == ("2+2", 4.0, "sum")
    assert row.for_scorers() == rows[0] | {"question": "2+2", "answer": 4.0, "task": "sum"}
    assert dataset.tasks() == ["sum"]


def test_a_digest_changes_with_content_order_limit_and_key_map(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "rows.jsonl", ROWS))
    other = str(write_jsonl(tmp_path / "other.jsonl", [*ROWS[:4], ROWS[4] | {"answer": 6}]))
    turned = str(write_jsonl(tmp_path / "turned.jsonl", ROWS[::-1]))
    digests = {
        load_dataset(settings).digest
        for settings in (
            DataSettings(path=path),
            DataSettings(path=other),
            DataSettings(path=turned),
            DataSettings(path=path, limit=4),
            DataSettings(path=path, answer_key="level"),
        )
    }
    assert len(digests) == 5


def test_a_question_may_be_a_list_of_chat_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "2+2"}]
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{"question": messages, "answer": "4"}]))
    assert load_dataset(DataSettings(path=path)).rows[0].question == tuple(messages)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    message = refused(path=str(tmp_path / "absent.jsonl"))
    assert "does not exist" in message and "absent.jsonl" in message


def test_a_malformed_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1", "answer": "1"}\n\n{"question": \n')
    assert "line 3 is not a JSON object" in refused(path=str(path)) and f"{path}:3" in refused(path=str(path))
    path.write_text("[1, 2]\n")
    assert "line 1 is not a JSON object" in refused(path=str(path))
    path.write_bytes(b'{"question": "\xff"}\n')
    assert "line 1 is not a JSON object" in refused(path=str(path))


def test_a_row_without_a_mapped_key_is_named_with_the_keys_it_has(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [*ROWS, {"question": "x", "solution": "y"}])
    message = refused(path=str(path))
    assert "row 5 has no `answer`" in message and "question, solution" in message and "answer_key" in message
    assert load_dataset(DataSettings(path=str(path), answer_key=None)).rows[5].answer is None
    assert "row 0 has no `task`" in refused(path=str(path), answer_key=None, task_key="task")


def test_a_question_that_is_no_text_is_refused(tmp_path: Path) -> None:
    for question in (3, " ", [], [{"content": "no role"}]):
        path = write_jsonl(tmp_path / "rows.jsonl", [{"question": question, "answer": 1}])
        assert "`question` of row 0" in refused(path=str(path))


def test_an_empty_file_a_strange_ending_and_a_broken_file_are_refused(tmp_path: Path) -> None:
    for name, content, says in (
        ("empty.jsonl", "", "no rows"),
        ("rows.csv", "a,b", "`.csv` are not read"),
        ("rows.parquet", "not parquet", "cannot be read"),
    ):
        (tmp_path / name).write_text(content)
        assert says in refused(path=str(tmp_path / name))
    (tmp_path / "plain").mkdir()
    assert "not a Hugging Face dataset" in refused(path=str(tmp_path / "plain"))
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    assert "no splits" in refused(path=str(tmp_path / "rows.jsonl"), split="train")


def test_the_order_of_a_pass_follows_from_seed_and_pass_alone() -> None:
    assert pass_order(6, seed=1, pass_number=0) == [4, 0, 2, 1, 5, 3]
    orders = [pass_order(1000, seed, number) for seed, number in ((1, 0), (1, 1), (2, 0))]
    assert all(sorted(order) == list(range(1000)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.skipif(not DATA.exists(), reason="the problem sets are not beside the repository")
@pytest.mark.parametrize(
    ("name", "prompt_key", "answer_key", "count"),
    [
        ("gsm8k_train.jsonl", "question", "answer", 7473),
        ("math500.jsonl", "problem", "answer", 500),
        ("aime25.jsonl", "problem", "answer", 30),
        ("mawps_singleop.jsonl", "input", "target", None),
    ],
)
def test_known_problem_sets_are_read(name: str, prompt_key: str, answer_key: str, count: int | None) -> None:
    settings = DataSettings(path=str(DATA / name), prompt_key=prompt_key, answer_key=answer_key)
    rows = load_dataset(settings).rows
    assert len(rows) == (count or len(rows)) and rows[0].answer is not None
