# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint is calibrated: does it hold the channel sets and centring vectors that its contract wants?"""

from __future__ import annotations

from vllm_quads.compensation.policy import uses_blocks
from vllm_quads.compensation.state import STATE_FILE, CompensationState
from vllm_quads.nvfp4.contract import Centering, Contract, Form, Scheme

HOW = (
    "write it again with `quads quantize SRC DST --calibrate PROMPTS.txt`, or let the engine gather error statistics "
    "and push"
)


def wants_calibration(contract: Contract | None) -> bool:
    """True if a contract has options that do nothing without a compensation state; None is a BF16 checkpoint."""
    if contract is None or contract.scheme is not Scheme.W4A4:
        return False
    return uses_blocks(contract) or contract.activation.centering is not Centering.NONE


def missing_calibration(contract: Contract | None, state: CompensationState | None) -> str | None:
    """What a checkpoint lacks, what that means and what to do; None if it has all that its contract wants."""
    if contract is None or not wants_calibration(contract):
        return None
    sites = [] if state is None else list(state.sites.values())
    lacking = []
    if uses_blocks(contract) and not any(bool(s.blocks.any()) for s in sites):
        who = "prompt tokens are not compensated (on Hopper they are)"
        who = who if contract.compensation.form is Form.AUTO else "tokens are not compensated"
        lacking.append(f"no block for RAC is chosen: {who}")
    if contract.activation.centering is not Centering.NONE and not any(bool(s.center.any()) for s in sites):
        lacking.append("no channel is centred")
    if not lacking:
        return None
    why = f"{STATE_FILE.as_posix()} is not there" if state is None else f"{STATE_FILE.as_posix()} is incomplete"
    return f"not calibrated: {why}, so {', and '.join(lacking)}; {HOW}"
