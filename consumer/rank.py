"""A rank ends with its launcher from its first moment on, also while it imports what takes seconds.

`python -m consumer.rank --settings FILE`, started by torchrun.
"""

import os
import sys

from buffer.processes import die_with_launcher

if __name__ == "__main__":
    die_with_launcher()
    from consumer import service

    code = service.main()
    # After a failure threads of the process group may wait for ranks that are gone: end without them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code) if code else sys.exit(0)
