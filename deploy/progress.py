"""A run is shown from its status alone, within 80 columns: to a terminal as a live view, to a file line by line."""

from collections.abc import Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deploy.pool_status import PoolDetail, PoolStatus
from deploy.status import ConsumerStatus, ProducerStatus, Status, StepReward

WIDTH = 80
BARS = "▁▂▃▄▅▆▇█"
SPARKS = 32  # characters of the reward's curve
EVENTS = 4
PRODUCERS = 8
POOLS = 6
STATE_STYLES = {"serving": "green", "joining": "yellow", "draining": "yellow", "quarantined": "bold red"}
WARNINGS = {"failure", "quarantine", "lease lost", "fenced", "aborted"}
UNKNOWN = "–"


def render(status: Status) -> RenderableType:
    """The live view; for `rich.live.Live`."""
    parts: list[RenderableType] = [_course(status), _numbers(status), _waiting(status)]
    if status.pools:
        parts.append(_pools(status.pools))
    if status.producers or status.consumer:
        parts.append(_members(status))
    if status.events:
        parts.append(_events(status))
    title = Text.assemble(("forebay ", "bold cyan"), (status.run, "bold"), (f"  {_phase(status)}", "dim"))
    return Panel(Group(*parts), title=title, title_align="left", width=WIDTH, border_style="cyan", padding=(0, 1))


def render_pools(pools: Sequence[PoolDetail]) -> RenderableType:
    """Each pool, and below it its replicas."""
    parts: list[RenderableType] = [_pools(pools)]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for column in ("replica", "state", "version", "process", "host"):
        table.add_column(column, no_wrap=True, overflow="ellipsis", justify="left")
    for pool in pools:
        for replica in pool.replicas:
            state = Text("dead", style="bold red") if not replica.alive else Text(replica.state)
            if replica.told_to_drain and replica.state != "draining":
                state.append(", told to drain", style="yellow")
            pid = UNKNOWN if replica.pid is None else str(replica.pid)
            table.add_row(replica.name, state, _version(replica.version), pid, replica.host)
    return Group(*parts, table)


def line(status: Status) -> str:
    """One plain line about the newest step."""
    parts = [f"step {status.step or 0}/{status.steps}"]
    if status.reward is not None:
        parts.append(f"reward {status.reward:.3f}")
    if status.accuracy is not None and status.accuracy.value is not None:
        parts.append(f"accuracy {status.accuracy.value:.3f} (version {status.accuracy.version})")
    if status.response_length is not None:
        parts.append(f"length {status.response_length:.1f}")
    if status.staleness is not None:
        parts.append(f"staleness {status.staleness:.2f}")
    if status.tokens_per_second is not None:
        parts.append(f"{status.tokens_per_second:.0f} tokens/s")
    if status.mismatch is not None:
        parts.append(f"mismatch {status.mismatch:.1e}")
    if status.eta_seconds:
        parts.append(f"{duration(status.eta_seconds)} left")
    if status.step is None:
        parts.append(status.waiting)
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """A time for people: 42 s, 3:07, 2:15:00."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def sparkline(rewards: Sequence[StepReward], width: int = SPARKS) -> str:
    """The newest rewards as bars between the lowest and the highest of them; a step without one is a gap."""
    shown = [step.reward for step in rewards][-width:]
    known = [reward for reward in shown if reward is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    places = [None if r is None else (r - low) / span if span else 0.5 for r in shown]
    return "".join(" " if p is None else BARS[min(int(p * len(BARS)), len(BARS) - 1)] for p in places)


def _phase(status: Status) -> str:
    if status.stopping and status.phase == "running":
        return "stopping"
    return "paused" if status.paused else (status.phase or "not started").splitlines()[0]


def _course(status: Status) -> RenderableType:
    done = status.step or 0
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    left = f"{duration(status.eta_seconds)} left" if status.eta_seconds else ""
    grid.add_row(
        Text.assemble("step ", (f"{done}", "bold"), f"/{status.steps}"),
        ProgressBar(total=max(status.steps, 1), completed=done, complete_style="cyan", finished_style="green"),
        left,
    )
    return grid


def _numbers(status: Status) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in range(2):
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    curve = sparkline(status.rewards, width=20)
    largest = status.last_step.get("staleness/max")
    bound = status.ledger.max_staleness
    known = {"max": largest, "bound": bound}
    extremes = ", ".join(f"{name} {value:.0f}" for name, value in known.items() if value is not None)
    limits = f" ({extremes})" if extremes else ""
    grid.add_row(
        "reward",
        Text.assemble((_shown(status.reward, ".3f"), "bold"), " ", (curve, "cyan")),
        "accuracy",
        _accuracy(status),
    )
    grid.add_row(
        "length",
        _shown(status.response_length, ".1f") + " tokens",
        "staleness",
        _shown(status.staleness, ".2f") + limits,
    )
    grid.add_row(
        "generated",
        _shown(status.tokens_per_second, ".0f") + " tokens/s",
        "mismatch",
        _shown(status.mismatch, ".1e"),
    )
    counts = status.ledger.counts
    dropped = counts.get("dropped", 0)
    grid.add_row(
        "version",
        UNKNOWN if status.version is None else str(status.version),
        "prompts",
        f"{counts.get('leased', 0)} leased, {counts.get('generated', 0)} ready"
        + (f", {dropped} dropped" * bool(dropped)),
    )
    return grid


def _accuracy(status: Status) -> Text:
    known = [one for one in status.evaluations if one.accuracy is not None]
    if not known:
        return Text(UNKNOWN)
    last = Text.assemble((f"{known[-1].accuracy:.3f}", "bold green"), (f" (version {known[-1].version})", "dim"))
    return last if len(known) == 1 else Text.assemble(f"{known[0].accuracy:.3f} → ", last)


def _shown(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def _waiting(status: Status) -> RenderableType:
    sentence = status.waiting[:1].upper() + status.waiting[1:] + "."
    return Text(sentence, style="italic yellow", overflow="fold")


def _pools(pools: Sequence[PoolStatus]) -> RenderableType:
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("pool", no_wrap=True, overflow="ellipsis", max_width=14)
    table.add_column("serving", ratio=1, no_wrap=True, overflow="ellipsis")
    for column in ("tokens/s", "groups", "staleness"):
        table.add_column(column, justify="right", no_wrap=True)
    for pool in pools[:POOLS]:
        reached = pool.serving == pool.running == pool.desired and not pool.draining
        replicas = Text(f"{pool.serving} of {pool.desired}", style="" if reached else "yellow")
        if pool.running > pool.serving:
            replicas.append(f", {pool.running - pool.serving} not yet", style="yellow")
        if pool.draining:
            replicas.append(f", {pool.draining} draining", style="yellow")
        table.add_row(
            pool.name,
            replicas,
            _shown(pool.tokens_per_second, ".0f"),
            UNKNOWN if pool.share is None else f"{pool.groups} ({pool.share:.0%})",
            _shown(pool.staleness, ".2f"),
        )
    if len(pools) > POOLS:
        table.add_row(f"and {len(pools) - POOLS} others", "", "", "", "")
    return table


def _members(status: Status) -> RenderableType:
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("member", no_wrap=True, overflow="ellipsis", max_width=18)
    table.add_column("state", no_wrap=True)
    table.add_column("version", justify="right", no_wrap=True)
    table.add_column("running", justify="right", no_wrap=True)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("waits for", ratio=1, no_wrap=True, overflow="ellipsis")
    if status.consumer:
        about = Text(_first_line(status.consumer.last_error), style="red")
        table.add_row("consumer-0", _state(status.consumer), _version(status.consumer.version), "", "", about)
    for producer in status.producers[:PRODUCERS]:
        error = _first_line(producer.last_error)
        table.add_row(
            producer.name,
            _state(producer),
            _version(producer.version),
            UNKNOWN if producer.running is None else str(producer.running),
            _shown(producer.tokens_per_second, ".0f"),
            Text(error, style="red") if error else Text(producer.waiting),
        )
    if len(status.producers) > PRODUCERS:
        table.add_row(f"and {len(status.producers) - PRODUCERS} others", "", "", "", "", "")
    return table


def _state(member: ProducerStatus | ConsumerStatus) -> Text:
    if not member.alive:
        return Text("dead", style="bold red")
    return Text(member.state, style=STATE_STYLES.get(member.state, ""))


def _version(version: int | None) -> str:
    return UNKNOWN if version is None else str(version)


def _events(status: Status) -> RenderableType:
    lines = []
    for event in status.events[-EVENTS:]:
        clock = datetime.fromtimestamp(event.time).strftime("%H:%M:%S")
        style = "red" if event.kind in WARNINGS else ""
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(f"{clock} ", style="dim")
        text.append(f"{event.kind} {event.who}: {_first_line(event.text)}", style=style)
        lines.append(text)
    return Group(*lines)


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
