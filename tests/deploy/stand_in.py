"""Stands in for a producer or a consumer: a member of the run until it is told to leave, and nothing else.

Called as the services are: ``-m MODULE --settings FILE``.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

from buffer.client import connect
from buffer.members import Members
from buffer.metrics import Control
from buffer.processes import LAUNCHER


def main() -> int:
    module, settings = sys.argv[2], json.loads(Path(sys.argv[4]).read_text())
    os.environ.pop(LAUNCHER, None)
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    client = connect(settings["redis_url"], password=os.environ[settings["buffer"]["password_env"]])
    members, control = Members(client, settings["run"], heartbeat_seconds=1.0), Control(client, settings["run"])
    producer = module == "producer.service"
    name, role = (settings["member"], "producer") if producer else ("consumer-0", "consumer")
    incarnation = members.join(name, role=role, pool=settings.get("pool", role), info={"pid": str(os.getpid())})
    members.set_state(name, incarnation, "serving", version=0)
    while not told.wait(0.1) and not control.get("stop"):
        members.report(name, incarnation)
    members.leave(name, incarnation)
    return 0


if __name__ == "__main__":
    sys.exit(main())
