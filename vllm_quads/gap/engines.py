# SPDX-License-Identifier: Apache-2.0
"""The rollout engines of the gap experiment: one quantized engine that changes its contract, one BF16 engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vllm_quads.compensation import CompensationState
from vllm_quads.nvfp4 import Contract, QuadsError
from vllm_quads.plugin.inprocess import adapt

MAX_MODEL_LEN = 1024
SHARED_CARD = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 4 << 30}
"""Both engines and the trainer share a card: each engine takes its weights and a cache of this size, 32 sequences of
full length for Mixtral. The share of the card is then only what has to be free at its start."""


class RolloutBench:
    """Both engines live in this process. `options` are the engine arguments that recording needs."""

    def __init__(self, model: Path, contract: Contract, options: Mapping[str, Any]) -> None:
        self._model = str(model)
        self._options = {"enforce_eager": True, "max_model_len": MAX_MODEL_LEN, "dtype": "bfloat16", **options}
        if torch.cuda.is_available():
            self._options |= SHARED_CARD
        self.llm = self._start(quantization="quads", additional_config={"quads": _options(contract)})
        engine = adapt(self.llm)
        assert engine is not None
        self.engine = engine
        self._bf16: Any = None

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        from vllm.platforms import current_platform

        return str(current_platform.device_type)

    @contextmanager
    def statistics(self) -> Iterator[None]:
        """Gather error statistics inside of the block."""
        self.engine.collect_statistics(True)
        yield
        self.engine.collect_statistics(False)

    def calibrate(self, contract: Contract, sensitivities: Mapping[str, float]) -> CompensationState:
        """The compensation state of a contract, from the statistics gathered so far."""
        self.engine.set_activation(contract)
        return self.engine.refresh_compensation(sensitivities)

    def configured(self, contract: Contract, state: CompensationState) -> Any:
        """The quantized engine under a contract with the same weights."""
        self.engine.set_activation(contract)
        self.engine.set_compensation(state)
        return self.llm

    def bf16(self) -> Any:
        """The unquantized engine."""
        if self._bf16 is None:
            self._bf16 = self._start()
        return self._bf16

    def _start(self, **extra: Any) -> Any:
        from vllm import LLM

        try:
            return LLM(self._model, **self._options, **extra)
        except QuadsError:
            raise
        except Exception as e:
            raise QuadsError(
                f"vLLM could not start on {self._model}: {e}. `quads doctor` checks the installation"
            ) from e


def _options(contract: Contract) -> dict[str, Any]:
    """A contract as user options: everything but its own header."""
    return {k: v for k, v in contract.to_dict().items() if k not in ("quant_method", "version")}
