"""Several inputs of one call."""

from __future__ import annotations

import asyncio

import pytest

from motet.pipelines.pipeline import together


@pytest.mark.parametrize(("most", "seen"), [(0, 7), (3, 3)])
def test_in_order_and_so_many_at_a_time(most: int, seen: int) -> None:
    running, peak = 0, 0

    async def work(number: int) -> int:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        for _ in range(8 - number):  # the last ones end first
            await asyncio.sleep(0)
        running -= 1
        return number * number

    assert asyncio.run(together(work, range(7), most=most)) == [0, 1, 4, 9, 16, 25, 36]
    assert peak == seen


def test_the_first_error_cancels_the_rest() -> None:
    ended: list[int] = []

    async def work(number: int) -> None:
        if number == 2:
            raise ValueError("the third")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(number)

    async def main() -> None:
        with pytest.raises(ValueError, match="the third"):
            await together(work, range(4))
        await asyncio.sleep(0)
        assert sorted(ended) == [0, 1, 3]

    asyncio.run(main())
