"""Staging slots and results against a device that is late on purpose: nothing is overwritten while it is in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from motet.engine.executor import InlineExecutor
from motet.engine.transfers import Readback, StagedInputs

from .. import tiny

GARBAGE = 0xEE


class LateDevice:
    """Queues everything and does nothing until somebody waits for an event behind it."""

    def __init__(self, *, waits: bool = True) -> None:
        self.queue: list[Callable[[], object]] = []
        self.num_done = 0
        self.num_waits = 0  # that found undone work
        self.waits = waits  # False: events that do not wait, which the tests must notice

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), GARBAGE, dtype=torch.uint8)

    device_memory = host_memory

    def launch(self, work: Callable[[], object]) -> None:
        self.queue.append(work)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.launch(lambda: destination.copy_(source))

    def record(self) -> LateEvent:
        return LateEvent(self, len(self.queue))

    def run(self, until: int) -> None:
        while self.num_done < until:
            self.queue[self.num_done]()
            self.num_done += 1


class LateEvent:
    def __init__(self, device: LateDevice, position: int) -> None:
        self.device = device
        self.position = position

    def synchronize(self) -> None:
        if self.device.waits:
            self.device.num_waits += self.position > self.device.num_done
            self.device.run(self.position)


def run_steps(
    device: LateDevice, num_steps: int, depth: int, **options: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Steps whose kernel adds up what it was given, `depth` of them in flight; (results, what they should be)."""
    staged, readback = StagedInputs(device, **options), Readback(device)
    rng = np.random.default_rng(0)
    flying: list[Callable[[], torch.Tensor]] = []
    results, expected = [], []
    for _ in range(num_steps):
        array = np.empty(0, np.int64)
        with staged.step():
            total = torch.zeros(3, dtype=torch.int64)
            wanted = np.zeros(3, np.int64)
            for _ in range(rng.integers(1, 5)):
                array = rng.integers(0, 1 << 40, 3)
                wanted += array
                given = staged.put(array)
                array[:] = -1  # the caller goes on using its memory
                table = staged.put(rng.integers(0, 9, (2, 5)).astype(np.int32))
                device.launch(lambda given=given, total=total: total.add_(given))
                assert table.dtype is torch.int32 and table.shape == (2, 5)
            flying.append(readback.fetch(total))
        expected.append(wanted.tolist())
        if len(flying) > depth:
            results.append(flying.pop(0)().tolist())
    return results + [result().tolist() for result in flying], expected


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 64])
def test_every_step_reads_what_was_put_for_it(depth: int, chunk_bytes: int) -> None:
    results, expected = run_steps(LateDevice(), 20, depth, chunk_bytes=chunk_bytes)
    assert results == expected


def test_the_late_device_shows_an_overwrite() -> None:
    """The same steps with events that do not wait, and nothing run until the end: later steps overwrite earlier ones."""
    device = LateDevice(waits=False)
    staged = StagedInputs(device)
    seen: list[int] = []
    for step in range(3):
        with staged.step():
            given = staged.put(np.array([step]))
            device.launch(lambda given=given: seen.append(int(given)))
    device.run(len(device.queue))
    assert seen == [2, 1, 2]  # two slots: step 0's was taken by step 2


def test_at_depth_one_only_results_are_waited_for() -> None:
    device = LateDevice()
    run_steps(device, 20, 1)
    assert device.num_waits == 20  # one for each result; no slot was still in flight when its turn came


def test_a_result_does_not_wait_for_the_next_step() -> None:
    device = LateDevice()
    readback = Readback(device)
    first = readback.fetch(torch.tensor([7]))
    device.launch(lambda: pytest.fail("the next step was waited for"))
    assert first().tolist() == [7]


def test_what_is_put_between_steps_is_guarded_too() -> None:
    device = LateDevice()
    staged = StagedInputs(device)
    with staged.step():
        staged.put(np.array([1]))
    late = staged.put(np.array([5]))  # the tokens of accepted drafts, say
    seen: list[int] = []
    device.launch(lambda: seen.append(int(late)))
    for _ in range(2):
        with staged.step():
            staged.put(np.array([9]))
    device.run(len(device.queue))
    # The copy was done before its slot's turn came; what reads it is launched in order, before the slot's next copy.
    assert seen == [5]


def test_an_error_inside_a_step_leaves_its_slot_guarded() -> None:
    device = LateDevice()
    staged = StagedInputs(device)
    seen: list[int] = []
    with pytest.raises(RuntimeError, match="broken"), staged.step():
        given = staged.put(np.array([3]))
        device.launch(lambda: seen.append(int(given)))
        raise RuntimeError("broken")
    for _ in range(2):
        with staged.step():
            staged.put(np.array([4]))
    assert seen == [3]


def test_result_memory_is_used_again_once_read() -> None:
    device = LateDevice()
    readback = Readback(device)
    both = [readback.fetch(torch.tensor([n])) for n in (1, 2)]
    assert [result().tolist() for result in both] == [[1], [2]]
    assert len(readback._free) == 2
    assert readback.fetch(torch.arange(5))().tolist() == [0, 1, 2, 3, 4]
    assert len(readback._free) == 2


class PromptDevice(LateDevice):
    """Does everything at once, as a CPU must that runs a model's kernels; what a slot held is garbage once it is reused."""

    def launch(self, work: Callable[[], object]) -> None:
        work()


class ForgetfulInputs(StagedInputs):
    @contextmanager
    def step(self) -> Iterator[None]:
        with super().step():
            for host, device in self._slots[self._turn].chunks:
                host.fill_(GARBAGE)
                device.fill_(GARBAGE)
            yield


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("settings", [{}, {"graphs": "padded"}, {"speculation": "ngram"}])
def test_a_runner_with_staged_inputs_gives_the_same_tokens(depth: int, settings: dict[str, str]) -> None:
    """The way to a CUDA device, walked on a CPU: nothing of a step is read after its slot was taken by a later one."""
    requests = [
        tiny.request(
            [*tiny.prompt(3 + 7 * seed, seed), *[5, 6, 7] * 4], max_tokens=10 + 2 * seed, temperature=0.6 * (seed % 2), seed=seed,
            logprobs=2 if seed == 3 else None, presence_penalty=0.5 if seed == 2 else 0.0,
        )
        for seed in range(5)
    ]  # fmt: skip
    for path in (tiny.llama(), tiny.windowed()):
        plain = tiny.answers(tiny.engine(path), requests)
        staged = tiny.engine(path, **settings)
        runner, device = staged.executor.runner, PromptDevice()
        runner._staged, runner._readback = ForgetfulInputs(device, chunk_bytes=256), Readback(device)
        runner._decode_inputs = None  # what a CPU has instead
        staged.executor, staged.depth = InlineExecutor(runner), depth if "speculation" not in settings else 0
        assert tiny.answers(staged, requests) == plain
        assert tiny.all_free(staged)
