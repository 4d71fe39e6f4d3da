# SPDX-License-Identifier: Apache-2.0
"""One compensated operand: its three forms multiply the same numbers, and what it costs and keeps is as documented."""

from __future__ import annotations

import pytest
import torch
from rac_data import activations, packed, random_site
from torch import Tensor

from vllm_quads.compensation import (
    Compensated,
    linear_forward,
    merged,
    prepare_matrix,
    quantize_with_residual,
    token_forms,
    uses_blocks,
)
from vllm_quads.compensation.forms import appended, appended_weight, columns_of, stacked, sum_pairs
from vllm_quads.compensation.linear import PreparedMatrix, multiply
from vllm_quads.nvfp4 import BlockScaleRule, Compensation, Contract, Form, Scheme, quantize_blocks

M, N, K = 13, 40, 96
RULES = list(BlockScaleRule)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrix(blocks: Tensor | None = None, center: Tensor | None = None) -> PreparedMatrix:
    weight = packed(N, K)
    return prepare_matrix(weight.scaled(), weight.decode_scale.expand(N), blocks, center)


def dense() -> Tensor:
    return packed(N, K).dequantize().to(torch.float64)


def assert_product(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """y equals x @ weight.T (float64) within what float32 accumulation may lose."""
    bound = 1e-6 * (x.abs() @ weight.abs().T)
    assert (y.to(torch.float64) - x @ weight.T).abs().le(bound).all()


def f64(c: Compensated) -> tuple[Tensor, Tensor]:
    """Dequantized Q(x) and Q(r) in float64."""
    return c.main.dequantize().to(torch.float64), c.residual.dequantize().to(torch.float64)


def forms_of(form: Form, m: int, decode: Tensor | None = None):  # type: ignore[no-untyped-def]
    return token_forms(form, m, decode, torch.device("cpu"))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_appended_form_is_the_formula(rule: BlockScaleRule, dtype: torch.dtype) -> None:
    """Appended blocks compute Q(x) W + Q(r)[S] W[:, S]: operands bit for bit, the product within FP32 summation."""
    blocks = random_site(K).blocks[0]
    columns = columns_of(blocks)
    c = quantize_with_residual(activations(M, K, dtype=dtype), rule=rule)
    operand = appended(c, columns)
    assert torch.equal(operand[:, :K], c.main.scaled())
    assert torch.equal(operand[:, K:], c.residual.scaled()[:, columns])
    weight = packed(N, K).scaled()
    assert torch.equal(appended_weight(weight, columns)[:, K:], weight[:, columns])

    main, residual = f64(c)
    y = multiply(c, forms_of(Form.BLOCKS, M), matrix(blocks))
    assert_product(y, torch.cat((main, residual[:, columns]), 1), torch.cat((dense(), dense()[:, columns]), 1))


@pytest.mark.parametrize("rule", RULES)
def test_all_blocks_rows_and_merged_are_one_product(rule: BlockScaleRule) -> None:
    """All blocks appended, the residual as a second row, and the merged operand differ only by FP32 summation."""
    c = quantize_with_residual(activations(M, K), rule=rule)
    everything = torch.ones(K // 16, dtype=torch.bool)
    blocks = multiply(c, forms_of(Form.BLOCKS, M), matrix(everything))
    rows = multiply(c, forms_of(Form.ROWS, M), matrix(everything))
    one = merged(c, dtype=torch.float32) @ packed(N, K).scaled().T * c.main.decode_scale * packed(N, K).decode_scale
    main, residual = f64(c)
    for y in (blocks, rows, one):
        assert_product(y, main + residual, dense())
    assert torch.equal(stacked(c)[0::2], c.main.scaled())
    assert torch.equal(stacked(c)[1::2], c.residual.scaled())
    assert torch.equal(sum_pairs(torch.tensor([[1.0], [2.0], [3.0], [5.0]])), torch.tensor([[3.0], [8.0]]))


@pytest.mark.parametrize("rule", RULES)
def test_operands_are_exact_in_16_bits_and_their_sum_in_32(rule: BlockScaleRule) -> None:
    """q * s survives BF16 and FP16 unchanged in every form but merged, whose sum is exact in FP32."""
    c = quantize_with_residual(activations(64, K) * torch.logspace(-20, 20, 64)[:, None], rule=rule)
    for operand in (appended(c, columns_of(random_site(K).blocks[0])), stacked(c)):
        assert torch.equal(operand.to(torch.bfloat16).to(torch.float32), operand)
        assert torch.equal(operand.to(torch.float16).to(torch.float32), operand)
    exact = c.main.scaled().to(torch.float64) + c.residual.scaled().to(torch.float64)
    assert torch.equal(merged(c, dtype=torch.float32).to(torch.float64), exact)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)])
def test_merged_form_rounds_within_its_bound(rule: BlockScaleRule, dtype: torch.dtype, bound: float) -> None:
    """Each merged element is Q(x) + Q(r) (chosen blocks only) with one rounding: 2^-11 in FP16, 2^-8 in BF16."""
    blocks = random_site(K).blocks[0]
    c = quantize_with_residual(activations(200, K), rule=rule)
    exact = c.main.scaled() + c.residual.scaled() * blocks.repeat_interleave(16)
    got = merged(c, blocks, dtype)
    assert got.dtype == dtype
    error = (got.to(torch.float32) - exact).abs()
    assert (error <= bound * exact.abs()).all()
    assert error.any()  # the bound is about something


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_removes_the_quantization_error(rule: BlockScaleRule, dtype: torch.dtype) -> None:
    """The full residual removes at least 98 % of the operand's squared error, chosen blocks exactly their own."""
    x = activations(300, K, dtype=dtype)
    main, residual = f64(quantize_with_residual(x, rule=rule))
    x = x.to(torch.float64)
    before, after = (x - main).square(), (x - main - residual).square()
    assert after.sum() <= 0.02 * before.sum()
    channels = random_site(K).blocks[0].repeat_interleave(16)
    partly = (x - main - residual * channels).square()
    assert torch.equal(partly[:, channels], after[:, channels])
    assert torch.equal(partly[:, ~channels], before[:, ~channels])
    assert after.sum() < partly.sum() < before.sum()


@pytest.mark.parametrize("form", [Form.NONE, Form.BLOCKS, Form.ROWS])
def test_centring_is_undone_by_the_bias(form: Form) -> None:
    """Subtracting a channel offset and adding W @ offset gives the exact product up to the quantization error."""
    x = activations(M, K)
    site = random_site(K, centered=True)
    center = x.mean(dim=0)
    c = quantize_with_residual(x, center=center)
    blocks = None if form is Form.NONE else site.blocks[0]
    y = multiply(c, forms_of(form, M), matrix(blocks, center))

    main, residual = f64(c)
    keep = {Form.NONE: torch.zeros(K), Form.BLOCKS: site.blocks[0].repeat_interleave(16), Form.ROWS: torch.ones(K)}
    operand = torch.cat((main + residual * keep[form], center.to(torch.float64).expand(M, K)), dim=1)
    assert_product(y, operand, torch.cat((dense(), dense()), dim=1))

    plain = quantize_with_residual(x).main.dequantize()
    assert (main + center - x).square().sum() < (plain - x).square().sum()  # an offset is worth removing


def tree_sum(e: Tensor) -> Tensor:
    """The documented order: halves of the block, then halves of those."""
    while e.shape[-1] > 1:
        e = e[..., : e.shape[-1] // 2] + e[..., e.shape[-1] // 2 :]
    return e.squeeze(-1)


def block_errors(x: Tensor, g: Tensor, rule: BlockScaleRule) -> Tensor:
    """Squared float32 errors [B, 16] of single-block rows."""
    return (x - quantize_blocks(x, g, rule).dequantize()).square()


def test_four_over_six_is_never_worse_than_six() -> None:
    """Under one global scale no block has a larger squared error with four-over-six, and many have a smaller one."""
    x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
    g = torch.tensor(1536.0) / x.abs().max()
    six = tree_sum(block_errors(x, g, BlockScaleRule.MAX_TO_SIX))
    four = tree_sum(block_errors(x, g, BlockScaleRule.FOUR_OVER_SIX))
    assert (four <= six).all()
    assert (four < six).float().mean() > 0.2


def test_four_over_six_breaks_near_ties_in_tree_order() -> None:
    """Where float32 summation order decides between 4 and 6, the order is halves of the block, not left to right."""
    gen = torch.Generator().manual_seed(3)
    x = torch.randint(-12, 13, (6000, 16), generator=gen) / 7.0
    x[:, 0] = 12.0 / 7.0
    g = torch.tensor(700.0)
    six = quantize_blocks(x, g)
    # The other candidate: the same blocks with the block scale of amax -> 4, found by asking for a 1.5x larger amax.
    scaled = quantize_blocks(torch.cat((x, x[:, :1] * 1.5 * torch.eye(1, 16)), dim=1), g).scales[:, 1]
    s4 = scaled.to(torch.float32)[:, None]
    o = 1.0 / (s4 * six.decode_scale)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    y = (x * o).abs()
    nearest = grid[(y[..., None] - grid).abs().argmin(dim=-1)]  # 12/7 scaled by 1.5 leaves no exact ties
    e4 = (x - (nearest * torch.sign(x) * s4) * six.decode_scale).square()
    e6 = block_errors(x, g, BlockScaleRule.MAX_TO_SIX)
    want = tree_sum(e4) < tree_sum(e6)
    got = quantize_blocks(x, g, BlockScaleRule.FOUR_OVER_SIX)
    assert torch.equal(got.scales.to(torch.float32), torch.where(want[:, None], s4, six.scales.to(torch.float32)))

    def left_to_right(e: Tensor) -> Tensor:
        total = torch.zeros(e.shape[0])
        for column in e.T:
            total = total + column
        return total

    assert (want != (left_to_right(e4) < left_to_right(e6))).any()  # the order matters on these blocks


@pytest.mark.parametrize("rule", RULES)
def test_a_token_has_the_same_bits_alone_and_in_a_batch(rule: BlockScaleRule) -> None:
    """Per-token scales: main and residual of a token do not depend on the other tokens of its step, in either form."""
    x, center = activations(M, K), random_site(K, centered=True).center
    decode = torch.arange(M) % 3 == 0
    blocks = random_site(K).blocks[0]
    together = quantize_with_residual(x, rule=rule, center=center)
    y = multiply(together, forms_of(Form.AUTO, M, decode), matrix(blocks, center))
    for i in range(M):
        alone = quantize_with_residual(x[i : i + 1], rule=rule, center=center)
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a.codes()[0], b.codes()[i])
            assert torch.equal(a.scales.view(torch.uint8)[0], b.scales.view(torch.uint8)[i])
            assert torch.equal(a.decode_scale[0], b.decode_scale[i])
        one = multiply(alone, forms_of(Form.AUTO, 1, decode[i : i + 1]), matrix(blocks, center))
        torch.testing.assert_close(one[0], y[i], rtol=1e-5, atol=1e-5 * float(y.abs().max()))


def test_auto_gives_decode_tokens_rows_and_others_blocks() -> None:
    """AUTO: a decode token is multiplied as ROWS would, any other as BLOCKS would; unknown counts as prefill."""
    x, blocks = activations(M, K), random_site(K).blocks[0]
    c, decode = quantize_with_residual(x), torch.arange(M) % 2 == 1
    auto = multiply(c, forms_of(Form.AUTO, M, decode), matrix(blocks))
    rows, part = (multiply(c, forms_of(f, M), matrix(blocks)) for f in (Form.ROWS, Form.BLOCKS))
    tolerance = {"rtol": 1e-5, "atol": 1e-5 * float(rows.abs().max())}
    torch.testing.assert_close(auto, torch.where(decode[:, None], rows, part), **tolerance)
    assert (rows - part).abs().max() > 100 * tolerance["atol"]
    assert torch.equal(multiply(c, forms_of(Form.AUTO, M), matrix(blocks)), part)


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("mask", [None, "mixed", "all", "none"])
def test_every_token_has_one_form(form: Form, mask: str | None) -> None:
    """rows and blocks of `token_forms` are disjoint and cover the step; only AUTO looks at the mask."""
    decode = {None: None, "mixed": torch.arange(7) % 2 == 0, "all": torch.ones(7) > 0, "none": torch.ones(7) < 0}[mask]
    forms = forms_of(form, 7, decode)
    assert sorted(forms.rows.tolist() + forms.blocks.tolist()) == list(range(7))
    if form is Form.AUTO:
        assert forms.rows.tolist() == ([] if decode is None else decode.nonzero().flatten().tolist())
    else:
        assert len(forms.rows) == (7 if form is Form.ROWS else 0)


def test_contracts_that_multiply_blocks() -> None:
    """Only W4A4 with BLOCKS or AUTO and a ratio above 0 ever needs a channel set."""
    assert uses_blocks(Contract())
    assert uses_blocks(Contract(compensation=Compensation(Form.BLOCKS, 0.1)))
    for c in (Compensation(Form.ROWS), Compensation(Form.NONE), Compensation(Form.AUTO, 0.0)):
        assert not uses_blocks(Contract(compensation=c))
    assert not uses_blocks(Contract(scheme=Scheme.W4A16))


@pytest.mark.parametrize("rule", RULES)
def test_static_scale_forms_agree(rule: BlockScaleRule) -> None:
    """A static scale as a scalar, [1], [1, 1] or [M, 1] is the same quantization, and every token uses it."""
    x, g = activations(M, K), torch.tensor(37.5)
    want = multiply(quantize_with_residual(x, rule=rule, g=g), forms_of(Form.ROWS, M), matrix())
    for shaped in (g[None], g[None, None], g.expand(M, 1)):
        c = quantize_with_residual(x, rule=rule, g=shaped)
        assert torch.equal(multiply(c, forms_of(Form.ROWS, M), matrix()), want)
    assert torch.equal(quantize_with_residual(x, rule=rule, g=g).residual.decode_scale, torch.ones(()) / g)


@pytest.mark.parametrize("g", [None, torch.tensor(20.0)], ids=["token", "static"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("form", list(Form))
def test_a_bad_token_stays_alone(form: Form, bad: float, g: Tensor | None) -> None:
    """NaN or Inf in one token's activations makes all of its outputs NaN and leaves every other token as it was."""
    x = activations(M, K)
    decode, contract = torch.arange(M) % 2 == 0, Contract(compensation=Compensation(form))
    blocks = random_site(K).blocks[0]
    good = linear_forward(x, matrix(blocks), contract, g=g, decode=decode)
    x[4, 17] = bad
    y = linear_forward(x, matrix(blocks), contract, g=g, decode=decode)
    assert y[4].isnan().all()
    others = torch.arange(M) != 4
    assert torch.equal(y[others], good[others])


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_forward_keeps_the_dtype_and_takes_no_tokens(form: Form, dtype: torch.dtype) -> None:
    """A dense linear answers in its input's dtype, from the same numbers, and an empty step gives an empty output."""
    contract = Contract(compensation=Compensation(form))
    x = activations(M, K, dtype=dtype)
    y = linear_forward(x, matrix(), contract)
    assert y.dtype == dtype
    assert torch.equal(y, linear_forward(x.to(torch.float32), matrix(), contract).to(dtype))
    empty = linear_forward(x[:0], matrix(), contract, decode=torch.zeros(0, dtype=torch.bool))
    assert empty.shape == (0, N)
    assert empty.dtype == dtype
