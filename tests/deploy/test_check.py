"""What does not fit is named before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.check import check_spec
from deploy.spec import load_spec
from tests.deploy.specs import write_spec


def problems_of(folder: Path, **changes: Any) -> list[str]:
    return [str(problem) for problem in check_spec(load_spec(write_spec(folder, **changes))).problems]


def test_a_right_spec_has_no_problem_and_its_numbers_follow(tmp_path: Path) -> None:
    report = check_spec(load_spec(write_spec(tmp_path, max_staleness=3)))
    assert not report.problems
    derived = report.derived
    assert derived["samples per step"] == 4
    assert derived["longest sequence (tokens)"] == 32
    assert derived["groups in flight, at most"] == 8
    assert derived["model parameters"] == 40
    assert derived["bytes of one policy version"] == 160
    assert derived["prompts of a pass"] == 8
    assert derived["passes that the steps need"] == 1.0
    # 2 completions x (16 tokens x 28 bytes + 1 KiB) + 16 prompt tokens x 4 bytes + 1 KiB
    assert derived["bytes of a group, at most"] == 2 * (16 * 28 + 1024) + 64 + 1024
    assert derived["bytes that the buffer needs, at most"] == 8 * 4032


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model__path": "nowhere"}, "the model folder does not exist"),
        ({"data__path": "nowhere.jsonl"}, "the dataset does not exist"),
        ({"data__prompt_key": "problem"}, "row 0 has no `problem`"),
        ({"data__answer_key": None}, "compares with a reference answer"),
        ({"prompt__template": "r1zero"}, "there is no template `r1zero`"),
        ({"prompt__template": "chat"}, "the model has no chat template"),
        ({"rewards": [{"name": "maths"}]}, "there is no reward `maths`"),
        ({"rewards": [{"name": "exact"}, {"name": "exact"}]}, "stands twice"),
        ({"sampling__max_tokens": 500}, "the model takes 128"),
        ({"consumer__micro_batch_tokens": 31}, "a micro-batch holds 31"),
        ({"consumer__ranks": 5}, "5 ranks share 4 samples"),
        ({"algorithm__updates_per_step": 3}, "3 updates cannot be made of 2 groups"),
        ({"passes": 1, "steps": 5}, "5 steps of 2 groups need 10 prompts"),
        ({"buffer__budget_bytes": 1000}, "the budget is 1000"),
        ({"producers__producer__communicator": "hccl"}, "no communicator hccl"),
        ({"producers__producer__replicas": 65}, "starts with 65 replicas and may have 64"),
        ({"producers__producer__tasks": ["default", "sums"]}, "to answer the tasks sums, and no row"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    found = problems_of(tmp_path, **changes)
    assert len(found) == 1 and said in found[0], found
    assert "cure: " in found[0]


def test_a_task_without_a_pool_is_refused_and_one_pool_for_all_is_enough(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, data__task_key="kind", producers={"fast": {"tasks": ["sum"]}, "slow": {}})
    kinds = ("sum", "sum", "product", "root")
    rows = [{"question": f"{number}=", "answer": "1", "kind": kind} for number, kind in enumerate(kinds)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = check_spec(load_spec(spec))
    assert not report.problems
    assert [report.derived[f"prompts of task {task}"] for task in ("sum", "product", "root")] == [2, 1, 1]
    (problem,) = check_spec(load_spec(spec, ["producers.slow.tasks=[sum]"])).problems
    assert problem.what == "no pool answers the tasks product, root of the data"
    assert not check_spec(load_spec(spec, ["producers.slow.tasks=[product, root]"])).problems


def test_a_malformed_row_is_named_with_its_line(tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path))
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('{"question": "1+1="')
    (problem,) = check_spec(spec).problems
    assert problem.where == f"{tmp_path}/data.jsonl:9"


def test_weights_that_are_cut_short_are_named(tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    (problem,) = check_spec(spec).problems
    assert "the weights cannot be read" in str(problem)


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    found = problems_of(tmp_path, data__path="nowhere.jsonl", model__path="nowhere", buffer__budget_bytes=1)
    assert len(found) == 3


def test_the_example_is_a_right_spec_but_for_what_its_preparation_makes() -> None:
    root = Path(__file__).resolve().parents[2]
    spec = load_spec(root / "examples" / "quickstart.yaml")
    missing = [p for p in check_spec(spec).problems if "does not exist" not in p.what]
    assert not missing, missing
    assert spec.max_staleness > 1, "the quickstart is asynchronous"
    assert json.loads(spec.model_dump_json())["evaluation"]["data"]["path"].endswith("heldout.jsonl")
