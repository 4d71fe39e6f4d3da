# SPDX-License-Identifier: Apache-2.0
"""A running `vllm serve` as a rollout engine, over HTTP.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --quantization quads

    engine = HttpEngine("http://localhost:8000")
    RolloutSync(model, engine).push()                    # tensors over NCCL, CUDA IPC or files
    engine.load_checkpoint("ckpt/step-100")              # or a directory that `export_checkpoint` wrote

The routes are vLLM's own; those that change an engine exist only with VLLM_SERVER_DEV_MODE=1. Whoever reaches them
controls the server, so keep its port within the cluster.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_quads.nvfp4 import RefitError
from vllm_quads.refit.planes import DiskPlane
from vllm_quads.refit.remote import InFlight, RemoteEngine
from vllm_quads.refit.report import RefitReport
from vllm_quads.refit.transport import DataPlane

_LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


class HttpControl:
    """vLLM's HTTP routes. Every method raises RefitError that says what the server answered, or that it did not."""

    can_pause = True

    def __init__(self, url: str, timeout: float = 300.0, api_key: str | None = None) -> None:
        """url: of the server, without a path; timeout: seconds to wait for one answer."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RefitError(f"{url!r}: is not the address of a server, expected something like http://localhost:8000")
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self.label = self.url
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._checked = False

    def _call(self, method: str, route: str, body: Mapping[str, Any] | None = None, **query: Any) -> Any:
        url = f"{self.url}{route}"
        if query:
            url += "?" + urllib.parse.urlencode(query, doseq=True)
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers=self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                text = response.read()
        except urllib.error.HTTPError as e:
            raise self._refused(route, e) from e
        except (TimeoutError, socket.timeout) as e:  # noqa: UP041 (two classes before 3.11)
            raise RefitError(self._no_answer(route)) from e
        except (http.client.HTTPException, OSError) as e:  # URLError is an OSError
            if isinstance(getattr(e, "reason", None), TimeoutError):
                raise RefitError(self._no_answer(route)) from e
            raise RefitError(
                f"{self.url}: cannot be reached ({getattr(e, 'reason', e)}); is the server running?"
            ) from e
        try:
            return json.loads(text) if text else None
        except ValueError:
            return text.decode(errors="replace")

    def _no_answer(self, route: str) -> str:
        return (
            f"{self.url}{route}: no answer within {self._timeout:.0f} s; ask `status()` for what the server serves, "
            f"and raise `timeout` if it only needed longer"
        )

    def _refused(self, route: str, error: urllib.error.HTTPError) -> RefitError:
        said = error.read().decode(errors="replace").strip()
        if error.code == 404:
            return RefitError(
                f"{self.url}: has no {route}; start the server with VLLM_SERVER_DEV_MODE=1, which adds vLLM's routes "
                f"for weight updates (and keep its port within the cluster)"
            )
        if error.code in (401, 403):
            return RefitError(f"{self.url}{route}: access denied ({error.code}); pass the server's api_key")
        return RefitError(f"{self.url}{route}: answered {error.code}: {said[:2000] or error.reason}")

    def require_quads(self) -> None:
        """Raise RefitError for a server of another quantization, before any of its workers is asked something that
        only QUADS knows."""
        if self._checked:
            return
        if "quads_policy_version" not in str(self._call("GET", "/metrics")):
            info = str(self._call("GET", "/server_info")["vllm_config"])
            found = re.search(r"quantization=(\w+)", info)
            if found is None or found.group(1) != "quads":
                raise RefitError(
                    f"{self.url}: serves quantization {found.group(1) if found else None!r}, expected 'quads'; start "
                    f"it with --quantization quads"
                )
        self._checked = True

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """`/collective_rpc`."""
        self.require_quads()
        answer = self._call("POST", "/collective_rpc", {"method": method, "args": list(args)})
        return list(answer["results"]) if isinstance(answer, Mapping) else []

    def init(self, info: Mapping[str, Any]) -> None:
        """`/init_weight_transfer_engine`."""
        self._call("POST", "/init_weight_transfer_engine", {"init_info": dict(info)})

    def start(self) -> None:
        """`/start_weight_update`."""
        self._call("POST", "/start_weight_update")

    def update(self, info: Mapping[str, Any]) -> None:
        """`/update_weights`."""
        self._call("POST", "/update_weights", {"update_info": dict(info)})

    def finish(self) -> None:
        """`/finish_weight_update`."""
        self._call("POST", "/finish_weight_update")

    def set_weight_version(self, version: str) -> None:
        """`/update_weight_version`, which vLLM has since 0.27; before, the version is in `/metrics` alone."""
        try:
            self._call("POST", "/update_weight_version", {"new_version": version})
        except RefitError as e:
            if not (isinstance(e.__cause__, urllib.error.HTTPError) and e.__cause__.code == 404):
                raise

    def pause(self, mode: str) -> None:
        """`/pause`."""
        self._call("POST", "/pause", mode=mode)

    def resume(self) -> None:
        """`/resume`."""
        self._call("POST", "/resume")

    def is_paused(self) -> bool:
        """`/is_paused`."""
        return bool(self._call("GET", "/is_paused")["is_paused"])

    def require_idle(self) -> None:
        """A server can pause."""

    def reset_prefix_cache(self, running: bool) -> bool:
        """`/reset_prefix_cache`."""
        answer = self._call("POST", "/reset_prefix_cache", reset_running_requests=str(running).lower())
        return bool(answer["success"]) if isinstance(answer, Mapping) else True

    def sleep(self, level: int) -> None:
        """`/sleep`, letting running requests finish first."""
        self._call("POST", "/sleep", level=level, mode="wait")

    def wake_up(self, tags: list[str] | None) -> None:
        """`/wake_up`."""
        query: dict[str, Any] = {} if tags is None else {"tags": tags}
        self._call("POST", "/wake_up", **query)

    def world_size(self) -> int:
        """Workers over all data-parallel ranks."""
        return int(self._call("GET", "/get_world_size")["world_size"])


class HttpEngine(RemoteEngine):
    """`vllm_quads.refit.RolloutEngine` for a running server."""

    def __init__(
        self,
        url: str,
        data: DataPlane | str = "auto",
        *,
        in_flight: InFlight | str = InFlight.WAIT,
        directory: str | Path | None = None,
        timeout: float = 300.0,
        api_key: str | None = None,
    ) -> None:
        """Nothing is asked of the server yet.

        Args:
            url: of the server, for example http://localhost:8000.
            data: how tensors travel: "nccl" (GPUs of one cluster, not the trainer's own), "ipc" (the trainer's own
                GPU), "disk" (files in `directory`), or "auto": "disk" without a GPU or with `directory`, else "nccl".
            in_flight: what happens to running requests (see `InFlight`).
            directory: for "disk"; one that both sides see. None fits a server on this machine.
            timeout: seconds to wait for one answer of the server.
            api_key: of the server, if it has one.

        Raises RefitError for an address or a data plane that cannot be.
        """
        self.control = HttpControl(url, timeout, api_key)
        plane = _plane(data, self.control, directory) if isinstance(data, str) else data
        super().__init__(self.control, plane, in_flight)

    def load_checkpoint(
        self, path: str | Path, policy_version: int | None = None, fingerprint: str | None = None
    ) -> RefitReport:
        """Refit from a checkpoint directory that the server reads itself: what `export_checkpoint` or
        `save_pretrained` wrote.

        Args:
            path: as the server sees it.
            policy_version: None counts on from the server's version.
            fingerprint: what `export_checkpoint` reported; None lets the server compute it from the files.

        Raises:
            RefitError: the server refused or failed; the message says which weights serve.
        """
        start = time.perf_counter()
        version = self.policy_version() + 1 if policy_version is None else policy_version
        message = {
            "op": "checkpoint", "path": str(Path(path)), "policy_version": version, "fingerprint": fingerprint,
        }  # fmt: skip
        self._open(message)
        report = self.commit()
        return report.with_seconds(client_total=time.perf_counter() - start)


def _plane(data: str, control: HttpControl, directory: str | Path | None) -> DataPlane:
    import torch

    if data == "auto":
        data = "disk" if directory is not None or not torch.cuda.is_available() else "nccl"
    if data == "disk":
        if directory is None and control.host not in _LOCAL:
            raise RefitError(
                f"{control.url}: is another machine; pass `directory`, a path that the trainer and the server both see"
            )
        return DiskPlane(directory)
    if data in ("nccl", "ipc"):
        if not torch.cuda.is_available():
            raise RefitError(f"data={data!r} needs a GPU for the trainer, and torch sees none; use 'disk'")
        try:
            from vllm_quads.plugin.transfer_send import IpcPlane, NcclPlane
        except ImportError as e:
            raise RefitError(f"data={data!r} uses vLLM's own transport: install vllm beside the trainer ({e})") from e
        return NcclPlane(control.world_size) if data == "nccl" else IpcPlane()
    raise RefitError(f"data: is {data!r}, expected 'auto', 'nccl', 'ipc', 'disk' or a data plane")


def adapt_url(obj: Any) -> HttpEngine | None:
    """Adapter for `vllm_quads.refit.as_engine`: knows addresses of servers."""
    return HttpEngine(obj) if isinstance(obj, str) and obj.startswith(("http://", "https://")) else None


__all__ = ["HttpControl", "HttpEngine", "adapt_url"]
