"""A run spec that is right, with its data and a model folder, for tests that break one thing of it."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file


def write_model_folder(folder: Path, *, positions: int = 128) -> Path:
    """What `forebay check` reads of a model: configuration, tokenizer configuration, headers of the weights."""
    folder.mkdir(parents=True)
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": positions}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    save_file({"model.embed_tokens.weight": np.zeros((10, 4), np.float32)}, folder / "model.safetensors")
    return folder


def right_content(folder: Path) -> dict[str, Any]:
    """A spec that fits, whose files lie in ``folder``."""
    if not (folder / "model").exists():
        write_model_folder(folder / "model")
    rows = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "right",
        "folder": str(folder / "run"),
        "steps": 4,
        "groups_per_step": 2,
        "group_size": 2,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"path": str(folder / "data.jsonl")},
        "prompt": {"template": "raw", "max_tokens": 16},
        "sampling": {"max_tokens": 16},
        "rewards": [{"name": "exact"}],
    }


def changed(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The content with values at dotted keys replaced."""
    result = copy.deepcopy(content)
    for name, value in changes.items():
        *keys, last = name.split(".")
        place = result
        for key in keys:
            place = place.setdefault(key, {})
        place[last] = value
    return result


def write_spec(place: Path, /, **changes: Any) -> Path:
    """A spec file; keys of ``changes`` may have `__` for a dot."""
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    path = place / "spec.yaml"
    path.write_text(yaml.safe_dump(changed(right_content(place), dotted)))
    return path
