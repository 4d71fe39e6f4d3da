# SPDX-License-Identifier: Apache-2.0
"""`structure_problems`: what headers and config.json alone say about a checkpoint that was cut, mixed or resized.

An engine that loads such a checkpoint may serve uninitialised or reshaped weights without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from vllm_quads.checkpoint.disk_names import check_stack, config_value, is_stack
from vllm_quads.checkpoint.headers import FLOATING, TensorHeader
from vllm_quads.checkpoint.info import CheckpointInfo
from vllm_quads.checkpoint.layouts import LAYOUTS, SCALE_SUFFIXES
from vllm_quads.checkpoint.reader import CheckpointReader
from vllm_quads.nvfp4.errors import CheckpointError, FormatError
from vllm_quads.nvfp4.names import canonical_name, expand, expert_index, layer_index

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PARTS = ("gate_proj", "up_proj", "down_proj")
_CODES = tuple({"." + layout.codes for layout in LAYOUTS.values()})


def structure_problems(reader: CheckpointReader, info: CheckpointInfo) -> Iterator[CheckpointError]:
    """Weights of another dtype or without elements, layers and experts that are missing or too many, odd shapes."""
    odd = list(_odd_tensors(reader, info))
    yield from odd
    if odd:  # what else is wrong would follow from that
        return
    yield from _missing_layers(reader, info)
    yield from _missing_head(reader, info)
    present = {n for name, header in reader.headers.items() for n in _matrices(name, header)}
    foreign = set(_foreign_stacks(reader, info))
    blocks: dict[str, dict[str, tuple[int, int] | None]] = {}
    for name in sorted(present):
        if expert_index(name) is not None:
            block, _, rest = name.partition(".experts.")
            blocks.setdefault(block, {})[rest] = info.weights.get(name)
    gated = any(rest.endswith(".gate_proj") for block in blocks.values() for rest in block)
    parts = _PARTS if gated else _PARTS[1:]
    count = next((n for n in (config_value(info.config, key) for key in _EXPERT_COUNTS) if isinstance(n, int)), None)
    for block, experts in blocks.items():
        if count is not None:
            yield from _expert_names(block, set(experts), count, parts)
        shapes = {r: shape for r, shape in experts.items() if shape and f"{block}.experts.{r}" not in foreign}
        yield from _expert_shapes(block, shapes)


def _matrices(name: str, header: TensorHeader) -> list[str]:
    if is_stack(name, len(header.shape)):
        return expand(name, header.shape[0])
    codes = next((c for c in _CODES if name.endswith(c)), None)
    return [canonical_name(name.removesuffix(codes))] if codes is not None else []


def _foreign_stacks(reader: CheckpointReader, info: CheckpointInfo) -> Iterator[str]:
    """Matrices of fused stacks with other axes than ours (GPT-OSS, Llama 4): complete, but not to be quantized."""
    for name, header in reader.headers.items():
        if is_stack(name, len(header.shape)):
            try:
                check_stack(name, header.shape, info.config)
            except FormatError:
                yield from expand(name, header.shape[0])


def _odd_tensors(reader: CheckpointReader, info: CheckpointInfo) -> Iterator[CheckpointError]:
    packed = {f"{m}.{info.layout.codes}" for m in info.modules.values()} if info.modules else set()
    for name, header in reader.headers.items():
        stack = is_stack(name, len(header.shape))
        if name in packed or not (stack or name.endswith(_CODES)) or name.endswith(SCALE_SUFFIXES):
            continue
        if header.dtype not in FLOATING:
            packs = "U8 (packed), " if info.modules else ""
            yield CheckpointError(
                f"{name}: is {header.dtype} {list(header.shape)}, expected {packs}{', '.join(FLOATING)}; QUADS does "
                f"not read weights in other quantizations, take the BF16 checkpoint"
            )
        elif 0 in header.shape:
            yield CheckpointError(
                f"{name}: has shape {list(header.shape)}, without elements; write the checkpoint again"
            )
        elif not stack and expert_index(name.rpartition(".")[0]) is not None and len(header.shape) != 2:
            yield CheckpointError(
                f"{name}: has shape {list(header.shape)}, expected [N, K]; write the checkpoint again"
            )


def _missing_layers(reader: CheckpointReader, info: CheckpointInfo) -> Iterator[CheckpointError]:
    count = config_value(info.config, "num_hidden_layers")
    present = {i for i in map(layer_index, reader.headers) if i is not None}
    if not isinstance(count, int) or not present:
        return
    missing = [i for i in range(count) if i not in present]
    if missing:
        yield CheckpointError(
            f"layer {missing[0]}: has no tensor ({len(missing)} of num_hidden_layers = {count} layers have none); the "
            f"checkpoint is incomplete, download or write it again"
        )


def _missing_head(reader: CheckpointReader, info: CheckpointInfo) -> Iterator[CheckpointError]:
    names = reader.headers
    causal = any(str(a).endswith("ForCausalLM") for a in info.config.get("architectures") or ())
    embedded = any(n.endswith("embed_tokens.weight") for n in names)
    if (
        causal
        and embedded
        and info.config.get("tie_word_embeddings") is False
        and not any("lm_head" in n for n in names)
    ):
        yield CheckpointError(
            "lm_head.weight: is missing, and config.json says tie_word_embeddings = false; set it to true if the "
            "model's output is its embedding, otherwise the checkpoint is incomplete"
        )


def _expert_names(block: str, present: set[str], count: int, parts: tuple[str, ...]) -> Iterator[CheckpointError]:
    """Every layer that has experts must have all of them, and no others."""
    expected = {f"{e}.{part}" for e in range(count) for part in parts}
    for rest in sorted(expected - present)[:1]:
        yield CheckpointError(
            f"{block}.experts.{rest}: is missing ({len(expected - present)} of {len(expected)} expert matrices of "
            f"this layer are); the checkpoint is incomplete"
        )
    extra = sorted(rest for rest in present if int(rest.partition(".")[0]) >= count)
    for rest in extra[:1]:
        yield CheckpointError(
            f"{block}.experts.{rest}: is one too many ({len(extra)} matrices are), config.json says {count} experts; "
            f"correct config.json or write the checkpoint again"
        )


def _expert_shapes(block: str, shapes: dict[str, tuple[int, int]]) -> Iterator[CheckpointError]:
    """The experts of a layer are multiplied as one stack: gate and up [I, H], down [H, I], the same in all experts."""
    oriented = {rest: shape[::-1] if rest.endswith(".down_proj") else shape for rest, shape in shapes.items()}
    if len(set(oriented.values())) <= 1:
        return
    usual, _ = Counter(oriented.values()).most_common(1)[0]
    rest = next(r for r, shape in oriented.items() if shape != usual)
    expected = usual[::-1] if rest.endswith(".down_proj") else usual
    yield CheckpointError(
        f"{block}.experts.{rest}: has shape {list(shapes[rest])}, expected {list(expected)} like the other experts of "
        f"this layer; write the checkpoint again"
    )
