"""Each transition of a prompt, on the real server."""

import time

import pytest

from buffer.errors import Fenced, ForebayError, LedgerBroken, SpecError
from buffer.ledger import Ledger, Waiting
from tests.buffer.world import World, make_group

# -- passes and configuration


def test_a_pass_is_leased_in_its_own_order(world: World) -> None:
    world.set_up(rows=5, per_step=5, staleness=0)
    answer = world.lease(count=5)
    assert [lease.prompt for lease in answer.leases] == [0, 1, 2, 3, 4]
    assert [lease.row for lease in answer.leases] == [4, 3, 2, 1, 0]
    assert [lease.ticket for lease in answer.leases] == [1, 2, 3, 4, 5]


def test_a_pass_opens_once(world: World) -> None:
    world.set_up()
    assert not world.open_pass(0)
    assert world.open_pass(1)
    assert not world.open_pass(1)
    assert world.ledger.passes_opened() == 2
    assert world.counts()["pending"] == 24
    world.holds()


def test_a_large_pass_opened_by_two_at_once_is_complete(world: World) -> None:
    world.set_up(rows=25_000, per_step=3)
    other = Ledger(world.client, world.run)
    order = list(range(25_000))
    assert not other.open_pass(0, order, world.tasks)
    world.holds()
    assert world.counts()["pending"] == 25_000


def test_a_pass_of_other_length_or_out_of_turn_is_refused(world: World) -> None:
    world.set_up(rows=12, passes=2)
    with pytest.raises(SpecError, match="has 3 rows, the passes of this run have 12"):
        world.ledger.open_pass(1, [0, 1, 2], ["default"] * 3)
    with pytest.raises(LedgerBroken):
        world.open_pass(5)
    world.open_pass(1)
    with pytest.raises(ForebayError, match="the run has 2 passes"):
        world.open_pass(2)


def test_other_numbers_or_other_data_are_refused(world: World) -> None:
    world.set_up()
    same = dict(
        groups_per_step=3,
        max_staleness=1,
        budget_bytes=1_000_000,
        lease_seconds=30.0,
        reserve_bytes=1_000,
        passes=None,
        data_digest="digest",
    )
    world.ledger.configure(**same)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="data_digest = digest, this process asks for other"):
        world.ledger.configure(**{**same, "data_digest": "other"})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="max_staleness = 1"):
        world.ledger.configure(**{**same, "max_staleness": 2})  # type: ignore[arg-type]


def test_a_budget_below_one_group_is_refused(world: World) -> None:
    with pytest.raises(SpecError, match="no prompt could be leased"):
        world.set_up(budget=10, reserve=100)


# -- who may lease


def test_nobody_leases_before_version_0(world: World) -> None:
    world.set_up(version=False)
    assert world.lease().refusal == "no_version"


def test_a_member_leases_only_what_it_has_proved(world: World) -> None:
    world.set_up()
    assert world.lease("stranger").refusal == "not_proved"
    incarnation = world.members.join("p2", role="producer", pool="producer", info={})
    assert world.lease("p2").refusal == "not_proved"
    world.members.set_state("p2", incarnation, "serving", version=0)
    assert world.lease("p2", version=1).refusal == "not_proved"
    assert world.lease("p2").leases
    world.members.set_state("p2", incarnation, "draining")
    assert world.lease("p2").refusal == "not_proved"


def test_a_quarantined_member_gets_no_lease(world: World) -> None:
    world.set_up()
    incarnation = world.members.join("p0", role="producer", pool="producer", info={})
    world.members.set_state("p0", incarnation, "quarantined", version=0)
    answer = world.lease("p0")
    assert answer.refusal == "quarantined"
    assert "p0" in answer.detail


def test_pause_and_stop_are_obeyed(world: World) -> None:
    world.set_up()
    world.control.set("pause", "1")
    assert world.lease().refusal == "paused"
    world.control.set("pause", "")
    assert world.lease().leases
    world.control.set("stop", "drain")
    assert world.lease().refusal == "stopping"


# -- how many may be leased


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_leases_never_exceed_what_max_staleness_allows(world: World, staleness: int) -> None:
    world.set_up(rows=100, per_step=4, staleness=staleness, producers=("p0",))
    allowed = (staleness + 1) * 4
    first = world.generate(100)
    assert len(first) == allowed
    refused = world.lease()
    assert refused.refusal == "staleness"
    assert f"{allowed} are allowed at version 0" in refused.detail
    # One step trained and published allows one step more, to whoever has proved the new version.
    world.train(1)
    assert world.lease().refusal == "staleness"
    world.publish(1)
    assert world.lease().refusal == "staleness"
    world.serve("p0", 1)
    assert len(world.lease(count=100, version=1).leases) == 4
    world.holds()


def test_a_group_that_is_not_usable_makes_room_for_another(world: World) -> None:
    world.set_up(per_step=2, staleness=0)
    first, second = world.lease(count=5).leases
    assert world.lease().refusal == "staleness"
    world.ledger.commit(first, make_group(first), usable=False, reason="no signal")
    world.ledger.drop(second, "over-long prompt")
    assert len(world.lease(count=5).leases) == 2
    report = world.ledger.verify()
    assert report.dropped == {"no signal": 1, "over-long prompt": 1}
    assert not report.problems


def test_leases_stop_at_the_byte_budget_and_go_on_when_bytes_are_freed(world: World) -> None:
    world.set_up(rows=50, per_step=2, staleness=9, budget=4_000, reserve=1_000)
    leases = world.lease(count=50).leases
    assert len(leases) == 4
    answer = world.lease()
    assert answer.refusal == "budget"
    assert "4000 reserved" in answer.detail
    for lease in leases:
        world.commit(lease)
    stored = world.ledger.summary()["stored_bytes"]
    assert isinstance(stored, int) and 0 < stored < 4_000
    got = len(world.lease(count=50).leases)
    assert got == (4_000 - stored) // 1_000
    world.train(1)
    assert world.lease(count=50).leases
    world.holds()


def test_a_prompt_that_went_back_is_never_kept_out_by_younger_ones(world: World) -> None:
    world.set_up(rows=50, per_step=2, staleness=1, budget=4_000, reserve=1_000, tasks=["a"] * 25 + ["b"] * 25)
    first = world.ledger.lease("p0", count=1, version=0, tasks=["b"]).leases
    world.ledger.give_back(first)
    younger = world.ledger.lease("p1", count=50, version=0, tasks=["a"])
    assert len(younger.leases) == 3
    again = world.ledger.lease("p0", count=1, version=0, tasks=["b"]).leases
    assert [lease.prompt for lease in again] == [first[0].prompt]
    assert again[0].ticket == first[0].ticket
    assert again[0].token > first[0].token


def test_a_pool_gets_only_the_tasks_it_asks_for(world: World) -> None:
    world.set_up(rows=6, per_step=6, staleness=0, tasks=["a", "b", "a", "b", "a", "b"])
    leases = world.ledger.lease("p0", count=6, version=0, tasks=["a"]).leases
    assert [lease.task for lease in leases] == ["a"] * 3
    assert world.ledger.lease("p0", count=6, version=0, tasks=["a"]).refusal == "exhausted"


def test_the_end_of_a_pass_asks_for_the_next_and_the_end_of_all_says_so(world: World) -> None:
    world.set_up(rows=4, per_step=8, staleness=0, passes=2)
    world.generate(4)
    assert world.lease().refusal == "no_pass"
    world.open_pass(1)
    leases = world.lease(count=9).leases
    assert [lease.prompt for lease in leases] == [4, 5, 6, 7]
    assert {lease.pass_number for lease in leases} == {1}
    world.ledger.drop(leases[0], "over-long prompt")
    assert world.lease().refusal == "exhausted"


# -- the end of a lease


def test_an_expired_lease_goes_back_and_is_leased_first(world: World) -> None:
    world.set_up(lease_seconds=0.2)
    lost = world.lease("p0", count=2).leases
    time.sleep(0.3)
    again = world.lease("p1", count=3).leases
    assert [lease.prompt for lease in again] == [0, 1, 2]
    assert [lease.ticket for lease in again] == [1, 2, 3]
    assert again[0].token > lost[1].token
    history = world.ledger.history(0)
    assert history is not None
    assert history["last_return"] == "p0: lease ran out"
    assert history["attempts"] == 2
    world.holds()


def test_a_renewed_lease_lives_on(world: World) -> None:
    world.set_up(lease_seconds=0.4)
    leases = world.lease("p0", count=2).leases
    for _ in range(4):
        time.sleep(0.15)
        leases = world.ledger.renew(leases)
    assert len(leases) == 2
    assert [lease.prompt for lease in world.lease("p1", count=1).leases] == [2]


def test_renewal_says_which_leases_are_lost(world: World) -> None:
    world.set_up()
    kept, lost = world.lease("p0", count=2).leases
    world.ledger.give_back([lost])
    assert [lease.prompt for lease in world.ledger.renew([kept, lost])] == [kept.prompt]


def test_whoever_was_presumed_dead_cannot_commit_drop_or_give_back(world: World) -> None:
    world.set_up(lease_seconds=0.2)
    old = world.lease("p0").leases[0]
    time.sleep(0.3)
    new = world.lease("p1").leases[0]
    assert new.prompt == old.prompt
    with pytest.raises(Fenced, match="leased by p1"):
        world.commit(old)
    with pytest.raises(Fenced):
        world.ledger.drop(old, "over-long prompt")
    world.ledger.give_back([old])
    assert world.client.exists(world.ledger.blob_key(old.prompt, old.token)) == 0
    assert world.commit(new, producer="p1")
    with pytest.raises(Fenced):
        world.commit(old)
    assert world.ledger.read_groups([new.prompt])[0].producer == "p1"
    world.holds()


def test_the_leases_of_a_dead_member_go_back_at_once(world: World) -> None:
    world.set_up()
    leases = world.lease("p0", count=3).leases
    mine = world.lease("p1", count=1).leases
    assert world.ledger.give_back_all("p0") == 3
    assert world.ledger.give_back_all("p0") == 0
    with pytest.raises(Fenced):
        world.commit(leases[0])
    assert world.commit(mine[0])
    assert [lease.prompt for lease in world.lease("p1", count=3).leases] == [0, 1, 2]
    world.holds()


# -- repetition


def test_a_repeated_commit_does_not_double(world: World) -> None:
    world.set_up()
    lease = world.lease().leases[0]
    assert world.commit(lease) is True
    before = world.ledger.summary()
    assert world.commit(lease) is False
    assert world.ledger.summary() == before
    world.holds()


def test_a_second_answer_under_one_lease_changes_nothing(world: World) -> None:
    world.set_up()
    lease = world.lease().leases[0]
    world.commit(lease, length=3)
    assert world.commit(lease, length=9) is False
    assert len(world.ledger.read_groups([lease.prompt])[0].samples[0].tokens()) == 3
    world.holds()


def test_a_payload_left_by_a_broken_commit_is_replaced(world: World) -> None:
    world.set_up()
    lease = world.lease().leases[0]
    world.client.set(world.ledger.blob_key(lease.prompt, lease.token), b"half a commit")
    assert world.commit(lease) is True
    assert world.ledger.read_groups([lease.prompt])
    world.holds()


def test_a_lease_of_the_same_prompt_does_not_renew_an_older_one(world: World) -> None:
    world.set_up()
    old = world.lease("p0").leases[0]
    world.ledger.give_back([old])
    new = world.lease("p0").leases[0]
    assert [lease.token for lease in world.ledger.renew([old, new])] == [new.token]


def test_a_commit_repeated_after_its_step_was_trained_leaves_no_payload(world: World) -> None:
    world.set_up(per_step=1)
    lease = world.generate(1)[0]
    world.train(1)
    assert world.commit(lease) is False
    assert world.client.exists(world.ledger.blob_key(lease.prompt, lease.token)) == 0
    world.holds()


def test_a_repeated_drop_is_counted_once(world: World) -> None:
    world.set_up()
    lease = world.lease().leases[0]
    world.ledger.drop(lease, "over-long prompt")
    world.ledger.drop(lease, "over-long prompt")
    report = world.ledger.verify()
    assert report.dropped == {"over-long prompt": 1}
    assert not report.problems


def test_a_repeated_lease_request_gets_the_same_leases(world: World) -> None:
    world.set_up()
    first = world.ledger._ask("lease", "p0", "2", "0", "request-1")
    assert world.ledger._ask("lease", "p0", "2", "0", "request-1") == first
    assert world.counts()["leased"] == 2
    assert world.ledger._ask("lease", "p0", "2", "0", "request-2") != first
    world.holds()


def test_a_repeated_publish_request_gets_the_same_version(world: World) -> None:
    world.set_up()
    ask = world.ledger._ask
    assert ask("publish", str(world.fence), "1", "r") == ask("publish", str(world.fence), "1", "r") == ["ok", "1"]
    assert world.ledger.current_version() == 1


# -- plans


def test_a_plan_takes_groups_in_the_order_of_their_leases(world: World) -> None:
    world.set_up(per_step=3, staleness=1)
    leases = world.lease(count=6).leases
    for lease in reversed(leases):
        world.commit(lease)
    assert world.plan(1).prompts == (0, 1, 2)
    assert world.plan(2).prompts == (3, 4, 5)
    world.holds()


def test_a_plan_waits_for_a_straggler_and_names_its_holder(world: World) -> None:
    world.set_up(per_step=3, staleness=1)
    straggler = world.lease("p1", count=1).leases[0]
    world.generate(5, "p0")
    waiting = world.ledger.plan(1, fence=world.fence, final=False)
    assert isinstance(waiting, Waiting)
    assert waiting.missing == 1
    assert waiting.holders == ("p1",)
    assert "prompt 0 is leased by p1" in waiting.detail
    world.ledger.give_back([straggler])
    waiting = world.ledger.plan(1, fence=world.fence, final=False)
    assert isinstance(waiting, Waiting)
    assert waiting.holders == ("pending again",)
    world.generate(1, "p0")
    assert world.plan(1).prompts == (0, 1, 2)


def test_a_plan_says_how_many_prompts_nobody_has_leased(world: World) -> None:
    world.set_up(per_step=3)
    world.generate(1)
    waiting = world.ledger.plan(1, fence=world.fence, final=False)
    assert isinstance(waiting, Waiting)
    assert (waiting.missing, waiting.holders) == (2, ())
    assert "2 are not leased yet" in waiting.detail


def test_a_plan_waits_for_the_first_producer_before_anybody_brought_the_data(world: World) -> None:
    fence = world.ledger.register_publisher()
    answer = world.ledger.plan(1, fence=fence, final=False)
    assert isinstance(answer, Waiting)
    assert "waits for the first producer" in answer.detail


def test_a_plan_is_written_once_and_read_by_all_ranks(world: World) -> None:
    world.set_up(per_step=3, staleness=1)
    assert world.ledger.read_plan(1) is None
    world.generate(6)
    plan = world.plan(1)
    assert world.plan(1, final=True) == plan
    assert Ledger(world.client, world.run).read_plan(1) == plan
    assert [group.prompt for group in world.ledger.read_groups(plan.prompts)] == list(plan.prompts)
    assert world.ledger.last_planned_step() == 1
    assert world.ledger.last_trained_step() == 0


def test_steps_are_planned_and_retired_one_by_one(world: World) -> None:
    world.set_up(per_step=3, staleness=1)
    world.generate(6)
    world.plan(1)
    with pytest.raises(LedgerBroken, match="last one is step 1"):
        world.ledger.plan(3, fence=world.fence, final=False)
    world.plan(2)
    with pytest.raises(LedgerBroken):
        world.ledger.retire(2, fence=world.fence)
    with pytest.raises(LedgerBroken, match="no plan"):
        world.ledger.retire(9, fence=world.fence)


def test_a_plan_carries_the_flags_once(world: World) -> None:
    world.set_up(per_step=3, staleness=2)
    world.generate(9)
    world.control.set("checkpoint", "1")
    assert world.plan(1).checkpoint
    assert world.plan(1).checkpoint
    assert not world.plan(2).checkpoint
    world.control.set("stop", "drain")
    assert world.plan(3).final


def test_used_up_data_ends_with_a_clear_error(world: World) -> None:
    world.set_up(rows=4, per_step=3, passes=1)
    world.generate(4)
    world.train(1)
    with pytest.raises(ForebayError, match="the data is used up: 1 groups are left, step 2 needs more") as ended:
        world.ledger.plan(2, fence=world.fence, final=False)
    assert "passes" in ended.value.cure


def test_used_up_data_still_waits_for_running_prompts(world: World) -> None:
    world.set_up(rows=3, per_step=3, passes=1)
    world.generate(2)
    running = world.lease().leases[0]
    assert isinstance(world.ledger.plan(1, fence=world.fence, final=False), Waiting)
    world.commit(running)
    assert world.plan(1).prompts == (0, 1, 2)


def test_retiring_frees_bytes_and_payloads_and_may_be_repeated(world: World) -> None:
    world.set_up(per_step=3)
    world.generate(3)
    plan = world.train(1)
    assert world.ledger.summary()["stored_bytes"] == 0
    assert not list(world.client.scan_iter(f"forebay:{{{world.run}:0}}:group:*"))
    world.ledger.retire(1, fence=world.fence)
    assert world.counts()["trained"] == 3
    with pytest.raises(LedgerBroken, match="prompt 0 has no stored group: it is trained"):
        world.ledger.read_groups(plan.prompts)
    history = world.ledger.history(0)
    assert history is not None
    assert (history["state"], history["step"], history["producer"]) == ("trained", 1, "p0")
    assert history["rewards"] == [0.0, 1.0]
    world.holds()


# -- publishers


def test_an_older_publisher_can_change_nothing(world: World) -> None:
    world.set_up(per_step=3)
    world.generate(3)
    old, world.fence = world.fence, world.ledger.register_publisher()
    for attempt in (
        lambda: world.ledger.plan(1, fence=old, final=False),
        lambda: world.ledger.retire(1, fence=old),
        lambda: world.ledger.publish(fence=old, step=1),
    ):
        with pytest.raises(Fenced, match="has taken over"):
            attempt()
    world.train(1)
    assert world.publish(1) == 1


def test_the_version_never_goes_back_over_a_restart_of_the_consumer(world: World) -> None:
    world.set_up(per_step=3, staleness=0, rows=30)
    for step in (1, 2, 3):
        world.generate(3, version=step - 1)
        world.train(step)
        assert world.publish(step) == step
        world.serve("p0", step)
    world.fence = world.ledger.register_publisher()
    assert world.ledger.next_version() == 4
    # The checkpoint is of step 1: its weights allow no lease before the journalled steps are replayed.
    assert world.publish(1) == 4
    world.serve("p0", 4)
    assert world.lease(version=4).refusal == "staleness"
    assert world.publish(3) == 5
    world.serve("p0", 5)
    assert len(world.lease(count=9, version=5).leases) == 3


# -- verification


def test_verification_holds_through_a_whole_run(world: World) -> None:
    world.set_up(rows=9, per_step=3, staleness=1, passes=2)
    for step in range(1, 7):
        if step == 3:
            world.open_pass(1)
        world.serve("p0", step - 1)
        world.generate(3, version=step - 1)
        world.holds()
        world.train(step)
        world.holds()
        world.publish(step)
    report = world.ledger.verify()
    assert report.counts["trained"] == 18
    assert sum(report.counts.values()) == 18


def test_verification_finds_what_does_not_add_up(world: World) -> None:
    world.set_up(per_step=3, staleness=1)
    generated = world.generate(4)
    world.lease(count=1)
    world.plan(1)
    run = f"forebay:{{{world.run}}}:"
    damages = {
        "the payload of prompt 3": lambda: world.client.delete(
            world.ledger.blob_key(generated[3].prompt, generated[3].token)
        ),
        "the stored groups have": lambda: world.client.hincrby(f"{run}counters", "stored", 5),
        "are pending, the counter says": lambda: world.client.hincrby(f"{run}counters", "pending", 1),
        "prompt 4 is leased and listed in nothing": lambda: world.client.zrem(f"{run}leases", "4"),
        "prompt 3 is generated and not in play": lambda: world.client.zrem(f"{run}inplay", "3"),
        "prompt 9 is pending and listed in nothing": lambda: world.client.zrem(f"{run}pending:default", "9"),
        "prompt 0 is planned and in no plan": lambda: world.client.hset(f"{run}plan:1", "prompts", "1 2"),
    }
    world.holds()
    for sentence, damage in damages.items():
        damage()
        problems = world.ledger.verify().problems
        assert any(sentence in problem for problem in problems), (sentence, problems)


def test_orphan_payloads_are_collected_and_live_ones_stay(world: World) -> None:
    world.set_up(lease_seconds=0.3)
    generated = world.generate(1)[0]
    abandoned = world.lease().leases[0]
    world.client.set(world.ledger.blob_key(abandoned.prompt, abandoned.token), b"half a commit")
    assert world.ledger.collect_orphans() == 0
    time.sleep(0.4)
    again = world.lease().leases[0]
    assert again.prompt == abandoned.prompt
    assert world.ledger.collect_orphans() == 1
    assert world.ledger.read_groups([generated.prompt])
    world.holds()


def test_the_first_lease_of_each_process_is_known_and_later_ones_do_not_change_it(world: World) -> None:
    world.set_up()
    assert world.ledger.first_leases() == {}
    before = time.time() - 1  # the server runs on this machine
    (lease,) = world.lease("p0").leases
    first = world.ledger.first_leases()
    assert set(first) == {("p0", 1)} and before < first["p0", 1] < time.time() + 1
    world.ledger.give_back([lease])
    time.sleep(0.002)
    world.lease("p0", 2)
    assert world.ledger.first_leases() == first
    world.serve("p0", 0)  # another process of the name
    assert world.lease("p0", 0).leases == ()
    assert world.ledger.first_leases() == first, "a lease that was not given is none"
    world.lease("p0")
    assert set(world.ledger.first_leases()) == {("p0", 1), ("p0", 2)}
