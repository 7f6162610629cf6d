"""The consumer's service, killed (-9, no clean-up) when a step reaches the point that a test names."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import buffer.journal
import buffer.ledger
from buffer.processes import die_with_parent
from consumer import service


def dying_at(step: int, call: Callable[..., Any], step_of: Callable[..., int]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        if step_of(*args, **kwargs) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    return watched


def die_as_told() -> None:
    """Arrange the death that the environment names."""
    point, step = os.environ.get("DIE_BEFORE", ""), int(os.environ.get("DIE_AT_STEP", "0"))
    ledger = buffer.ledger.Ledger
    if point == "journal":
        buffer.journal.write = dying_at(step, buffer.journal.write, lambda folder, plan, groups: plan.step)
    elif point == "retire":
        ledger.retire = dying_at(step, ledger.retire, lambda self, at, fence: at)  # type: ignore[method-assign]
    elif point == "publish":
        chief = service.Chief
        chief.publish = dying_at(step, chief.publish, lambda self, at: at)  # type: ignore[method-assign]
    elif point == "rename":
        service.checkpoint._synchronise = dying_at(  # type: ignore[attr-defined]
            step,
            service.checkpoint._synchronise,
            lambda path: step if path.name == f".part-step-{step:08d}" else -1,
        )


def run(environment: dict[str, str], arguments: list[str], said: str) -> None:
    """The service in a process that was forked after its imports; what it says on stderr goes to a file."""
    for number, path in ((1, os.devnull), (2, said)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.environ |= environment
    die_with_parent()
    die_as_told()
    code = service.main(arguments)
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    die_as_told()
    os._exit(service.main(sys.argv[1:]))
