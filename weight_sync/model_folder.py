"""A model folder means the same to every side that reads it.

The trainer, the engine and a person's tools read one folder with different versions of transformers,
and each ignores in silence what it does not know: transformers 5 writes `rope_parameters`, 4.51 then
rotates with its default theta and every log-prob is a little wrong. So folders are written in the
form that all of them read (`save_portable`), and a folder with a key that the installed transformers
does not know is refused (`check_config`), never half read.
"""

import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffer.errors import ForebayError

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
MAX_SHARD_BYTES = 4 << 30

# Keys about the folder or its tokenizer, not about the model: no side computes differently for them.
_ABOUT_THE_FOLDER = frozenset(
    {
        "model_type",
        "architectures",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "auto_map",
        "tokenizer_class",
        "transformers.js_config",
        "is_llama_config",
        "unk_token_id",
        "unsloth_version",
    }
)
# Generic keys of older versions that newer ones dropped. At these values they ask for nothing.
_OLD_DEFAULTS: dict[str, Any] = {
    "return_dict": True,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
    "task_specific_params": None,
}
# transformers 5 takes these as arguments and turns them into `rope_parameters`.
_CLASSIC_ROPE = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
_TOKENIZER_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
    "model_max_length",
    "clean_up_tokenization_spaces",
    "padding_side",
    "truncation_side",
    "add_prefix_space",
    "add_bos_token",
    "add_eos_token",
    "chat_template",
)


class ModelFolderError(ForebayError):
    """A model folder is missing, incomplete, or would not mean the same to every side."""

    exit_code = 2


def read_config(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFolderError(
            "the model folder has no config.json" if Path(folder).is_dir() else "the model folder does not exist",
            where=str(folder),
            cure="give the path of a folder in Hugging Face format (config.json, tokenizer.json, *.safetensors)",
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelFolderError(
            f"config.json cannot be read: {error}", where=str(path), cure="copy the folder again; is it complete?"
        ) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelFolderError(
            "config.json does not name a model_type", where=str(path), cure="use a folder in Hugging Face format"
        )
    return config


def check_config(folder: str | Path) -> None:
    """Refuse a configuration that the installed transformers would read otherwise than it is meant."""
    import transformers

    config = read_config(folder)
    _refuse_contradictory_rope(config, str(Path(folder) / CONFIG))
    unknown = sorted(unknown_keys(config))
    if unknown:
        raise ModelFolderError(
            f"transformers {transformers.__version__} does not know {', '.join(map(repr, unknown))} of a "
            f"{config['model_type']} configuration and would ignore it",
            where=str(Path(folder) / CONFIG),
            cure="rewrite the folder's configuration for every side with "
            f"`python -m weight_sync.model_folder {folder}`, or remove the key if it has no meaning",
        )


def unknown_keys(config: Mapping[str, Any]) -> set[str]:
    """Keys that neither the configuration class of the installed transformers nor the model's code reads."""
    known, source = _known_keys(config["model_type"])
    return {
        key
        for key, value in config.items()
        if not (
            key.startswith("_")
            or key in known
            or value is None
            or value is False
            or (key in _OLD_DEFAULTS and value == _OLD_DEFAULTS[key])
            # Some keys, such as `head_dim` of Qwen2 in 4.51, are read by the model without being declared.
            or re.search(rf"""(\.|["']){re.escape(key)}\b""", source)
        )
    }


def _known_keys(model_type: str) -> tuple[set[str], str]:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ModelFolderError(
            f"transformers {transformers.__version__} does not know the model type {model_type!r}",
            cure="use a model of an architecture that both the trainer and the engine know",
        )
    config_class = CONFIG_MAPPING[model_type]
    known = set(_ABOUT_THE_FOLDER) | set(getattr(config_class, "attribute_map", {}))
    for base in config_class.__mro__:
        if "__init__" in vars(base) and base is not object:
            known.update(inspect.signature(base.__init__).parameters)
        if is_dataclass(base):
            known.update(field.name for field in fields(base))
    known.update(transformers.PretrainedConfig().to_dict())
    known.update(transformers.GenerationConfig().to_dict())
    if "rope_parameters" in known:
        known |= _CLASSIC_ROPE
    module = config_class.__module__.replace(".configuration_", ".modeling_")
    try:
        source = inspect.getsource(importlib.import_module(module))
    except (ImportError, OSError):
        source = ""
    return known, source


def _refuse_contradictory_rope(config: Mapping[str, Any], where: str) -> None:
    modern = config.get("rope_parameters")
    if not isinstance(modern, Mapping):
        return
    pairs: list[tuple[str, Any, Any]] = [
        (key, config[key], modern[key])
        for key in ("rope_theta", "partial_rotary_factor")
        if config.get(key) is not None and modern.get(key) is not None
    ]
    if config.get("rope_scaling") is not None:
        pairs.append(("rope_scaling", _scaling(config["rope_scaling"]), _scaling(modern)))
    for key, classic, new in pairs:
        if classic != new:
            raise ModelFolderError(
                f"{key} is {classic!r}, but rope_parameters says {new!r}: each version of transformers would take "
                "its own",
                where=where,
                cure="keep the right one and remove the other",
            )


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """The part of a rope dictionary that scales; None where it is the plain rotation."""
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor", "type")}
    scaling["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    return None if scaling["rope_type"] == "default" else scaling


def portable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same configuration in the classic keys, which transformers 4 and 5 and vLLM all read alike."""
    where = str(config.get("_name_or_path") or config.get("model_type"))
    _refuse_contradictory_rope(config, where)
    portable = {
        key: value for key, value in config.items() if not key.startswith("_") and key != "transformers_version"
    }
    if "dtype" in portable:
        dtype = portable.pop("dtype")
        portable.setdefault("torch_dtype", dtype)
    if portable.get("torch_dtype") is not None:
        portable["torch_dtype"] = str(portable["torch_dtype"]).removeprefix("torch.")
    rope = portable.pop("rope_parameters", None)
    if rope:
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise ModelFolderError(
                "rope_parameters differ by layer type, which transformers 4 cannot express",
                where=where,
                cure="use a model with one rotation for all layers",
            )
        for key in ("rope_theta", "partial_rotary_factor"):
            if rope.get(key) is not None:
                portable[key] = rope[key]
        portable["rope_scaling"] = _scaling(rope)
    if portable.get("rope_scaling") is None:
        portable.pop("rope_scaling", None)
    _drop_derived(portable, where)
    return portable


def _drop_derived(config: dict[str, Any], where: str) -> None:
    """Remove what newer versions write beside the keys that it follows from."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    # Llama of 4.51 declares head_dim; Qwen2 does not, and derives the same.
    if heads and hidden and config.get("head_dim") == hidden // heads:
        del config["head_dim"]
    kinds = config.get("layer_types")
    if kinds is None:
        config.pop("layer_types", None)
    elif set(kinds) == {"full_attention"} and not config.get("use_sliding_window"):
        del config["layer_types"]
        if "sliding_window" in config:
            config["sliding_window"] = None
    elif "use_sliding_window" in config and kinds == [
        "sliding_attention" if index >= config.get("max_window_layers", 0) else "full_attention"
        for index in range(len(kinds))
    ]:
        del config["layer_types"]
    else:
        raise ModelFolderError(
            "layer_types mixes attention kinds in a way that transformers 4 cannot express",
            where=where,
            cure="use a model whose layers all attend fully",
        )


def save_portable(
    model: Any,
    tokenizer: Any,
    folder: str | Path,
    *,
    state: "Mapping[str, torch.Tensor] | None" = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write model and tokenizer so that every side reads them alike.

    `state` replaces the model's own tensors, for a trainer that gathers them itself. config.json comes last:
    a folder that a crash left half written is not a model folder.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / CONFIG).unlink(missing_ok=True)
    _save_weights(dict(model.state_dict() if state is None else state), tied_names(model), target, max_shard_bytes)
    if tokenizer is not None:
        save_portable_tokenizer(tokenizer, target)
    if getattr(model, "generation_config", None) is not None:
        generation = {
            key: value
            for key, value in model.generation_config.to_diff_dict().items()
            if not key.startswith("_") and key != "transformers_version"
        }
        _write_json(target / "generation_config.json", generation)
    _write_json(target / CONFIG, portable_config(_explicit_config(model)))
    return target


def _explicit_config(model: Any) -> dict[str, Any]:
    """The configuration with every key whose default a version may have changed."""
    config = dict(model.config.to_diff_dict())
    # to_diff_dict omits what equals the defaults of *this* version.
    for key in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
        config[key] = getattr(model.config, key, None)
    config["architectures"] = [type(model).__name__]
    config["torch_dtype"] = str(next(model.parameters()).dtype)
    config.pop("dtype", None)
    config.pop("quantization_config", None)  # the tensors that are written are not quantised
    return config


def tied_names(model: Any) -> set[str]:
    """Names in the model's state of tensors that are another one's, and are not stored."""
    if not model.config.tie_word_embeddings:
        return set()
    # A list of names in transformers 4, a mapping to the tensor each is tied to in 5.
    return set(model._tied_weights_keys or ())


def _save_weights(state: "dict[str, torch.Tensor]", tied: set[str], target: Path, max_shard_bytes: int) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    for stale in (*target.glob("model*.safetensors"), target / INDEX):
        stale.unlink(missing_ok=True)
    tensors = {name: state[name].detach().cpu().contiguous() for name in sorted(state) if name not in tied}
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_bytes)
    for file, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, target / file, metadata={"format": "pt"})
    if split.is_sharded:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        _write_json(target / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(split.tensor_to_filename)})


def save_portable_tokenizer(tokenizer: Any, folder: str | Path) -> None:
    """Write the tokenizer as tokenizer.json and the few settings whose names mean the same to both versions."""
    target = Path(folder)
    if not getattr(tokenizer, "is_fast", False):
        raise ModelFolderError(
            "the tokenizer has no fast form, and only tokenizer.json means the same to every side",
            where=str(target),
            cure="convert the tokenizer to tokenizer.json with AutoTokenizer.from_pretrained(..., use_fast=True)",
        )
    tokenizer.save_pretrained(str(target))
    path = target / "tokenizer_config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    settings = {key: _plain(written[key]) for key in _TOKENIZER_KEYS if written.get(key) is not None}
    extra = written.get("extra_special_tokens")
    if extra:
        names = extra.values() if isinstance(extra, dict) else extra
        settings.setdefault("additional_special_tokens", [_plain(name) for name in names])
    if tokenizer.chat_template:
        settings["chat_template"] = tokenizer.chat_template
    # transformers 5 calls the class TokenizersBackend; both understand the older name.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write_json(path, settings)
    for name in ("chat_template.jinja", "added_tokens.json", "vocab.json", "merges.txt"):
        (target / name).unlink(missing_ok=True)
    special = {key: value for key, value in settings.items() if key.endswith(("_token", "_tokens"))}
    special = {key: value for key, value in special.items() if not isinstance(value, bool)}
    _write_json(target / "special_tokens_map.json", special)


def _plain(value: Any) -> Any:
    """An added token as its text; its flags are in tokenizer.json."""
    if isinstance(value, dict) and "content" in value:
        return value["content"]
    return [_plain(item) for item in value] if isinstance(value, list) else value


def rewrite_config(folder: str | Path) -> None:
    """Make the configuration of an existing folder portable, in place."""
    _write_json(Path(folder) / CONFIG, portable_config(read_config(folder)))


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a folder, each of which exists."""
    target = Path(folder)
    if (target / INDEX).is_file():
        index = json.loads((target / INDEX).read_text(encoding="utf-8"))
        files = [target / name for name in sorted(set(index["weight_map"].values()))]
    else:
        files = [target / WEIGHTS]
    for path in files:
        if not path.is_file():
            raise ModelFolderError(
                f"the model folder has no {path.name}",
                where=str(target),
                cure="Forebay reads safetensors only (other formats can run code when they load): "
                "save the model again with save_pretrained, or copy the missing file",
            )
    return files


def tensor_names(folder: str | Path) -> list[str]:
    """Names of the stored tensors, sorted; a tied head is not among them."""
    from safetensors import safe_open

    names: list[str] = []
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            names.extend(file.keys())
    return sorted(names)


def read_tensors(folder: str | Path) -> "Iterator[tuple[str, torch.Tensor]]":
    """Stored tensors one by one, by file and then by name; never all of them in memory."""
    from safetensors import safe_open

    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)


def folder_digest(folder: str | Path) -> str:
    """SHA-256 over everything that decides what the model computes: configuration, tokenizer, weights."""
    target = Path(folder)
    digest = hashlib.sha256()
    canonical = json.dumps(portable_config(read_config(target)), sort_keys=True, separators=(",", ":"))
    digest.update(canonical.encode())
    paths = [target / name for name in TOKENIZER_FILES if (target / name).is_file()] + weight_files(target)
    for path in paths:
        with path.open("rb") as file:
            digest.update(f"\0{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description="Rewrite a model folder's config.json so that every side reads it.")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    try:
        rewrite_config(arguments.folder)
    except ForebayError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
