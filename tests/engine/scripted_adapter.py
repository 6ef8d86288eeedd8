"""A painter small enough to follow: rows are mixed with their captions by masked means over a padded batch, as real ones do.

Prompts are words; each word is one token. Special words: "nan" makes its row's prediction not a number, "raise" makes the whole
forward pass raise, "unencodable" is refused by the encoder, "undecodable" makes a picture whose decode raises.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from motet.engine.diffusion_engine import DiffusionEngine
from motet.engine.errors import InvalidRequest
from motet.engine.painter import Rows
from motet.engine.picture_request import PictureOrder, PictureRules
from motet.engine.types import TERMINAL, AnyEvent, ImageRequest, ModelInfo

RULES = PictureRules(
    sizes=((16, 16), (32, 16)),
    num_steps=4,
    guidance="cfg",
    guidance_scale=3.0,
    solver="euler",
    solvers=("euler", "ancestral"),
)
INFO = ModelInfo(model="fake", kind="image", source="", max_model_len=0, vocab_size=0, hidden_size=8)
DIM = 8


@dataclass(frozen=True, eq=False)
class Cond:
    prompt: str
    embeds: torch.Tensor  # [L, DIM]


@dataclass(eq=False)
class Trunk:
    hidden: torch.Tensor
    shift: torch.Tensor
    shape: tuple[int, ...]
    done: int = 0


class ScriptedPainter:
    def __init__(self, *, seed: int = 0, num_blocks: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = [torch.randn(DIM, DIM, generator=generator) / DIM**0.5 for _ in range(num_blocks + 2)]
        self.devices = (torch.device("cpu"),) * 3
        self.batches: list[list[str]] = []  # the prompts of each forward pass
        self.encoded: list[str] = []
        self.log: list[str] = []  # what happened, in order, when a test asks for it
        self.encode_gate: threading.Event | None = None  # the encoder waits for it
        self.decode_gate: threading.Event | None = None
        self.block_rows: list[int] = []  # rows of each run of blocks beyond the first

    # stages

    def encode(self, prompts: Sequence[str]) -> list[Cond]:
        self.log.append("encode begins")
        if self.encode_gate is not None:
            assert self.encode_gate.wait(10)
        self.encoded += prompts
        if any("unencodable" in prompt for prompt in prompts):
            raise InvalidRequest("prompt: not in our language", param="prompt")
        self.log.append("encode ends")
        return [self._cond(prompt) for prompt in prompts]

    def _cond(self, prompt: str) -> Cond:
        words = prompt.split() or ["nothing"]
        rows = [torch.randn(DIM, generator=torch.Generator().manual_seed(zlib.crc32(word.encode()))) for word in words]
        return Cond(prompt, torch.stack(rows))

    def num_tokens(self, cond: Cond) -> int:
        return len(cond.embeds)

    def num_bytes(self, cond: Cond) -> int:
        return cond.embeds.nbytes

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels[::8, ::8].permute(2, 0, 1).float().mean(0, keepdim=True).expand(2, -1, -1) / 127.5 - 1

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        return (2, height // 8, width // 8)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        self.log.append("decode begins")
        if self.decode_gate is not None:
            assert self.decode_gate.wait(10)
        if (latents.abs() > 1e6).any():
            raise RuntimeError("undecodable")
        pixels = ((latents.mean(1).tanh() + 1) * 127.5).to(torch.uint8)
        self.log.append("decode ends")
        return pixels.repeat_interleave(8, 1).repeat_interleave(8, 2)[..., None].expand(-1, -1, -1, 3)

    def cost(self, width: int, height: int, num_tokens: int) -> float:
        return width * height / 256

    def batch_key(self, width: int, height: int) -> Hashable:
        return (width, height)

    # the denoiser, whole and in parts

    def forward(self, rows: Rows) -> torch.Tensor:
        trunk = self.blocks(self.begin(rows), 0, None)
        return self.finish(trunk, trunk.hidden)

    def begin(self, rows: Rows) -> Trunk:
        prompts = [cond.prompt for cond in rows.conds]
        self.batches.append(prompts)
        self.log.append("denoise")
        if any("raise" in prompt for prompt in prompts):
            raise RuntimeError("a row that raises")
        longest = max(len(cond.embeds) for cond in rows.conds)
        padded = torch.stack(
            [torch.nn.functional.pad(c.embeds, (0, 0, 0, longest - len(c.embeds)), value=9.0) for c in rows.conds]
        )
        lengths = torch.tensor([len(cond.embeds) for cond in rows.conds])
        mask = (torch.arange(longest)[None] < lengths[:, None])[..., None]
        caption = (padded * mask).sum(1) / lengths[:, None]
        shift = (caption + rows.times[:, None] + 0.01 * rows.guidance[:, None]) @ self.weights[-2]
        hidden = rows.latents.flatten(1)[..., None] * self.weights[-1][0]
        for row, prompt in enumerate(prompts):
            if "nan" in prompt.split():
                hidden[row] = float("nan")
            if "undecodable" in prompt:
                hidden[row] = 1e12
        return Trunk(hidden, shift, tuple(rows.latents.shape))

    def hidden(self, trunk: Trunk) -> torch.Tensor:
        return trunk.hidden

    def indicator(self, trunk: Trunk) -> torch.Tensor:
        return trunk.hidden + trunk.shift[:, None]

    def select(self, trunk: Trunk, rows: Sequence[int]) -> Trunk:
        picked = list(rows)
        return Trunk(trunk.hidden[picked], trunk.shift[picked], (len(picked), *trunk.shape[1:]), trunk.done)

    def blocks(self, trunk: Trunk, start: int, stop: int | None) -> Trunk:
        assert trunk.done == start
        last = len(self.weights) - 2 if stop is None else stop
        if last > 1:
            self.block_rows.append(len(trunk.hidden))
        hidden = trunk.hidden
        for weight in self.weights[start:last]:
            hidden = hidden + 0.3 * ((hidden + trunk.shift[:, None]) @ weight).tanh()
        return Trunk(hidden, trunk.shift, trunk.shape, last)

    def finish(self, trunk: Trunk, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean(-1).reshape(trunk.shape)


class StraightRun:
    """Euler steps over evenly spaced noise levels from 1 to 0; "ancestral" adds noise on the way."""

    def __init__(self, order: PictureOrder, shape: tuple[int, ...]) -> None:
        self.sigmas = [1 - step / order.num_steps for step in range(order.num_steps + 1)]
        self.begin = order.begin
        self.ancestral = order.solver == "ancestral"

    def time(self, step: int) -> float:
        return self.sigmas[step]

    def start(self, noise: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        sigma = self.sigmas[self.begin]
        return noise if image is None else sigma * noise + (1 - sigma) * image

    def scale(self, latents: torch.Tensor, step: int) -> torch.Tensor:
        return latents

    def takes_noise(self, step: int) -> bool:
        return self.ancestral

    def advance(
        self, latents: torch.Tensor, prediction: torch.Tensor, step: int, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen = latents - self.sigmas[step] * prediction
        latents = latents + (self.sigmas[step + 1] - self.sigmas[step]) * prediction
        if noise is not None:
            latents = latents + 0.1 * self.sigmas[step + 1] * noise
        return latents, seen


def engine(painter: ScriptedPainter | None = None, **settings: object) -> DiffusionEngine:
    options: dict[str, object] = {"rules": RULES, "max_step_cost": 64.0, "begin_solver": StraightRun} | settings
    return DiffusionEngine(info=INFO, painter=painter or ScriptedPainter(), **options)  # type: ignore[arg-type]


def request(name: str, prompt: str = "a red apple", **fields: object) -> ImageRequest:
    return ImageRequest(request_id=name, model="fake", prompt=prompt, **fields)  # type: ignore[arg-type]


def run_until(one: DiffusionEngine, done: Callable[[list[AnyEvent]], bool], events: list[AnyEvent]) -> list[AnyEvent]:
    """Steps until `done(events)`, as a host would take them; at most 10,000."""
    pause = threading.Event()
    for _ in range(10_000):
        if done(events):
            return events
        if one.has_work():
            events += one.step()
        else:
            assert one.next_timer() is not None, "the engine waits for nothing"
            pause.wait(0.001)
    raise AssertionError("it never came")


def run(one: DiffusionEngine, *requests: ImageRequest) -> list[AnyEvent]:
    """Everything that is told until all requests have ended."""
    for each in requests:
        one.submit(each)
    return run_until(one, lambda events: one.num_requests() == 0, [])


def ends(events: list[AnyEvent]) -> dict[str, AnyEvent]:
    """The terminal event of each request; exactly one each, after all its others, and events are numbered."""
    found: dict[str, AnyEvent] = {}
    numbers: dict[str, int] = {}
    for event in events:
        assert event.request_id not in found, "an event after the end"
        assert event.seq == numbers.get(event.request_id, 0)
        numbers[event.request_id] = event.seq + 1
        if isinstance(event, TERMINAL):
            found[event.request_id] = event
    return found
