# SPDX-License-Identifier: Apache-2.0
"""An in-process vLLM `LLM` as a rollout engine, and what can be asked of it and changed on it between generations.

    llm = LLM("Qwen/Qwen3-30B-A3B", quantization="quads")
    engine = as_engine(llm)              # vllm_quads.refit.as_engine, used by trainer_qat.RolloutSync
    engine.fingerprint(), engine.contract(), engine.quantized()

Needs the engine in this process: `VLLM_ENABLE_V1_MULTIPROCESSING=0` and no tensor parallelism, or a rank of a parallel
engine for each process (`launched`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torch import Tensor, nn

from vllm_quads.compensation import CompensationState
from vllm_quads.nvfp4 import Contract, ContractError, QuadsError, QuantizedSet, RefitError, first_difference
from vllm_quads.plugin import compat
from vllm_quads.refit import Manifest, RefitReport, RefitStatus

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_quads.plugin.config import QuadsConfig
    from vllm_quads.plugin.refit import RefitSession

_T = TypeVar("_T")
_UNFINISHED = "the engine has unfinished requests, which would mix two policies; let them finish first"
_RUNTIME_SECTIONS = ("scheme", "activation", "compensation")


class VllmEngine:
    """`vllm_quads.refit.RolloutEngine` for an in-process `LLM`. Use `as_engine(llm)`: one object per engine."""

    def __init__(self, llm: LLM) -> None:
        self._llm = weakref.proxy(llm)
        self._written = False

    # -- reading -------------------------------------------------------------------------------------------------

    def contract(self) -> Contract:
        """The contract that is serving."""
        return self._read(lambda config: config.contract)

    def quantized(self) -> QuantizedSet:
        """The quantized weights, by canonical name."""

        def read(config: QuadsConfig) -> QuantizedSet:
            assert config.quantized is not None
            return config.quantized

        return self._read(read)

    def fingerprint(self) -> str:
        """Fingerprint of the quantized weights that are serving, computed now from their bytes."""
        from vllm_quads.plugin.policy import model_fingerprint

        return self._read(model_fingerprint)

    def policy_version(self) -> int:
        """Version given by the last committed push; 0 before the first."""
        return self._read(lambda config: config.policy_version)

    def compensation(self) -> CompensationState:
        """Channel sets, centring vectors and sensitivities that are serving. `save` puts them beside an export."""
        return self._read(lambda config: config.compensation())

    # -- refit ---------------------------------------------------------------------------------------------------

    def begin(self, manifest: Manifest) -> None:
        """Validate a push. Raises RefitError naming the first difference in contract, set, names, shapes, dtypes or
        version, or if requests are unfinished, which two policies would answer."""
        if self._llm.llm_engine.has_unfinished_requests():
            raise RefitError(_UNFINISHED)
        self._session(lambda session: session.begin(manifest))
        self._written = False

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Install tensors, layer by layer; where they lie, if they are `refit.Lasting`. Raises RefitError, and then the
        refit is over (see `refit.RefitSession`)."""
        if not self._written:
            self._end_for_requests()
        self._session(lambda session: session.receive(tensors))
        self._written = True

    def commit(self, digests: Mapping[str, int] | None = None, plain: Mapping[str, int] | None = None) -> RefitReport:
        """Verify and serve the new weights, or raise RefitError: the previous ones serve, or none (see `status`).

        Requests that were added since `begin`, but of which nothing has been computed, are answered by the new weights.
        """
        self._prepare_commit()
        return self._session(lambda session: session.commit(digests, plain))

    def _prepare_commit(self) -> None:
        self._end_for_requests()
        # vLLM does not do this by itself. Before the commit, so that new weights never meet old key/value blocks.
        if not self._llm.reset_prefix_cache():
            self._fail(RefitError("vLLM refused to reset its prefix cache"))

    def abort(self) -> None:
        """End the refit that is under way, if there is one, as after a failure."""
        self._session(lambda session: session.abort())

    def status(self) -> RefitStatus:
        """Whether the engine may serve, and how its refits have ended."""
        return self._session(lambda session: session.status())

    def _end_for_requests(self) -> None:
        """End the refit if something has been computed of a request since `begin`. Raises RefitError then."""
        if self._llm.llm_engine.has_unfinished_requests() and compat.has_running_requests(self._llm):
            self._fail(RefitError(_UNFINISHED))

    def _fail(self, error: RefitError) -> NoReturn:
        raise self._session(lambda session: session.fail(error))

    # -- changing what does not change weights -------------------------------------------------------------------

    def set_activation(self, contract: Contract) -> None:
        """Switch scheme, activation and compensation options of the running engine.

        Raises ContractError if the contract also differs in what is quantized or how weights are, or if the engine
        replays CUDA graphs, which keep the options that they were captured with.
        """
        mine = self.contract()
        keep = {key: getattr(mine, key) for key in _RUNTIME_SECTIONS}
        difference = first_difference(_with(contract, keep), mine)
        if difference is not None:
            raise ContractError(f"only {list(_RUNTIME_SECTIONS)} can change on a running engine, not {difference}")
        self._read(lambda config: config.replace_contract(contract))
        self._llm.reset_prefix_cache()

    def set_compensation(self, state: CompensationState) -> None:
        """Take over compensation state, for example one that `CompensationState.load` read."""
        self._read(lambda config: config.set_compensation(state))
        self._llm.reset_prefix_cache()

    def collect_statistics(self, on: bool = True) -> None:
        """Start or stop gathering error statistics while the engine generates.

        An engine with CUDA graphs has to be started with additional_config={"quads_statistics": True} for this, and
        with a contract that has a use for statistics (appended blocks or centring); else ContractError is raised.
        """
        self._read(lambda config: config.collect(on))

    def reset_statistics(self) -> None:
        """Forget the statistics gathered so far."""

        def reset(config: QuadsConfig) -> None:
            for runtime in config.runtimes.values():
                runtime.reset_statistics()

        self._read(reset)

    def refresh_compensation(self, sensitivities: Mapping[str, float] | None = None) -> CompensationState:
        """Choose channel sets and centring vectors from the statistics gathered so far, and serve with them.

        sensitivities: site name -> mean squared gradient of the log-prob with respect to the site's output; without
        them, those of the last time, or else a uniform ratio. Raises QuadsError if no statistics were gathered.
        """
        from vllm_quads.plugin.policy import refresh_compensation

        if not self._read(lambda config: refresh_compensation(config, sensitivities)):
            raise QuadsError(
                "nothing to choose from: gather statistics first (collect_statistics, then generate), with a contract "
                "that uses appended blocks or centring"
            )
        self._llm.reset_prefix_cache()
        return self.compensation()

    # -- plumbing ------------------------------------------------------------------------------------------------

    def _run(self, fn: Callable[[nn.Module], _T]) -> _T:
        if not compat.is_in_process(self._llm):
            raise RefitError(
                "the engine runs in other processes, where QUADS cannot reach its weights: start it with "
                "VLLM_ENABLE_V1_MULTIPROCESSING=0 and tensor_parallel_size=1"
            )
        result: _T = self._llm.apply_model(fn)[0]
        return result

    def _session(self, fn: Callable[[RefitSession], _T]) -> _T:
        from vllm_quads.plugin.refit import session_of

        return self._run(lambda model: fn(session_of(model)))

    def _read(self, fn: Callable[[QuadsConfig], _T]) -> _T:
        from vllm_quads.plugin.policy import config_of

        return self._run(lambda model: fn(config_of(model)))


def _with(contract: Contract, sections: Mapping[str, Any]) -> Contract:
    from dataclasses import replace

    return replace(contract, **sections)
