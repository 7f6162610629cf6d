"""Members are alive while they report, and only the newest process of a name may speak for it."""

import time

import pytest

from buffer.errors import Fenced
from tests.buffer.world import World


def test_a_member_is_dead_after_five_missed_reports(world: World) -> None:
    incarnation = world.members.join("p0", role="producer", pool="fast", info={"pid": "1"})
    member = world.members.all()[0]
    assert (member.name, member.role, member.pool, member.state) == ("p0", "producer", "fast", "joining")
    assert (member.version, member.incarnation, member.alive, member.info) == (-1, incarnation, True, {"pid": "1"})
    time.sleep(1.1)
    assert not world.members.all()[0].alive
    world.members.report("p0", incarnation, {"pid": "2"})
    assert world.members.all()[0].alive
    assert world.members.all()[0].info == {"pid": "2"}


def test_a_newer_process_of_the_same_name_fences_the_older(world: World) -> None:
    old = world.members.join("p0", role="producer", pool="fast", info={})
    world.members.set_state("p0", old, "serving", version=3)
    new = world.members.join("p0", role="producer", pool="fast", info={})
    assert new > old
    with pytest.raises(Fenced):
        world.members.report("p0", old)
    with pytest.raises(Fenced):
        world.members.set_state("p0", old, "serving", version=4)
    world.members.leave("p0", old)
    assert world.members.all()[0].version == -1
    world.members.leave("p0", new)
    assert world.members.all() == []


def test_an_incarnation_never_comes_back(world: World) -> None:
    first = world.members.join("p0", role="producer", pool="fast", info={})
    world.members.leave("p0", first)
    assert world.members.join("p0", role="producer", pool="fast", info={}) > first


def test_members_are_listed_by_role(world: World) -> None:
    world.members.join("c0", role="consumer", pool="consumer", info={})
    world.members.join("p0", role="producer", pool="fast", info={})
    assert [member.name for member in world.members.all("consumer")] == ["c0"]
    assert [member.name for member in world.members.all()] == ["c0", "p0"]
