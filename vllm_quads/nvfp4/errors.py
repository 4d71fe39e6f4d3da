# SPDX-License-Identifier: Apache-2.0
"""The errors a user can meet. Each message names the tensor or option, what was expected and what to do."""

from __future__ import annotations


class QuadsError(Exception):
    """Base of all errors that QUADS raises on purpose."""


class FormatError(QuadsError, ValueError):
    """A tensor is not a valid NVFP4 operand: wrong shape, dtype, or a non-finite value."""


class ContractError(QuadsError, ValueError):
    """The contract is malformed, of an unknown version, or does not fit the model."""


class MismatchError(QuadsError):
    """Trainer and rollout disagree on what is quantized, or on the bytes it was quantized to."""


class CheckpointError(QuadsError):
    """A checkpoint is incomplete, truncated or inconsistent with its contract."""


class RefitError(QuadsError):
    """A weight refit was refused or failed; the message says what serves."""
