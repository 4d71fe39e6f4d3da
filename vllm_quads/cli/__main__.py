# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_quads.cli`, the same as `quads`."""

from __future__ import annotations

from vllm_quads.cli import main

main()
