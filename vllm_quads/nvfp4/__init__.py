# SPDX-License-Identifier: Apache-2.0
"""NVFP4 numerics shared by trainer and rollout: format, quant-dequant path, contract and fingerprint.

The ground floor of QUADS: imports torch and nothing of vLLM, Triton or the trainer.
"""

from __future__ import annotations

from vllm_quads.nvfp4.contract import (
    Activation,
    ActivationGlobalScale,
    Allocation,
    Centering,
    Compensation,
    Contract,
    Form,
    QuantizedSet,
    Scheme,
    WeightGlobalScale,
    first_difference,
)
from vllm_quads.nvfp4.errors import (
    CheckpointError,
    ContractError,
    FormatError,
    MismatchError,
    QuadsError,
    RefitError,
)
from vllm_quads.nvfp4.fingerprint import (
    fingerprint,
    fingerprint_of,
    matrix_digest,
    name_weights,
    packed_digest,
    tensor_digest,
    unit_digests,
    unit_fingerprint,
    unit_of,
)
from vllm_quads.nvfp4.formats import BLOCK_SIZE
from vllm_quads.nvfp4.names import Kind, canonical_name, expand, kind_of, scale_group
from vllm_quads.nvfp4.packed import PackedTensor
from vllm_quads.nvfp4.reference import (
    BlockScaleRule,
    Quantized,
    encode_scale,
    fake_quantize_weight,
    quantize_activation,
    quantize_blocks,
    quantize_weight,
    weight_amax,
)
from vllm_quads.nvfp4.swizzle import swizzle, unswizzle

__all__ = [
    "BLOCK_SIZE",
    "Activation",
    "ActivationGlobalScale",
    "Allocation",
    "BlockScaleRule",
    "Centering",
    "CheckpointError",
    "Compensation",
    "Contract",
    "ContractError",
    "Form",
    "FormatError",
    "Kind",
    "MismatchError",
    "PackedTensor",
    "QuadsError",
    "Quantized",
    "QuantizedSet",
    "RefitError",
    "Scheme",
    "WeightGlobalScale",
    "canonical_name",
    "encode_scale",
    "expand",
    "fake_quantize_weight",
    "fingerprint",
    "fingerprint_of",
    "first_difference",
    "kind_of",
    "matrix_digest",
    "name_weights",
    "packed_digest",
    "quantize_activation",
    "quantize_blocks",
    "quantize_weight",
    "scale_group",
    "swizzle",
    "tensor_digest",
    "unit_digests",
    "unit_fingerprint",
    "unit_of",
    "unswizzle",
    "weight_amax",
]
