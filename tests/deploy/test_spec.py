"""What a run spec accepts, refuses and hands on."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from buffer.errors import SpecError
from buffer.settings import Settings
from consumer.settings import ConsumerSettings
from deploy.spec import RunSpec, load_spec, parse_spec, schema
from producer.settings import ProducerSettings
from tests.deploy.specs import changed, right_content, write_spec


def fault_of(content: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(content, "spec.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("stpes", "steps"),
        ("producers.producer.engine.thread", "threads"),
        ("consumer.optimizer.learningrate", "learning_rate"),
        ("evaluation.evry", "every"),
        ("buffer.uri", "url"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_named(key: str, nearest: str, tmp_path: Path) -> None:
    assert f"unknown key `{key}`; did you mean `{nearest}`?" in fault_of(changed(right_content(tmp_path), {key: 1}))


def test_an_unknown_key_in_a_list_is_named_with_its_place(tmp_path: Path) -> None:
    content = changed(right_content(tmp_path), {"rewards": [{"name": "exact", "wieght": 2}]})
    assert "unknown key `rewards.0.wieght`; did you mean `weight`?" in fault_of(content)


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    text = fault_of(changed(right_content(tmp_path), {"steps": 0, "group_size": "many", "seed": -1}))
    assert all(f"`{key}`" in text for key in ("steps", "group_size", "seed")), text


@pytest.mark.parametrize("name", ["Upper", "under_score", "-dash", "a" * 64, ""])
def test_a_run_name_that_no_cluster_would_take_is_refused(name: str, tmp_path: Path) -> None:
    assert "`name`" in fault_of(changed(right_content(tmp_path), {"name": name}))


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        load_spec(tmp_path / "none.yaml")


def test_broken_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("name: a\nsteps: [1, 2\nfolder: x\n")
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert caught.value.where.startswith(f"{path}:3:")


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("name: a\nsteps: 1\nsteps: 2\n")
    with pytest.raises(SpecError, match="the key `steps` stands twice"):
        load_spec(path)


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words"])
def test_what_is_no_map_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match="run spec is"):
        load_spec(path)


def test_yaml_that_would_make_objects_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("name: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(SpecError, match="not valid YAML"):
        load_spec(path)


def test_a_change_on_the_command_line_wins(tmp_path: Path) -> None:
    spec = load_spec(
        write_spec(tmp_path), ["steps=9", "consumer.optimizer.learning_rate=1e-3", "producers.fast.replicas=2"]
    )
    assert (spec.steps, spec.consumer.optimizer.learning_rate) == (9, 1e-3)
    assert spec.pools()["fast"].replicas == 2


@pytest.mark.parametrize("change", ["steps", "=3", "steps.deep=3", "a..b=1"])
def test_a_change_that_is_none_is_refused(change: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(write_spec(tmp_path), [change])
    assert caught.value.where == "--set"


def test_each_service_is_handed_its_part_with_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right_content(tmp_path)
    monkeypatch.chdir(tmp_path)
    spec = load_spec(write_spec(tmp_path, folder="run", model__path="model", data__path="data.jsonl"))
    producer = spec.producer_settings("producer", "producer-0", "redis://here")
    consumer = spec.consumer_settings("redis://here", resume=True)
    assert ProducerSettings.model_validate_json(producer.model_dump_json()) == producer
    assert ConsumerSettings.model_validate_json(consumer.model_dump_json()) == consumer
    paths = [producer.model.path, producer.data.path, producer.folder, consumer.model_path, consumer.folder]
    assert all(os.path.isabs(path) and path.startswith(str(tmp_path)) for path in paths), paths
    assert consumer.resume and consumer.wire_dtype == "float32" and consumer.communicators == ("gloo",)


def test_the_schema_describes_every_field() -> None:
    described = schema()

    def description(content: dict[str, Any]) -> str:
        if said := content.get("description"):
            return said
        target = content.get("$ref", "").removeprefix("#/$defs/")  # left out where the model's own is the same
        return described["$defs"].get(target, {}).get("description", "")

    undescribed = [
        f"{name}.{field}"
        for name, model in {**described["$defs"], "RunSpec": described}.items()
        for field, content in model["properties"].items()
        if not description(content)
    ]
    assert not undescribed
    assert json.loads(json.dumps(described)) == described
    assert described["additionalProperties"] is False


def test_every_settings_model_refuses_unknown_keys_and_changes() -> None:
    def models(kind: type[Settings]) -> set[type[Settings]]:
        return {kind} | {model for below in kind.__subclasses__() for model in models(below)}

    found = models(Settings)
    assert RunSpec in found
    loose = [model.__name__ for model in found if model.model_config.get("extra") != "forbid"]
    assert not loose
