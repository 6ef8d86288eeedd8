"""Snake and the residual unit: every backend and instruction set against the definition, in pieces against the whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from motet.kernels import snake as door
from motet.kernels.cpu import build
from motet.kernels.snake import SnakeUnit, snake, snake_unit


def usable() -> list[str]:
    """Plain torch, and the instruction sets that the library holds and this CPU has."""
    if not build.load():
        return ["torch"]
    from motet.kernels.cpu import ops

    names = list(build.instruction_sets(build.platform.machine()))
    return ["torch", *names[: names.index(ops.instruction_set()) + 1]]


@pytest.fixture(params=usable(), autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    torch.manual_seed(0)
    if request.param == "torch":
        monkeypatch.setattr(door, "cpu_ops", lambda: None)
        yield "torch"
        return
    from motet.kernels.cpu import ops

    best = ops.instruction_set()
    monkeypatch.setattr(door, "cpu_ops", lambda: ops)
    assert ops.use_instruction_set(request.param)
    yield request.param
    ops.use_instruction_set(best)


def unit_of(channels: int, dilation: int = 3, *, dtype: torch.dtype = torch.float32) -> SnakeUnit:
    made = {
        "alpha": torch.rand(channels) * 3 + 0.2,
        "taps": torch.randn(7, channels) * 0.4,
        "taps_bias": torch.randn(channels) * 0.1,
        "second_alpha": torch.rand(channels) * 3 + 0.2,
        "matrix": torch.randn(channels, channels) * channels**-0.5,
        "bias": torch.randn(channels) * 0.1,
    }
    return SnakeUnit(**{name: value.to(dtype) for name, value in made.items()}, dilation=dilation)


def doubled(unit: SnakeUnit) -> SnakeUnit:
    names = ("alpha", "taps", "taps_bias", "second_alpha", "matrix", "bias")
    return SnakeUnit(**{name: getattr(unit, name).double() for name in names}, dilation=unit.dilation)


def defined(x: torch.Tensor, unit: SnakeUnit) -> torch.Tensor:
    """The whole unit over whole streams that begin after zeros, as torch's convolutions say it, in fp64: [B, N, C]."""

    def active(rows: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        return rows + torch.sin(alpha * rows) ** 2 / (alpha + 1e-9)

    wide = doubled(unit)
    x = x.double()
    padded = torch.nn.functional.pad(active(x, wide.alpha), (0, 0, 2 * unit.delay, 0)).transpose(1, 2)
    y = torch.nn.functional.conv1d(
        padded, wide.taps.t()[:, None], wide.taps_bias, dilation=unit.dilation, groups=x.shape[2]
    )
    late = torch.nn.functional.pad(x, (0, 0, unit.delay, 0))[:, : x.shape[1]]
    return late + active(y.transpose(1, 2), wide.second_alpha) @ wide.matrix + wide.bias


@pytest.mark.parametrize("shape", [(3, 40), (2, 5, 16), (1, 7), (300, 130)])
def test_snake(shape: tuple[int, ...]) -> None:
    x, alpha = torch.randn(shape) * 4, torch.rand(shape[-1]) * 4 + 0.05
    want = x.double() + torch.sin(alpha.double() * x.double()) ** 2 / (alpha.double() + 1e-9)
    # The sine sees alpha * x, rounded; what that is wrong by is divided by alpha again.
    torch.testing.assert_close(snake(x, alpha).double(), want, atol=3e-6, rtol=1e-6)


def test_large_arguments_keep_their_digits() -> None:
    # alpha is a power of two: alpha * x has no rounding that would hide what the sine is wrong by.
    x = torch.cat([torch.linspace(-3000, 3000, 4096), torch.tensor([1e5, -1e7, 3e9, 0.0] * 4)]).view(-1, 16)
    for alpha in (0.25, 1.0, 2.0):
        vector = torch.full((16,), alpha)
        got = (snake(x, vector).double() - x.double()) * alpha
        want = torch.sin(alpha * x.double()) ** 2
        small = x.abs() <= 3000
        room = (x.abs().double() * alpha * 2.0**-23)[small] + 1e-6  # the sum is rounded to x's digits
        assert ((got - want)[small].abs() <= room).all()
    far = snake(torch.tensor([[1e5] * 16]), torch.full((16,), 0.125)).double() - 1e5
    assert (far - torch.sin(torch.tensor(12500.0).double()) ** 2 * 8).abs().max() < 0.01
    odd = snake(torch.tensor([[float("nan"), float("inf"), 1.0, 0.0]]), torch.ones(4))
    assert odd[0].isnan().tolist() == [True, True, False, False] and odd[0, 3] == 0


def test_an_alpha_of_nothing_is_the_identity() -> None:
    x = torch.randn(4, 32)
    assert torch.equal(snake(x, torch.zeros(32)), x)


@pytest.mark.parametrize("channels", [8, 16, 48, 64])
@pytest.mark.parametrize("dilation", [1, 9])
def test_unit_is_the_definition(channels: int, dilation: int) -> None:
    unit, x = unit_of(channels, dilation), torch.randn(2, 77, channels)
    out = snake_unit(x, unit, unit.new_state(2), torch.tensor([0, 1]))
    torch.testing.assert_close(out.double(), defined(x, unit), atol=2e-5, rtol=1e-5)


def test_unit_where_the_sine_is_far() -> None:
    unit, x = unit_of(16, 1), torch.randn(1, 20, 16)
    x[0, 7, 3] = 3e4
    unit.alpha[3] = 1.0
    out = snake_unit(x, unit, unit.new_state(1), torch.tensor([0]))
    want = defined(x, unit)
    assert out.isfinite().all()
    near = want.abs() < 100
    assert ((out - want).abs()[near] < 0.05).all()


@pytest.mark.parametrize("batch", [1, 4])
def test_pieces_and_slots(batch: int) -> None:
    """Streams in slots of any order, in pieces of any size: the same rows; a stranger's state stays untouched."""
    unit, x = unit_of(32), torch.randn(batch, 90, 32)
    whole = defined(x, unit).float()
    state = unit.new_state(6)
    for part in state:
        part[1] = 7.0
    slots = torch.tensor([5, 2, 0, 3][:batch])
    pieces = [snake_unit(piece, unit, state, slots) for piece in x.split([1, 2, 30, 7, 50], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=2e-5, rtol=1e-5)
    assert all((part[1] == 7.0).all() for part in state)


def test_rows_that_do_not_exist_are_zero() -> None:
    unit, x = unit_of(16), torch.randn(3, 70, 16)
    slots = torch.arange(3)
    keep = torch.tensor([[0, 70], [3, 65], [70, 70]])
    all_rows = snake_unit(x, unit, unit.new_state(3), slots)
    out = snake_unit(x, unit, unit.new_state(3), slots, keep)
    assert torch.equal(out[0], all_rows[0]) and torch.equal(out[1, 3:65], all_rows[1, 3:65])
    assert not out[1, :3].any() and not out[1, 65:].any() and not out[2].any()


def test_batched_equals_alone_bit_for_bit() -> None:
    unit, x = unit_of(64), torch.randn(5, 100, 64)
    together = snake_unit(x, unit, unit.new_state(5), torch.arange(5))
    for row in (0, 3):
        alone = snake_unit(x[row : row + 1], unit, unit.new_state(1), torch.tensor([0]))
        torch.testing.assert_close(alone[0], together[row], atol=0 if door.cpu_ops() else 2e-6, rtol=0)


@pytest.mark.parametrize("backend", [name for name in usable() if name != "torch"], indirect=True)
def test_wrong_shapes_are_errors_and_not_crashes() -> None:  # plain torch checks for itself
    ops = door.cpu_ops()
    assert ops is not None
    unit, x = unit_of(16), torch.randn(2, 5, 16)
    with pytest.raises(RuntimeError, match="no such slot"):
        snake_unit(x, unit, unit.new_state(2), torch.tensor([0, 2]))
    with pytest.raises(RuntimeError, match="states are"):
        snake_unit(x, unit, unit_of(16, 1).new_state(2), torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="keep is"):
        snake_unit(x, unit, unit.new_state(2), torch.tensor([0, 1]), torch.tensor([[0, 1]]))
    with pytest.raises(RuntimeError, match="alpha"):
        snake(x, torch.ones(8))
