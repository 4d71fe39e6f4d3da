# SPDX-License-Identifier: Apache-2.0
"""Asymmetric QAT for NVFP4 rollouts: weight-only fake quantization through the rollout's own path."""

from __future__ import annotations
