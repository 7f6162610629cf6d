"""A scorer that hangs, crashes or raises costs its own sample and one process, never the engine or a wrong reward.

Each process works through batches; the time limit holds for each item. A process that exceeds it, or ends, is replaced;
the item is tried again up to its reward's ``retries`` times and then is ``failed``.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from buffer.errors import DeadlineExceeded, SpecError
from producer.rewards import check_names
from producer.rewards.weighted import Part, Reward, weighted_sum
from producer.rewards.worker import Answer, Item, Ready, ScorerChoice
from producer.settings import RewardSettings

START_SECONDS = 120.0
STOP_SECONDS = 5.0


@dataclass(frozen=True)
class Judged:
    """A completion that is to be scored."""

    completion: str
    finish_reason: str


class ScorerProcesses:
    """A fixed number of scorer processes; every method is called from one event loop."""

    def __init__(self, rewards: Sequence[RewardSettings], *, processes: int | None = None) -> None:
        check_names(rewards)
        self._rewards = tuple(rewards)
        self._count = processes or max(2, min(8, (os.cpu_count() or 1) // 4))
        self._idle: asyncio.Queue[_Process] = asyncio.Queue()
        self._all: set[_Process] = set()
        self.replaced = 0  # processes that were killed or had ended

    async def start(self) -> None:
        """Start every process; raises SpecError when a reward cannot be imported."""
        try:
            await asyncio.gather(*(self._add() for _ in range(self._count)))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End every process."""
        await asyncio.gather(*(process.kill() for process in self._all))
        self._all.clear()

    async def score(self, row: Mapping[str, Any], completions: Sequence[Judged]) -> list[Reward]:
        """The reward of each completion of one row; never raises for what a scorer does."""
        columns = msgspec.to_builtins(dict(row), enc_hook=str)
        keys = [(sample, part) for sample in range(len(completions)) for part in range(len(self._rewards))]
        parts: dict[tuple[int, int], Part] = {}
        attempts = dict.fromkeys(keys, 0)
        while keys:
            items = [
                Item(part, completions[sample].completion, columns, completions[sample].finish_reason)
                for sample, part in keys
            ]
            answers = await self._batch(items)
            again = []
            # The batch ends early, with an answer "failed", when its process was lost at that item.
            for key, answer in zip(keys, answers, strict=False):
                attempts[key] += 1
                if answer.outcome == "failed" and attempts[key] <= self._rewards[key[1]].retries:
                    again.append(key)
                else:
                    parts[key] = Part(answer.outcome, answer.value, answer.error)
            keys = again + keys[len(answers) :]
        return [
            weighted_sum(
                self._rewards,
                {reward.name: parts[sample, part] for part, reward in enumerate(self._rewards)},
            )
            for sample in range(len(completions))
        ]

    async def _batch(self, items: Sequence[Item]) -> list[Answer]:
        """Answers to the first items: all of them, or up to the one at which the process was lost."""
        process = await self._idle.get()
        lost = True
        try:
            answers = await process.judge(items, [self._rewards[item.scorer].timeout_seconds for item in items])
            lost = len(answers) < len(items) or process.ended
            return answers
        finally:
            if lost:  # also when this task was cancelled in the midst of a batch
                self.replaced += 1
                await self._replace(process)
            else:
                self._idle.put_nowait(process)

    async def _replace(self, process: "_Process") -> None:
        self._all.discard(process)
        await process.kill()
        await self._add()

    async def _add(self) -> None:
        process = await _Process.start(self._rewards)
        self._all.add(process)
        self._idle.put_nowait(process)


class _Process:
    """One scorer process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.ended = False

    @classmethod
    async def start(cls, rewards: Sequence[RewardSettings]) -> "_Process":
        root = str(Path(__file__).resolve().parents[2])
        search_path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
        started = cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "producer.rewards.worker",
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # so that what a scorer starts can be killed with it
            )
        )
        names = ", ".join(reward.name for reward in rewards)
        try:
            started._write([ScorerChoice(reward.name, reward.options) for reward in rewards])
            line = await asyncio.wait_for(started._stdout.readline(), START_SECONDS)
        except TimeoutError:
            await started.kill()
            raise DeadlineExceeded(
                f"a scorer process was not ready after {START_SECONDS:.0f} s",
                where=f"rewards: {names}",
                cure="make the module of the reward import faster",
            ) from None
        except BaseException:
            await started.kill()
            raise
        error = msgspec.json.decode(line, type=Ready).error if line else "the scorer process ended while it started"
        if error:
            await started.kill()
            raise SpecError(error, where=f"rewards: {names}", cure="correct the reward's name or its module")
        return started

    @property
    def _stdout(self) -> asyncio.StreamReader:
        assert self._process.stdout is not None
        return self._process.stdout

    def _write(self, records: Sequence[msgspec.Struct]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(records) + b"\n")

    async def judge(self, items: Sequence[Item], seconds: Sequence[float]) -> list[Answer]:
        """Answers in order; the last one is "failed" and the list is short when the process was lost at that item."""
        self._write(items)  # buffered by the transport: the process reads while it judges
        answers: list[Answer] = []
        for limit in seconds:
            try:
                line = await asyncio.wait_for(self._stdout.readline(), limit)
            except TimeoutError:
                self.ended = True
                answers.append(Answer("failed", error=f"exceeded its {limit:g} s"))
                break
            if not line.endswith(b"\n"):
                self.ended = True
                answers.append(Answer("failed", error="the scorer process ended"))
                break
            try:
                answers.append(msgspec.json.decode(line, type=Answer))
            except msgspec.DecodeError:
                self.ended = True
                answers.append(Answer("failed", error="wrote into the channel of its answers"))
                break
        return answers

    async def kill(self) -> None:
        """End the process and what it started."""
        self.ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
