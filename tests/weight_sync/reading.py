"""What an environment makes of a model folder: ``python -m tests.weight_sync.reading FOLDER...`` prints it as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ("producer", "consumer")
TEXTS = (
    "347+585=",
    "Two  spaces\n\tand a tab",
    "Ångström, e\u0301 and 日本語",
    "<|im_start|>user<|im_end|>",
    " leading",
)
LENGTH = 48  # tokens of the sequence that is scored


def probe_tokens(vocabulary: int) -> list[int]:
    """Any tokens will do, as long as they are many enough for positions to matter."""
    return [(37 * index + 11) % min(250, vocabulary) for index in range(LENGTH)]


def read(folder: str | Path) -> dict[str, Any]:
    """Everything of a folder that both sides must agree on; raises ModelFolderError when it is refused."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from weight_sync.model_folder import check_config

    check_config(folder)
    model = AutoModelForCausalLM.from_pretrained(str(folder), torch_dtype=torch.float32, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    tokens = torch.tensor(probe_tokens(model.config.vocab_size))
    with torch.no_grad():
        log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    messages = [{"role": "user", "content": "347+585"}]
    encoded = [tokenizer(text)["input_ids"] for text in TEXTS]
    return {
        "class": type(model).__name__,
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "special": [model.generation_config.eos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        "encoded": encoded,
        "decoded": [tokenizer.decode(ids) for ids in encoded],
        "plain": [tokenizer.decode(ids, skip_special_tokens=True) for ids in encoded],
        "chat": tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        "log_probs": log_probs.tolist(),
    }


def here() -> str:
    """The name of the environment of this process."""
    return Path(sys.prefix).name


def run_in(environment: str, *arguments: str, seconds: float = 240) -> "subprocess.CompletedProcess[str]":
    """Run Python in an environment, in the project's root."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    command = [str(ROOT / ".venv" / environment / "bin" / "python"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=seconds)


def read_in(environment: str, *folders: Path) -> list[dict[str, Any]]:
    """What the environment makes of the folders."""
    if environment == here():
        return [read(folder) for folder in folders]
    result = run_in(environment, "-m", "tests.weight_sync.reading", *map(str, folders))
    assert result.returncode == 0, result.stderr[-2000:]
    return list(json.loads(result.stdout.splitlines()[-1]))


def main(folders: list[str]) -> None:
    from buffer.errors import ForebayError

    try:
        print(json.dumps([read(folder) for folder in folders]))
    except ForebayError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(sys.argv[1:])
