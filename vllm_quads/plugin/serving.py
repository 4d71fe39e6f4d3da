# SPDX-License-Identifier: Apache-2.0
"""vLLM engines whose workers are other processes: `LLM` with tensor or expert parallelism, and `AsyncLLM`.

`as_engine(llm)` finds the right one. An `AsyncLLM` may be refitted from any thread but that of its event loop:

    report = await asyncio.to_thread(sync.push)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import weakref
from collections.abc import Coroutine, Mapping
from typing import Any

from vllm_quads.nvfp4 import RefitError
from vllm_quads.plugin import compat
from vllm_quads.refit.planes import InlinePlane
from vllm_quads.refit.remote import InFlight, RemoteEngine
from vllm_quads.refit.transport import DataPlane

_ENGINES: weakref.WeakKeyDictionary[Any, RemoteEngine] = weakref.WeakKeyDictionary()


class LlmControl:
    """An `LLM` with worker processes. It runs requests only inside of its own calls: there is nothing to pause."""

    label = "LLM"
    can_pause = False

    def __init__(self, llm: Any) -> None:
        self._llm = weakref.proxy(llm)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """`collective_rpc`."""
        _require_quads(self.label, self._llm.llm_engine.vllm_config)
        try:
            return list(self._llm.collective_rpc(method, args=args))
        except Exception as e:
            raise self._failed(method, e) from e

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(self._llm, method)(*args, **kwargs)
        except Exception as e:
            raise self._failed(method, e) from e

    def _failed(self, method: str, error: Exception) -> RefitError:
        ended = type(error).__name__ == "EngineDeadError" or str(error).endswith("cancelled")
        advice = (
            "; the engine has ended, make a new LLM (if the system's log says out of memory: set "
            "VLLM_CPU_KVCACHE_SPACE on a CPU, or gpu_memory_utilization)"
        )
        return RefitError(f"{self.label}: {method} failed: {error}{advice if ended else ''}")

    def init(self, info: Mapping[str, Any]) -> None:
        """`init_weight_transfer_engine`."""
        self._call("init_weight_transfer_engine", {"init_info": dict(info)})

    def start(self) -> None:
        """`start_weight_update`."""
        self._call("start_weight_update")

    def update(self, info: Mapping[str, Any]) -> None:
        """`update_weights`."""
        self._call("update_weights", {"update_info": dict(info)})

    def finish(self) -> None:
        """`finish_weight_update`."""
        self._call("finish_weight_update")

    def set_weight_version(self, version: str) -> None:
        """`update_weight_version`, where vLLM has it."""
        if hasattr(self._llm, "update_weight_version"):
            self._call("update_weight_version", version)

    def pause(self, mode: str) -> None:
        """Nothing runs between its calls."""

    def resume(self) -> None:
        """Nothing was paused."""

    def is_paused(self) -> bool:
        """Never."""
        return False

    def require_idle(self) -> None:
        """Raise RefitError for requests that were added but not finished."""
        if self._llm.llm_engine.has_unfinished_requests():
            raise RefitError("the engine has unfinished requests, which would mix two policies; let them finish first")

    def reset_prefix_cache(self, running: bool) -> bool:
        """`reset_prefix_cache`."""
        return bool(self._call("reset_prefix_cache", reset_running_requests=running))

    def sleep(self, level: int) -> None:
        """`sleep`."""
        self._call("sleep", level=level)

    def wake_up(self, tags: list[str] | None) -> None:
        """`wake_up`."""
        self._call("wake_up", tags)

    def world_size(self) -> int:
        """Workers."""
        return int(self._llm.llm_engine.vllm_config.parallel_config.world_size)


class AsyncControl:
    """An `AsyncLLM`, from a thread that is not that of its event loop."""

    label = "AsyncLLM"
    can_pause = True

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop | None = None, timeout: float = 300.0) -> None:
        """loop: that the engine runs in; None finds it."""
        self._llm = weakref.proxy(llm)
        self._loop = loop
        self._timeout = timeout

    def _find_loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop
        if loop is None:
            handler = getattr(self._llm, "output_handler", None)
            if handler is None:
                raise RefitError(
                    "AsyncLLM: has no event loop yet; create it inside of a coroutine, or pass its loop to AsyncEngine"
                )
            loop = self._loop = handler.get_loop()
        try:
            inside = asyncio.get_running_loop() is loop
        except RuntimeError:
            inside = False
        if inside:
            raise RefitError(
                "AsyncLLM: a refit waits for the engine's event loop, so that it cannot run in that loop's own thread; "
                "use `await asyncio.to_thread(RolloutSync, model, llm)` or `await asyncio.to_thread(sync.push)`"
            )
        if not loop.is_running():
            raise RefitError("AsyncLLM: its event loop is not running; keep it running in a thread of its own")
        return loop

    def _run(self, what: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        loop = self._find_loop()
        coroutine: Coroutine[Any, Any, Any] = call(*args, **kwargs)
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        try:
            return future.result(self._timeout)
        except concurrent.futures.TimeoutError as e:
            future.cancel()
            raise RefitError(f"AsyncLLM: {what}: no answer within {self._timeout:.0f} s; ask status()") from e
        except Exception as e:
            raise RefitError(f"AsyncLLM: {what} failed: {e or type(e).__name__}") from e

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """`collective_rpc`."""
        _require_quads(self.label, self._llm.vllm_config)
        return list(self._run(method, self._llm.collective_rpc, method, args=args))

    def init(self, info: Mapping[str, Any]) -> None:
        """`init_weight_transfer_engine`."""
        request = compat.init_request(dict(info))
        self._run("init_weight_transfer_engine", self._llm.init_weight_transfer_engine, request)

    def start(self) -> None:
        """`start_weight_update`."""
        self._run("start_weight_update", self._llm.start_weight_update)

    def update(self, info: Mapping[str, Any]) -> None:
        """`update_weights`."""
        self._run("update_weights", self._llm.update_weights, compat.update_request(dict(info)))

    def finish(self) -> None:
        """`finish_weight_update`."""
        self._run("finish_weight_update", self._llm.finish_weight_update)

    def set_weight_version(self, version: str) -> None:
        """`update_weight_version`, where vLLM has it."""
        if hasattr(self._llm, "update_weight_version"):
            self._run("update_weight_version", self._llm.update_weight_version, version)

    def pause(self, mode: str) -> None:
        """`pause_generation`."""
        self._run("pause_generation", self._llm.pause_generation, mode=mode)

    def resume(self) -> None:
        """`resume_generation`."""
        self._run("resume_generation", self._llm.resume_generation)

    def is_paused(self) -> bool:
        """`is_paused`."""
        return bool(self._run("is_paused", self._llm.is_paused))

    def require_idle(self) -> None:
        """It can pause."""

    def reset_prefix_cache(self, running: bool) -> bool:
        """`reset_prefix_cache`."""
        return bool(self._run("reset_prefix_cache", self._llm.reset_prefix_cache, reset_running_requests=running))

    def sleep(self, level: int) -> None:
        """`sleep`, letting running requests finish first."""
        self._run("sleep", self._llm.sleep, level, mode="wait")

    def wake_up(self, tags: list[str] | None) -> None:
        """`wake_up`."""
        self._run("wake_up", self._llm.wake_up, tags)

    def world_size(self) -> int:
        """Workers."""
        return int(self._llm.vllm_config.parallel_config.world_size)


class LlmEngine(RemoteEngine):
    """`vllm_quads.refit.RolloutEngine` for an `LLM` with worker processes."""

    def __init__(self, llm: Any, data: DataPlane | str = "auto") -> None:
        """data: "ipc", "nccl", "inline", "disk", a data plane, or "auto": "ipc" on a GPU, "inline" on a CPU."""
        control = LlmControl(llm)
        super().__init__(control, _plane(data, control))


class AsyncEngine(RemoteEngine):
    """`vllm_quads.refit.RolloutEngine` for an `AsyncLLM`."""

    def __init__(
        self,
        llm: Any,
        data: DataPlane | str = "auto",
        *,
        in_flight: InFlight | str = InFlight.WAIT,
        loop: asyncio.AbstractEventLoop | None = None,
        timeout: float = 300.0,
    ) -> None:
        """data: as for `LlmEngine`; loop: that the engine runs in (None finds it); timeout: seconds for one answer."""
        control = AsyncControl(llm, loop, timeout)
        super().__init__(control, _plane(data, control), in_flight)


def _require_quads(label: str, vllm_config: Any) -> None:
    """Raise RefitError before workers are asked something that they would fail at (see `transfer`)."""
    quantization = vllm_config.model_config.quantization
    if quantization != "quads":
        raise RefitError(f'{label}: serves quantization {quantization!r}; start it with quantization="quads"')
    transfer = vllm_config.weight_transfer_config
    if transfer is not None and transfer.backend != "quads":
        raise RefitError(
            f"{label}: was started with the weight-transfer backend {transfer.backend!r}; leave weight_transfer_config "
            f"out, or set its backend to 'quads'"
        )


def _plane(data: DataPlane | str, control: LlmControl | AsyncControl) -> DataPlane:
    if not isinstance(data, str):
        return data
    if data == "auto":
        data = "inline" if compat.is_cpu() else "ipc"
    if data == "inline":
        return InlinePlane()
    if data == "disk":
        from vllm_quads.refit.planes import DiskPlane

        return DiskPlane()
    if data in ("ipc", "nccl"):
        from vllm_quads.plugin.transfer_send import IpcPlane, NcclPlane

        return IpcPlane() if data == "ipc" else NcclPlane(control.world_size)
    raise RefitError(f"data: is {data!r}, expected 'auto', 'ipc', 'nccl', 'inline', 'disk' or a data plane")


def adapt(obj: Any) -> RemoteEngine | None:
    """Adapter for `vllm_quads.refit.as_engine`: knows engines whose model is not in this process."""
    if not type(obj).__module__.startswith("vllm."):
        return None
    if obj not in _ENGINES:
        if hasattr(obj, "pause_generation") and hasattr(obj, "collective_rpc"):
            _ENGINES[obj] = AsyncEngine(obj)
        elif hasattr(obj, "apply_model") and not compat.is_in_process(obj):
            _ENGINES[obj] = LlmEngine(obj)
        else:
            return None
    return _ENGINES[obj]


__all__ = ["AsyncControl", "AsyncEngine", "LlmControl", "LlmEngine", "adapt"]
