# SPDX-License-Identifier: Apache-2.0
"""The weights of a prepared model as a framework's own transport wants them: (name, tensor) pairs, packed.

For frameworks that call vLLM's `model.load_weights` themselves. `RolloutSync` does more: it validates before a byte
moves and swaps at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from trainer_qat.payload import Payload
from vllm_quads.nvfp4 import MismatchError, PackedTensor, canonical_name, fingerprint, packed_digest
from vllm_quads.refit import TensorSpec


class WeightStream:
    """Iterate once or again; every rank of a sharded model has to."""

    def __init__(self, model: nn.Module, *, packed: bool = True) -> None:
        """packed: codes and scales (28 % of the BF16 bytes), or BF16 weights, which the engine quantizes itself.

        Raises ContractError or MismatchError as `trainer_qat.payload.Payload` does.
        """
        self.payload = Payload(model)
        self.packed = packed
        self.fingerprint: str | None = None
        """Of the quantized weights, after a packed pass has ended; what the engine's has to be then."""

    def specs(self) -> dict[str, TensorSpec]:
        """Name -> shape and dtype of all that is going to be sent."""
        return self.payload.specs(packed=self.packed)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.fingerprint = None
        digests: dict[str, int] = {}
        for item in self.payload.items(packed=self.packed):
            if isinstance(item.value, PackedTensor):
                digests[canonical_name(item.name)] = int(packed_digest(item.value))
            yield from item.tensors().items()
        if self.packed:
            self.fingerprint = fingerprint(digests)


def require_fingerprint(sent: str, answers: list[dict[str, object]]) -> None:
    """Compare with what vLLM's workers answered to `collective_rpc("weight_transfer_engine", args=("fingerprint",))`.

    Raises MismatchError if a worker did not answer, or serves other weights.
    """
    for rank, answer in enumerate(answers):
        found = answer.get("fingerprint") if isinstance(answer, dict) else None
        if found != sent:
            why = answer.get("error") if isinstance(answer, dict) and found is None else f"fingerprint {found}"
            raise MismatchError(
                f"worker {rank} does not serve the policy that was sent (fingerprint {sent}): {why}; do not use its "
                f"rollouts"
            )
    if not answers:
        raise MismatchError(f"no worker said which weights it serves; the trainer sent fingerprint {sent}")
