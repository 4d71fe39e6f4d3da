# SPDX-License-Identifier: Apache-2.0
"""Compensation state from a Hugging Face model, without an engine: what `quads quantize --calibrate` uses."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from trainer_qat.inventory import Weight, require_contract
from trainer_qat.observe import Pass, observing, quantized_weights, site_of
from trainer_qat.payload import full_tensor
from trainer_qat.prepare import state_of
from trainer_qat.ranks import Ranks, reshard
from vllm_quads.compensation import CompensationState, SiteInputs, SiteStatistics, quantize_with_residual, refresh
from vllm_quads.compensation.statistics import RING_ROWS
from vllm_quads.nvfp4 import Contract, ContractError, PackedTensor, QuadsError, Scheme
from vllm_quads.nvfp4.names import expert_index


def calibrate(
    model: nn.Module,
    batches: Sequence[Tensor],
    contract: Contract | None = None,
    *,
    sensitivities: Mapping[str, float] | None = None,
) -> CompensationState:
    """Gather activation error statistics on calibration text and choose centring vectors and blocks.

    Args:
        model: a Hugging Face causal language model, prepared or not. Activations stay in the model's dtype; their
            quantization error is measured on the side.
        batches: token ids int64 [B, T] without padding. Under FSDP2 all ranks call this with the same ones and get
            the same state; weights are gathered one GEMM at a time.
        contract: None takes that of a prepared model.
        sensitivities: see `trainer_qat.sensitivity`; without them every site gets the same ratio.

    Raises:
        ContractError: the contract does not quantize activations, or does not fit the model.
        QuadsError: there is no calibration token, or the ranks of a sharded model have different ones.
    """
    if contract is None:
        contract = state_of(model).contract
    require_contract(contract)
    if contract.scheme is not Scheme.W4A4:
        raise ContractError(f"scheme: is {contract.scheme.value!r}; only 'w4a4' quantizes activations")
    odd = next((b for b in batches if not isinstance(b, Tensor) or b.dim() != 2), None)
    if odd is not None:
        shape = f"of shape {tuple(odd.shape)}" if isinstance(odd, Tensor) else f"that is {type(odd).__name__}"
        raise QuadsError(f"calibrate: batches hold a batch {shape}, expected a list of int64 [B, T]")
    if not sum(b.numel() for b in batches):
        raise QuadsError("calibrate: there is no calibration token; give at least one sequence")
    _require_same(batches, Ranks.of(model))
    gathered = _Gatherer(model, contract)
    device = next(model.parameters()).device
    with torch.no_grad(), observing(model, contract, gathered.observe):
        for batch in batches:
            gathered.tokens += batch.numel()
            model(input_ids=batch.to(device), use_cache=False)
        reshard(model)  # every rank must see the same parameters as shards, or one would wait for the others
        return refresh(gathered.inputs(), contract, sensitivities)


def _require_same(batches: Sequence[Tensor], ranks: Ranks) -> None:
    """Each rank would get a state of its own out of batches of its own. A collective."""
    if not ranks.sharded:
        return
    digest = hashlib.blake2b()
    for batch in batches:
        digest.update(repr(tuple(batch.shape)).encode() + batch.to("cpu", torch.int64).numpy().tobytes())
    if ranks.differ(digest.hexdigest()):
        raise QuadsError(
            "calibrate: the ranks of a sharded model were given different batches; give every rank the same ones, for "
            "all of them take part in each forward pass and keep the same state"
        )


class _Gatherer:
    """Statistics of every site that runs."""

    def __init__(self, model: nn.Module, contract: Contract) -> None:
        self.contract = contract
        self.tokens = 0
        self.weights: dict[str, list[Weight]] = {}
        for weight in quantized_weights(model, contract):
            self.weights.setdefault(site_of(weight.name).name, []).append(weight)
        self.statistics: dict[str, SiteStatistics] = {}
        self.pairs: dict[str, Tensor] = {}
        self.per_expert: dict[str, bool] = {}

    def observe(self, p: Pass) -> None:
        name = p.site.name
        first = self.weights[name][0].name
        if p.matrix.endswith(".up_proj") if p.expert is not None else p.matrix != first:
            return  # k and v have q's input, up has gate's
        if name not in self.statistics:
            groups = _experts(self.weights[name])
            sets = groups if p.site.per_expert_input else 1
            ring = 0 if p.site.per_expert_input else RING_ROWS
            self.statistics[name] = SiteStatistics(p.x.shape[-1], sets, ring_rows=ring, device=p.x.device)
            self.pairs[name] = torch.zeros(groups, dtype=torch.int64, device=p.x.device)
            self.per_expert[name] = p.site.per_expert_input
        expert = torch.zeros_like(p.x[:, 0], dtype=torch.int64) if p.expert is None else p.expert
        self.pairs[name] += torch.bincount(expert, minlength=self.pairs[name].numel())
        if p.x.shape[0]:
            main = quantize_with_residual(p.x, rule=self.contract.activation.block_scale_rule).main
            residual = p.x.to(torch.float32) - main.dequantize()
            self.statistics[name].update(p.x, residual, p.expert if p.site.per_expert_input else None)

    def inputs(self) -> dict[str, SiteInputs]:
        out = {}
        for name, statistics in sorted(self.statistics.items()):
            share = self.pairs[name].to(torch.float64) / self.tokens
            out[name] = SiteInputs(statistics, _packed(self.weights[name], name), share, self.per_expert[name])
        return out


def _experts(weights: Sequence[Weight]) -> int:
    """Number of experts of a site; 1 for a dense linear."""
    if weights[0].tensor.dim() == 3:
        return weights[0].tensor.shape[0]
    numbers = [expert_index(w.name) for w in weights]
    return max((n for n in numbers if n is not None), default=0) + 1


def _packed(weights: Sequence[Weight], name: str) -> PackedTensor:
    """Packed weights [E, N, K] of a site, from a stack, per-expert matrices or the parts of a dense linear."""
    if weights[0].tensor.dim() == 3:
        return PackedTensor.quantize(full_tensor(weights[0].tensor), name=name)
    experts: list[list[Tensor]] = [[] for _ in range(_experts(weights))]
    for weight in weights:
        experts[expert_index(weight.name) or 0].append(full_tensor(weight.tensor))
    return PackedTensor.quantize(torch.stack([torch.cat(parts) for parts in experts]), name=name)
