# SPDX-License-Identifier: Apache-2.0
"""How far trainer and rollout are apart: pure functions on log-probs of sampled tokens.

`trainer` and `rollout` are natural-log probabilities that the two policies give to the same tokens, which the rollout
sampled: [B, T], or [T] for one sequence. `mask` (same shape, bool or 0/1) is true for tokens that count; what lies
under a false mask may be anything, NaN included. Everything is computed in float64: BF16 is not rounded again.

Names and formulas are those of verl 0.8 (`verl/trainer/ppo/rollout_corr_helper.py`, keys `rollout_corr/*`: `kl`,
`k3_kl`, `training_ppl`, `log_ppl_diff`, `ppl_ratio`, `chi2_token`, `chi2_seq`, `rollout_is_*`) and of TRL 1.16
(`trl/trainer/grpo_trainer.py`: `sampling/sampling_logp_difference/{mean,max}`, `sampling/importance_sampling_ratio/*`,
`vllm_importance_sampling_mode`). Two differences: verl clamps log-ratios to +-20 before it exponentiates, here nothing
is clamped; and rows without tokens are left out of means over sequences. With d = trainer - rollout and tokens drawn
from the rollout, the estimators of KL(rollout || trainer) are (Schulman, "Approximating KL Divergence", 2020)

    k1 = mean(-d)        k2 = mean(d^2 / 2)        k3 = mean(e^d - 1 - d)

Temperature: an importance ratio compares the distributions that were sampled from. At a temperature other than 1 (or
with top-p, top-k) take vLLM's `logprobs_mode="processed_logprobs"` and scale the trainer's logits by the same
temperature (`selective_log_softmax`, `at_temperature`); vLLM's default, raw log-probs, ignores it. Never mix the two.

Infinities: a token that one policy gives probability 0 has an infinite gap, and the means say so (inf); where both
policies give probability 0 they agree. Signed sums over gaps of +inf and of -inf (k1, weights of a sequence that
neither policy can produce) have no value and are NaN. NaN stays NaN: mask tokens that the engine could not score
(`mask & ~rollout.isnan()`, as TRL does).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_quads.nvfp4 import QuadsError

LEVELS = ("token", "sequence")
MODES = ("truncate", "mask")
_ROWS = 1024  # of logits at a time
_ROUNDING = 0.05  # by how much a log-softmax in BF16 may exceed 0


@dataclass(frozen=True)
class MismatchReport:
    """Mismatch over the tokens of a batch. Without any token the counts are 0 and the rest is NaN."""

    tokens: int
    sequences: int
    """Sequences with at least one token."""
    mean_gap: float
    """mean |d|, nats."""
    p99_gap: float
    """99th percentile of |d|, nats."""
    max_gap: float
    """max |d|, nats: the metric of the QUADS paper."""
    k1: float
    """mean(-d); signed."""
    k2: float
    k3: float
    """mean(e^d - 1 - d) >= 0."""
    ess: float
    """Effective sample size of the token weights w = e^d, as a share: mean(w)^2 / mean(w^2), in (0, 1]."""
    chi2: float
    """mean(w^2) - 1."""
    chi2_seq: float
    """The same of sequence weights e^(sum of d), averaged over sequences."""
    training_ppl: float
    """Perplexity of each sequence under the trainer, averaged over sequences."""
    rollout_ppl: float
    training_log_ppl: float
    """Log-perplexity (mean negative log-prob) of each sequence under the trainer, averaged over sequences."""
    rollout_log_ppl: float
    log_ppl_diff: float
    """training - rollout log-perplexity of each sequence, averaged over sequences; signed."""
    log_ppl_abs_diff: float
    """The same of its magnitude."""
    ppl_ratio: float
    """training / rollout perplexity of each sequence, averaged over sequences."""
    infinite: int
    """Tokens with an infinite gap."""

    def to_dict(self, prefix: str = "mismatch/") -> dict[str, float]:
        """Flat dictionary for TensorBoard or W&B, keys as verl and TRL name them."""
        return {prefix + _KEYS.get(k, k): float(v) for k, v in dataclasses.asdict(self).items()}


_KEYS = {
    "mean_gap": "sampling_logp_difference/mean",
    "p99_gap": "sampling_logp_difference/p99",
    "max_gap": "sampling_logp_difference/max",
    "k1": "kl",
    "k2": "k2_kl",
    "k3": "k3_kl",
    "ess": "eff_sample_size",
    "chi2": "chi2_token",
}


def measure(trainer: Tensor, rollout: Tensor, mask: Tensor | None = None) -> MismatchReport:
    """All metrics of a batch at once; see `MismatchReport`.

    Raises QuadsError for shapes that differ, and for values above 0: probabilities, or negative log-likelihoods.
    """
    t, r, m = _checked(trainer, rollout, mask)
    for name, x in (("trainer", t), ("rollout", r)):
        if bool((x[m] > _ROUNDING).any()):
            raise QuadsError(
                f"mismatch: {name} holds {float(x[m].max()):.3g}, expected log-probs, which are at most 0 (are these "
                f"probabilities, or negative log-likelihoods?)"
            )
    d = log_ratio(t, r, m)[m]
    gap = d.abs()
    seq_t, seq_r = _sequence_means(t, m), _sequence_means(r, m)
    difference = _difference(seq_r, seq_t)
    empty = d.numel() == 0
    return MismatchReport(
        tokens=d.numel(),
        sequences=seq_t.numel(),
        mean_gap=float(gap.mean()),
        p99_gap=_quantile(gap, 0.99),
        max_gap=math.nan if empty else float(gap.max()),
        k1=float((-d).mean()),
        k2=float((d.square() / 2).mean()),
        k3=float(_k3(d).mean()),
        ess=float(effective_sample_size(d)),
        chi2=float((2 * d).exp().mean() - 1),
        chi2_seq=float((2 * _sequence_sums(log_ratio(t, r, m), m)).exp().mean() - 1),
        training_ppl=float((-seq_t).exp().mean()),
        rollout_ppl=float((-seq_r).exp().mean()),
        training_log_ppl=float((-seq_t).mean()),
        rollout_log_ppl=float((-seq_r).mean()),
        log_ppl_diff=float(difference.mean()),
        log_ppl_abs_diff=float(difference.abs().mean()),
        ppl_ratio=float(difference.exp().mean()),
        infinite=int(torch.isinf(d).sum()),
    )


def log_ratio(trainer: Tensor, rollout: Tensor, mask: Tensor | None = None) -> Tensor:
    """d = trainer - rollout, float64, zero where the mask is false."""
    t, r, m = _checked(trainer, rollout, mask)
    return torch.where(m, _difference(t, r), 0.0)


def k1(trainer: Tensor, rollout: Tensor, mask: Tensor | None = None) -> Tensor:
    """mean(rollout - trainer), float64 scalar: unbiased, may be negative (verl's `kl`)."""
    return _masked_mean(-log_ratio(trainer, rollout, mask), mask)


def k2(trainer: Tensor, rollout: Tensor, mask: Tensor | None = None) -> Tensor:
    """mean(d^2 / 2), float64 scalar: biased, low variance."""
    return _masked_mean(log_ratio(trainer, rollout, mask).square() / 2, mask)


def k3(trainer: Tensor, rollout: Tensor, mask: Tensor | None = None) -> Tensor:
    """mean(e^d - 1 - d), float64 scalar: unbiased and never negative (verl's `k3_kl`)."""
    return _masked_mean(_k3(log_ratio(trainer, rollout, mask)), mask)


def full_kl(p_log_probs: Tensor, q_log_probs: Tensor) -> Tensor:
    """KL(p || q) = sum_v p (log p - log q) of full distributions [..., V]; float64 [...].

    A token with p = 0 adds nothing; one with q = 0 and p > 0 makes the divergence infinite.
    """
    if p_log_probs.shape != q_log_probs.shape:
        raise QuadsError(f"full_kl: shapes {tuple(p_log_probs.shape)} and {tuple(q_log_probs.shape)} differ")
    p, q = p_log_probs.to(torch.float64), q_log_probs.to(torch.float64)
    terms = torch.where(p == -torch.inf, 0.0, p.exp() * _difference(p, q))
    return terms.sum(dim=-1).clamp(min=0.0)  # rounding may leave -1e-17


def effective_sample_size(log_weights: Tensor) -> Tensor:
    """mean(w)^2 / mean(w^2) of w = e^log_weights over all elements, float64 scalar in (0, 1].

    Computed in logs, so weights may be of any size. NaN without elements; 0 if all weights are 0.
    """
    x = log_weights.to(torch.float64).flatten()
    if x.numel() == 0:
        return torch.tensor(torch.nan, dtype=torch.float64)
    if bool((x == torch.inf).any()):
        return (x == torch.inf).to(torch.float64).mean()  # the limit: infinite weights drown all others
    if bool((x == -torch.inf).all()):
        return torch.zeros((), dtype=torch.float64)
    top = x.max()
    w = (x - top).exp()
    return w.mean().square() / w.square().mean()


def importance_weights(
    trainer: Tensor,
    rollout: Tensor,
    mask: Tensor | None = None,
    *,
    level: str = "token",
    mode: str = "truncate",
    upper: float = 2.0,
    lower: float | None = None,
) -> Tensor:
    """Truncated (TIS) or masked (MIS) importance weights pi_trainer / pi_rollout, float32 [B, T].

    Args:
        trainer, rollout, mask: as everywhere in this module.
        level: "token", or "sequence" for the product over a sequence's tokens, given to each of them.
        mode: "truncate" clamps weights to [lower, upper]; "mask" zeroes weights outside of it.
        upper: largest weight; lower: smallest weight, None for no bound.

    Padding has weight 0. The four combinations are TRL's `vllm_importance_sampling_mode` (`token_truncate`,
    `sequence_mask`, ...); "truncate" with upper C is TIS (Yao et al., 2025), which verl calls `rollout_is`.
    """
    if level not in LEVELS or mode not in MODES:
        raise QuadsError(f"importance_weights: level={level!r}, mode={mode!r}; expected {LEVELS} and {MODES}")
    if not all(_is_number(x) for x in (upper, 0.0 if lower is None else lower)):
        raise QuadsError(f"importance_weights: lower={lower!r}, upper={upper!r}; expected numbers")
    if not upper > 0 or (lower is not None and not 0 <= lower <= upper):
        raise QuadsError(f"importance_weights: lower={lower}, upper={upper}; expected 0 <= lower <= upper, upper > 0")
    t, r, m = _checked(trainer, rollout, mask)
    d = log_ratio(t, r, m)
    if level == "sequence":
        d = d.sum(dim=-1, keepdim=True).expand_as(d)
    w = d.exp()
    low = 0.0 if lower is None else lower
    w = w.clamp(low, upper) if mode == "truncate" else torch.where((w < low) | (w > upper), 0.0, w)
    return torch.where(m, w, 0.0).to(torch.float32)


def weight_metrics(
    trainer: Tensor,
    rollout: Tensor,
    mask: Tensor | None = None,
    *,
    level: str = "token",
    mode: str = "truncate",
    upper: float = 2.0,
    lower: float | None = None,
    prefix: str = "",
) -> dict[str, float]:
    """What the weights of `importance_weights` (same arguments) do to a batch, under verl's names.

    `rollout_is_mean`, `_max`, `_min`, `_std` and `_eff_sample_size` are those of the weights as applied, over tokens.
    `rollout_is_ratio_fraction_high` and `_low` are the shares of the raw ratios, of tokens or sequences, above `upper`
    and below `lower` (1 / upper if None, as in verl). NaN without tokens.
    """
    t, r, m = _checked(trainer, rollout, mask)
    w = importance_weights(t, r, m, level=level, mode=mode, upper=upper, lower=lower)[m].to(torch.float64)
    d = log_ratio(t, r, m)
    ratio = _sequence_sums(d, m) if level == "sequence" else d[m]
    low = 1.0 / upper if lower is None else lower
    empty = w.numel() == 0
    values = {
        "mean": float(w.mean()),
        "max": math.nan if empty else float(w.max()),
        "min": math.nan if empty else float(w.min()),
        "std": math.nan if empty else float(w.std(correction=0)),
        "eff_sample_size": float(effective_sample_size(w.log())),
        "ratio_fraction_high": float((ratio.exp() > upper).to(torch.float64).mean()),
        "ratio_fraction_low": float((ratio.exp() < low).to(torch.float64).mean()),
    }
    return {f"{prefix}rollout_is_{key}": value for key, value in values.items()}


def selective_log_softmax(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs float32 [B, T] of tokens [B, T] under logits [B, T, V] of any float dtype, at a temperature.

    Computed in float32 a thousand tokens at a time: BF16 logits are not rounded again, and no float32 copy is made.
    Differentiable. Raises QuadsError if the shapes do not fit, the temperature is not positive, or a token is not in
    the vocabulary (on a GPU that would have to be waited for: torch's own assertion tells of it there).
    """
    _check_temperature("selective_log_softmax", temperature)
    if logits.shape[:-1] != token_ids.shape:
        raise QuadsError(
            f"selective_log_softmax: logits {tuple(logits.shape)} and tokens {tuple(token_ids.shape)} do not fit, "
            f"expected [..., V] and [...]"
        )
    waits = token_ids.device.type != "cpu" or torch.compiler.is_compiling()
    if not waits and not bool(((token_ids >= 0) & (token_ids < logits.shape[-1])).all()):
        raise QuadsError(
            f"selective_log_softmax: token ids are {int(token_ids.min())} to {int(token_ids.max())}, expected 0 to "
            f"{logits.shape[-1] - 1}; take the input ids, not labels with -100, and mask the padding afterwards"
        )
    parts = zip(logits.flatten(0, -2).split(_ROWS), token_ids.flatten().split(_ROWS), strict=True)
    picked = [
        torch.log_softmax(rows.to(torch.float32) / temperature, dim=-1).gather(-1, ids[:, None])[:, 0]
        for rows, ids in parts
    ]
    return torch.cat(picked).view(token_ids.shape)


def at_temperature(log_probs: Tensor, temperature: float) -> Tensor:
    """Full distributions [..., V] of log-probs at temperature 1, brought to another one: float32 log-softmax."""
    _check_temperature("at_temperature", temperature)
    return torch.log_softmax(log_probs.to(torch.float32) / temperature, dim=-1)


# --- helpers ---------------------------------------------------------------------------------------------------------


def _checked(trainer: Tensor, rollout: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    for name, value in (("trainer", trainer), ("rollout", rollout), ("mask", mask)):
        if not isinstance(value, Tensor) and not (name == "mask" and value is None):
            raise QuadsError(f"mismatch: {name} is {type(value).__name__}, expected a tensor [B, T] or [T]")
    if trainer.shape != rollout.shape or (mask is not None and mask.shape != trainer.shape) or trainer.dim() == 0:
        raise QuadsError(
            f"mismatch: trainer {tuple(trainer.shape)}, rollout {tuple(rollout.shape)} and mask "
            f"{None if mask is None else tuple(mask.shape)} need one shape, [B, T] or [T]; pad all of them alike"
        )
    m = torch.ones(trainer.shape, dtype=torch.bool, device=trainer.device) if mask is None else as_mask(mask)
    return trainer.detach().to(torch.float64), rollout.detach().to(torch.float64), m.to(trainer.device)


def as_mask(mask: Tensor) -> Tensor:
    """The mask as bool. Raises QuadsError unless it is of 0 and 1: labels with -100 would count everywhere."""
    if mask.dtype is not torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        odd = mask[(mask != 0) & (mask != 1)].flatten()[0]
        raise QuadsError(f"mismatch: mask holds {odd.item()}, expected 0 or 1 (from labels: `labels != -100`)")
    return mask.bool()


def _check_temperature(where: str, temperature: float) -> None:
    if not _is_number(temperature) or not 0 < temperature < math.inf:
        raise QuadsError(f"{where}: temperature is {temperature!r}, expected one positive number")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """a - b, and 0 where both are the same infinity."""
    return torch.where(a == b, 0.0, a - b)


def _k3(d: Tensor) -> Tensor:
    # expm1 keeps small d exact; at d = inf the limit is inf, not inf - inf.
    return torch.where(d == torch.inf, torch.inf, torch.expm1(d) - d).clamp(min=0.0)


def _masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    return x.mean() if mask is None else x[mask.bool().to(x.device)].mean()


def _sequence_sums(x: Tensor, m: Tensor) -> Tensor:
    """Sum over the tokens of each sequence that has any, [sequences]."""
    rows, masks = (t.flatten(0, -2) if t.dim() > 1 else t[None] for t in (x, m))
    return torch.where(masks, rows, 0.0).sum(dim=-1)[masks.any(dim=-1)]


def _sequence_means(x: Tensor, m: Tensor) -> Tensor:
    """Mean over the tokens of each sequence that has any, [sequences]."""
    count = m.sum(dim=-1).flatten()
    return _sequence_sums(x, m) / count[count > 0]


def _quantile(x: Tensor, q: float) -> float:
    """Quantile with linear interpolation; `torch.quantile` refuses more than 2^24 elements."""
    if x.numel() == 0 or bool(x.isnan().any()):
        return math.nan
    position = q * (x.numel() - 1)
    low = math.floor(position)
    ordered = x.sort().values[low : low + 2]
    a, b = float(ordered[0]), float(ordered[-1])
    return a if position == low or a == b else a + (b - a) * (position - low)
