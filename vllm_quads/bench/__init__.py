# SPDX-License-Identifier: Apache-2.0
"""`quads bench`: what the kernels and the engine reach on this machine, beside vLLM's own, with the floors they face.

Each benchmark returns a `Result`, which is stored as JSON, printed as a table and plotted. Nothing here is imported by
the rest of the package.
"""

from __future__ import annotations

from vllm_quads.bench.environment import MissingEnvironment
from vllm_quads.bench.result import Result, Series
from vllm_quads.bench.shapes import SHAPES, MoEShape, shape_named

__all__ = ["SHAPES", "MissingEnvironment", "MoEShape", "Result", "Series", "shape_named"]
