# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.moe`: one MoE layer, QUADS against vLLM's own kernels in the same process.

Everything a layer does between the router and the residual stream is timed: grouping, activation quantization (with
residual compensation), both GEMMs, SiLU·mul, the top-k sum. CUDA graphs, four layers in rotation (so that no weight is
found in the L2 cache), uniform routing without replacement, the same inputs for everybody, median of 15 replays.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import copy_bandwidth, graph_time_us
from vllm_quads.kernels import MoECompensation, PreparedMoE, Tuning, prepare_moe_weights, quads_moe
from vllm_quads.nvfp4 import PackedTensor

SHAPES = {
    # experts on this GPU, top-k of a token that land here, hidden, intermediate
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "deepseek-v3-ep8": (32, 8, 7168, 2048),
}
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096)
LAYERS = 4


def prepare_random(experts: int, hidden: int, intermediate: int) -> PreparedMoE:
    """A random layer of four distinct experts, repeated in random order: as good as distinct ones for timing."""
    parts = []
    for _ in range(min(experts, 4)):
        w13 = PackedTensor.quantize(torch.randn(1, 2, intermediate, hidden, device="cuda").mul(0.05).bfloat16())
        w2 = PackedTensor.quantize(torch.randn(1, hidden, intermediate, device="cuda").mul(0.05).bfloat16())
        scales = w13.block_scales.view(torch.uint8).flatten(1, 2).view(torch.float8_e4m3fn)
        parts.append(
            prepare_moe_weights(
                w13.codes.flatten(1, 2), scales, w13.decode_scale, w2.codes, w2.block_scales, w2.decode_scale
            )
        )
    pick = [parts[int(i)] for i in torch.randint(0, len(parts), (experts,))]
    tensors = [torch.cat([getattr(p, name) for p in pick]) for name in ("w13", "w2", "w13_decode", "w2_decode")]
    return PreparedMoE(*tensors, hidden, intermediate)


def inputs(tokens: int, experts: int, top_k: int, hidden: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """One (x, router weights, expert ids) per layer."""
    torch.manual_seed(tokens)
    result = []
    for _ in range(LAYERS):
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(tokens, experts, device="cuda").topk(top_k, 1).indices.to(torch.int32).contiguous()
        result.append((x, torch.softmax(torch.randn(tokens, top_k, device="cuda"), 1), ids))
    return result


def floor_us(shape: tuple[int, int, int, int], ids: list[Tensor], bandwidth: float) -> float:
    """Time to read the packed weights (4.5 bits each) of the experts that are hit, in microseconds."""
    _, _, hidden, intermediate = shape
    hit = sum(int(i.unique().numel()) for i in ids) / len(ids)
    return hit * 3 * hidden * intermediate * 4.5 / 8 / bandwidth * 1e6


def measure(shape: tuple[int, int, int, int], tokens: list[int], peers: bool, bandwidth: float) -> dict[str, Any]:
    """{name: {tokens: microseconds}} of one shape."""
    experts, top_k, hidden, intermediate = shape
    rows: dict[str, dict[int, float]] = {}
    layers = [prepare_random(experts, hidden, intermediate) for _ in range(LAYERS)]

    def compensation(ratio: float) -> MoECompensation:
        return MoECompensation(
            mask13=torch.rand(1, hidden // 16, device="cuda") < ratio,
            mask2=torch.rand(experts, intermediate // 16, device="cuda") < ratio,
            center13=torch.randn(hidden, device="cuda") * 0.01,
            bias13=torch.randn(experts, 2 * intermediate, device="cuda") * 0.01,
        )

    half = compensation(0.25)
    none = MoECompensation(center13=half.center13, bias13=half.bias13)
    everything = MoECompensation(center13=half.center13, bias13=half.bias13, full_all=True)
    variants: dict[str, tuple[MoECompensation, bool]] = {
        "QUADS plain W4A4": (MoECompensation(), False),
        "QUADS 4/6 + centring, no RAC": (none, True),
        "QUADS 4/6 + centring, RAC 25 %": (half, True),
        "QUADS 4/6 + centring, RAC 100 % (default)": (everything, True),
    }
    for name, (c, four) in variants.items():
        rows[name] = {
            m: graph_time_us(
                [
                    lambda p=p, i=i, c=c, four=four: quads_moe(
                        i[0], p, i[1], i[2], compensation=c, four_over_six=four, tuning=Tuning()
                    )
                    for p, i in zip(layers, inputs(m, experts, top_k, hidden), strict=True)
                ]
            )
            for m in tokens
        }
    del layers
    if peers:
        from benchmarks.peers import PEERS

        for name, build in PEERS.items():
            torch.cuda.empty_cache()
            try:
                layers_of_peer = [build(experts, hidden, intermediate) for _ in range(LAYERS)]
                rows[name] = {
                    m: graph_time_us(
                        [
                            lambda f=f, i=i: f(*i)
                            for f, i in zip(layers_of_peer, inputs(m, experts, top_k, hidden), strict=True)
                        ]
                    )
                    for m in tokens
                }
                del layers_of_peer
            except (RuntimeError, AssertionError, ImportError, ValueError) as e:
                print(f"{name}: not measured ({type(e).__name__}: {e})")
    rows["floor: NVFP4 bytes"] = {
        m: floor_us(shape, [i[2] for i in inputs(m, experts, top_k, hidden)], bandwidth) for m in tokens
    }
    return rows


def table(rows: dict[str, dict[int, float]], tokens: list[int]) -> str:
    """Markdown table, microseconds a layer."""
    lines = ["| tokens | " + " | ".join(map(str, tokens)) + " |", "|---" * (len(tokens) + 1) + "|"]
    for name, values in rows.items():
        cells = [f"{values[m]:.1f}" if values[m] < 100 else f"{values[m]:.0f}" for m in tokens]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--no-peers", action="store_true", help="leave vLLM's kernels out")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    if args.no_peers:
        rows = measure(SHAPES[args.shape], args.tokens, False, bandwidth)
    else:
        from vllm.config import VllmConfig, set_current_vllm_config

        with set_current_vllm_config(VllmConfig()):
            rows = measure(SHAPES[args.shape], args.tokens, True, bandwidth)
    print(f"{args.shape}, {torch.cuda.get_device_name()}, {bandwidth / 1e12:.2f} TB/s, microseconds a layer")
    print(table(rows, args.tokens))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "shape": dict(zip(("experts", "top_k", "hidden", "intermediate"), SHAPES[args.shape], strict=True)),
            "bandwidth_bytes_per_s": bandwidth,
            "microseconds": rows,
        }
        if not args.no_peers:
            import vllm

            record["vllm"] = vllm.__version__
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
