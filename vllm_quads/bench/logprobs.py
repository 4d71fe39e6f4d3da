# SPDX-License-Identifier: Apache-2.0
"""`quads bench logprobs`: do two machines (a CPU and a GPU, say) give the same tokens the same log-probs?

One machine records: it samples answers, decodes them in every arm and keeps each token's log-prob and the likeliest
tokens. The other decodes the same tokens and compares. What BF16 itself shows between the two is the yardstick, and
what each arm makes of rounding differences that are nobody's fault (`nudge`) tells how much more an arm may show.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_quads.bench import environment
from vllm_quads.bench.nudge import nudged
from vllm_quads.bench.result import Result, Series
from vllm_quads.compensation import CompensationState
from vllm_quads.nvfp4 import Contract, QuadsError

TOP = 16
"""Tokens per position whose log-probs are kept."""
BF16, W4A4, ROWS = "BF16", "W4A4", "W4A4 + 4/6 + RAC rows"
ARMS: dict[str, Contract | None] = {
    BF16: None,
    W4A4: Contract().merged(
        {"activation": {"block_scale_rule": "max_to_six", "centering": "none"}, "compensation": {"form": "none"}}
    ),
    ROWS: Contract().merged({"activation": {"centering": "none"}, "compensation": {"form": "rows"}}),
}
"""`rows`, not the default `auto`: a CPU compensates decode tokens only under `auto`, Hopper kernels all of them."""
COLUMNS = ("KL", "mean log-prob gap", "p99 gap", "max gap")
"""Nats; gaps are absolute differences of the log-prob of the token that was generated."""
_FORMAT = "quads-bench-logprobs-1"
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Recording:
    """Tokens, and the log-probs that each arm gave them on one machine. N is the number of generated tokens."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    chosen: dict[str, Tensor]
    """By arm: float32 [N], log-probs of the tokens."""
    top_ids: dict[str, Tensor]
    """By arm: int32 [N, TOP], the likeliest tokens."""
    top: dict[str, Tensor]
    """By arm: float32 [N, TOP], their log-probs."""
    environment: dict[str, str]

    def save(self, path: Path) -> Path:
        """Write one safetensors file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for i, arm in enumerate(self.chosen):
            tensors |= {f"{i}.chosen": self.chosen[arm], f"{i}.ids": self.top_ids[arm], f"{i}.top": self.top[arm]}
        metadata = {
            "format": _FORMAT,
            "arms": json.dumps(list(self.chosen)),
            "prompts": json.dumps(self.prompts),
            "tokens": json.dumps(self.tokens),
            "environment": json.dumps(self.environment),
        }
        save_file({k: v.clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}, path, metadata)
        return path

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what `save` wrote. Raises QuadsError if it is something else."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise QuadsError(f"{path}: is no recording of log-probs; make one with --record")
                arms = json.loads(metadata["arms"])
                parts = {
                    k: {a: file.get_tensor(f"{i}.{k}") for i, a in enumerate(arms)} for k in ("chosen", "ids", "top")
                }
        except (SafetensorError, KeyError) as e:
            raise QuadsError(f"{path}: is no recording of log-probs, or damaged ({e}); make one with --record") from e
        return cls(
            json.loads(metadata["prompts"]),
            json.loads(metadata["tokens"]),
            parts["chosen"],
            parts["ids"],
            parts["top"],
            json.loads(metadata["environment"]),
        )


def record(model: Path, prompts: Sequence[Sequence[int]], max_tokens: int, progress: Progress) -> Recording:
    """Sample an answer to each prompt with the BF16 engine of this machine, and decode it in every arm."""
    arms = _Arms(model, progress)
    tokens = arms.sample(prompts, max_tokens)
    found = arms.decode(prompts, tokens, ARMS)
    flat = torch.tensor([t for row in tokens for t in row])[:, None]
    tops = {arm: rows.topk(TOP, dim=1) for arm, rows in found.items()}
    return Recording(
        [list(p) for p in prompts],
        tokens,
        {arm: rows.gather(1, flat)[:, 0] for arm, rows in found.items()},
        {arm: t.indices.to(torch.int32) for arm, t in tops.items()},
        {arm: t.values for arm, t in tops.items()},
        environment.describe(),
    )


def package_prompts(model: Path, count: int) -> list[list[int]]:
    """The first prompts that ship with the package, as tokens of the model. Raises QuadsError if there are fewer."""
    from transformers import AutoTokenizer

    from vllm_quads.gap.experiment import load_prompts

    texts = load_prompts(None)
    if count > len(texts):
        raise QuadsError(f"--prompts: is {count}, but the package has {len(texts)}")
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.chat_template is None:
        return [list(tokenizer(text).input_ids) for text in texts[:count]]
    messages = [[{"role": "user", "content": text}] for text in texts[:count]]
    return [list(tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False)) for m in messages]


def run_logprobs(model: Path, recording: Recording, progress: Progress = lambda *_: None, nudge: float = 0.0) -> Result:
    """Decode the recorded tokens on this machine and compare. Raises QuadsError for an arm that is not known here.

    With `nudge` every arm also decodes them while that share of the activations moves by one BF16 value (`nudge.py`),
    and is compared with itself.
    """
    unknown = [arm for arm in recording.chosen if arm not in ARMS]
    if unknown:
        raise QuadsError(f"the recording has the arms {', '.join(unknown)}, which this version does not know")
    if not 0.0 <= nudge <= 1.0:
        raise QuadsError(f"--nudge: is {nudge}, expected a share from 0 to 1")
    arms = _Arms(model, progress, nudged=nudge > 0)
    found = arms.decode(recording.prompts, recording.tokens, list(recording.chosen))
    moved = arms.decode(recording.prompts, recording.tokens, list(recording.chosen), nudge) if nudge else {}
    return compare(recording, found, environment.describe(), model.name, moved, nudge)


def compare(
    recording: Recording,
    found: dict[str, Tensor],
    described: dict[str, str],
    name: str,
    moved: dict[str, Tensor] | None = None,
    nudge: float = 0.0,
) -> Result:
    """The result from full log-prob distributions [N, V] by arm; `moved` are those under a `nudge`."""
    flat = torch.tensor([t for row in recording.tokens for t in row])[:, None]
    series = []
    for arm, rows in found.items():
        values = differences(
            recording.chosen[arm], recording.top_ids[arm], recording.top[arm], rows.gather(1, flat)[:, 0], rows
        )
        series.append(_series(f"{arm}, here against there", "peer" if arm == BF16 else "quads", values))

    def both_here(base: Tensor, other: Tensor) -> tuple[float, ...]:
        top = base.topk(TOP, dim=1)
        return differences(base.gather(1, flat)[:, 0], top.indices, top.values, other.gather(1, flat)[:, 0], other)

    for arm, rows in (moved or {}).items():
        series.append(_series(nudged_name(arm), "check", both_here(found[arm], rows)))
    for arm in found:  # for scale: what quantization itself changes, on this machine
        if arm != BF16 and BF16 in found:
            series.append(_series(f"{arm} against BF16, both here", "check", both_here(found[BF16], found[arm])))
    settings: dict[str, Any] = {
        "name": name,
        "columns": list(COLUMNS),
        "tokens": len(flat),
        "recorded_on": recording.environment,
        "kl": f"of the recorded distribution from this one, nats, over its {TOP} likeliest tokens and the rest as one",
    }
    if moved:
        settings["nudge"] = (
            f"{nudge:g} of the outputs of norms, attention and feed-forward blocks moved by one BF16 value"
        )
    return Result("logprobs", f"Log-probs of {name} on two machines", "column", tuple(series), described, settings)


def nudged_name(arm: str) -> str:
    """The series of an arm whose activations were nudged."""
    return f"{arm} nudged against not, both here"


def differences(
    chosen: Tensor, top_ids: Tensor, top: Tensor, other_chosen: Tensor, other: Tensor
) -> tuple[float, float, float, float]:
    """`COLUMNS`. chosen, other_chosen [N]; top_ids, top [N, TOP] of the first machine; other [N, V] of the second.

    The KL lumps all tokens but the first machine's likeliest into one, which bounds the full divergence from below.
    """
    p = top.double()
    q = other.gather(1, top_ids.long()).double()
    rest_p, rest_q = (torch.log1p(-v.exp().sum(1).clamp(max=1 - 1e-9)) for v in (p, q))
    kl = (p.exp() * (p - q)).sum(1) + rest_p.exp() * (rest_p - rest_q)
    gap = (chosen.double() - other_chosen.double()).abs()
    return float(kl.mean()), float(gap.mean()), float(gap.quantile(0.99)), float(gap.max())


def _series(name: str, role: str, values: tuple[float, ...]) -> Series:
    return Series(name, role, "nats", dict(enumerate(values)))


class _Arms:
    """Both engines of `vllm_quads.gap`, and every arm on the same tokens."""

    def __init__(self, model: Path, progress: Progress, *, nudged: bool = False) -> None:
        self._model, self._progress = model, progress
        self._done, self._total = 0, len(ARMS) * (1 + nudged) + 2
        self._bench: Any = None

    def sample(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """One answer of up to `max_tokens` tokens per prompt."""
        from vllm_quads.gap.capture import sample

        llm = self._engines().bf16()
        self._step("sampling")
        return sample(llm, prompts, max_tokens=max_tokens, seed=0).token_ids

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        arms: Sequence[str] | dict[str, Any],
        nudge: float = 0.0,
    ) -> dict[str, Tensor]:
        """Log-prob distributions float32 [N, V] of the given tokens, by arm."""
        from vllm_quads.gap.capture import force_decode

        engines = self._engines()
        found = {}
        for arm in arms:
            self._step(f"{arm}, nudged" if nudge else arm)
            contract = ARMS[arm]
            llm = engines.bf16() if contract is None else engines.configured(contract, CompensationState())
            with nudged(llm, nudge) if nudge else contextlib.nullcontext():
                distributions = force_decode(llm, prompts, tokens).distributions
            assert distributions is not None
            found[arm] = torch.cat(distributions)
        self._progress(self._total, self._total, "")
        return found

    def _engines(self) -> Any:
        if self._bench is None:
            from vllm_quads.gap.capture import engine_options
            from vllm_quads.gap.engines import RolloutBench

            self._step("starting the engines")
            contract = ARMS[W4A4]
            assert contract is not None
            self._bench = RolloutBench(self._model, contract, {"skip_tokenizer_init": True, **engine_options()})
        return self._bench

    def _step(self, what: str) -> None:
        self._progress(self._done, self._total, what)
        self._done += 1
