# SPDX-License-Identifier: Apache-2.0
"""What fake quantization costs a training step: time and memory of a Qwen3-MoE step, with and without it.

One model and one optimizer serve all arms in turn (plain, each cache mode, other ways to fake-quantize), so that
nothing but the weights' quantization differs. Weights and tokens are random; learning rate and weight decay are 0, so
that every arm sees the same weights while the optimizer does all its work.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer_qat.cache import CacheMode
from trainer_qat.fake_quant import StraightThrough
from trainer_qat.prepare import (
    _ExpertsView,
    experts_of,
    prepare_qat,
    remove_qat,
)

QWEN3_30B_A3B: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
"""Shapes of a layer."""
_LAYERS, _VOCABULARY = 48, 151936
"""Of the real model; the bench's vocabulary shrinks with its number of layers, so that the head's share is the same."""

MatrixQuantizer = Callable[[Tensor, Tensor], Tensor]
"""Fake quantization of one expert's matrix [N, K] with its amax float32 [], as other trainers do it."""


@dataclass
class Arm:
    """Measured steps of one way to train."""

    name: str
    step_ms: float
    """Median time of a step: micro-batches, forward and backward, and the optimizer."""
    steps_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    """Peak of allocated GPU memory during the steps."""
    loss: float = float("nan")
    """Loss of the first micro-batch."""


@dataclass
class StepBench:
    """A model, its optimizer and its batches, on the current CUDA device."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[Tensor]
    quantized_bytes: int
    """BF16 bytes of the routed experts."""

    @staticmethod
    def build(
        layers: int,
        tokens: int,
        micro_batches: int,
        sequence: int = 4096,
        *,
        wrap: Callable[[nn.Module], object] = lambda model: None,
        **sizes: int,
    ) -> StepBench:
        """A random Qwen3-MoE in BF16 with `layers` layers, AdamW with BF16 states, gradient checkpointing.

        tokens: of one micro-batch, in sequences of `sequence` tokens. wrap: called before the optimizer is made, to
        shard the model. sizes: other shapes than Qwen3-30B-A3B's.
        """
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        vocabulary = max(1024, _VOCABULARY * layers // _LAYERS // 128 * 128)
        config = Qwen3MoeConfig(
            **{**QWEN3_30B_A3B, **sizes}, num_hidden_layers=layers, vocab_size=vocabulary, use_cache=False
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                model = Qwen3MoeForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        model.set_experts_implementation("grouped_mm")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        experts = [p for _, m in experts_of(model) for p in m.parameters() if p.dim() == 3]
        quantized_bytes = sum(2 * p.numel() for p in experts)
        wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=device == "cuda")
        bench = StepBench(model, optimizer, [], quantized_bytes)
        bench.set_batches(tokens, micro_batches, sequence)
        return bench

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        size: int = self.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        return size

    def set_batches(self, tokens: int, micro_batches: int, sequence: int = 4096) -> None:
        """Other random micro-batches of this many tokens each."""
        sequence = min(sequence, tokens)
        shape, device = (tokens // sequence, sequence), next(self.model.parameters()).device
        self.batches = [torch.randint(0, self.vocabulary, shape, device=device) for _ in range(micro_batches)]

    def step(self) -> Tensor:
        """One optimizer step; the loss of its first micro-batch."""
        self.optimizer.zero_grad(set_to_none=True)
        first: Tensor | None = None
        for batch in self.batches:
            loss = self.model(input_ids=batch, labels=batch).loss / len(self.batches)
            loss.backward()
            first = loss.detach() * len(self.batches) if first is None else first
        self.optimizer.step()
        assert first is not None
        return first

    def measure(self, name: str, steps: int, warm_up: int = 2) -> Arm:
        """Time and peak memory of the model as it is prepared now."""
        gc.collect()
        torch.cuda.empty_cache()
        loss = torch.zeros(())
        for _ in range(warm_up):
            loss = self.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        return Arm(name, statistics.median(times), times, torch.cuda.max_memory_allocated(), loss.item())

    @contextlib.contextmanager
    def quantized(self, cache: CacheMode) -> Iterator[None]:
        """Within, the model is prepared with this cache."""
        prepare_qat(self.model, cache=cache)
        try:
            yield
        finally:
            remove_qat(self.model)

    @contextlib.contextmanager
    def per_expert(self, quantize: MatrixQuantizer) -> Iterator[None]:
        """Within, every expert's matrix is fake-quantized by itself in a Python loop, in every forward pass.

        Its amax is that of the first pass, which is as cheap as ModelOpt's calibrated one and cheaper than verl's,
        which is renewed each step. The results are gathered, so that both sides multiply with grouped_mm.
        """
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        kept: dict[int, tuple[Tensor, ...]] = {}

        def stack(weight: Tensor) -> Tensor:
            with torch.no_grad():
                if weight.data_ptr() not in kept:
                    kept[weight.data_ptr()] = weight.detach().abs().amax(dim=(1, 2)).float().unbind()
                pairs = zip(weight.detach().unbind(), kept[weight.data_ptr()], strict=True)
                quantized = torch.stack([quantize(matrix, amax) for matrix, amax in pairs])
            result: Tensor = StraightThrough.apply(weight, quantized)
            return result

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            view = _ExpertsView(module, *(stack(getattr(module, name)) for name in ("gate_up_proj", "down_proj")))
            inner = ALL_EXPERTS_FUNCTIONS.get_interface("grouped_mm", None)
            result: Tensor = inner(view, *args, **kwargs)
            return result

        ALL_EXPERTS_FUNCTIONS.register("quads_bench_loop", forward)
        configs: list[Any] = [m.config for _, m in experts_of(self.model)]
        for config in configs:
            config._experts_implementation_internal = "quads_bench_loop"
        try:
            yield
        finally:
            for config in configs:
                config._experts_implementation_internal = "grouped_mm"


def modelopt_formula(matrix: Tensor, amax: Tensor) -> Tensor:
    """NVIDIA ModelOpt's NVFP4 fake quantization of a matrix [N, K] in torch operations.

    Formula of its Triton kernel (`fp4_kernel_hopper.py`, 0.47): block scale e4m3(min(m / (6 ws2), 448)) * ws2 with
    ws2 = amax / 2688, 1 where that is under 1e-5.
    """
    x = matrix.float().unflatten(-1, (-1, 16))
    ws2 = amax / 2688.0
    scale = (x.abs().amax(dim=-1, keepdim=True) / (6.0 * ws2)).clamp(max=448.0).to(torch.float8_e4m3fn).float() * ws2
    scale = torch.where(scale < 1e-5, 1.0, scale)
    y = (x / scale).clamp(-6.0, 6.0)
    step = (y * 0.5).abs().clamp(min=0.5).log2().floor().exp2()
    values: Tensor = ((y / step).round() * step * scale).flatten(-2)
    return values.to(matrix.dtype)


def modelopt_kernel() -> MatrixQuantizer | None:
    """NVIDIA ModelOpt's own Triton kernel for one matrix, if the package is installed."""
    try:
        from modelopt.torch.kernels.quantization.gemm.fp4_kernel_hopper import fp4_fake_quant_block
    except ImportError:
        return None
    kernel: MatrixQuantizer = fp4_fake_quant_block
    return kernel


def verl_kernel() -> MatrixQuantizer | None:
    """verl's own Triton kernel for one matrix (`verl/utils/qat/linear.py`), if the package is installed.

    Only that file is loaded: the package itself asks for ray and more.
    """
    package = importlib.util.find_spec("verl")
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder) / "utils" / "qat" / "linear.py"
        spec = importlib.util.spec_from_file_location("quads_bench_verl", file)
        if file.is_file() and spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            kernel: MatrixQuantizer = module.fp4_fake_quant_weight
            return kernel
    return None


def layers_that_fit(free_bytes: int, tokens: int) -> int:
    """Layers whose weights, gradients, AdamW states and BF16 cache fit, with room for activations and the head."""
    layer = 128 * 3 * 2048 * 768 + 2048 * 128 * (32 * 2 + 4 * 2) + 128 * 2048
    per_layer = 5 * 2 * layer + 2 * tokens * 2048
    return max(1, int((free_bytes - (16 << 30)) // per_layer))


def ratios(arms: Sequence[Arm], baseline: Arm, quantized_bytes: int) -> dict[str, dict[str, float]]:
    """Name -> step time over the baseline's, and peak memory above it in units of the quantized BF16 bytes."""
    return {
        arm.name: {
            "step time": arm.step_ms / baseline.step_ms,
            "memory": (arm.peak_bytes - baseline.peak_bytes) / quantized_bytes,
        }
        for arm in arms
    }
