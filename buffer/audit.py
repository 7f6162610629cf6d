"""The ledger's counters are compared with the prompts themselves, at one moment, and each difference is a sentence."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import redis

from buffer.scripts import Scripts, decode, pairs, prefix

STATES = ("pending", "leased", "generated", "planned", "trained", "dropped")
MOST_PROBLEMS = 100


def verify(
    client: "redis.Redis", scripts: Scripts, blob_key: Callable[[int, int], str]
) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Counts by state, drops by reason, and what does not add up."""
    reply = scripts.call("snapshot")
    counters, config, dropped = pairs(reply[0]), pairs(reply[1]), pairs(reply[2])
    prompts: dict[int, dict[str, str]] = {}
    fields = ("state", "token", "ticket", "holder", "bytes", "step", "task", "pass", "row", "reason")
    for line in reply[3]:
        prompt_number, *values = (decode(value) for value in line)
        prompts[int(prompt_number)] = dict(zip(fields, values, strict=True))
    pending = {int(p): decode(task) for task, members in reply[4] for p in members}
    pending_listed = sum(len(members) for _, members in reply[4])
    returned = {int(p): (int(float(score)), decode(task)) for task, scored in reply[5] for p, score in _scored(scored)}
    leases = {int(p) for p in reply[6]}
    inplay = {int(p): int(float(score)) for p, score in _scored(reply[7])}
    plans = [[decode(part) for part in plan] for plan in reply[8]]
    held = {int(p): decode(holder) for holder, members in reply[9] for p in members}
    orders = [int(length) // 4 for length in reply[10]]

    def number(name: str) -> int:
        return int(counters.get(name, 0))

    problems: list[str] = []
    say = problems.append

    total, rows = number("total"), number("rows")
    for pass_number in range(number("passes")):
        if orders[pass_number] != rows:
            say(f"pass {pass_number} has {orders[pass_number]} rows in its order, not {rows}")
    if sum(orders) != total:
        say(f"the opened passes have {sum(orders)} prompts, the counter says {total}")

    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for prompt in range(total):
        life = prompts.get(prompt)
        state = life["state"] if life else "pending"
        counts[state] += 1
        places = [
            name
            for name, place in (
                ("pending", pending),
                ("returned", returned),
                ("leases", leases),
            )
            if prompt in place
        ]
        expected = ["leases"] if state == "leased" else []
        if state == "pending":
            expected = ["returned"] if life else ["pending"]
        if places != expected:
            say(f"prompt {prompt} is {state} and listed in {_list(places)}, it should be in {_list(expected)}")
        if life is None:
            continue
        if state not in STATES:
            say(f"prompt {prompt} is in the unknown state {state!r}")
        if rows and int(life["pass"] or -1) != prompt // rows:
            say(f"prompt {prompt} says it is of pass {life['pass']}, by its number it is of pass {prompt // rows}")
        in_play = state in ("pending", "leased", "generated")
        if in_play != (prompt in inplay):
            say(f"prompt {prompt} is {state} and {'not ' if in_play else ''}in play")
        elif in_play and inplay[prompt] != int(life["ticket"]):
            say(f"prompt {prompt} has ticket {life['ticket']} and is in play with {inplay[prompt]}")
        if prompt in returned and returned[prompt] != (int(life["ticket"]), life["task"]):
            say(f"prompt {prompt} went back under another ticket or task than its own")
        if (state == "leased") != (prompt in held):
            say(f"prompt {prompt} is {state} and {'held by ' + held[prompt] if prompt in held else 'held by nobody'}")
        elif state == "leased" and held[prompt] != life["holder"]:
            say(f"prompt {prompt} is leased by {life['holder']} and listed as held by {held[prompt]}")
        if state == "dropped":
            reasons[life["reason"]] += 1
    for prompt in sorted((set(prompts) | set(pending) | set(returned) | leases | set(inplay)) - set(range(total))):
        say(f"prompt {prompt} is of no opened pass")
    if pending_listed != len(pending):
        say(f"{pending_listed - len(pending)} prompts are pending under two tasks")
    tickets = Counter(life["ticket"] for life in prompts.values())
    for ticket, times in tickets.items():
        if times > 1:
            say(f"ticket {ticket} was given to {times} prompts")

    for state in STATES:
        if counts[state] != number(state):
            say(f"{counts[state]} prompts are {state}, the counter says {number(state)}")
    if len(returned) != number("returned"):
        say(f"{len(returned)} prompts went back, the counter says {number('returned')}")
    if dict(reasons) != {reason: int(value) for reason, value in dropped.items()}:
        say(f"dropped by reason: {dict(reasons)} by the prompts, {dropped} by the counters")
    _check_numbers(prompts, counts, number, int(config.get("reserve_bytes", 0)), say)
    _check_plans(prompts, plans, number, int(config.get("groups_per_step", 0)), say)
    _check_payloads(client, prompts, blob_key, scripts, say)
    if len(problems) > MOST_PROBLEMS:
        problems = [*problems[:MOST_PROBLEMS], f"and {len(problems) - MOST_PROBLEMS} more"]
    return {state: counts[state] for state in STATES}, dict(reasons), problems


def _check_numbers(
    prompts: dict[int, dict[str, str]],
    counts: "Counter[str]",
    number: Callable[[str], int],
    reserve: int,
    say: Callable[[str], None],
) -> None:
    stored = sum(int(life["bytes"] or 0) for life in prompts.values() if life["state"] in ("generated", "planned"))
    if stored != number("stored"):
        say(f"the stored groups have {stored} bytes, the counter says {number('stored')}")
    reserved = counts["leased"] * reserve
    if reserved != number("reserved"):
        say(f"{counts['leased']} leases reserve {reserved} bytes, the counter says {number('reserved')}")
    accepted = counts["generated"] + counts["planned"] + counts["trained"]
    if accepted != number("accepted"):
        say(f"{accepted} groups were accepted, the counter says {number('accepted')}")


def _check_plans(
    prompts: dict[int, dict[str, str]],
    plans: list[list[str]],
    number: Callable[[str], int],
    per_step: int,
    say: Callable[[str], None],
) -> None:
    """Every planned or trained prompt is in exactly one plan, of the step that it names."""
    planned: dict[int, str] = {}
    through = 0
    for step, members, state, counted in plans:
        if not members:
            say(f"the plan of step {step} is missing")
            continue
        numbers = [int(prompt) for prompt in members.split()]
        through += len(numbers)
        if len(numbers) != per_step:
            say(f"the plan of step {step} has {len(numbers)} groups, not {per_step}")
        if int(counted or 0) != through:
            say(f"through step {step} there are {through} planned groups, its plan says {counted}")
        if (state == "trained") != (int(step) <= number("last_trained")):
            say(f"the plan of step {step} is {state}, the last trained step is {number('last_trained')}")
        for prompt in numbers:
            if prompt in planned:
                say(f"prompt {prompt} is in the plans of steps {planned[prompt]} and {step}")
            planned[prompt] = step
            life = prompts.get(prompt)
            if life is None or life["state"] != state or life["step"] != step:
                found = f"{life['state']} at step {life['step'] or 'none'}" if life else "pending"
                say(f"prompt {prompt} is in the plan of step {step}, which is {state}, and is itself {found}")
    for prompt, life in prompts.items():
        if life["state"] in ("planned", "trained") and prompt not in planned:
            say(f"prompt {prompt} is {life['state']} and in no plan")
    if through != number("planned_groups"):
        say(f"the plans have {through} groups, the counter says {number('planned_groups')}")


def _check_payloads(
    client: "redis.Redis",
    prompts: dict[int, dict[str, str]],
    blob_key: Callable[[int, int], str],
    scripts: Scripts,
    say: Callable[[str], None],
) -> None:
    """Each generated or planned prompt has its payload, of the size that is counted."""
    stored = [(p, life) for p, life in prompts.items() if life["state"] in ("generated", "planned")]
    for start in range(0, len(stored), 1000):
        part = stored[start : start + 1000]
        pipeline = client.pipeline(transaction=False)
        for prompt, life in part:
            pipeline.strlen(blob_key(prompt, int(life["token"])))
        for (prompt, life), size in zip(part, pipeline.execute(), strict=True):
            if size == int(life["bytes"] or 0):
                continue
            now = decode(client.hget(f"{scripts.prefix}prompt:{prompt}", "state"))
            if now in ("generated", "planned"):  # else it was retired since the snapshot
                say(f"the payload of prompt {prompt} has {size} bytes, the ledger says {life['bytes']}")


def history(client: "redis.Redis", run: str, prompt: int) -> dict[str, object] | None:
    """What is known of one prompt; None for a number of no opened pass."""
    found = pairs(client.hgetall(f"{prefix(run)}prompt:{prompt}"))
    if not found:
        total = int(client.hget(f"{prefix(run)}counters", "total") or 0)
        return {"prompt": prompt, "state": "pending", "attempts": 0} if 0 <= prompt < total else None
    whole = {"row", "pass", "ticket", "token", "attempts", "bytes", "step", "place", "leased_version"}
    whole |= {"oldest_version", "newest_version"}
    times = {"leased_at", "finished_at", "trained_at"}
    life: dict[str, object] = {"prompt": prompt}
    for name, value in found.items():
        if name in whole:
            life[name] = int(value)
        elif name in times:
            life[name] = int(value) / 1000
        elif name == "rewards":
            life[name] = [_reward(part) for part in value.split()]
        elif name == "lengths":
            life[name] = [int(part) for part in value.split()]
        elif name == "mean_reward":
            life[name] = float(value) if value else None
        else:
            life[name] = value
    return life


def _reward(text: str) -> float | str:
    return text if text in ("unscorable", "failed") else float(text)


def collect_orphans(client: "redis.Redis", run: str) -> int:
    """Delete payloads whose token can no longer become, or no longer is, a stored group."""
    start = prefix(run)
    collected = 0
    escaped = run.replace("\\", "\\\\").replace("[", "\\[").replace("*", "\\*").replace("?", "\\?")
    keys: list[str] = []
    for key in client.scan_iter(match=f"forebay:{{{escaped}:*}}:group:*", count=1000):
        keys.append(decode(key))
        if len(keys) >= 500:
            collected += _collect(client, start, keys)
            keys = []
    return collected + _collect(client, start, keys)


def _collect(client: "redis.Redis", start: str, keys: list[str]) -> int:
    if not keys:
        return 0
    pipeline = client.pipeline(transaction=False)
    tokens = []
    for key in keys:
        prompt, token = key.rsplit(":", 2)[1:]
        tokens.append(token)
        pipeline.hmget(f"{start}prompt:{prompt}", "state", "token")
    orphans = [
        key
        for key, token, (state, current) in zip(keys, tokens, pipeline.execute(), strict=True)
        # A token is never given twice: once its lease has ended otherwise, its payload can never become real.
        if decode(current) != token or decode(state) not in ("leased", "generated", "planned")
    ]
    return int(client.unlink(*orphans)) if orphans else 0


def _scored(reply: Any) -> list[tuple[Any, Any]]:
    """Members with scores, whether the reply nests them or not."""
    if reply and isinstance(reply[0], list | tuple):
        return [(member, score) for member, score in reply]
    return list(zip(reply[::2], reply[1::2], strict=True))


def _list(names: list[str]) -> str:
    return ", ".join(names) if names else "nothing"
