# SPDX-License-Identifier: Apache-2.0
"""Where the mismatch enters: trainer and emulated rollout on the same tokens, decoder layer by decoder layer.

The trainer's forward pass (W4A16, if the model is prepared) is compared with the rollout's numerics (W4A4 with residual
compensation; see `trainer_qat.emulate`) in three ways:

- isolated: each layer gets the trainer's hidden states, so its error is its own;
- accumulated: the whole model is emulated, so errors of earlier layers are in it, and amplified or damped;
- alone: only this layer is emulated, and what counts is how far the log-probs move (one forward pass per layer).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainer_qat.emulate import emulated_rollout
from trainer_qat.mismatch import MismatchReport, measure, selective_log_softmax
from trainer_qat.prepare import experts_of
from vllm_quads.compensation import CompensationState
from vllm_quads.nvfp4 import Contract, QuadsError, canonical_name
from vllm_quads.nvfp4.names import layer_index

_LAYER = re.compile(r"(^|\.)layers\.\d+$")


@dataclass(frozen=True)
class LayerRow:
    """One decoder layer. Errors are |rollout - trainer| / |trainer| of each token's output vector, averaged over tokens
    (an average of norms would be that of the few tokens with massive activations)."""

    layer: int
    isolated: float
    """Error that arises in this layer."""
    accumulated: float
    """Error of the hidden states behind this layer."""
    rerouted: float | None
    """Share of the (token, expert) choices that are not the trainer's in the emulated model; None without experts."""
    mean_gap: float | None = None
    """mean |log-prob gap| in nats if only this layer is emulated; None if that was not asked for."""


@dataclass(frozen=True)
class LayerProbe:
    """What `probe_layers` found."""

    rows: tuple[LayerRow, ...]
    report: MismatchReport
    """Trainer against the fully emulated rollout, on the log-probs of the given tokens."""
    trainer: Tensor = field(repr=False)
    """Log-probs float32 [B, T-1] of tokens 1 to T-1 under the trainer."""
    rollout: Tensor = field(repr=False)
    """The same under the emulated rollout."""
    mask: Tensor = field(repr=False)
    """bool [B, T-1]: tokens that count."""

    def to_dict(self, prefix: str = "probe/") -> dict[str, float]:
        """Flat dictionary for TensorBoard or W&B: `layer_007/isolated` and so on, and the report."""
        out = self.report.to_dict(prefix)
        for row in self.rows:
            for name in ("isolated", "accumulated", "rerouted", "mean_gap"):
                value = getattr(row, name)
                if value is not None:
                    out[f"{prefix}layer_{row.layer:03d}/{name}"] = float(value)
        return out

    def __str__(self) -> str:
        lines = ["layer  isolated  accumulated  rerouted  mean |gap| alone"]
        for r in self.rows:
            rerouted = "-" if r.rerouted is None else f"{r.rerouted:.2%}"
            gap = "-" if r.mean_gap is None else f"{r.mean_gap:.4f}"
            lines.append(f"{r.layer:5d}  {r.isolated:8.4f}  {r.accumulated:11.4f}  {rerouted:>8}  {gap:>16}")
        lines.append(f"all layers: mean |gap| {self.report.mean_gap:.4f}, max {self.report.max_gap:.3f} nats")
        return "\n".join(lines)


def probe_layers(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    contract: Contract | None = None,
    compensation: CompensationState | None = None,
    decode: Tensor | bool = True,
    gaps: bool = False,
) -> LayerProbe:
    """Compare trainer and emulated rollout on given tokens.

    Args:
        model: a Hugging Face causal language model, prepared or not (then the trainer computes in BF16, and errors of
            the weights count as well).
        input_ids: int64 [B, T], prompts and completions.
        attention_mask: [B, T], 0 for padding; padded tokens do not count.
        contract, compensation, decode: see `emulated_rollout`.
        gaps: also emulate each layer alone; one forward pass per layer.

    Raises:
        QuadsError: the model has no decoder layers by the usual name (`...layers.N`), or there is no token.
        ContractError: as `prepare_qat`.
    """
    if input_ids.dim() != 2 or input_ids.shape[1] < 2:
        raise QuadsError(f"probe_layers: input_ids have shape {tuple(input_ids.shape)}, expected [B, T] with T >= 2")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise QuadsError(
            f"probe_layers: attention_mask has shape {tuple(attention_mask.shape)}, expected that of input_ids, "
            f"{tuple(input_ids.shape)}"
        )
    counted = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if not bool((counted[:, 1:] & counted[:, :-1]).any()):
        raise QuadsError("probe_layers: attention_mask leaves no two tokens in a row, so nothing is compared")
    layers = _decoder_layers(model)
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}

    def log_probs() -> Tensor:
        return selective_log_softmax(model(**inputs).logits[:, :-1], input_ids[:, 1:])

    with torch.no_grad():
        with _recording(model, layers) as reference:
            trainer = log_probs()
        if reference.outputs.keys() != layers.keys():
            silent = min(layers.keys() - reference.outputs.keys())
            raise QuadsError(f"probe_layers: decoder layer {silent} is no module that is called, so it has no output")
        alone: dict[int, float] = {}
        mask = counted[:, 1:] & counted[:, :-1]
        with emulated_rollout(model, contract, compensation, decode=decode) as emulation:
            with _recording(model, layers) as accumulated:
                rollout = log_probs()
            with _recording(model, layers, feed=reference) as isolated:
                model(**inputs)
            if gaps:
                quantized = {layer_index(w.name) for w in emulation.weights}
                for layer in layers:
                    emulation.layers = {layer} & quantized
                    alone[layer] = measure(trainer, log_probs(), mask).mean_gap if emulation.layers else 0.0
    rows = tuple(
        LayerRow(
            layer,
            _relative_error(isolated.outputs[layer], reference.outputs[layer], counted),
            _relative_error(accumulated.outputs[layer], reference.outputs[layer], counted),
            _rerouted(accumulated.experts.get(layer), reference.experts.get(layer), counted),
            alone.get(layer),
        )
        for layer in layers
    )
    return LayerProbe(rows, measure(trainer, rollout, mask), trainer, rollout, mask)


@dataclass
class _Recording:
    """What one forward pass showed, by layer."""

    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    experts: dict[int, Tensor] = field(default_factory=dict)
    """Chosen experts int64 [B*T, k]."""


@contextlib.contextmanager
def _recording(model: nn.Module, layers: dict[int, nn.Module], feed: _Recording | None = None) -> Iterator[_Recording]:
    """Record inputs, outputs and routing of every layer; with `feed`, give each layer the inputs recorded there."""
    recording = _Recording()
    handles: list[Any] = []

    def before(layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            x: Tensor = args[0] if args else kwargs["hidden_states"]
            recording.inputs[layer] = x
            if feed is not None:
                x = feed.inputs[layer]
                args, kwargs = ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})
            return args, kwargs

        return hook

    def after(layer: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            recording.outputs[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def routing(layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recording.experts[layer] = args[1] if len(args) > 1 else kwargs["top_k_index"]

        return hook

    for layer, module in layers.items():
        handles.append(module.register_forward_pre_hook(before(layer), with_kwargs=True))
        handles.append(module.register_forward_hook(after(layer)))
    for path, module in experts_of(model):
        index = layer_index(canonical_name(path))
        if index in layers:
            handles.append(module.register_forward_pre_hook(routing(index), with_kwargs=True))
    try:
        yield recording
    finally:
        for handle in handles:
            handle.remove()


def _decoder_layers(model: nn.Module) -> dict[int, nn.Module]:
    layers: dict[int, nn.Module] = {}
    for path, module in model.named_modules():
        name = canonical_name(path)
        index = layer_index(f"{name}.")
        if _LAYER.search(name) and index is not None:
            if index in layers:
                raise QuadsError(f"probe_layers: {type(model).__name__} has two stacks of layers; probe one of them")
            layers[index] = module
    if not layers:
        raise QuadsError(f"probe_layers: {type(model).__name__} has no decoder layers named `...layers.N`")
    return layers


def _relative_error(rollout: Tensor, trainer: Tensor, counted: Tensor) -> float:
    mask = counted.to(trainer.device)
    a, b = rollout[mask].to(torch.float64), trainer[mask].to(torch.float64)
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).mean())


def _rerouted(rollout: Tensor | None, trainer: Tensor | None, counted: Tensor) -> float | None:
    if rollout is None or trainer is None:
        return None
    mask = counted.flatten().to(trainer.device)
    a, b = rollout[mask], trainer[mask]
    kept = (a[:, :, None] == b[:, None, :]).any(dim=-1)
    return float((~kept).to(torch.float64).mean())
