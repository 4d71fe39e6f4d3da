# SPDX-License-Identifier: Apache-2.0
"""The gap experiment's capture: every arm decodes given tokens on the real path and reports its own distributions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")

from vllm_quads.gap.capture import engine_options, force_decode, sample  # noqa: E402
from vllm_quads.nvfp4.errors import QuadsError  # noqa: E402

VOCABULARY, EOS, MAX_LEN = 256, 2, 96


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-mixtral")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.3,  # spread-out distributions
        eos_token_id=EOS,
        dtype="bfloat16",
    )
    transformers.MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as env:
        env.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        env.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        env.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        env.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        env.setenv("HF_HUB_OFFLINE", "1")
        options = engine_options()
        from vllm import LLM

        # few seats and a small token budget: requests queue, prompts are prefilled in chunks, rows move
        engine = LLM(
            str(model_dir),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=MAX_LEN,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            **{**options, "enable_chunked_prefill": True},
        )
        yield engine


def _requests() -> tuple[list[list[int]], list[list[int]]]:
    """Nine prompts, some longer than one prefill chunk, and tokens of uneven lengths with end tokens in the middle."""
    draw = torch.Generator().manual_seed(1)
    lengths = [(5, 3), (50, 9), (12, 1), (7, 14), (40, 6), (3, 20), (33, 2), (9, 8), (21, 11)]
    prompts = [torch.randint(3, VOCABULARY, (p,), generator=draw).tolist() for p, _ in lengths]
    tokens = [torch.randint(3, VOCABULARY, (t,), generator=draw).tolist() for _, t in lengths]
    tokens[3][5] = tokens[5][0] = tokens[7][-1] = EOS
    return prompts, tokens


def _short_prompts() -> list[list[int]]:
    """Prompts that four seats never have to chunk (`sample` refuses others on CPU)."""
    return [prompt[:8] for prompt in _requests()[0]]


def _at(distributions: list[torch.Tensor], token_ids: list[list[int]]) -> list[torch.Tensor]:
    return [d[torch.arange(len(t)), t] for d, t in zip(distributions, token_ids, strict=True)]


def test_forced_tokens_are_decoded_with_the_models_own_logprobs(llm: Any) -> None:
    """The engine emits exactly the given tokens, past end tokens too, and the recorded distribution of each position
    is normalized and gives the log-prob that the engine reports for the token."""
    prompts, tokens = _requests()
    arm = force_decode(llm, prompts, tokens)
    assert (arm.prompt_token_ids, arm.token_ids) == (prompts, tokens)
    assert arm.distributions is not None
    for distribution, logprobs, t, at in zip(
        arm.distributions, arm.logprobs, tokens, _at(arm.distributions, tokens), strict=True
    ):
        assert distribution.shape == (len(t), VOCABULARY)
        assert distribution.dtype == torch.float32
        torch.testing.assert_close(distribution.logsumexp(-1), torch.zeros(len(t)), rtol=0, atol=1e-5)
        torch.testing.assert_close(at, logprobs, rtol=0, atol=1e-6)
    assert min(float(x.min()) for x in arm.logprobs) < -5  # tokens that the model would hardly choose


def test_each_request_gets_the_distributions_of_its_own_context(llm: Any, model_dir: Path) -> None:
    """Row by row, the recorded distributions are those of the same model in transformers on prompt + tokens: no row
    is mixed up when requests queue, chunk, finish and move."""
    prompts, tokens = _requests()
    recorded = force_decode(llm, prompts, tokens).distributions
    assert recorded is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    divergences = []
    for prompt, t, actual in zip(prompts, tokens, recorded, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + t])).logits[0, len(prompt) - 1 : -1]
        expected = logits.double().log_softmax(-1)
        divergences.append((expected.exp() * (expected - actual.double())).sum(-1))
    kl = torch.cat(divergences)
    assert kl.median() < 2e-3
    # bfloat16 may flip the second of two near-equal experts now and then; a wrong context costs several nats
    assert (kl > 0.1).float().mean() < 0.05, kl.sort().values[-6:]


def test_recording_and_forcing_change_nothing(llm: Any) -> None:
    """Decoding sampled tokens again gives the log-probs and distributions of the sampling, bit for bit, with and
    without recording."""
    prompts = _short_prompts()
    once = sample(llm, prompts, max_tokens=12, temperature=1.0, seed=3, distributions=True)
    again = force_decode(llm, prompts, once.token_ids)
    plain = force_decode(llm, prompts, once.token_ids, distributions=False)
    assert plain.distributions is None
    assert once.distributions is not None
    assert again.distributions is not None
    for a, b, c in zip(once.logprobs, again.logprobs, plain.logprobs, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    for a, b in zip(once.distributions, again.distributions, strict=True):
        assert torch.equal(a, b)


def test_free_sampling_records_what_the_engine_sampled(llm: Any) -> None:
    """Sampling is reproducible by its seed, stops at the end token or the limit, and greedy takes the argmax."""
    prompts = _short_prompts()
    first = sample(llm, prompts, max_tokens=12, temperature=1.0, seed=3)
    assert first.token_ids == sample(llm, prompts, max_tokens=12, temperature=1.0, seed=3).token_ids
    assert first.token_ids != sample(llm, prompts, max_tokens=12, temperature=1.0, seed=99).token_ids
    assert all(len(t) == 12 or t[-1] == EOS for t in first.token_ids)
    greedy = sample(llm, prompts, max_tokens=12, temperature=0.0, distributions=True)
    assert greedy.distributions is not None
    for distribution, tokens in zip(greedy.distributions, greedy.token_ids, strict=True):
        assert distribution.argmax(-1).tolist() == tokens


def test_seeded_sampling_that_would_kill_the_engine_is_refused(llm: Any) -> None:
    """vLLM on CPU dies when it prefills a seeded request in chunks: one clear error, and the engine lives on."""
    prompts, _ = _requests()
    if torch.cuda.is_available():
        pytest.skip("only on CPU")
    with pytest.raises(QuadsError, match="enable_chunked_prefill=False"):
        sample(llm, prompts, max_tokens=4)
    assert len(sample(llm, prompts, max_tokens=4, temperature=0.0).token_ids) == len(prompts)


def test_ordinary_requests_pass_through(llm: Any) -> None:
    """A request that asks for nothing is not touched, also beside others: greedy decoding equals captured greedy."""
    from vllm import SamplingParams

    prompts = _short_prompts()
    expected = sample(llm, prompts, max_tokens=8, temperature=0.0)
    params = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == expected.token_ids


def test_rows_follow_the_persistent_batch(llm: Any) -> None:
    """Adding, replacing, removing, one-way moves and swaps of batch rows keep each request's tokens with its row."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    from vllm_quads.gap.processor import FORCED, CaptureProcessor

    processor = CaptureProcessor(None, torch.device("cpu"), False)  # type: ignore[arg-type]
    outputs: dict[str, list[int]] = {name: [] for name in "abcd"}

    def request(name: str, forced: list[int] | None) -> tuple[SamplingParams, list[int], list[int]]:
        return SamplingParams(extra_args=None if forced is None else {FORCED: forced}), [7], outputs[name]

    def forced_tokens(rows: int) -> list[int | None]:
        original = torch.randn(rows, 16)
        logits = processor.apply(original.clone())
        result: list[int | None] = []
        for before, after in zip(original, logits, strict=True):
            free = torch.equal(before, after)
            assert free or after.isinf().sum() == 15
            result.append(None if free else int(after.argmax()))
        return result

    def update(
        size: int, removed: list[int] | None = None, added: list[Any] | None = None, moved: list[Any] | None = None
    ) -> None:
        processor.update_state(BatchUpdate(size, removed or [], added or [], moved or []))

    update(3, added=[(0, *request("a", [1, 2])), (1, *request("b", None)), (2, *request("c", [5, 6, 7]))])
    assert forced_tokens(3) == [1, None, 5]
    for name in "abc":
        outputs[name].append(0)
    processor.update_state(None)
    assert forced_tokens(3) == [2, None, 6]
    update(3, moved=[(0, 2, MoveDirectionality.SWAP)])
    assert forced_tokens(3) == [6, None, 2]
    update(3, moved=[(0, 1, MoveDirectionality.SWAP)])  # with a row that is not tracked
    assert forced_tokens(3) == [None, 6, 2]
    outputs["a"].append(0)  # at its end: free again
    assert forced_tokens(3) == [None, 6, None]
    update(2, removed=[0], moved=[(2, 0, MoveDirectionality.UNIDIRECTIONAL)])
    assert forced_tokens(2) == [None, 6]
    update(2, added=[(0, *request("d", [9]))])  # takes the row over
    assert forced_tokens(2) == [9, 6]
    update(1, removed=[0], moved=[(1, 0, MoveDirectionality.UNIDIRECTIONAL)])
    assert forced_tokens(1) == [6]
    update(0, removed=[0])
    assert processor._rows == {}


@pytest.mark.parametrize(
    ("prompts", "tokens", "message"),
    [
        ([[5, 6]], [[3], [4]], "1 prompts but 2 token sequences"),
        ([[5, 6], [7]], [[3], []], "sequence 1: token ids to decode must be at least one"),
        ([[5, 6]], [[3, VOCABULARY]], r"sequence 0: .*0\.\.255"),
        ([[5] * 90], [[3] * 7], "sequence 0: 90 prompt.*max_model_len=96"),
    ],
)
def test_impossible_tokens_are_refused(llm: Any, prompts: Any, tokens: Any, message: str) -> None:
    """Tokens that cannot be decoded are one clear error before anything runs."""
    with pytest.raises(QuadsError, match=message):
        force_decode(llm, prompts, tokens)


@pytest.mark.parametrize(
    ("processors", "mode", "message"),
    [(None, "raw_logprobs", "engine_options"), ("ours", "processed_logprobs", "logprobs_mode='raw_logprobs'")],
)
def test_an_unfit_engine_is_refused(processors: Any, mode: str, message: str) -> None:
    """An engine without the processor, or whose log-probs are not the model's own, is named as such."""
    from vllm_quads.gap.processor import CaptureProcessor

    config = SimpleNamespace(
        logits_processors=[CaptureProcessor] if processors else None,
        logprobs_mode=mode,
        max_model_len=MAX_LEN,
        get_vocab_size=lambda: VOCABULARY,
    )
    engine: Any = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(model_config=config)))
    with pytest.raises(QuadsError, match=message):
        sample(engine, [[5]], max_tokens=1)
    with pytest.raises(QuadsError, match=message):
        force_decode(engine, [[5]], [[6]])


def test_missing_distributions_are_an_error(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the engine recorded nothing (it runs in another process), that is said instead of returning less."""
    from vllm_quads.gap import processor

    monkeypatch.setattr(processor.Recording, "write", lambda self, position, row: None)
    with pytest.raises(QuadsError, match=r"0 of 2 distributions.*VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        force_decode(llm, [[5, 6]], [[3, 4]])
    assert processor.RECORDINGS == {}
