# SPDX-License-Identifier: Apache-2.0
"""Weight kernels (amax, fake quantization, packing, dequantization, digest) against the copy bandwidth of the GPU.

python -m benchmarks.weights quads-bench
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_quads.bench import environment
from vllm_quads.bench.weights import run_weights


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path("quads-bench"), help="folder of the result")
    out = parser.parse_args().out
    environment.require_or_exit(hopper=False, vllm=False)
    result = run_weights()
    for series in result.series:
        print(f"{series.name}: {', '.join(f'{v:.4g}' for v in series.values.values())} {series.unit}")
    print("saved", result.save(out / f"{result.stem}.json").name)


if __name__ == "__main__":
    main()
