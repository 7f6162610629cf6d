"""torchrun for one machine, ending with the exit code of the rank that failed first, which torchrun itself hides.

`python -m consumer.launch --settings FILE` starts as many ranks as the settings say. The ranks die with the launcher.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from buffer.errors import SpecError
from buffer.processes import LAUNCHER
from buffer.settings import read_settings
from consumer.settings import ConsumerSettings


def main(arguments: list[str] | None = None) -> int:
    """Run all ranks to their end; a rank killed by signal n gives 128 + n."""
    parser = argparse.ArgumentParser(prog="python -m consumer.launch", description="All ranks of the consumer.")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file of the consumer's settings")
    file = parser.parse_args(arguments).settings
    try:
        ranks = read_settings(ConsumerSettings, file).settings.ranks
    except SpecError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    os.environ[LAUNCHER] = str(os.getpid())
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # a rank says itself why it ended
    options = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    try:
        torchrun.run(torchrun.parse_args([*options, "-m", "consumer.rank", "--settings", str(file)]))
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return 128 - code if code < 0 else code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
