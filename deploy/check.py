"""What does not fit is named before anything starts, every fault at once, with the numbers that it follows from."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buffer.errors import ForebayError, SpecError
from deploy.spec import RunSpec
from producer.data import Dataset, load_dataset
from producer.prompts import check_template
from producer.rewards import check_names
from producer.settings import DataSettings
from producer.sizes import group_bytes
from weight_sync.model_folder import read_config

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
NEED_ANSWER = ("math", "exact")
COMMUNICATORS = ("gloo",)  # that weight_sync has
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass
class CheckReport:
    """Derived numbers, by a name that says the unit, and what does not fit."""

    derived: dict[str, int | float | str | None] = field(default_factory=dict)
    problems: list[ForebayError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def raise_problems(self) -> None:
        """Raise SpecError when something does not fit."""
        if len(self.problems) == 1:
            raise self.problems[0]
        if self.problems:
            text = "".join(f"\n- {problem}" for problem in self.problems)
            raise SpecError(f"{len(self.problems)} things do not fit:{text}")


def check_spec(spec: RunSpec) -> CheckReport:
    """Everything that can be known of a spec without starting anything; reads the data and the model's headers."""
    report = CheckReport()
    checks: tuple[Callable[[RunSpec, CheckReport], Iterator[ForebayError]], ...] = (
        _sizes,
        _model,
        _data,
        _evaluation,
        _prompt,
        _rewards,
        _buffer,
        _pools,
        _controller,
    )
    for check in checks:
        try:
            report.problems += check(spec, report)
        except ForebayError as error:
            report.problems.append(error)
    return report


def _longest(spec: RunSpec) -> int:
    return spec.prompt.max_tokens + spec.sampling.max_tokens


def _sizes(spec: RunSpec, report: CheckReport) -> Iterator[ForebayError]:
    samples = spec.groups_per_step * spec.group_size
    report.derived |= {
        "groups per step": spec.groups_per_step,
        "samples per step": samples,
        "longest sequence (tokens)": _longest(spec),
        "tokens of a step, at most": samples * _longest(spec),
        "tokens per micro-batch, at most": spec.consumer.micro_batch_tokens,
        "consumer world size (ranks)": spec.consumer.ranks,
        "producers at the start": sum(pool.replicas for pool in spec.producers.values()),
        "groups in flight, at most": (spec.max_staleness + 1) * spec.groups_per_step,
    }
    if spec.consumer.micro_batch_tokens < _longest(spec):
        yield SpecError(
            f"a sequence may have {_longest(spec)} tokens (prompt.max_tokens + sampling.max_tokens), a micro-batch "
            f"holds {spec.consumer.micro_batch_tokens}",
            where="consumer.micro_batch_tokens",
            cure="raise it to the longest sequence at least",
        )
    if spec.algorithm.updates_per_step > spec.groups_per_step:
        yield SpecError(
            f"{spec.algorithm.updates_per_step} updates cannot be made of {spec.groups_per_step} groups",
            where="algorithm.updates_per_step",
            cure="each update needs a group of its own",
        )
    if spec.consumer.ranks > samples:
        yield SpecError(
            f"{spec.consumer.ranks} ranks share {samples} samples of a step: some would have none",
            where="consumer.ranks",
            cure="use fewer ranks or more groups per step",
        )


def _model(spec: RunSpec, report: CheckReport) -> Iterator[ForebayError]:
    config = read_config(spec.model.path)
    limit = config.get("max_position_embeddings")
    report.derived["model's longest sequence (tokens)"] = limit
    if isinstance(limit, int) and _longest(spec) > limit:
        yield SpecError(
            f"prompt.max_tokens + sampling.max_tokens = {_longest(spec)}, the model takes {limit}",
            where="sampling.max_tokens",
            cure="make prompts or completions shorter",
        )
    parameters = _parameters(Path(spec.model.path))
    report.derived["model parameters"] = parameters
    report.derived["bytes of one policy version"] = parameters * ITEM_BYTES[spec.model.dtype]
    if spec.prompt.template == "chat" and not _has_chat_template(Path(spec.model.path)):
        yield SpecError(
            "the model has no chat template",
            where=f"{spec.model.path}/tokenizer_config.json",
            cure="set `prompt.template` to r1_zero or raw (base models), or to a Jinja file",
        )


def _parameters(folder: Path) -> int:
    """Elements of all tensors, from the headers of the safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SpecError(
            "the model folder has no weights",
            where=str(folder),
            cure="put model.safetensors there (or shards with their index)",
        )
    total = 0
    for file in files:
        try:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header: dict[str, Any] = json.loads(opened.read(length)) if length < 1 << 30 else {}
        except (OSError, ValueError) as error:
            raise SpecError(
                f"the weights cannot be read: {error}", where=str(file), cure="copy the folder again; is it complete?"
            ) from error
        for name, entry in header.items():
            if name != "__metadata__":
                elements = 1
                for size in entry["shape"]:
                    elements *= size
                total += elements
    return total


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError) as error:
        raise SpecError(
            f"the model folder has no readable tokenizer: {error}",
            where=str(folder / "tokenizer_config.json"),
            cure="put tokenizer.json and tokenizer_config.json beside config.json",
        ) from error


def _rows(data: DataSettings, report: CheckReport, what: str) -> Dataset | None:
    """The data, each row of it read and checked where this environment can read the format."""
    path = Path(data.path)
    if path.exists() and path.suffix not in (".jsonl", ".json", ".ndjson"):
        report.notes.append(f"the rows of {data.path} are read and checked when a producer starts")
        return None
    dataset = load_dataset(data)
    report.derived[what] = len(dataset.rows)
    return dataset


def _data(spec: RunSpec, report: CheckReport) -> Iterator[ForebayError]:
    dataset = _rows(spec.data, report, "prompts of a pass")
    if dataset is None:
        return
    yield from _tasks(spec, report, Counter(dataset.tasks()))
    rows = len(dataset.rows)
    needed = spec.steps * spec.groups_per_step
    report.derived["passes that the steps need"] = round(needed / rows, 2)
    if spec.passes is not None and spec.passes * rows < needed:
        yield SpecError(
            f"{spec.steps} steps of {spec.groups_per_step} groups need {needed} prompts, {spec.passes} passes of "
            f"{rows} rows give {spec.passes * rows}",
            where="passes",
            cure="raise `passes` (or leave it out), or lower `steps`",
        )


def _tasks(spec: RunSpec, report: CheckReport, rows: "Counter[str]") -> Iterator[ForebayError]:
    """Each task of the data must have a pool that answers it, or its prompts would be waited for for ever."""
    named = {task for pool in spec.producers.values() for task in pool.tasks}
    if not named:
        return
    report.derived |= {f"prompts of task {task}": number for task, number in sorted(rows.items())}
    if all(pool.tasks for pool in spec.producers.values()) and (left := sorted(rows.keys() - named)):
        yield SpecError(
            f"no pool answers the tasks {', '.join(left)} of the data",
            where="producers.<pool>.tasks",
            cure="name them in a pool, or leave `tasks` out of one: it answers all",
        )
    for name, pool in spec.producers.items():
        if unknown := sorted(set(pool.tasks) - rows.keys()):
            yield SpecError(
                f"the pool `{name}` is to answer the tasks {', '.join(unknown)}, and no row of the data is of them",
                where=f"producers.{name}.tasks",
                cure=f"the data has: {', '.join(sorted(rows))}; `data.task_key` names the column",
            )


def _evaluation(spec: RunSpec, report: CheckReport) -> Iterator[ForebayError]:
    if spec.evaluation is not None:
        _rows(spec.evaluation.data, report, "held-out prompts")
    yield from ()


def _prompt(spec: RunSpec, report: CheckReport) -> Iterator[ForebayError]:
    check_template(spec.prompt)
    yield from ()


def _rewards(spec: RunSpec, report: CheckReport) -> Iterator[ForebayError]:
    check_names(spec.rewards)
    for reward in spec.rewards:
        if ":" in reward.name:
            report.notes.append(f"the reward {reward.name} is imported and tried when a producer starts")
        if reward.name in NEED_ANSWER and spec.data.answer_key is None:
            yield SpecError(
                f"the reward `{reward.name}` compares with a reference answer, and the data has none",
                where="data.answer_key",
                cure="name the column of the answer",
            )


def _buffer(spec: RunSpec, report: CheckReport) -> Iterator[ForebayError]:
    group = group_bytes(
        group_size=spec.group_size,
        prompt_tokens=spec.prompt.max_tokens,
        completion_tokens=spec.sampling.max_tokens,
    )
    # Trained groups leave Redis for the journal with each step, so the checkpoint interval does not enter.
    needed = (spec.max_staleness + 1) * spec.groups_per_step * group
    report.derived |= {
        "bytes of a group, at most": group,
        "bytes of a step, at most": group * spec.groups_per_step,
        "bytes that the buffer needs, at most": needed,
        "bytes that the buffer may hold": spec.buffer.budget_bytes,
    }
    if needed > spec.buffer.budget_bytes:
        yield SpecError(
            f"(max_staleness + 1) x groups_per_step x bytes of a group = {needed} bytes, the budget is "
            f"{spec.buffer.budget_bytes}",
            where="buffer.budget_bytes",
            cure=f"set it to {needed} or more, or lower max_staleness, groups_per_step, group_size or max_tokens",
        )


def _pools(spec: RunSpec, report: CheckReport) -> Iterator[ForebayError]:
    for kind in spec.communicators():
        if kind not in COMMUNICATORS:
            yield SpecError(
                f"weight_sync has no communicator {kind}",
                where="producers.<pool>.communicator",
                cure="use `gloo`, which carries the weights through host memory on any hardware",
            )
    for name, pool in spec.producers.items():
        report.derived[f"replicas of pool {name}"] = pool.replicas
        if pool.replicas > pool.max_replicas:
            yield SpecError(
                f"the pool `{name}` starts with {pool.replicas} replicas and may have {pool.max_replicas}",
                where=f"producers.{name}.max_replicas",
                cure="raise it, or start with fewer replicas",
            )
        parallel = pool.engine.args.get("tensor_parallel_size", 1)
        if parallel != 1:
            report.derived[f"devices of one replica of pool {name}"] = parallel
    if not any(pool.replicas for pool in spec.producers.values()):
        report.notes.append("no pool starts with a producer: the consumer waits until one is added")


def _controller(spec: RunSpec, report: CheckReport) -> Iterator[ForebayError]:
    if spec.controller.host not in LOOPBACK:
        report.notes.append(
            f"the controller listens on {spec.controller.host}: its token crosses the network, put TLS in front of it"
        )
    yield from ()
