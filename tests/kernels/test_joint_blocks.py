"""A transformer's blocks as one call: right on every instruction set, and each row by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from motet.kernels import dispatch
from motet.kernels.joint_blocks import JointBlocks, Stream, can_run, expanded, pack, reference

from .test_cpu_build import usable_instruction_sets

D, H, L, T = 64, 2, 5, 13  # odd counts: tiles with ragged ends
LENGTHS = (3, 5, 0, 1)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.04}  # of numbers of about 4


@pytest.fixture(params=usable_instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    ops = dispatch.cpu_ops()
    if ops is None:
        pytest.skip("the C++ kernels are switched off")
    best = ops.instruction_set()
    assert ops.use_instruction_set(request.param)
    yield request.param
    ops.use_instruction_set(best)


def layer(out: int, into: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.randn(out, into) * into**-0.5).to(dtype), (0.1 * torch.randn(out)).to(dtype)


def stream(dtype: torch.dtype, *, single: bool = False) -> Stream:
    return Stream(
        qkv=layer(3 * D, D, dtype),
        norm_q=1 + 0.1 * torch.randn(D // H),
        norm_k=1 + 0.1 * torch.randn(D // H),
        out=None if single else layer(D, D, dtype),
        up=layer(4 * D, D, dtype),
        down=layer(D, (5 if single else 4) * D, dtype),
    )


class Case:
    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.doubles = [(stream(dtype), stream(dtype)) for _ in range(2)]
        self.singles = [stream(dtype, single=True) for _ in range(2)]
        self.blocks = JointBlocks(self.doubles, self.singles, heads=H, eps=1e-6)
        self.tokens = torch.randn(len(LENGTHS), L + T, D)
        for row, length in enumerate(LENGTHS):
            self.tokens[row, length:L] = float("nan")  # padding is never looked at
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        self.mods = 0.5 * torch.randn(len(LENGTHS), (2 * 12 + 2 * 3) * D)
        angle = torch.randn(T, D // H // 2)
        self.turn = expanded(angle.cos(), angle.sin())

    def run(
        self, rows: slice = slice(None), start: int = 0, stop: int = 4, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        tokens = self.tokens if tokens is None else tokens
        return self.blocks(
            tokens[rows].contiguous(), self.lengths[rows], L, self.mods[rows].contiguous(), self.turn, start, stop
        )

    def expected(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the words that are there, and of the picture."""
        length = LENGTHS[row]
        tokens = torch.cat([self.tokens[row : row + 1, :length], self.tokens[row : row + 1, L:]], 1)
        made = reference(
            self.doubles, self.singles, tokens, length, self.mods[row : row + 1], self.turn, heads=H, eps=1e-6
        )[0]
        return made[:length], made[length:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set_computes_the_definition(instruction_set: str, dtype: torch.dtype) -> None:
    if not can_run(D, H, dtype):
        assert dtype is torch.bfloat16 and instruction_set != "avx512bf16"
        with pytest.raises(RuntimeError, match="no bf16 dot product"):
            Case(dtype).run()
        return
    case = Case(dtype)
    out = case.run()
    for row, length in enumerate(LENGTHS):
        words, picture = case.expected(row)
        assert bool(((out[row, :length] - words).abs() < TOLERANCE[dtype]).all())
        assert (out[row, L:] - picture).abs().max() < TOLERANCE[dtype]
        assert not out[row, length:L].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_in_any_company(dtype: torch.dtype) -> None:
    """Bit for bit: alone, in parts, on one thread or on more than there are rows."""
    if not can_run(D, H, dtype):
        pytest.skip("not on this CPU")
    case = Case(dtype)
    together = case.run()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(case.run(), together)
            for row in range(len(LENGTHS)):
                assert torch.equal(case.run(slice(row, row + 1))[0], together[row])
    finally:
        torch.set_num_threads(before)
    parts = case.tokens
    for start, stop in ((0, 1), (1, 3), (3, 4)):
        parts = case.run(start=start, stop=stop, tokens=parts)
    assert torch.equal(parts, together)


def test_without_lengths_every_word_counts() -> None:
    if not can_run(D, H, torch.float32):
        pytest.skip("not on this CPU")
    case = Case(torch.float32)
    tokens, full = torch.randn(4, L + T, D), torch.full((4,), L, dtype=torch.int32)
    alike = [case.blocks(tokens, lengths, L, case.mods, case.turn, 0, 4) for lengths in (None, full)]
    assert torch.equal(*alike)


def test_what_does_not_fit_is_refused() -> None:
    assert not can_run(48, 2, torch.float32) and not can_run(64, 8, torch.float32)  # tiles of 64, heads of 16s
    assert not can_run(2048, 16, torch.float32) and not can_run(64, 2, torch.float16)
    if not can_run(D, H, torch.float32):
        pytest.skip("not on this CPU")
    case = Case(torch.float32)
    with pytest.raises(RuntimeError, match="mods"):
        case.blocks(case.tokens, case.lengths, L, case.mods[:, :-1].contiguous(), case.turn, 0, 4)
    with pytest.raises(RuntimeError, match="lengths"):
        case.blocks(case.tokens, case.lengths.long(), L, case.mods, case.turn, 0, 4)
    with pytest.raises(RuntimeError, match="cos and sin"):
        case.blocks(case.tokens, case.lengths, L - 1, case.mods, case.turn, 0, 4)
    wrong = replace(case.singles[0], down=layer(D, 4 * D, torch.float32))
    with pytest.raises(RuntimeError, match="expected a packed weight"):
        JointBlocks([], [wrong], heads=H, eps=1e-6)(case.tokens, case.lengths, L, case.mods, case.turn, 0, 1)


def test_packing_puts_columns_side_by_side() -> None:
    weight = torch.arange(128 * 6).float().view(128, 6)
    assert torch.equal(pack(weight)[1, 4, :, 0], weight[64:, 4])
    halves = weight.to(torch.bfloat16)
    assert torch.equal(pack(halves)[1, 2], halves[64:, 4:])
