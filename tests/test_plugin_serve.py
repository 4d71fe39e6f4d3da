# SPDX-License-Identifier: Apache-2.0
"""The server: plain `vllm serve MODEL --quantization quads`, with the plugin found by its entry points alone.

One server for all tests, which push into it and read its metrics.
"""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_helpers import PROMPTS
from serving_helpers import complete, get, manifest, post, serving, train, trainer, with_tokenizer
from torch import nn

pytest.importorskip("vllm")

from trainer_qat import RolloutSync, export_checkpoint
from vllm_quads.nvfp4 import Contract, RefitError
from vllm_quads.refit import HttpEngine, as_engine

OPTIONS = {"compensation": {"form": "rows"}}
pytestmark = pytest.mark.slow


@dataclass
class Server:
    """A server that is ready, its trainer, and what it said first."""

    url: str
    model_path: Path
    log: Path
    trainer: nn.Module
    first: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.first = {n: t.clone() for n, t in self.trainer.state_dict().items()}
        self.fresh = self.scores()

    def scores(self) -> list[tuple[list[int], list[float], str]]:
        """Greedy answers to a few prompts; equal answers mean equal weights."""
        return [complete(self.url, p) for p in PROMPTS]

    def metric(self, name: str, **labels: str) -> float:
        """Value of one metric, 0 if there is none."""
        for line in get(f"{self.url}/metrics").splitlines():
            if re.match(rf"{name}[{{ ]", line) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        return 0.0


@pytest.fixture(scope="module")
def server(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("serve")
    model = with_tokenizer(tiny_qwen3_moe, directory / "model")
    log = directory / "server.log"
    # One request at a time: a CPU's matrix products may depend on the batch in their last bits.
    options = ("--enforce-eager", "--max-num-seqs", "1", "--additional-config", json.dumps({"quads": OPTIONS}))
    options += ("--logprobs-mode", "processed_logprobs")  # greedy decoding gives the same under any mode
    with serving(model, log, *options, VLLM_SERVER_DEV_MODE="1") as url:
        yield Server(url, model, log, trainer(tiny_qwen3_moe, OPTIONS))


def test_served_logprobs_equal_those_of_an_in_process_engine(server: Server, engine: Callable[..., Any]) -> None:
    """The server quantizes, routes and multiplies as the in-process engine with the same options does, to the last bit
    that HTTP carries, and it logs what it quantized."""
    from vllm import SamplingParams

    llm = engine(server.model_path, additional_config={"quads": OPTIONS})
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=1, ignore_eos=True, detokenize=False)
    (mine,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)
    tokens = list(mine.outputs[0].token_ids)
    served_tokens, values, _ = server.fresh[0]
    assert served_tokens == tokens
    expected = [entry[t].logprob for entry, t in zip(mine.outputs[0].logprobs, tokens, strict=True)]
    assert values == pytest.approx(expected, abs=1e-6)
    assert "quads: 24 of" in server.log.read_text()
    assert as_engine(llm).fingerprint() == as_engine(server.url).fingerprint()


def test_pushes_over_http(server: Server) -> None:
    """A trainer in another process pushes packed and BF16 weights through files; both sides have one fingerprint, and
    policy A pushed again gives the answers of the server's own load. Version and metrics follow."""
    model = server.trainer
    sync = RolloutSync(model, server.url)
    train(model, 1)
    report = sync.push()
    changed = server.scores()
    assert changed != server.fresh
    assert report.fingerprint == sync.payload.fingerprint() == as_engine(server.url).fingerprint()
    sync.push(packed=False)
    assert server.scores() == changed
    model.load_state_dict(server.first)
    report = sync.push(7)
    assert server.scores() == server.fresh
    assert as_engine(server.url).policy_version() == 7 == server.metric("quads_policy_version")
    assert server.metric("quads_fingerprint_info", fingerprint=report.fingerprint) == 1
    assert server.metric("quads_refit_total", outcome="committed") == 3
    assert server.metric("quads_refit_bytes_total", payload="packed") == 2 * report.bytes
    assert server.metric("quads_refit_bytes_total", payload="bf16") > report.bytes
    assert server.metric("quads_refit_seconds_count", phase="verify") == 3
    assert _weight_info(server.url) in (None, "7")  # a route of vLLM 0.27 and newer


def _weight_info(url: str) -> str | None:
    try:
        return str(json.loads(get(f"{url}/weight_info"))["weight_version"])
    except urllib.error.HTTPError:
        return None


def test_reload_from_checkpoints(server: Server, engine: Callable[..., Any], tmp_path: Path) -> None:
    """A directory of `export_checkpoint` and one of `save_pretrained` are read by the server itself; afterwards it
    answers as a fresh engine on that directory."""
    from vllm import SamplingParams

    model = server.trainer
    rollout = HttpEngine(server.url)
    train(model, 2)
    exported = export_checkpoint(model, tmp_path / "packed")
    report = rollout.load_checkpoint(exported.path, fingerprint=exported.fingerprint)
    assert report.fingerprint == exported.fingerprint == rollout.fingerprint()
    values = server.scores()
    llm = engine(exported.path, additional_config={"quads": OPTIONS})
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=0, ignore_eos=True, detokenize=False)
    (mine,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)
    assert values[0][0] == list(mine.outputs[0].token_ids)
    assert values[0][1] == pytest.approx([next(iter(e.values())).logprob for e in mine.outputs[0].logprobs], abs=1e-6)
    model.save_pretrained(tmp_path / "bf16")
    assert rollout.load_checkpoint(tmp_path / "bf16").fingerprint == exported.fingerprint
    assert server.scores() == values
    model.load_state_dict(server.first)
    export_checkpoint(model, tmp_path / "first")
    rollout.load_checkpoint(tmp_path / "first")  # without a fingerprint: the server computes it from the files
    assert server.scores() == server.fresh


def test_what_must_not_be_served_is_refused(server: Server, tmp_path: Path) -> None:
    """Wrong version, wrong contract, NaN, an expert that is missing, a directory that is not there, a file that is
    truncated: each is refused with its name, the previous answers stay, and the refusal is counted."""
    model, rollout = server.trainer, HttpEngine(server.url)
    model.load_state_dict(server.first)
    sync = RolloutSync(model, rollout)
    sync.push()
    version, fingerprint = rollout.policy_version(), rollout.fingerprint()
    counted = [server.metric("quads_refit_total", outcome=o) for o in ("refused", "rolled_back", "broken")]

    def refused(said: str, attempt: Callable[[], Any]) -> None:
        with pytest.raises(RefitError, match=said):
            attempt()
        assert (rollout.policy_version(), rollout.fingerprint()) == (version, fingerprint)

    refused(rf"policy version {version} is not newer", lambda: sync.push(version))
    refused("previous weights keep serving", lambda: _push_damaged(sync, rollout, lambda name: "layers.1" in name))
    other = trainer(server.model_path, {"compensation": {"form": "blocks"}})
    export_checkpoint(other, tmp_path / "other")
    refused(r"compensation\.form", lambda: rollout.load_checkpoint(tmp_path / "other"))
    refused("is not a directory", lambda: rollout.load_checkpoint(tmp_path / "nowhere"))
    good = export_checkpoint(model, tmp_path / "good")
    refused("they do not hold the same", lambda: rollout.load_checkpoint(good.path, fingerprint="0" * 16))
    shard = good.path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    refused("truncated", lambda: rollout.load_checkpoint(good.path))
    assert server.scores() == server.fresh
    now = [server.metric("quads_refit_total", outcome=o) for o in ("refused", "rolled_back", "broken")]
    assert [after - before for after, before in zip(now, counted, strict=True)] == [4, 2, 0]
    reasons = {r: server.metric("quads_refit_refusals_total", reason=r) for r in ("manifest", "tensor", "verification")}
    assert (reasons["manifest"], reasons["tensor"], reasons["verification"]) == (4, 1, 1)
    assert not json.loads(get(f"{server.url}/is_paused"))["is_paused"]


def _push_damaged(sync: RolloutSync, rollout: HttpEngine, where: Callable[[str], bool]) -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for item in sync.payload.items():
            for name, tensor in item.tensors().items():
                if where(name) and name.endswith("input_layernorm.weight"):
                    tensor = torch.full_like(tensor, torch.nan)
                yield name, tensor

    rollout.begin(manifest(sync, rollout))
    rollout.load(stream())
    rollout.commit()


def test_a_trainer_that_is_killed_half_way(server: Server) -> None:
    """The server waits with half of a push; another trainer is told so, recovers it, and the old answers are back."""
    model, rollout = server.trainer, HttpEngine(server.url)
    model.load_state_dict(server.first)
    sync = RolloutSync(model, rollout)
    sync.push()
    dead = HttpEngine(server.url)
    train(model, 3)
    dead.begin(manifest(sync, dead))
    dead.load(pair for item in list(sync.payload.items())[:20] for pair in item.tensors().items())
    del dead
    with pytest.raises(RefitError, match=r"another trainer's update is open.*recover\(\)"):
        sync.push()
    rollout.recover()
    assert server.scores() == server.fresh


def test_requests_during_a_push_see_one_policy_each(server: Server) -> None:
    """Clients that send all the time get the old answer or the new one, never a third; first old ones, then new ones.
    None is lost."""
    model = server.trainer
    model.load_state_dict(server.first)
    sync = RolloutSync(model, server.url)
    sync.push()
    prompt = PROMPTS[1]
    old = complete(server.url, prompt, 24)
    train(model, 4)
    answers: list[list[Any]] = [[] for _ in range(3)]
    stop = threading.Event()

    def client(mine: list[Any]) -> None:
        while not stop.is_set():
            mine.append(complete(server.url, prompt, 24))

    threads = [threading.Thread(target=client, args=(mine,)) for mine in answers]
    for thread in threads:
        thread.start()
    time.sleep(0.4)
    sync.push()
    time.sleep(0.4)
    stop.set()
    for thread in threads:
        thread.join(60)
    new = complete(server.url, prompt, 24)
    assert new != old
    for mine in answers:
        kinds = [(answer != old) + (answer not in (old, new)) for answer in mine]
        assert kinds == sorted(kinds)
        assert {0, 1} == set(kinds)
    model.load_state_dict(server.first)
    sync.push()


def test_calls_that_speak_another_protocol_are_refused(server: Server) -> None:
    """vLLM's own calls without QUADS' manifest: the error says what to use, and the next push succeeds."""
    post(f"{server.url}/start_weight_update")
    post(
        f"{server.url}/update_weights", {"update_info": {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[1]]}}
    )
    with pytest.raises(urllib.error.HTTPError):
        post(f"{server.url}/finish_weight_update")
    assert "refitted through vllm_quads.refit.as_engine or HttpEngine" in server.log.read_text()
    post(f"{server.url}/finish_weight_update")
    server.trainer.load_state_dict(server.first)
    RolloutSync(server.trainer, server.url).push()
    assert server.scores() == server.fresh


def test_trl_server_mode_pushes_over_http(server: Server, tmp_path: Path) -> None:
    """GRPOTrainer with vllm_mode="server" samples from this server, and each of its policies reaches it through a
    verified push: one fingerprint on both sides at every step."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    from datasets import Dataset
    from test_integration_trl import Watch, config, reward
    from transformers import PreTrainedTokenizerFast

    from trainer_qat.integrations.trl import QuadsGRPOTrainer

    assert issubclass(QuadsGRPOTrainer, trl.GRPOTrainer)
    before = as_engine(server.url).policy_version()
    trainer = QuadsGRPOTrainer(
        str(server.model_path),
        reward,
        args=config(tmp_path, vllm_mode="server", vllm_server_base_url=server.url, max_steps=2),
        train_dataset=Dataset.from_dict({"prompt": ["w5 w9 w12", "w3 w4"] * 4}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(server.model_path, eos_token="w1", pad_token="w2"),
        contract=Contract().merged(OPTIONS),
    )
    watch = Watch(trainer, server.url)
    trainer.add_callback(watch)
    trainer.train()
    assert [(mine == theirs, version - before) for mine, theirs, version in watch.seen] == [(True, 1), (True, 2)]
    assert watch.seen[0][0] != watch.seen[1][0]
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 2
    assert all(0 < line["quads/sampling_logp_difference/mean"] < 0.5 for line in lines)
