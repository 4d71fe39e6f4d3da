# SPDX-License-Identifier: Apache-2.0
"""Which form of the residual each token gets."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_quads.nvfp4.contract import Contract, Form, Scheme


class TokenForms(NamedTuple):
    """Row indices int64 of the tokens of one step, by form; together they cover every token once."""

    rows: Tensor
    """Full residual as a second row."""
    blocks: Tensor
    """Selected blocks appended along K (the forwards drop them where the contract uses none)."""


def token_forms(form: Form, num_tokens: int, decode: Tensor | None, device: torch.device) -> TokenForms:
    """Split the tokens of a step by form.

    decode: bool [M], True for a token whose request contributes exactly one token to this step; None means that
    nothing is known, and then every token counts as prefill. Only Form.AUTO looks at it. The split is per token, so
    what a token computes does not depend on the other requests of its batch.
    """
    everything = torch.arange(num_tokens, device=device)
    nothing = everything[:0]
    if form is Form.ROWS:
        return TokenForms(everything, nothing)
    if form is Form.AUTO and decode is not None:
        return TokenForms(everything[decode], everything[~decode])
    return TokenForms(nothing, everything)


def uses_blocks(contract: Contract) -> bool:
    """True if the contract can multiply appended blocks at all."""
    c = contract.compensation
    return contract.scheme is Scheme.W4A4 and c.form in (Form.BLOCKS, Form.AUTO) and c.ratio > 0
