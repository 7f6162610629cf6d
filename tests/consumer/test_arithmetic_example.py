"""The arithmetic example's data is right, its sets share no problem, and what is prepared is not prepared again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.arithmetic.model import EOS, build_tokenizer
from examples.arithmetic.prepare import (
    IGNORED,
    MARK,
    Preparation,
    Problem,
    answer,
    batches,
    draw_problems,
    greedy_accuracy,
    is_finished,
    prepare,
    sums,
)

SMALL = Preparation(
    train_rows=64, heldout_rows=16, validation_rows=16, hidden=32, layers=1, steps=4, evaluate_every=2, threads=1
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def pretraining_problems(preparation: Preparation) -> set[Problem]:
    return {(left, right) for left, right in draw_problems(preparation).pretraining.tolist()}


def test_no_problem_is_in_two_sets() -> None:
    problems = draw_problems(Preparation())
    sets = [set(problems.train), set(problems.heldout), set(problems.validation), pretraining_problems(Preparation())]
    assert len(set().union(*sets)) == sum(map(len, sets)) == 900 * 900
    assert [len(found) for found in sets[:2]] == [Preparation().train_rows, 256]


def test_the_same_seed_draws_the_same_problems_and_another_one_others() -> None:
    assert draw_problems(SMALL).train == draw_problems(SMALL).train
    assert draw_problems(SMALL).train != draw_problems(replace(SMALL, seed=SMALL.seed + 1)).train


def test_answers_without_forgotten_carries_are_right() -> None:
    tokenizer = build_tokenizer()
    preparation = replace(SMALL, careless=0.0, batch=256)
    ids, labels = next(batches(preparation, draw_problems(preparation).pretraining))
    lengths = set()
    for row, learned in zip(ids.tolist(), labels.tolist(), strict=True):
        question, rest = tokenizer.decode(row, skip_special_tokens=False).split("=")
        left, right = map(int, question.split("+"))
        right_answer = answer((left, right))
        assert int(right_answer) == left + right
        assert rest.startswith(right_answer + EOS)
        kept = [token for token in learned if token != IGNORED]
        assert tokenizer.decode(kept, skip_special_tokens=False) == right_answer + EOS
        lengths.add(len(right_answer))
    assert lengths == {3, 4}


def test_a_careless_answer_leaves_out_the_carries_and_is_otherwise_right() -> None:
    left, right = torch.tensor([347, 347, 999, 111, 950]), torch.tensor([585, 585, 999, 222, 60])
    careful = torch.tensor([True, False, False, False, False])
    assert sums(left, right, careful).tolist() == [932, 822, 1888, 333, 910]


def test_careless_examples_have_their_share() -> None:
    tokenizer = build_tokenizer()
    preparation = replace(SMALL, careless=0.65, batch=4096)
    ids, _ = next(batches(preparation, draw_problems(preparation).pretraining))
    carrying = wrong = 0
    for row in ids.tolist():
        question, rest = tokenizer.decode(row, skip_special_tokens=False).split("=")
        left, right = map(int, question.split("+"))
        if int(sums(*torch.tensor([[left], [right], [0]]))) != left + right:
            carrying += 1
            wrong += not rest.startswith(answer((left, right)) + EOS)
    assert carrying > 2000
    assert wrong / carrying == pytest.approx(0.65, abs=0.05)


def test_batches_are_the_same_every_time_and_differ_from_each_other() -> None:
    pool = draw_problems(SMALL).pretraining
    one, other = batches(SMALL, pool), batches(SMALL, pool)
    first, second = next(one), next(one)
    assert torch.equal(first[0], next(other)[0]) and torch.equal(second[1], next(other)[1])
    assert not torch.equal(first[0], second[0])


def test_a_prepared_folder_holds_right_answers_and_a_model_and_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "out"
    prepare(folder, SMALL)
    assert "held-out accuracy" in capsys.readouterr().out
    for name, count in (("train.jsonl", SMALL.train_rows), ("heldout.jsonl", SMALL.heldout_rows)):
        rows = rows_of(folder / name)
        assert len(rows) == count
        for row in rows:
            left, right = row["question"].removesuffix("=").split("+")
            assert row == {"question": f"{left}+{right}=", "answer": str(int(left) + int(right))}
    model = AutoModelForCausalLM.from_pretrained(str(folder / "model"))
    mark = json.loads((folder / MARK).read_text())
    assert mark["heldout_accuracy"] == greedy_accuracy(model, draw_problems(SMALL).heldout)

    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    prepare(folder, SMALL)
    assert "prepared already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_the_same_parameters_give_the_same_model(tmp_path: Path) -> None:
    for name in ("one", "two"):
        prepare(tmp_path / name, SMALL)
    one, two = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_other_parameters_or_an_interrupted_preparation_are_prepared_again(tmp_path: Path) -> None:
    prepare(tmp_path, SMALL)
    other = replace(SMALL, seed=SMALL.seed + 1)
    assert is_finished(tmp_path, SMALL) and not is_finished(tmp_path, other)
    before = rows_of(tmp_path / "heldout.jsonl")
    prepare(tmp_path, other)
    assert rows_of(tmp_path / "heldout.jsonl") != before
    (tmp_path / MARK).unlink()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"half")
    prepare(tmp_path, other)
    assert is_finished(tmp_path, other)
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 1000


def test_pre_training_ends_at_its_deadline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(tmp_path, replace(SMALL, steps=10**6, evaluate_every=10**6, deadline_seconds=0.5))
    assert "stopped by the deadline" in capsys.readouterr().out
    assert is_finished(tmp_path, replace(SMALL, steps=10**6, evaluate_every=10**6, deadline_seconds=0.5))
