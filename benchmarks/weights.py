# SPDX-License-Identifier: Apache-2.0
"""Weight kernels (amax, fake quantization, packing, dequantization, digest) against the copy bandwidth of the GPU.

python -m benchmarks.weights quads-bench
"""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_quads.bench import environment
from vllm_quads.bench.weights import run_weights


def main() -> None:
    """Measure, print and store."""
    environment.require_or_exit(hopper=False, vllm=False)
    result = run_weights()
    for series in result.series:
        print(f"{series.name}: {', '.join(f'{v:.4g}' for v in series.values.values())} {series.unit}")
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "quads-bench") / f"{result.stem}.json"
    print("saved", result.save(path).name)


if __name__ == "__main__":
    main()
