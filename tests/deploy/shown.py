"""Runs as the services would write them, by the classes that the services use."""

from buffer.members import State
from buffer.metrics import Metrics
from deploy.status import Status, read_status
from tests.buffer.world import World

HEARTBEAT = 60.0  # nobody of these worlds reports, and nobody is to die of it


def status_of(world: World, *, steps: int = 5, heartbeat_seconds: float = HEARTBEAT) -> Status:
    """The run's status."""
    return read_status(world.client, run=world.run, steps=steps, heartbeat_seconds=heartbeat_seconds)


def join(world: World, name: str, state: State, version: int = -1, **info: str) -> int:
    """A producer, or the consumer, in a state; the incarnation."""
    role = "consumer" if name.startswith("consumer") else "producer"
    incarnation = world.members.join(name, role=role, pool=role, info=info)
    world.members.set_state(name, incarnation, state, version=version)
    return incarnation


def step_numbers(step: int, **changes: float) -> dict[str, float]:
    """What the consumer records of a step."""
    return {
        "reward/mean": 0.1 * step,
        "response/length_mean": 10.0 + step,
        "staleness/mean": 0.5,
        "staleness/max": 1.0,
        "mismatch/mean_abs": 1e-6 * step,
        "mismatch/max": 1e-5 * step,
        "mismatch/all_mean_abs": 2e-6 * step,
        "groups": 3.0,
        "samples": 6.0,
        "tokens": 60.0,
        "time/wait": 0.5,
        "time/forward_backward": 1.0,
        "time/step": 0.1,
        "time/publish": 0.2,
        "time/total": 2.0,
        **changes,
    }


def evaluation_numbers(step: int, accuracy: float) -> dict[str, float]:
    """What a producer records of an evaluation."""
    return {
        "step": float(step),
        "asked": float(step),
        "problems": 20.0,
        "accuracy": accuracy,
        "mean_reward": accuracy,
        "mean_length": 12.5,
        "truncated": 0.0,
        "failed": 0.0,
        "unscorable": 0.0,
        "over_long": 0.0,
        "seconds": 1.5,
        "reward/exact": accuracy,
    }


def trained_run(world: World, steps: int = 3) -> World:
    """A run that has trained, was evaluated, and whose members are at work."""
    world.set_up(rows=40, producers=())
    join(world, "consumer-0", "serving", 0)
    for name in ("p0", "p1"):
        join(world, name, "serving", 0)
    metrics = Metrics(world.client, world.run)
    metrics.record_evaluation(0, evaluation_numbers(0, 0.25))
    for step in range(1, steps + 1):
        world.generate(3, version=step - 1)
        world.train(step)
        world.publish(step)
        metrics.record_step(step, step_numbers(step))
        join(world, "p0", "serving", step)
    metrics.record_evaluation(steps, evaluation_numbers(steps, 0.75))
    metrics.record_producer("p0", {"tokens_per_second": 100.0, "running": 2.0, "version": float(steps)})
    metrics.record_producer("p1", {"tokens_per_second": 50.0, "running": 0.0, "version": 0.0})
    metrics.event("join", "p0", "pool producer, somewhere")
    world.control.set("phase", "running")
    return world
