# SPDX-License-Identifier: Apache-2.0
"""The weight-transfer backend in a worker: vLLM's calls, vLLM's own transports, and what a worker answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from plugin_helpers import scores
from serving_helpers import manifest, train, trainer
from torch import Tensor, nn

pytest.importorskip("vllm")

from trainer_qat import RolloutSync
from vllm_quads.nvfp4 import RefitError
from vllm_quads.plugin import compat, transfer, transfer_send
from vllm_quads.plugin.metrics import RefitMetrics
from vllm_quads.plugin.serving import LlmEngine
from vllm_quads.plugin.transfer_receive import Receivers, decode_handle
from vllm_quads.plugin.transfer_send import IpcPlane, NcclPlane
from vllm_quads.refit import Lasting, as_engine
from vllm_quads.refit.planes import DiskPlane, InlinePlane

WORKER = "weight_transfer_engine"


@pytest.fixture(scope="module")
def shared(tiny_qwen3_moe: Path, module_engine: Callable[..., Any]) -> tuple[Any, Any]:
    return module_engine(tiny_qwen3_moe), trainer(tiny_qwen3_moe)


@pytest.mark.parametrize("plane", [InlinePlane(bucket_bytes=5000), DiskPlane()])
def test_vllms_calls_carry_a_whole_push(shared: tuple[Any, Any], plane: Any) -> None:
    """Through `start_weight_update`, `update_weights` and `finish_weight_update`, in many small buckets, a push gives
    the same weights as the in-process engine's own way."""
    llm, model = shared
    train(model, 1)
    direct = RolloutSync(model, llm)
    report, expected = direct.push(), scores(llm)
    train(model, 2)
    direct.push()
    assert scores(llm) != expected
    train(model, 1)
    sync = RolloutSync(model, LlmEngine(llm, plane))
    pushed = sync.push()
    fingerprint = pushed.fingerprint
    assert pushed.verified
    assert fingerprint == sync.payload.fingerprint() == as_engine(llm).fingerprint() != report.fingerprint
    values = scores(llm)
    direct.push()
    assert scores(llm) == values
    if hasattr(llm, "get_weight_version"):
        assert llm.get_weight_version() == str(as_engine(llm).policy_version() - 1)
    plane.close()


PLAIN = (
    "model.norm.weight", "model.layers.1.mlp.gate.weight", "model.embed_tokens.weight", "lm_head.weight",
    "model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.q_norm.weight",
)  # fmt: skip
"""Some tensors that are not quantized."""


def test_one_bit_of_a_tensor_that_is_not_quantized(shared: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A last bit that flips on the way is noticed whatever carries the tensor: within the process, as bytes in many
    messages, in files; packed and in BF16. The message names it, and the previous weights serve on. Unless it is not to
    be noticed (`verify=False`), which the report says."""
    llm, model = shared
    direct = RolloutSync(model, llm)
    direct.push()
    before = scores(llm)
    train(model, 3)
    damaged = ""

    def flipped(name: str, tensor: Tensor) -> Tensor:
        if name == damaged:
            tensor = tensor.clone()
            tensor.view(torch.int16).view(-1)[-1] ^= 1
        return tensor

    send: dict[type, Any] = {kind: kind.send for kind in (InlinePlane, DiskPlane)}
    for kind in send:

        def damaging(self: Any, control: Any, tensors: Any, kind: type = kind) -> None:
            send[kind](self, control, [(n, flipped(n, t)) for n, t in tensors])

        monkeypatch.setattr(kind, "send", damaging)
    load = type(direct.engine).load

    def loading(self: Any, tensors: Any) -> None:
        load(self, Lasting([(n, flipped(n, t)) for n, t in tensors]))

    monkeypatch.setattr(type(direct.engine), "load", loading)
    ways = [direct, *(RolloutSync(model, LlmEngine(llm, p)) for p in (InlinePlane(bucket_bytes=5000), DiskPlane()))]
    for i, damaged in enumerate(PLAIN):
        for way in (ways[i % 3], ways[(i + 1) % 3]):
            with pytest.raises(RefitError, match=rf"{damaged}: arrived with other bytes.*previous weights keep"):
                way.push(packed=i % 2 == 0)
    assert scores(llm) == before
    report = ways[1].push(verify=False)
    assert not report.verified
    assert "not compared with the trainer" in str(report)
    damaged = ""
    for packed in (True, False):
        assert all(way.push(packed=packed).verified for way in ways)
        after = scores(llm)
    monkeypatch.undo()
    direct.push()
    assert scores(llm) == after != before


def test_metrics_of_an_engine_in_this_process(shared: tuple[Any, Any]) -> None:
    """They are in prometheus_client's own registry, whichever way the push took."""
    from prometheus_client import REGISTRY

    llm, model = shared
    for engine in (llm, LlmEngine(llm)):
        report = RolloutSync(model, engine).push()
        assert REGISTRY.get_sample_value("quads_policy_version", {"engine": "0"}) == report.policy_version
        labels = {"engine": "0", "fingerprint": report.fingerprint}
        assert REGISTRY.get_sample_value("quads_fingerprint_info", labels) == 1
    before = REGISTRY.get_sample_value("quads_refit_total", {"engine": "0", "outcome": "refused"})
    with pytest.raises(RefitError, match="is not newer"):
        RolloutSync(model, llm).push(1)
    after = REGISTRY.get_sample_value("quads_refit_total", {"engine": "0", "outcome": "refused"})
    assert after == (before or 0) + 1


def test_weights_that_are_gone_are_not_reported_as_serving() -> None:
    """After a refit that left nothing to serve, no fingerprint is reported, until the next one has committed."""
    from prometheus_client import REGISTRY

    metrics, labels = RefitMetrics(9), {"engine": "9", "fingerprint": "f" * 16}
    metrics.serves(3, "f" * 16)
    metrics.ended("rolled_back", "tensor")
    assert REGISTRY.get_sample_value("quads_fingerprint_info", labels) == 1
    metrics.ended("broken", "tensor")
    assert not REGISTRY.get_sample_value("quads_fingerprint_info", labels)
    metrics.serves(4, "f" * 16)
    assert REGISTRY.get_sample_value("quads_fingerprint_info", labels) == 1


def test_files_of_metrics_do_not_pile_up(tmp_path: Path) -> None:
    """A worker leaves one file, which goes when it ends, and takes away those of workers that were killed."""
    dead = multiprocessing.get_context("spawn").Process(target=int)
    dead.start()
    dead.join()
    killed = tmp_path / f"quads-metrics-old.0.{dead.pid}.prom"
    running = tmp_path / f"quads-metrics-other.0.{os.getpid()}.prom"
    for file in (killed, running):
        file.write_text("")
    own = tmp_path / f"quads-metrics-new.0.{os.getpid()}.prom"
    with mock.patch("atexit.register") as at_exit:
        RefitMetrics(11, own)
    assert sorted(tmp_path.iterdir()) == sorted([own, running])
    (call,) = at_exit.call_args_list
    call.args[0](**call.kwargs)
    assert list(tmp_path.iterdir()) == [running]


def test_workers_that_share_a_gpu_are_not_sent_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is exported once may be opened by one process: the second would give it back twice."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(transfer_send, "_uuid", lambda i: "gpu-a")
    control = SimpleNamespace(rpc=lambda *_: [{"gpu": "gpu-a"}, {"gpu": "gpu-a"}])
    with pytest.raises(RefitError, match="several workers run on GPU gpu-a; use the NCCL"):
        IpcPlane().connect(control, "x")  # type: ignore[arg-type]


def test_a_worker_answers_questions(shared: tuple[Any, Any]) -> None:
    """Only JSON types, errors included, so that any of vLLM's transports can carry them."""
    llm, _ = shared
    for question in ("status", "describe", "fingerprint", "what?"):
        (answer,) = llm.collective_rpc(WORKER, args=(question,))
        json.dumps(answer)
        assert ("error" in answer) is (question == "what?")


def test_compensation_state_can_be_fetched(shared: tuple[Any, Any]) -> None:
    """What a remote engine gives for an export is what the engine in this process serves with."""
    llm, model = shared
    rollout = LlmEngine(llm)
    rollout.collect_statistics()
    scores(llm)
    RolloutSync(model, rollout).push()
    rollout.collect_statistics(False)
    state, expected = rollout.compensation(), as_engine(llm).compensation()  # type: ignore[attr-defined]
    assert state.sites.keys() == expected.sites.keys()
    assert any(bool(s.blocks.any()) or bool(s.center.any()) for s in state.sites.values())
    for name, site in state.sites.items():
        assert torch.equal(site.blocks, expected.sites[name].blocks)
        assert torch.equal(site.center, expected.sites[name].center)


def test_a_failed_update_does_not_block_the_next(shared: tuple[Any, Any]) -> None:
    """Messages out of order, an unknown operation and an update without a commit are failures that the worker keeps;
    `finish_weight_update` raises what nobody has asked for, and then the worker is ready again."""
    llm, model = shared
    before = as_engine(llm).fingerprint()
    rollout = LlmEngine(llm)
    for message, said in (
        ({"op": "commit"}, "commit came before a manifest"),
        ({"op": "load", "plane": "inline", "data": _bytes({"a": torch.ones(1)})}, "tensors came before a manifest"),
        ({"op": "load", "plane": "pigeon"}, "plane: is 'pigeon'"),
        ({"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[1]]}, r"op is ''.*as_engine or HttpEngine"),
        ({"op": "begin", "manifest": {}}, "not a refit manifest"),
    ):
        llm.start_weight_update()
        llm.update_weights({"update_info": message})
        with pytest.raises(RefitError, match=said):
            llm.finish_weight_update()
        llm.finish_weight_update()
    llm.start_weight_update()
    with pytest.raises(RefitError, match="finished without a commit"):
        llm.finish_weight_update()
    llm.finish_weight_update()
    assert as_engine(llm).fingerprint() == before
    sync = RolloutSync(model, rollout)
    assert sync.push().fingerprint == as_engine(llm).fingerprint()


def test_exceptions_that_vllm_sees_leave_no_update_open(shared: tuple[Any, Any]) -> None:
    """Ctrl-C amid a message, after which vLLM takes the update for closed, and an exception at its end, after which it
    takes it for open: the engine serves the weights of before, or those that were committed, and the next push is
    like any other."""
    llm, model = shared
    train(model, 5)
    sync = RolloutSync(model, LlmEngine(llm, InlinePlane(bucket_bytes=20000)))
    fingerprint, before = sync.push().fingerprint, scores(llm)
    train(model, 6)
    receive, calls = Receivers.receive, itertools.count()

    def interrupted(receivers: Receivers, *arguments: Any) -> None:
        receive(receivers, *arguments)
        if next(calls) == 2:
            raise KeyboardInterrupt

    with mock.patch.object(Receivers, "receive", interrupted), pytest.raises(KeyboardInterrupt):
        sync.push()
    assert (as_engine(llm).fingerprint(), scores(llm)) == (fingerprint, before)
    late = mock.patch.object(transfer, "refuse_together", side_effect=RuntimeError("at the end"))
    with late, pytest.raises(RefitError, match="at the end.*was committed"):
        sync.push()
    report = sync.push()
    assert report.fingerprint == as_engine(llm).fingerprint() != fingerprint
    assert scores(llm) != before
    RolloutSync(model, llm).push()


def test_an_update_of_another_trainer_is_not_aborted(shared: tuple[Any, Any]) -> None:
    """A second trainer's `begin` and `abort` leave the first one's update alone."""
    llm, model = shared
    first, second = (RolloutSync(model, LlmEngine(llm)) for _ in range(2))
    one, other = first.engine, second.engine
    assert one is not None
    assert other is not None
    one.begin(manifest(first, one))
    with pytest.raises(RefitError, match="another trainer's update is open"):
        other.begin(manifest(second, other))
    other.abort()
    one.load(pair for item in first.payload.items() for pair in item.tensors().items())
    assert one.commit().fingerprint == first.payload.fingerprint()


def test_a_trainer_that_was_given_up_does_not_write_into_the_next_push(shared: tuple[Any, Any]) -> None:
    """Workers ignore what it sends, whichever message it is, and it is told; the other's push is whole."""
    llm, model = shared
    hung, other = (RolloutSync(model, LlmEngine(llm)) for _ in range(2))
    one, two = hung.engine, other.engine
    assert isinstance(one, LlmEngine)
    assert isinstance(two, LlmEngine)
    tensors = [pair for item in other.payload.items() for pair in item.tensors().items()]
    for step in ("load", "commit"):
        one.begin(manifest(hung, one))
        two.recover()
        two.begin(manifest(other, two))
        two.load(tensors[:5])
        with pytest.raises(RefitError, match="this push is over"):
            one.load(tensors[5:9]) if step == "load" else one.commit()
        two.load(tensors[5:])
        assert two.commit().fingerprint == other.payload.fingerprint() == two.fingerprint()


def test_while_asleep_at_level_2_nothing_is_answered(shared: tuple[Any, Any]) -> None:
    """The engine refuses a request until the next push, which brings back all that was in the memory of the weights."""
    llm, model = shared
    sync = RolloutSync(model, LlmEngine(llm))
    sync.push()
    values, rollout = scores(llm), sync.engine
    assert isinstance(rollout, LlmEngine)
    rollout._ask("before_sleep")

    def lose(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.reshape(-1).view(torch.uint8).fill_(0x5A)

    llm.apply_model(lose)
    assert rollout.status().state.value == "refusing"
    assert "level 2" in rollout.status().reason
    sync.push()
    assert rollout.status().state.value == "serving"
    assert scores(llm) == values


@pytest.mark.parametrize("option", ["data_parallel_size", "pipeline_parallel_size"])
def test_what_a_refit_cannot_reach_is_refused_by_name(option: str, shared: tuple[Any, Any]) -> None:
    """Replicas behind one address and pipeline stages: the push says which option it was, and what to do."""
    llm, model = shared
    sync = RolloutSync(model, LlmEngine(llm))
    before = as_engine(llm).fingerprint()

    def set_size(worker: Any, size: int) -> None:
        engine = worker.weight_transfer_engine
        sizes = {"data_parallel_size": 1, "pipeline_parallel_size": 1, option: size}
        engine.parallel_config = SimpleNamespace(**sizes)

    llm.collective_rpc(set_size, args=(2,))
    with pytest.raises(RefitError, match=rf"{option}=2: .*; the previous weights keep serving"):
        sync.push()
    llm.collective_rpc(set_size, args=(1,))
    assert as_engine(llm).fingerprint() == before
    sync.push()


@pytest.mark.parametrize(
    ("quantization", "backend", "said"), [("fp8", None, "quantization 'fp8'"), ("quads", "nccl", "backend 'nccl'")]
)
def test_other_engines_are_not_asked(quantization: str, backend: str | None, said: str) -> None:
    """An engine of another quantization, or with another transfer backend, is refused before its workers hear of it."""
    transfer = None if backend is None else SimpleNamespace(backend=backend)
    config = SimpleNamespace(model_config=SimpleNamespace(quantization=quantization), weight_transfer_config=transfer)

    class Engine:
        llm_engine = SimpleNamespace(vllm_config=config)

    llm = Engine()
    with pytest.raises(RefitError, match=said):
        LlmEngine(llm).status()


def _bytes(tensors: dict[str, Tensor]) -> bytes:
    from safetensors.torch import save

    return save(tensors)


# -- vLLM's transports -------------------------------------------------------------------------------------------------


class Group:
    """One rank of a two-rank group, with vLLM's `broadcast`."""

    def __init__(self, mail: queue.Queue[Tensor], rank: int) -> None:
        self._mail, self._rank = mail, rank

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """From rank 0 to rank 1."""
        assert src == 0
        if self._rank == 0:
            self._mail.put(tensor.clone())
        else:
            tensor.copy_(self._mail.get(timeout=10))

    def destroy(self) -> None:
        """Nothing to leave."""


class Sink:
    """Takes what arrives."""

    def __init__(self) -> None:
        self.got: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Keep it."""
        self.got |= {n: t.clone() for n, t in weights}


@pytest.fixture
def receivers() -> tuple[Receivers, Sink]:
    sink = Sink()
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0, world_size=1), model_config=None)
    return Receivers(None, config, torch.device("cpu"), sink), sink


def test_nccl_buckets_go_through_vllms_own_code(
    receivers: tuple[Receivers, Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM's packed broadcast sends, vLLM's receiving engine takes apart into the same tensors, whatever dtypes
    and odd sizes a bucket holds. (Both run here over a group in memory.)"""
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None)
    if hasattr(packed_tensor, "_get_streams"):
        monkeypatch.setattr(packed_tensor, "_get_streams", lambda index, count: (stream,) * count)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *a, **k: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda s: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(transfer_send, "_require_gpu", lambda plane, tensors: None)
    mail: queue.Queue[Tensor] = queue.Queue()
    worker, sink = receivers
    joined: list[dict[str, Any]] = []

    def join(info: Any, parallel: Any) -> Group:
        joined.append({k: getattr(info, k) for k in ("master_address", "master_port", "rank_offset", "world_size")})
        return Group(mail, 1)

    monkeypatch.setattr(nccl_engine, "worker_init_process_group", join)
    monkeypatch.setattr(compat, "join_as_trainer", lambda info: Group(mail, 0))

    class Control:
        def init(self, info: Mapping[str, Any]) -> None:
            worker.init(info["plane"], info["info"])

        def update(self, info: Mapping[str, Any]) -> None:
            json.dumps(info)
            arguments = {k: v for k, v in info.items() if k not in ("op", "plane")}
            worker.receive(info["plane"], arguments)

        def rpc(self, method: str, *args: Any) -> list[Any]:
            return [{"plane_error": None}]

    g = torch.Generator().manual_seed(0)
    tensors = [
        ("codes", torch.randint(0, 255, (3, 5), dtype=torch.uint8, generator=g)),
        ("scale", torch.rand(7, generator=g).to(torch.float8_e4m3fn)),
        ("norm", torch.rand(3, generator=g).to(torch.bfloat16)),
        ("global", torch.rand((), generator=g)),
    ]
    plane = NcclPlane(lambda: 1, address="10.0.0.1", port=5)
    plane.connect(Control(), "engine 1")  # type: ignore[arg-type]
    plane.connect(Control(), "engine 1")  # type: ignore[arg-type]
    assert joined == [{"master_address": "10.0.0.1", "master_port": 5, "rank_offset": 1, "world_size": 2}]
    for _ in range(2):
        plane.send(Control(), tensors)  # type: ignore[arg-type]
        assert sink.got.keys() == dict(tensors).keys()
        for name, tensor in tensors:
            assert sink.got[name].dtype == tensor.dtype
            assert torch.equal(sink.got[name].float(), tensor.float())
        sink.got.clear()
    plane.connect(Control(), "engine 2")  # type: ignore[arg-type]
    assert len(joined) == 2


def test_a_worker_that_cannot_join_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer does not wait for a rendezvous that nobody comes to."""
    gone = threading.Event()
    monkeypatch.setattr(compat, "join_as_trainer", lambda info: gone.wait(30))
    control = SimpleNamespace(
        init=lambda info: None, rpc=lambda *a: [{"plane_error": None}, {"plane_error": "no route to host"}]
    )
    with pytest.raises(RefitError, match="worker 1 could not join: no route to host"):
        NcclPlane(lambda: 2, address="10.0.0.1", port=5).connect(control, "engine 1")  # type: ignore[arg-type]
    gone.set()


def test_ipc_handles_survive_as_json(receivers: tuple[Receivers, Sink], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker gets what torch's `rebuild_cuda_tensor` needs, out of JSON and without pickles, both for single tensors
    and for one shared buffer."""
    handle = [[2, 3], [3, 1], 4, "float8_e4m3fn", 0, "00ff", 4096, 512, "0a", 64, "0b", True]
    args = decode_handle(json.loads(json.dumps(handle)))
    assert args[1:4] == (torch.Size([2, 3]), (3, 1), 4)
    assert args[5:10] == (torch.float8_e4m3fn, 0, b"\x00\xff", 4096, 512)
    assert args[10:] == (False, b"\x0a", 64, b"\x0b", True)

    stored = torch.arange(6.0).reshape(2, 3)
    rebuilt: list[Any] = []

    def rebuild(*values: Any) -> Tensor:
        rebuilt.append(values)
        return stored if values[5] is torch.float32 else stored.view(-1).view(torch.uint8)

    monkeypatch.setattr("torch.multiprocessing.reductions.rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-1"))
    worker, sink = receivers
    single = [*handle[:3], "float32", *handle[4:]]
    worker.receive(
        "ipc", {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 3]], "handles": [{"GPU-1": single}]}
    )
    assert torch.equal(sink.got.pop("w"), stored)
    buffer = [*handle[:3], "uint8", *handle[4:]]
    worker.receive(
        "ipc",
        {"names": ["a", "b"], "dtype_names": ["float32"] * 2, "shapes": [[2], [2, 2]], "handles": {"GPU-1": buffer},
         "tensor_sizes": [8, 16]},
    )  # fmt: skip
    assert torch.equal(sink.got["a"], torch.tensor([0.0, 1.0]))
    assert torch.equal(sink.got["b"], torch.tensor([[2.0, 3.0], [4.0, 5.0]]))
    assert len(rebuilt) == 2
    worker.close()


def test_tensors_on_a_cpu_cannot_travel_by_gpu_transports() -> None:
    """The error names the tensor."""
    for plane in (IpcPlane(), NcclPlane(lambda: 1)):
        with pytest.raises(RefitError, match="a.weight: is on cpu"):
            plane.send(SimpleNamespace(), [("a.weight", torch.ones(1))])  # type: ignore[arg-type]
