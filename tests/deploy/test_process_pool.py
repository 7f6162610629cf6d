"""Processes of a pool end with the pool, whatever they start themselves and however the pool ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from buffer.errors import ForebayError
from buffer.members import Member
from deploy.pools.process import ProcessPool, adopt_orphans, end_descendants
from deploy.pools.silent import end_silent


def eventually(is_so: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def pool_of(folder: Path, code: str) -> ProcessPool:
    return ProcessPool(folder, lambda name: ([sys.executable, "-c", code, name], {"NAME": name}))


def test_a_process_that_ends_is_collected_once_with_its_code_and_last_words(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, "import os, sys; print('I am', os.environ['NAME']); sys.exit(3)")
    pool.start("worker-0")
    assert pool.wait(10)
    (ended,) = pool.collect()
    assert (ended.name, ended.code, ended.last_words) == ("worker-0", 3, "I am worker-0")
    assert pool.collect() == [] and pool.names() == []


def test_a_process_that_was_killed_says_by_which_signal(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, "import time; time.sleep(60)")
    pool.start("worker-0")
    os.kill(pool.pid("worker-0"), signal.SIGKILL)
    assert pool.wait(10)
    assert pool.collect()[0].code == -signal.SIGKILL


def test_a_process_that_ignores_the_request_is_killed_after_the_deadline(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    pool = pool_of(tmp_path, code)
    pool.start("worker-0")
    output = tmp_path / "logs" / "worker-0.out"
    assert eventually(lambda: output.read_text() == "up\n")
    started = time.monotonic()
    pool.stop(0.5)
    assert 0.4 < time.monotonic() - started < 5
    assert pool.collect()[0].code == -signal.SIGKILL


def test_a_program_that_is_not_there_is_said(tmp_path: Path) -> None:
    pool = ProcessPool(tmp_path, lambda name: ([str(tmp_path / "none")], {}))
    with pytest.raises(ForebayError, match="worker-0 cannot be started"):
        pool.start("worker-0")


def test_what_a_killed_service_leaves_behind_is_found_and_ended(tmp_path: Path) -> None:
    # The service's own child has a session of its own and outlives it: only its adopter can find it.
    child = "import subprocess, sys, time; c = subprocess.Popen(['sleep', '60'], start_new_session=True); "
    child += "print(c.pid, flush=True); time.sleep(60)"
    adopt_orphans()
    pool = pool_of(tmp_path, child)
    pool.start("worker-0")
    output = tmp_path / "logs" / "worker-0.out"
    assert eventually(lambda: output.read_text().endswith("\n"))
    orphan = psutil.Process(int(output.read_text()))
    others = [process.pid for process in psutil.Process().children(recursive=True) if process.pid != orphan.pid]
    pool.kill()
    pool.collect()
    assert orphan.is_running()
    assert end_descendants(5.0, spare=others) == []
    assert not orphan.is_running()


def test_the_last_words_are_this_processs_own_and_no_librarys_warnings(tmp_path: Path) -> None:
    code = "import warnings; print('first'); warnings.warn('old', FutureWarning); print('second')"
    pool = pool_of(tmp_path, code)
    for _ in range(2):
        pool.start("worker-0")
        assert pool.wait(10)
        (ended,) = pool.collect()
        assert sorted(ended.last_words.splitlines()) == ["first", "second"]


def test_a_process_that_says_nothing_is_ended_and_one_that_speaks_is_not(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, "import time; time.sleep(60)")
    members = []
    for name, silence in (("worker-0", 61.0), ("worker-1", 59.0)):
        pool.start(name)
        info = {"pid": str(pool.pid(name))}
        members.append(Member(name, "consumer", "consumer", "serving", 0, 1, False, silence, info))
    # A record of an earlier process: nobody here has its id.
    members.append(Member("worker-2", "producer", "producer", "serving", 0, 1, False, 900.0, {"pid": "1"}))
    assert [member.name for member in end_silent(members)] == ["worker-0"]
    assert pool.wait(10, "worker-0")
    assert pool.collect()[0].code == -signal.SIGKILL
    assert pool.names() == ["worker-1"]
    pool.kill()


def test_no_process_outlives_a_pool_whose_process_is_killed(tmp_path: Path) -> None:
    owner = (
        "import sys, time; from pathlib import Path; from deploy.pools.process import ProcessPool;"
        "pool = ProcessPool(Path(sys.argv[1]), lambda name: (['sleep', '60'], {})); pool.start('worker-0');"
        "print(pool.pid('worker-0'), flush=True); time.sleep(60)"
    )
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen([sys.executable, "-c", owner, str(tmp_path)], cwd=root, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        process.kill()
        assert eventually(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    finally:
        process.kill()
        process.wait(10)
