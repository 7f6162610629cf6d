"""Scorers of the tests' own, run in the real scorer processes; each misbehaves when the completion tells it to."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from producer.rewards import UNSCORABLE, Unscorable


def misbehaving(
    completion: str, row: Mapping[str, Any], finish_reason: str, *, folder: str = ""
) -> float | Unscorable | Any:
    """Do what the completion says; ``folder`` counts the calls."""
    if folder:
        with (Path(folder) / completion.replace(" ", "_")).open("a") as file:
            file.write("x")
    match completion:
        case "hang":
            time.sleep(600)
        case "raise":
            raise RuntimeError("the scorer's own fault")
        case "nan":
            return float("nan")
        case "infinite":
            return float("inf")
        case "nothing":
            return None
        case "text":
            return "0.5"
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            raise SystemExit(3)
        case "print":
            print("this must not reach the pipe")
            return 1.0
        case "unscorable":
            return UNSCORABLE
        case "once" if len((Path(folder) / "once").read_text()) == 1:
            raise RuntimeError("only the first time")
        case "finish":
            return 1.0 if finish_reason == "length" else 0.0
        case "child":
            pid = os.fork()
            if pid == 0:
                time.sleep(600)
            (Path(folder) / "child_pid").write_text(str(pid))
            time.sleep(600)
        case "pid":
            return float(os.getpid())
    return float(row["answer"])


not_a_function = 3
