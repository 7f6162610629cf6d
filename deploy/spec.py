"""A run spec is one YAML file, whole and typed: a key that is not known is refused and the nearest one is named.

It composes the settings that stand beside each service's code, and hands each service its part only. Relative paths are
of the working directory.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pydantic
import yaml
from pydantic import Field, field_validator

from buffer.errors import SpecError
from buffer.pools import Desired
from buffer.settings import BufferSettings, Settings
from consumer.settings import AlgorithmSettings, ConsumerSettings, TrainerSettings
from deploy.controller.settings import ControllerProcessSettings, ControllerSettings
from producer.settings import (
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    PoolSettings,
    ProducerSettings,
    PromptSettings,
    RewardSettings,
    SamplingSettings,
)
from weight_sync.settings import CommunicatorName, WeightSyncSettings

NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"  # of a Kubernetes object


class RunSpec(Settings):
    """All that a run is."""

    name: str = Field(pattern=NAME)
    """Name of the run: lower-case letters, digits and `-`. Its keys in Redis start with it."""
    folder: str
    """The run folder: checkpoints, journal, logs, TensorBoard events and the report go there."""
    seed: int = Field(default=0, ge=0, lt=1 << 31)
    """The order of prompts and the sampling seeds follow from it."""
    steps: int = Field(gt=0)
    """Optimizer steps to make."""
    groups_per_step: int = Field(default=32, gt=0)
    """Prompts whose groups make one step."""
    group_size: int = Field(default=8, ge=2)
    """Completions of one prompt: the group within which advantages are normalised."""
    max_staleness: int = Field(default=1, ge=0)
    """0: synchronous; 1: pipelined; more: asynchronous. Versions that a trained token may be behind."""
    on_stale: Literal["wait"] = "wait"
    """What happens to a group that grows too old: `wait` (the step waits for it while it is due)."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal: they carry no signal."""
    passes: int | None = Field(default=None, gt=0)
    """How often the data may be gone through; null: as often as the steps need."""
    model: ModelSettings
    """The model that is post-trained."""
    data: DataSettings
    """The prompts."""
    prompt: PromptSettings = PromptSettings()
    """How a row becomes the tokens that the model sees."""
    sampling: SamplingSettings = SamplingSettings()
    """How completions are sampled for training."""
    rewards: tuple[RewardSettings, ...] = Field(min_length=1)
    """Parts of the reward; a sample's reward is their weighted sum."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """The reinforcement-learning algorithm."""
    producers: dict[str, PoolSettings] = Field(default={"producer": PoolSettings()}, min_length=1)
    """Pools of producers by name; the common case is one, called `producer`."""
    consumer: TrainerSettings = TrainerSettings()
    """The consumer pool: ranks, optimizer, checkpoints."""
    evaluation: EvaluationSettings | None = None
    """Held-out evaluation; null: none."""
    weight_sync: WeightSyncSettings = WeightSyncSettings()
    """How a policy version reaches the producers."""
    buffer: BufferSettings = BufferSettings()
    """The Redis-protocol server that everything meets in."""
    controller: ControllerSettings = ControllerSettings()
    """The HTTP service that shows and steers the run."""

    @field_validator("producers")
    @classmethod
    def _pool_names(cls, pools: dict[str, PoolSettings]) -> dict[str, PoolSettings]:
        for name in pools:
            if name == "consumer" or not name.replace("-", "").isalnum() or name != name.lower():
                raise ValueError(f"`{name}` cannot be a pool's name: use lower-case letters, digits and `-`")
        return pools

    @property
    def path(self) -> Path:
        """The run folder, absolute."""
        return Path(self.folder).resolve()

    def pools(self) -> dict[str, Desired]:
        """What each pool of producers is to have at the start."""
        return {name: Desired(pool.replicas, pool.max_replicas) for name, pool in self.producers.items()}

    def producer_settings(self, pool: str, member: str, redis_url: str) -> ProducerSettings:
        """What one producer process is handed."""
        evaluation = self.evaluation
        if evaluation is not None:
            evaluation = evaluation.model_copy(update={"data": _absolute_data(evaluation.data)})
        return ProducerSettings(
            run=self.name,
            seed=self.seed,
            member=member,
            pool=pool,
            folder=str(self.path),
            model=self.model.model_copy(update={"path": _absolute(self.model.path)}),
            data=_absolute_data(self.data),
            prompt=self.prompt.model_copy(update={"template": _absolute_template(self.prompt.template)}),
            sampling=self.sampling,
            rewards=self.rewards,
            settings=self.producers[pool],
            evaluation=evaluation,
            weight_sync=self.weight_sync,
            buffer=self.buffer,
            redis_url=redis_url,
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            max_staleness=self.max_staleness,
            dynamic_sampling=self.dynamic_sampling,
            passes=self.passes,
        )

    def consumer_settings(self, redis_url: str, *, resume: bool) -> ConsumerSettings:
        """What each consumer rank is handed."""
        return ConsumerSettings(
            run=self.name,
            seed=self.seed,
            folder=str(self.path),
            model_path=_absolute(self.model.path),
            wire_dtype=self.model.dtype,
            communicators=self.communicators(),
            steps=self.steps,
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            max_staleness=self.max_staleness,
            evaluation_every=self.evaluation.every if self.evaluation else None,
            resume=resume,
            algorithm=self.algorithm,
            settings=self.consumer,
            weight_sync=self.weight_sync,
            buffer=self.buffer,
            redis_url=redis_url,
        )

    def controller_settings(self, redis_url: str, *, port: int) -> ControllerProcessSettings:
        """What the controller process is handed."""
        return ControllerProcessSettings(
            run=self.name,
            folder=str(self.path),
            steps=self.steps,
            host=self.controller.host,
            port=port,
            token_env=self.controller.token_env,
            buffer=self.buffer,
            redis_url=redis_url,
        )

    def communicators(self) -> tuple[CommunicatorName, ...]:
        """The kinds of communicator that the pools use, each once."""
        by_platform: dict[str, CommunicatorName] = {"ascend": "hccl", "cuda": "nccl", "cpu": "gloo", "auto": "gloo"}
        return tuple(dict.fromkeys(pool.communicator or by_platform[pool.platform] for pool in self.producers.values()))


def _absolute(path: str) -> str:
    return str(Path(path).resolve())


def _absolute_data(data: DataSettings) -> DataSettings:
    return data.model_copy(update={"path": _absolute(data.path)})


def _absolute_template(template: str) -> str:
    return _absolute(template) if Path(template).is_file() else template


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, which YAML would let win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key}` stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_spec(path: Path, changes: Sequence[str] = ()) -> RunSpec:
    """Read a spec; ``changes`` are `key.path=value` (YAML values) on top of it. Raises SpecError with every fault."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SpecError(
            f"the run spec cannot be read: {reason}", where=str(path), cure="name a YAML file, as in examples/"
        ) from error
    try:
        # A subclass of the safe loader: plain data only.
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise SpecError(
            f"the run spec is not valid YAML: {getattr(error, 'problem', None) or error}",
            where=where,
            cure="correct that line (indentation by spaces, `key: value`)",
        ) from error
    if not isinstance(content, dict):
        raise SpecError(
            "the run spec is empty" if content is None else "the run spec is not a map of keys",
            where=str(path),
            cure="write `key: value` lines; `forebay schema` lists them",
        )
    for change in changes:
        _apply(content, change)
    return parse_spec(content, str(path))


def parse_spec(content: Mapping[str, Any], source: str) -> RunSpec:
    """The spec of parsed content; raises SpecError with every fault in it."""
    try:
        return RunSpec.model_validate(content)
    except pydantic.ValidationError as error:
        faults = [_explain(fault) for fault in error.errors() if fault["type"] != "too_short" or not fault["input"]]
        raise SpecError(
            faults[0] if len(faults) == 1 else f"{len(faults)} faults:\n    " + "\n    ".join(faults),
            where=source,
            cure="correct the keys; `forebay schema` lists each with its unit and default",
        ) from error


def _apply(content: dict[Any, Any], change: str) -> None:
    name, equals, value = change.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise SpecError(f"`{change}` is not `key.path=value`", where="--set", cure="write e.g. --set steps=20")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise SpecError(
            f"the value of `{name}` is not valid YAML", where="--set", cure="quote texts that hold `:` or `[`"
        ) from error
    place: Any = content
    for key in keys[:-1]:
        if place.get(key) is None:
            place[key] = {}
        place = place[key]
        if not isinstance(place, dict):
            raise SpecError(f"`{key}` in `{name}` has no keys below it", where="--set", cure="see `forebay schema`")
    place[keys[-1]] = parsed


def _explain(fault: Any) -> str:
    location = [part for part in fault["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    name = ".".join(str(part) for part in location)
    if fault["type"] == "extra_forbidden":
        known = _keys_at(location[:-1])
        nearest = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"known here: {', '.join(known)}"
        return f"unknown key `{name}`; {hint}"
    if fault["type"] == "missing":
        return f"`{name}` is missing"
    given = json.dumps(fault["input"], default=str)
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"`{name}`: {message[0].lower() + message[1:]} (given: {given if len(given) < 60 else given[:57] + '...'})"


def _keys_at(location: Sequence[Any]) -> list[str]:
    """Keys of the settings model at a place of the spec."""
    found: Any = RunSpec
    for part in location:
        if _is_model(found):
            field = found.model_fields.get(part)
            found = field.annotation if field else None
        else:  # an index of a list, or a name in a map: the values' type follows
            found = get_args(found)[-1 if get_origin(found) is dict else 0] if get_args(found) else None
        if get_origin(found) in (Union, UnionType):
            found = next((kind for kind in get_args(found) if kind is not type(None)), None)
    return sorted(found.model_fields) if _is_model(found) else []


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Settings)


def schema() -> dict[str, Any]:
    """JSON schema of a run spec, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **RunSpec.model_json_schema(),
        "title": "Forebay run spec",
    }
