"""Our engine in this process, where a benchmark looks at what no client sees: final latents, and what each stage is at."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from motet.benchmarks.diffusion_claims.setting import Setting
from motet.benchmarks.motet_engine import EngineError
from motet.engine.cache_calibration import calibrate, read_coefficients
from motet.engine.config import HostConfig
from motet.engine.diffusion_engine import DiffusionEngine
from motet.engine.diffusion_load import picture_model, start_engine
from motet.engine.load import pick_dtype
from motet.engine.types import Done, ImageRequest
from motet.models.registry import resolve


class Studio:
    """A DiffusionEngine stepped by its caller. `latents` are those of the picture decoded last, fp32 [C, h, w]."""

    def __init__(self, setting: Setting) -> None:
        torch.set_num_threads(setting.threads)
        self._name, self._steps, self._path = setting.model, setting.sizes.steps, resolve(setting.model).path
        device = torch.device("cpu")
        self._model = picture_model(
            self._path,
            dtype=pick_dtype(setting.engine, device),
            devices=(device, device, device),
            compile=setting.pictures.image_compile,
        )
        self.engine: DiffusionEngine = start_engine(self._name, self._path, self._model)
        self.latents = torch.zeros(0)
        self._count = 0
        decode = self.engine.painter.decode

        def watched(latents: torch.Tensor) -> torch.Tensor:
            self.latents = latents[0]
            return decode(latents)

        self.engine.painter.decode = watched  # type: ignore[method-assign]

    def paint(self, prompt: str, seed: int) -> tuple[float, torch.Tensor]:
        """Seconds that one picture takes alone, and its final latents."""
        seconds = self.together([prompt], seed)
        return seconds, self.latents.clone()

    def together(self, prompts: Sequence[str], first_seed: int) -> float:
        """Seconds that pictures take which are asked for at once, each with the next seed."""
        engine = self.engine
        began = time.perf_counter()
        for at, prompt in enumerate(prompts):
            self._count += 1
            request = ImageRequest(
                request_id=str(self._count),
                model=self._name,
                prompt=prompt,
                seed=first_seed + at,
                num_steps=self._steps,
            )
            engine.submit(request)
        done = 0
        while done < len(prompts):
            if engine.has_work():
                done += sum(isinstance(event, Done) for event in engine.step())
            elif engine.num_requests():
                time.sleep(0.0002)
            if not engine.num_requests() and done < len(prompts):
                raise EngineError(f"a picture failed: {engine.last_error}")
        return time.perf_counter() - began

    def coefficients(self, prompts: Sequence[str], *, seed: int) -> tuple[float, ...]:
        """TeaCache's, as the model's folder has them, or else fitted on these. Raises ModelLoadError where no cache can work."""
        found = read_coefficients(self._path)
        return found or calibrate(self._model, prompts, num_steps=self._steps, seed=seed)[0]

    def close(self) -> None:
        self.engine.close()


def host_config(setting: Setting) -> HostConfig:
    return HostConfig(
        models=(setting.model,), threads=setting.threads, engine=setting.engine, pictures=setting.pictures
    )


@contextmanager
def studio(setting: Setting) -> Iterator[Studio]:
    made = Studio(setting)
    try:
        yield made
    finally:
        made.close()
