"""A journalled step is whole or it is refused."""

from pathlib import Path

import pytest

from buffer import journal
from buffer.ledger import Lease, Plan
from buffer.records import Group
from tests.buffer.world import make_group


def step(number: int) -> tuple[Plan, list[Group]]:
    leases = [Lease(number * 10 + i, i, i, i, 0, "default", 0) for i in (3, 1, 2)]
    plan = Plan(number, tuple(lease.prompt for lease in leases), version=number - 1, final=number == 3)
    return plan, [make_group(lease) for lease in leases]


def test_a_journalled_step_comes_back_in_the_order_of_its_plan(folder: Path) -> None:
    plan, groups = step(1)
    journal.write(folder, plan, groups)
    assert journal.read(folder, 1) == (plan, groups)
    assert journal.steps(folder) == [1]


def test_groups_that_are_not_the_plans_are_refused(folder: Path) -> None:
    plan, groups = step(1)
    with pytest.raises(journal.JournalBroken):
        journal.write(folder, plan, groups[::-1])
    assert journal.steps(folder) == []


@pytest.mark.parametrize("keep", [0, 5, 39, 200])
def test_a_torn_file_is_refused_by_name(folder: Path, keep: int) -> None:
    path = journal.write(folder, *step(1))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(journal.JournalBroken, match="torn or damaged") as refused:
        journal.read(folder, 1)
    assert refused.value.where == str(path)
    assert refused.value.cure


def test_one_changed_byte_is_refused(folder: Path) -> None:
    path = journal.write(folder, *step(1))
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(journal.JournalBroken, match="torn or damaged"):
        journal.read(folder, 1)


def test_a_step_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(journal.JournalBroken, match="step 9 is not in the journal"):
        journal.read(folder, 9)


def test_pruning_keeps_the_steps_that_a_checkpoint_needs(folder: Path) -> None:
    for number in (1, 2, 3):
        journal.write(folder, *step(number))
    (folder / "step-00000004.partial").write_bytes(b"half")
    assert journal.prune(folder, 3) == 2
    assert journal.steps(folder) == [3]
    assert [path.name for path in folder.iterdir()] == ["step-00000003.msgpack"]


def test_a_step_written_again_replaces_the_first(folder: Path) -> None:
    journal.write(folder, *step(1))
    journal.write(folder, *step(1))
    assert journal.steps(folder) == [1]
    assert journal.read(folder, 1)[0].prompts == (13, 11, 12)
