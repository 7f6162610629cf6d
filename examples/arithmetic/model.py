"""The same arguments give the same model folder, byte for byte, under every pinned version of transformers.

Writes a Qwen2-architecture model with random weights and a byte-level tokenizer. Neither part asks
transformers: its initialisation and its way of writing configurations change between versions, and
a folder must mean the same to the engine and to the trainer. Tests make their tiny models here too.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

PAD, EOS, UNUSED_START, UNUSED_END = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, EOS, UNUSED_START, UNUSED_END)
PAD_ID, EOS_ID = 0, 1
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
HEAD_DIM = 32  # the smallest that vLLM's CPU attention has a kernel for

# A question reads `12+30=`, an answer `42` and the end of text: the prompt of a chat is the plain sum.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{{- message['content'] + '\\n' -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- message['content'] + eos_token -}}"
    "{%- else -%}{{- message['content'] + '=' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
)


def build_tokenizer() -> Tokenizer:
    """One token a byte: a digit is a token, and any text in Unicode's composed form comes out as it went in."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # transformers 5 takes its own Qwen2Tokenizer for this model type whatever class the folder names, and that one
    # normalises; saying so here makes transformers 4 do the same.
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def model_config(*, tied: bool, hidden: int, layers: int, vocab: int = VOCAB_SIZE) -> dict[str, Any]:
    """Qwen2 with heads of `HEAD_DIM`, two query heads to a key-value head where the number of heads is even."""
    heads = hidden // HEAD_DIM
    if heads * HEAD_DIM != hidden:
        raise ValueError(f"hidden must be a multiple of {HEAD_DIM}, got {hidden}")
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "float32",
    }


def write_model(
    folder: str | Path,
    *,
    tied: bool = True,
    hidden: int = 64,
    layers: int = 2,
    seed: int = 0,
    vocab: int = VOCAB_SIZE,
    std: float = 0.02,
) -> Path:
    """Write a loadable folder with random weights of spread `std`; a larger one makes log-probs less uniform."""
    if vocab < VOCAB_SIZE:
        raise ValueError(f"the tokenizer has {VOCAB_SIZE} tokens, vocab={vocab} is too small for it")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    config = model_config(tied=tied, hidden=hidden, layers=layers, vocab=vocab)
    _write_json(target / "config.json", config)
    _write_json(
        target / "generation_config.json", {"bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    )
    build_tokenizer().save(str(target / "tokenizer.json"))
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": PAD,
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(target / "special_tokens_map.json", {"eos_token": EOS, "pad_token": PAD})
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _initial(name, shape, std, generator) for name, shape in tensor_shapes(config)}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Hugging Face names and shapes of a Qwen2 model; a tied head is the embedding and has no entry."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * HEAD_DIM
    key = config["num_key_value_heads"] * HEAD_DIM
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        for part, size in (("q", query), ("k", key), ("v", key)):
            yield f"{prefix}self_attn.{part}_proj.weight", (size, hidden)
            yield f"{prefix}self_attn.{part}_proj.bias", (size,)
        yield prefix + "self_attn.o_proj.weight", (hidden, query)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _initial(name: str, shape: tuple[int, ...], std: float, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    # Biases are random too: a bias that is lost on the way into an engine must show.
    return torch.randn(shape, generator=generator) * std


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
