"""A reward is a score, unscorable or failed, whatever a scorer does; a failure never becomes a number."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from buffer.errors import SpecError
from producer.rewards import UNSCORABLE, exact, format
from producer.rewards import math as math_reward
from producer.rewards.processes import Judged, ScorerProcesses
from producer.rewards.weighted import Part, Reward, weighted_sum
from producer.settings import RewardSettings

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
MISBEHAVING = "tests.producer.scorers:misbehaving"


def judge(
    rewards: Sequence[RewardSettings], completions: Sequence[str], *, answer: Any = "1", processes: int = 1
) -> tuple[list[Reward], ScorerProcesses]:
    async def run() -> tuple[list[Reward], ScorerProcesses]:
        scorers = ScorerProcesses(rewards, processes=processes)
        await scorers.start()
        try:
            judged = [Judged(text, "stop") for text in completions]
            return await asyncio.wait_for(scorers.score({"answer": answer}, judged), 60), scorers
        finally:
            await scorers.stop()

    return asyncio.run(run())


def one(name: str = MISBEHAVING, **settings: Any) -> list[RewardSettings]:
    return [RewardSettings(name=name, **{"timeout_seconds": 1.0, "retries": 0} | settings)]


def test_each_misbehaviour_fails_its_own_sample_and_no_other() -> None:
    completions = ["fine", "raise", "nan", "infinite", "nothing", "text", "die", "exit", "hang", "print", "unscorable"]
    rewards, scorers = judge(one(), [*completions, "fine"])
    assert [reward.outcome for reward in rewards] == (["scored"] + ["failed"] * 8 + ["scored", "unscorable", "scored"])
    errors = dict(zip(completions, (reward.error for reward in rewards), strict=False))
    assert "the scorer's own fault" in errors["raise"]
    assert "returned nan" in errors["nan"] and "returned inf" in errors["infinite"]
    assert "NoneType" in errors["nothing"] and "str" in errors["text"]
    assert "exceeded its 1 s" in errors["hang"] and "ended" in errors["die"]
    assert scorers.replaced == 3  # killed itself, exited, hung


def test_a_failed_scoring_is_tried_again_as_often_as_asked(tmp_path: Path) -> None:
    (reward, failed), _ = judge(one(retries=2, options={"folder": str(tmp_path)}), ["once", "raise"])
    assert reward.outcome == "scored"
    assert failed.outcome == "failed"
    assert len((tmp_path / "raise").read_text()) == 3


def test_a_hanging_scorer_is_killed_with_what_it_started(tmp_path: Path) -> None:
    (reward,), _ = judge(one(options={"folder": str(tmp_path)}), ["child"])
    assert reward.outcome == "failed"
    pid = int((tmp_path / "child_pid").read_text())
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True


def test_a_scorer_process_killed_from_outside_is_replaced() -> None:
    async def run() -> tuple[Reward, Reward]:
        scorers = ScorerProcesses(one(retries=1), processes=1)
        await scorers.start()
        try:
            (first,) = await scorers.score({"answer": 1}, [Judged("pid", "stop")])
            os.kill(int(first.value), signal.SIGKILL)
            (second,) = await asyncio.wait_for(scorers.score({"answer": 1}, [Judged("pid", "stop")]), 60)
            return first, second
        finally:
            await scorers.stop()

    first, second = asyncio.run(run())
    assert second.outcome == "scored" and second.value != first.value


def test_scoring_that_is_cancelled_leaves_no_answer_for_the_next(tmp_path: Path) -> None:
    async def run() -> list[Reward]:
        scorers = ScorerProcesses(one(timeout_seconds=30.0), processes=1)
        await scorers.start()
        try:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(scorers.score({"answer": 7}, [Judged("hang", "stop")]), 0.5)
            return await asyncio.wait_for(scorers.score({"answer": 3}, [Judged("fine", "stop")]), 30)
        finally:
            await scorers.stop()

    (reward,) = asyncio.run(run())
    assert reward.value == 3.0


def test_scorer_processes_die_with_their_producer() -> None:
    code = (
        "import asyncio, os\n"
        "from producer.rewards.processes import Judged, ScorerProcesses\n"
        "from producer.settings import RewardSettings\n"
        "async def run():\n"
        f"    scorers = ScorerProcesses([RewardSettings(name={MISBEHAVING!r})], processes=1)\n"
        "    await scorers.start()\n"
        "    (reward,) = await scorers.score({'answer': 1}, [Judged('pid', 'stop')])\n"
        "    print(int(reward.value), flush=True)\n"
        "    await scorers.score({'answer': 1}, [Judged('hang', 'stop')])\n"
        "asyncio.run(run())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait(10)
    assert not is_running(pid)


def test_completions_are_told_why_they_ended() -> None:
    async def run() -> list[Reward]:
        scorers = ScorerProcesses(one(), processes=1)
        await scorers.start()
        try:
            return await scorers.score({"answer": 0}, [Judged("finish", "length"), Judged("finish", "stop")])
        finally:
            await scorers.stop()

    assert [reward.value for reward in asyncio.run(run())] == [1.0, 0.0]


def test_parts_are_kept_by_name_and_summed_by_weight() -> None:
    rewards = [RewardSettings(name="exact", weight=1.0), RewardSettings(name="format", weight=0.2)]
    completion = "<think>1 + 1</think> <answer>2</answer>"
    scored, _ = judge(rewards, [completion, "2", "no"], answer=2)
    assert [reward.parts for reward in scored] == [
        {"exact": 1.0, "format": 1.0},
        {"exact": 1.0, "format": 0.0},
        {"exact": 0.0, "format": 0.0},
    ]
    assert [reward.value for reward in scored] == pytest.approx([1.2, 1.0, 0.0])


def test_a_sample_with_a_failed_or_unscorable_part_has_no_reward() -> None:
    rewards = [RewardSettings(name="exact"), RewardSettings(name="format")]
    failed = weighted_sum(rewards, {"exact": Part("failed", error="broke"), "format": Part("unscorable")})
    assert failed.outcome == "failed" and failed.error == "exact: broke"
    unscorable = weighted_sum(rewards, {"exact": Part("unscorable"), "format": Part("scored", 1.0)})
    assert unscorable.outcome == "unscorable" and unscorable.parts == {"format": 1.0}


@pytest.mark.parametrize("name", ["maths", "package.function", "package:", ":function", "a b:c"])
def test_an_unknown_reward_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(SpecError, match=r"there is no reward") as caught:
        ScorerProcesses([RewardSettings(name=name)])
    assert all(known in str(caught.value) for known in ("math", "exact", "format", "package.module:function"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tests.producer.scorers:absent", "cannot be imported"),
        ("no_such_package:score", "cannot be imported"),
        ("tests.producer.scorers:not_a_function", "is not a function"),
    ],
)
def test_a_reward_that_cannot_be_imported_ends_the_start(name: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        judge(one(name), ["x"])


def test_a_reward_named_twice_or_not_at_all_is_refused() -> None:
    with pytest.raises(SpecError, match="stands twice"):
        ScorerProcesses([RewardSettings(name="exact"), RewardSettings(name="exact")])
    with pytest.raises(SpecError, match="no reward"):
        ScorerProcesses([])


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so it is \boxed{42}", "42", 1.0),
        (r"first \boxed{41}, no: \boxed{42}.", "42", 1.0),
        (r"first \boxed{42}, no: \boxed{41}.", "42", 0.0),
        (r"<think>\boxed{3}</think><answer>\boxed{\frac{1}{2}}</answer>", "0.5", 1.0),
        ("<think>7</think><answer>42</answer>", "we add 40 and 2\n#### 42", 1.0),
        ("<answer>The total is 1,200 dollars</answer>", "#### 1,200", 1.0),
        (r"\boxed{\$70}", "... #### 70", 1.0),
        (r"\boxed{43}", 43.0, 1.0),
        (r"\boxed{\frac{2}{4}}", r"\frac12", 1.0),
        (r"\boxed{\left(3,\frac{\pi}{2}\right)}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        (r"\boxed{p - q}", "p-q", 1.0),
        (r"\boxed{q - p}", "p-q", 0.0),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1.0),
        (r"\boxed{10\%}", "10", 1.0),
        ("the answer is 42", "42", 0.0),
        (r"\boxed{42", "42", 0.0),
        (r"\boxed{}", "42", 0.0),
        (r"\boxed{\frac{}{}}", "42", 0.0),
        ("", "42", 0.0),
        (r"\boxed{42}", "", UNSCORABLE),
        (r"\boxed{42}", None, UNSCORABLE),
        (r"\boxed{42}", {"a": 1}, UNSCORABLE),
        (r"\boxed{42}", "#### ", UNSCORABLE),
    ],
)
def test_math_compares_the_final_answer_mathematically(completion: str, answer: Any, expected: object) -> None:
    assert math_reward.score(completion, {"answer": answer}, "stop") == expected


@pytest.mark.skipif(not DATA.exists(), reason="the problem sets are not beside the repository")
def test_math_reads_the_references_of_known_problem_sets() -> None:
    for name in ("gsm8k_test.jsonl", "math500.jsonl", "aime24.jsonl", "aime25.jsonl"):
        rows = [json.loads(line) for line in (DATA / name).read_text().splitlines()][:150]
        answers = [row["answer"].rsplit("####", 1)[-1].strip() for row in rows]
        right = [
            math_reward.score(f"\\boxed{{{answer}}}", row, "stop") for row, answer in zip(rows, answers, strict=True)
        ]
        assert right == [1.0] * len(rows), name
        assert 1.0 not in [math_reward.score("\\boxed{-987654321}", row, "stop") for row in rows], name


def test_an_answer_that_math_verify_cannot_finish_fails_and_is_no_zero() -> None:
    (slow, fine), scorers = judge(
        one("math", timeout_seconds=3.0), [r"\boxed{10^{10^{10}}+1}", r"\boxed{5}"], answer="5"
    )
    assert fine.outcome == "scored" and fine.value == 1.0
    assert (slow.outcome, slow.value) in {("failed", 0.0), ("scored", 0.0)}
    assert scorers.replaced == (1 if slow.outcome == "failed" else 0)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (" 42\n", 42, 1.0),
        ("42", "#### 42", 1.0),
        ("43", 43.0, 1.0),
        ("<think>x</think><answer> 42 </answer>", "42", 1.0),
        (r"<answer>\boxed{42}</answer>", "42", 1.0),
        ("42.0", "42", 0.0),
        ("the answer is 42", "42", 0.0),
        ("42", None, UNSCORABLE),
    ],
)
def test_exact_compares_letter_by_letter(completion: str, answer: Any, expected: object) -> None:
    assert exact.score(completion, {"answer": answer}, "stop") == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a</think>\n<answer>b</answer>", 1.0),
        (" <think>a\nb</think><answer>b</answer>\n", 1.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> bye", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think><think>a</think><answer>b</answer>", 0.0),
        ("<think></think><answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("", 0.0),
    ],
)
def test_format_wants_one_thought_and_one_answer_and_nothing_else(completion: str, expected: float) -> None:
    assert format.score(completion, {}, "stop") == expected
