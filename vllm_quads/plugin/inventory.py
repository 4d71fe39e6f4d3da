# SPDX-License-Identifier: Apache-2.0
"""What tensors a loaded vLLM model takes, under canonical names; and what a pushed tensor name means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_quads.nvfp4 import BLOCK_SIZE, RefitError, canonical_name, expand
from vllm_quads.nvfp4.names import is_expert_stack
from vllm_quads.plugin.config import QuadsConfig
from vllm_quads.plugin.linear import full_rows
from vllm_quads.plugin.loading import FLOATS, Role
from vllm_quads.plugin.runtime import LayerRuntime
from vllm_quads.refit import TensorSpec

_SUFFIXES = (*(role.value for role in Role), "bias")
_PACKED = {
    Role.WEIGHT_PACKED.value: "codes",
    Role.BLOCK_SCALE.value: "block scales",
    Role.DECODE_SCALE.value: "global scale",
    Role.ENCODE_SCALE.value: "global scale",
}
_OPTIONAL = (Role.INPUT_SCALE.value, Role.INPUT_ENCODE_SCALE.value)


@dataclass(frozen=True)
class TensorName:
    """A checkpoint tensor name, taken apart."""

    module: str
    """Canonical module name."""
    suffix: str
    """`weight`, a scale suffix, `bias`, or empty for a bare parameter."""

    @staticmethod
    def parse(name: str) -> TensorName:
        head, _, leaf = name.rpartition(".")
        if leaf in _SUFFIXES and head:
            return TensorName(canonical_name(head), leaf)
        return TensorName(canonical_name(name), "")

    def __str__(self) -> str:
        return f"{self.module}.{self.suffix}" if self.suffix else self.module


@dataclass(frozen=True)
class Inventory:
    """The tensors of a model."""

    quantized: Mapping[str, tuple[int, int]]
    """Canonical name -> (N, K) of each quantized matrix of this rank."""
    plain: Mapping[str, tuple[int, ...]]
    """Tensor name -> shape of everything else."""

    @staticmethod
    def of(model: nn.Module, config: QuadsConfig) -> Inventory:
        """Walk the model. Tied weights are listed once, under the name of the embedding."""
        quantized = {m.name: (m.n, m.k) for r in config.runtimes.values() for m in r.loader.matrices}
        plain: dict[str, tuple[int, ...]] = {}
        seen: set[int] = set()
        for name, module in model.named_modules():
            own = getattr(module, "quads", None)
            for leaf, param in module.named_parameters(recurse=False):
                if id(param) in seen or (isinstance(own, LayerRuntime) and leaf != "bias"):
                    continue
                seen.add(id(param))
                plain |= _plain(name, module, leaf, tuple(param.shape))
        return Inventory(quantized, plain)

    def check(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Raise RefitError for the first tensor that is unknown, of a wrong shape or dtype, sent twice, or missing."""
        arrived: dict[str, set[str]] = {}
        seen: set[str] = set()
        for name, spec in tensors.items():
            for item, shape in self._targets(name, spec):
                key = str(item)
                if key in seen:
                    raise RefitError(f"{name}: is sent twice (as {key}); send every tensor once")
                seen.add(key)
                if item.module in self.quantized and item.suffix != "bias":
                    arrived.setdefault(item.module, set()).update(self._check_quantized(name, item, shape, spec))
                else:
                    self._check_plain(name, key, shape, spec)
        for name in self.quantized:
            lacking = {"codes", "block scales", "global scale"} - arrived.get(name, set())
            if lacking:
                what = "weight" if len(lacking) == 3 else sorted(lacking)[0]
                raise RefitError(f"{name}: its {what} is missing from the push; a refit sends every weight")
        for name in self.plain:
            if name not in seen:
                raise RefitError(f"{name}: is missing from the push; a refit sends every weight")

    def _targets(self, name: str, spec: TensorSpec) -> Iterator[tuple[TensorName, tuple[int, ...]]]:
        item = TensorName.parse(name)
        if not (is_expert_stack(item.module) and len(spec.shape) == 3):
            yield item, spec.shape
            return
        modules = expand(item.module, spec.shape[0])
        per_expert = len(modules) // spec.shape[0]
        for module in modules:
            yield TensorName(module, "weight"), (spec.shape[1] // per_expert, spec.shape[2])

    def _check_quantized(self, name: str, item: TensorName, shape: tuple[int, ...], spec: TensorSpec) -> set[str]:
        n, k = self.quantized[item.module]
        dtype = str(spec.dtype)
        if item.suffix == "weight" and spec.dtype in FLOATS:
            _require(name, shape, ((n, k),))
            return {"codes", "block scales", "global scale"}
        if item.suffix in ("weight", Role.WEIGHT_PACKED.value):
            if dtype != "torch.uint8":
                raise RefitError(f"{name}: is {dtype}, expected packed codes (torch.uint8) or a BF16/FP16/FP32 weight")
            _require(name, shape, ((n, k // 2),))
            return {"codes"}
        if item.suffix == Role.BLOCK_SCALE.value:
            if dtype != "torch.float8_e4m3fn":
                raise RefitError(f"{name}: is {dtype}, expected torch.float8_e4m3fn block scales")
            _require(name, shape, ((n, k // BLOCK_SIZE),))
            return {"block scales"}
        if dtype != "torch.float32":
            raise RefitError(f"{name}: is {dtype}, expected torch.float32")
        _require(name, shape, ((), (1,)))
        return set() if item.suffix in _OPTIONAL else {_PACKED[item.suffix]}

    def _check_plain(self, name: str, key: str, shape: tuple[int, ...], spec: TensorSpec) -> None:
        # A tied lm_head may be sent under its own name too: the loader knows what to do with it.
        tied = self.plain.get("model.embed_tokens.weight") if key == "lm_head.weight" else None
        expected = self.plain.get(key, tied)
        if expected is None:
            raise RefitError(
                f"{name}: the engine has no such tensor; is the trainer's model the one that this engine serves?"
            )
        if spec.dtype not in FLOATS:
            raise RefitError(f"{name}: is {spec.dtype}, but this weight is not quantized: expected BF16, FP16 or FP32")
        _require(name, shape, (expected,))


def _require(name: str, shape: tuple[int, ...], allowed: tuple[tuple[int, ...], ...]) -> None:
    if tuple(shape) not in allowed:
        raise RefitError(f"{name}: has shape {tuple(shape)}, expected {allowed[0]}")


def _plain(name: str, module: nn.Module, leaf: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensors, whole, that one parameter is loaded from."""
    if isinstance(module, VocabParallelEmbedding) and leaf == "weight":
        return {f"{canonical_name(name)}.weight": (module.org_vocab_size, module.embedding_dim)}
    if isinstance(module, LinearBase) and leaf in ("weight", "bias"):
        parts = expand(name)
        rows = full_rows(module, [module.output_size])
        if len(parts) == len(rows):
            tail = (module.input_size,) if leaf == "weight" else ()
            return {f"{part}.{leaf}": (n, *tail) for part, n in zip(parts, rows, strict=True)}
    return {str(TensorName.parse(f"{name}.{leaf}" if name else leaf)): shape}
