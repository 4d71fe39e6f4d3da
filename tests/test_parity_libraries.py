# SPDX-License-Identifier: Apache-2.0
"""Parity with compressed-tensors, NVIDIA ModelOpt and torchao: where they agree, and exactly where they do not.

Each library is asserted bit for bit against QUADS' formula with that library's deviations put in (written in numpy, all
operations float32 unless said otherwise), and the number of blocks and codes that the deviations change on fixed data
is an expected value. Decoding has no disagreement: what any of them wrote means the same numbers.

| step           | QUADS                | compressed-tensors        | ModelOpt              | torchao            |
|----------------|----------------------|---------------------------|-----------------------|--------------------|
| global scale   | g = 2688/amax        | g, in the dtype of w      | d = amax/2688         | d = amax/2688      |
| block scale    | m (g (1/6))          | g (m/6), m/6 in w's dtype | m / (6 d)             | (m/6) / d          |
| smallest scale | 0x00                 | zero becomes 0x20 (0.125) | 0x01; zero block 0x38 | 0x08 (2^-6)        |
| code           | rne(x (1/(s (1/g)))) | rne(x / (s/g))            | rne(x / (s d))        | rne(x ((1/d) / s)) |
| code of x = -0 | 8, 0 in a zero block | 0                         | 0                     | 8                  |
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch

from vllm_quads.nvfp4 import PackedTensor
from vllm_quads.nvfp4.formats import unpack_codes

F32 = np.float32


class Coded(NamedTuple):
    """Codes [N, K], block scale bytes [N, K/16], and the global scale as the library stores it."""

    codes: np.ndarray
    scales: np.ndarray
    global_scale: float


def _codes(packed: torch.Tensor) -> np.ndarray:
    return unpack_codes(packed).numpy()


def _bytes(scales: torch.Tensor) -> np.ndarray:
    return scales.contiguous().view(torch.uint8).numpy()


# -- the libraries ---------------------------------------------------------------------------------------------------


def quads(w: torch.Tensor) -> Coded:
    p = PackedTensor.quantize(w)
    return Coded(_codes(p.codes), _bytes(p.block_scales), float(p.decode_scale))


def compressed_tensors(w: torch.Tensor) -> Coded:
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    args = QuantizationArgs(
        num_bits=4,
        type="float",
        symmetric=True,
        group_size=16,
        strategy="tensor_group",
        scale_dtype=torch.float8_e4m3fn,
    )
    blocks = w.unflatten(-1, (-1, 16))
    g = generate_gparam(w.min(), w.max())
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=g)
    state = {"weight": w, "weight_scale": scale, "weight_global_scale": g}
    out = NVFP4PackedCompressor.compress(state, QuantizationScheme(targets=["Linear"], weights=args))
    return Coded(_codes(out["weight_packed"]), _bytes(out["weight_scale"]), float(g))


def modelopt(w: torch.Tensor) -> Coded:
    pytest.importorskip("modelopt", reason="pip install --no-deps nvidia-modelopt (see the test extra)")
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    q, scale, scale_2 = NVFP4QTensor.quantize(w.clone(), 16)
    return Coded(_codes(q._quantized_data), _bytes(scale), float(scale_2))


def torchao(w: torch.Tensor) -> Coded:
    pytest.importorskip("torchao", reason="pip install torchao")
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    per_tensor = w.float().abs().max() / 2688.0
    scale, packed = nvfp4_quantize(w, 16, per_tensor)
    return Coded(_codes(packed), _bytes(scale).reshape(w.shape[0], -1), float(per_tensor))


# -- the same, as deviations from the formula -------------------------------------------------------------------------


def _e4m3(values: np.ndarray) -> np.ndarray:
    unique, inverse = np.unique(values, return_inverse=True)
    return np.array([oracle.e4m3_byte(v) for v in unique], dtype=np.uint8)[inverse].reshape(values.shape)


def _e2m1(values: np.ndarray) -> np.ndarray:
    unique, inverse = np.unique(values.view(np.uint32), return_inverse=True)
    codes = np.array([oracle.e2m1_code(v) for v in unique.view(np.float32)], dtype=np.uint8)
    return codes[inverse].reshape(values.shape)


def _bf16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.asarray(values)).to(torch.bfloat16).float().numpy()


def _expand(scale_bytes: np.ndarray) -> np.ndarray:
    return np.repeat(oracle.E4M3[scale_bytes].astype(F32), 16, axis=-1)


def as_compressed_tensors(w: torch.Tensor) -> Coded:
    in_dtype = _bf16 if w.dtype == torch.bfloat16 else np.asarray
    x = w.float().numpy()
    m = np.abs(x.reshape(len(x), -1, 16)).max(-1)
    g = in_dtype(F32(2688.0) / m.max()).astype(F32)
    scales = _e4m3(g * in_dtype(m / F32(6.0)))
    scales[scales == 0] = 0x20
    return Coded(_e2m1(x / (_expand(scales) / g)), scales, float(g))


def as_modelopt(w: torch.Tensor) -> Coded:
    x = w.float().numpy()
    m = np.abs(x.reshape(len(x), -1, 16)).max(-1)
    d = m.max() / F32(2688.0)
    sf = m / (F32(6.0) * d)
    sf = np.clip(np.where(sf == 0, F32(1.0), sf), F32(2.0**-9), F32(448.0))
    scales = _e4m3(sf)
    y = x / (_expand(scales) * d)
    return Coded(_e2m1(np.where(x < 0, y, np.abs(y))), scales, float(d))


def as_torchao(w: torch.Tensor) -> Coded:
    x = w.float().numpy()
    m = np.abs(x.reshape(len(x), -1, 16)).max(-1)
    d = m.max() / F32(2688.0)
    scales = _e4m3(np.clip((m / F32(6.0)) / d, F32(2.0**-6), F32(448.0)))
    return Coded(_e2m1(x * ((F32(1.0) / d) / _expand(scales))), scales, float(d))


LIBRARIES = {
    "compressed-tensors": (compressed_tensors, as_compressed_tensors),
    "modelopt": (modelopt, as_modelopt),
    "torchao": (torchao, as_torchao),
}


def _base() -> torch.Tensor:
    return (torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)


def _with_amax(amax: float) -> torch.Tensor:
    base = _base().float()
    return (base / base.abs().max() * amax).to(torch.bfloat16)


CASES = {
    "bf16": _base,
    "fp32": lambda: _base().float(),
    "amax 1": lambda: _with_amax(1.0),
    "amax 6": lambda: _with_amax(6.0),
    "amax 7": lambda: _with_amax(7.0),
    "small blocks": lambda: (_base().float() * torch.logspace(0, -9, 256)[:, None]).to(torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_library_is_the_formula_with_its_deviations(library: str, case: str) -> None:
    """Every code and scale byte of the library is explained by the deviations in the table above."""
    theirs, expected = (f(CASES[case]()) for f in LIBRARIES[library])
    assert theirs.global_scale == expected.global_scale
    np.testing.assert_array_equal(theirs.scales, expected.scales)
    np.testing.assert_array_equal(theirs.codes, expected.codes)


# (block scales of 8192, codes of 131072) that differ from QUADS.
DIFFERENCES = {
    ("compressed-tensors", "bf16"): (195, 578),
    ("compressed-tensors", "fp32"): (0, 81),
    ("compressed-tensors", "amax 1"): (0, 0),
    ("compressed-tensors", "amax 6"): (176, 683),
    ("compressed-tensors", "amax 7"): (218, 604),
    ("compressed-tensors", "small blocks"): (3322, 53188),
    ("modelopt", "bf16"): (0, 97),
    ("modelopt", "fp32"): (0, 97),
    ("modelopt", "amax 1"): (0, 0),
    ("modelopt", "amax 6"): (93, 465),
    ("modelopt", "amax 7"): (0, 13),
    ("modelopt", "small blocks"): (3322, 53188),
    ("torchao", "bf16"): (0, 81),
    ("torchao", "fp32"): (0, 81),
    ("torchao", "amax 1"): (0, 81),
    ("torchao", "amax 6"): (93, 519),
    ("torchao", "amax 7"): (149, 430),
    ("torchao", "small blocks"): (4390, 67790),
}


@pytest.mark.parametrize(("library", "case"), [(lib, c) for lib in LIBRARIES for c in CASES])
def test_number_of_differences(library: str, case: str) -> None:
    """How many bytes the deviations change on fixed data: ties between roundings, and tiny blocks."""
    w = CASES[case]()
    ours, theirs = quads(w), LIBRARIES[library][0](w)
    differences = int((ours.scales != theirs.scales).sum()), int((ours.codes != theirs.codes).sum())
    assert differences == DIFFERENCES[library, case]


def _edge() -> torch.Tensor:
    """Rows: ordinary with a -0; a block that underflows; -0; a block that underflows, and a small one."""
    x = torch.zeros(4, 32)
    x[0], x[0, 3], x[1, :16], x[2], x[3, :16], x[3, 16:] = 1.0, -0.0, 1e-6, -0.0, -1e-6, -1e-3
    return x.to(torch.bfloat16)


EDGE_SCALES = {
    "quads": [[0x7E, 0x7E], [0x00, 0x00], [0x00, 0x00], [0x00, 0x2E]],
    "compressed-tensors": [[0x7E, 0x7E], [0x20, 0x20], [0x20, 0x20], [0x20, 0x2E]],
    "modelopt": [[0x7E, 0x7E], [0x01, 0x38], [0x38, 0x38], [0x01, 0x2E]],
    "torchao": [[0x7E, 0x7E], [0x08, 0x08], [0x08, 0x08], [0x08, 0x2E]],
}
# Codes of: the underflowing block, the -0 block, the negative underflowing block.
EDGE_CODES = {"quads": (7, 0, 15), "compressed-tensors": (0, 0, 8), "modelopt": (3, 0, 11), "torchao": (0, 8, 8)}


@pytest.mark.parametrize("library", ["quads", *LIBRARIES])
def test_zero_and_underflowing_blocks(library: str) -> None:
    """The block scale byte of a zero block and of one too small for E4M3 differs in every library."""
    coded = quads(_edge()) if library == "quads" else LIBRARIES[library][0](_edge())
    assert coded.scales.tolist() == EDGE_SCALES[library]
    blocks = coded.codes[1, :16], coded.codes[2], coded.codes[3, :16]
    assert tuple(int(b[0]) for b in blocks) == EDGE_CODES[library]
    assert all((b == b[0]).all() for b in blocks)
    assert coded.codes[0, 3] == (8 if library in ("quads", "torchao") else 0)


def test_underflowing_block_survives_only_in_modelopt() -> None:
    """A block 1e-6 beside amax 1: ModelOpt's floor of 2^-9 keeps it (1.1e-6), the other three decode it to zero."""
    decoded = {}
    for library in ("quads", *LIBRARIES):
        c = quads(_edge()) if library == "quads" else LIBRARIES[library][0](_edge())
        decode = 1 / c.global_scale if library == "compressed-tensors" else c.global_scale
        decoded[library] = float(oracle.dequantize(c.codes, c.scales, decode)[1, 0])
    assert decoded["modelopt"] == pytest.approx(1.0899e-06, rel=1e-3)
    assert {library for library, value in decoded.items() if value == 0} == {"quads", "compressed-tensors", "torchao"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_their_bytes_decode_to_their_numbers(library: str) -> None:
    """Codes and scales written by any library decode through `PackedTensor` to code * scale * global scale."""
    coded = LIBRARIES[library][0](_base())
    scale = torch.tensor(coded.global_scale)
    packed = PackedTensor(
        torch.from_numpy(coded.codes[:, 0::2] | coded.codes[:, 1::2] << 4),
        torch.from_numpy(coded.scales).view(torch.float8_e4m3fn),
        1 / scale if library == "compressed-tensors" else scale,
    )
    exact = oracle.dequantize(coded.codes, coded.scales, float(packed.decode_scale))
    np.testing.assert_allclose(packed.dequantize().numpy(), exact, rtol=2**-23)
    error = np.linalg.norm(exact - _base().float().numpy()) / np.linalg.norm(_base().float().numpy())
    assert 0.08 < error < 0.11
