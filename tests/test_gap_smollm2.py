# SPDX-License-Identifier: Apache-2.0
"""What QUADS must show on a real language model: SmolLM2-MoE, 8 experts, all active."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from vllm_quads.gap import GapReport, GapRow
from vllm_quads.smollm2_moe import build_smollm2_moe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> GapReport:
    """The experiment as a user runs it, in a process of its own (other tests leave their mark on torch's threads)."""
    model = build_smollm2_moe(tmp_path_factory.mktemp("gap") / "smollm2-moe")
    command = [sys.executable, "-m", "vllm_quads.cli", "gap", str(model), "--arms", "quick", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    data = json.loads(done.stdout)
    names = [f.name for f in dataclasses.fields(GapRow)]
    rows = tuple(GapRow(**{name: row[name] for name in names}) for row in data["rows"])
    return GapReport(**{f.name: data[f.name] for f in dataclasses.fields(GapReport)} | {"rows": rows})


def test_the_qat_trainer_halves_the_gap_to_w4a4(report: GapReport) -> None:
    """Training through the rollout's weights leaves at most 0.6 of the KL that a BF16 trainer has to W4A4."""
    assert report.row("QAT", "W4A4").kl <= 0.6 * report.row("BF16", "W4A4").kl


@pytest.mark.parametrize(
    ("arm", "share"),
    [
        ("RAC 25 % + centring + 4/6", 0.60),
        ("RAC 50 % + centring + 4/6", 0.70),
        ("RAC rows (100 %)", 0.97),
        ("RAC rows, decode only", 0.88),
    ],
)
def test_compensation_removes_the_activation_gap(report: GapReport, arm: str, share: float) -> None:
    """Each form of RAC removes the promised share of the KL that quantized activations cause."""
    assert report.removed(arm) >= share


@pytest.mark.parametrize("arm", ["W4A4 + centring", "W4A4 + four-over-six"])
def test_the_free_levers_help_alone(report: GapReport, arm: str) -> None:
    """Centring and four-over-six, which cost no GEMM, each reduce the gap."""
    assert report.removed(arm) > 0


def test_the_engine_itself_is_not_the_gap(report: GapReport) -> None:
    """Drift between the two BF16 implementations is at least 20 times smaller than the naive W4A4 gap."""
    assert 20 * report.row("BF16", "BF16").kl <= report.row("BF16", "W4A4").kl


def test_weights_are_not_the_gap_once_the_trainer_shares_them(report: GapReport) -> None:
    """QAT trainer and W4A16 rollout multiply with the same numbers: what is left is engine drift."""
    assert report.row("QAT", "W4A16").kl <= 3 * report.row("BF16", "BF16").kl


def test_sampled_metrics_agree_with_the_exact_divergence(report: GapReport) -> None:
    """The metrics that a training run can log rank the arms as the exact KL does: plain, blocks, rows."""
    ranked = ["W4A4", "RAC 25 % + centring + 4/6", "RAC rows (100 %)"]
    rows = [report.row("QAT", arm) for arm in ranked]
    for metric in ("mean_gap", "k3"):
        values = [getattr(r, metric) for r in rows]
        assert values == sorted(values, reverse=True), metric
    assert rows[0].ess < rows[1].ess < rows[2].ess <= 1.0


def test_the_report_can_be_kept(report: GapReport, tmp_path) -> None:
    """gap.json holds every pair with the share removed, and gap.png is a picture."""
    data, picture = report.save(tmp_path)
    rows = json.loads(data.read_text())["rows"]
    assert len(rows) == 2 * 10
    assert all("removed" in r for r in rows if r["trainer"] == "QAT" and r["rollout"] != "BF16")
    assert picture.read_bytes().startswith(b"\x89PNG")
