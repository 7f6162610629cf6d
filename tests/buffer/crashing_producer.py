"""A producer process that a test kills: it leases and commits without end, or stops between the two writes of a commit.

Arguments: URL, run, name, `loop` or `between`. The password comes by the environment.
"""

import os
import sys
import time

from buffer.client import connect
from buffer.errors import Fenced
from buffer.ledger import Ledger
from buffer.processes import die_with_parent
from tests.buffer.world import make_group


def main() -> None:
    die_with_parent()
    url, run, name, mode = sys.argv[1:5]
    client = connect(url, password=os.environ["TEST_PASSWORD"], tls_ca_file=None, timeout_seconds=10.0)
    ledger = Ledger(client, run)
    if mode == "between":
        finish = ledger._finish

        def stop_before(*arguments: object) -> str:
            print("between", flush=True)
            time.sleep(60)
            return finish(*arguments)  # type: ignore[arg-type]

        ledger._finish = stop_before  # type: ignore[method-assign]
    print("ready", flush=True)
    while True:
        answer = ledger.lease(name, count=3, version=ledger.current_version())
        for lease in answer.leases:
            try:
                ledger.commit(lease, make_group(lease, producer=name, samples=8, length=500), usable=True)
            except Fenced:
                continue
        if answer.refusal == "exhausted":
            time.sleep(0.05)


if __name__ == "__main__":
    main()
