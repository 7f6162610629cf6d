"""The live view fits 80 columns and says what a person wants to know."""

from typing import Any

import pytest
from rich.console import Console

from buffer.metrics import Metrics
from buffer.pools import Desired, Pools
from deploy.progress import duration, line, render, sparkline
from deploy.status import Status, StepReward
from tests.buffer.world import World
from tests.deploy.shown import join, status_of, trained_run


def shown(status: Status, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115
    console.print(render(status))
    return console.export_text()


def fits(text: str) -> None:
    assert max(len(row) for row in text.splitlines()) <= 80, text


def test_a_run_that_has_written_nothing_is_shown(world: World) -> None:
    text = shown(status_of(world))
    fits(text)
    assert "not started" in text
    assert "The consumer has not joined" in text
    assert line(status_of(world)).startswith("step 0/5  the consumer has not joined")


def test_a_run_at_work_is_shown_within_80_columns(world: World) -> None:
    trained_run(world)
    world.lease("p0", count=3, version=3)
    status = status_of(world)
    text = shown(status)
    fits(text)
    for part in (
        "step 3/5", "4 s left", "reward", "0.300", "0.250 → 0.750", "13.0 tokens", "0.50 (max 1, bound 1)",
        "150 tokens/s", "3.0e-06", "Consumer-0 waits for 3 groups of step 4 from p0", "p0", "serving", "join p0",
    ):  # fmt: skip
        assert part in text, f"{part} is missing in\n{text}"
    assert line(status) == (
        "step 3/5  reward 0.300  accuracy 0.750 (version 3)  length 13.0  staleness 0.50  150 tokens/s  "
        "mismatch 3.0e-06  4 s left"
    )


def test_pools_are_shown_with_what_is_desired_and_what_they_brought(world: World) -> None:
    trained_run(world)
    names = ["producer", *(f"some-pool-with-quite-a-long-name-{number}" for number in range(9))]
    pools = Pools(world.client, world.run)
    pools.declare({name: Desired(3, 8) for name in names})
    pools.told_to_drain("p1")
    join(world, "p0", "joining")
    text = shown(status_of(world))
    fits(text)
    assert "others" in text
    (row,) = (row for row in text.splitlines() if "│ producer" in row)
    told = " ".join(row.strip("│").split())
    assert told == "producer 0 of 3, 1 not yet, 1 draining 50 9 (100%) 0.00"


def test_long_names_reasons_and_errors_do_not_break_the_frame(world: World) -> None:
    trained_run(world)
    for number in range(12):
        join(world, f"a-pool-with-quite-a-long-name-{number}", "serving", 3, waiting="staleness: " + "very long " * 30)
    join(world, "p1", "quarantined", 3, last_error="[bold]no markup[/] " + "x" * 300)
    metrics = Metrics(world.client, world.run)
    metrics.event("failure", "p1", "[/red] an unclosed tag and a long text " + "y" * 200)
    text = shown(status_of(world))
    fits(text)
    assert "others" in text
    assert "[/red] an unclosed tag" in text
    assert all(row[-1] in "│╮╯" for row in text.splitlines()), text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_row_is_wider_than_the_terminal_or_80_columns(world: World, width: int) -> None:
    text = shown(status_of(trained_run(world)), width)
    assert max(len(row) for row in text.splitlines()) <= min(width, 80)


@pytest.mark.parametrize(
    ("rewards", "curve"),
    [([], ""), ([None], ""), ([0.5], "▅"), ([0.0, 0.5, 1.0], "▁▅█"), ([0.0, None, 1.0], "▁ █"), ([-1.0, 1.0], "▁█")],
)
def test_the_curve_goes_from_the_lowest_reward_to_the_highest(rewards: list[Any], curve: str) -> None:
    assert sparkline([StepReward(step=n, reward=reward) for n, reward in enumerate(rewards)]) == curve


def test_times_are_for_people() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.4, 187, 8100)] == ["0 s", "59 s", "3:07", "2:15:00"]
