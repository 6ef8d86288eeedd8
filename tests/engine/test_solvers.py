"""Solvers and their levels against diffusers' schedulers over whole runs, rows against pictures alone, refusals by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor

from motet.engine.errors import InvalidRequest, ModelLoadError
from motet.engine.painter import SolverRun
from motet.engine.picture_request import PictureOrder
from motet.engine.schedules import Schedule, Spacing
from motet.engine.solvers import (
    ancestral_weights,
    begin_solver,
    dpmpp_weights,
    mix,
    unipc_weights,
    x0_weights,
)

SHAPE = (4, 8, 6)  # 12 tokens of 2 x 2
STEPS = (1, 2, 4, 20, 50)
FLUX = {"shift": 3.0, "use_dynamic_shifting": True}
QWEN = {"use_dynamic_shifting": True, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def config_of(name: str, **options: Any) -> dict[str, Any]:
    return {"_class_name": name, "_diffusers_version": "0.42.1", **options}


def order(solver: str, num_steps: int, begin: int = 0) -> PictureOrder:
    return PictureOrder(
        prompt="a cat", negative_prompt=None, width=64, height=48, num_steps=num_steps, begin=begin, guidance_scale=1.0,
        solver=solver, seeds=(0,), image=None, preview_every=0,
    )  # fmt: skip


def model(seed: int) -> Any:
    """A fixed network that bends: (latents, time) -> prediction."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, SHAPE[0], SHAPE[0], generator=generator) / 2

    def predict(latents: Tensor, time: float) -> Tensor:
        hidden = torch.einsum("...chw,cd->...dhw", latents, first) + math.sin(3 * time)
        return torch.einsum("...chw,cd->...dhw", hidden.tanh(), second)

    return predict


def noise_of(seed: int) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator), generator


def ours(
    run: SolverRun, num_steps: int, seed: int, *, begin: int = 0, image: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, list[Tensor]]:
    """The picture, and x0 at every step. `scale` of times, for the network."""
    predict = model(5)
    noise, generator = noise_of(seed)
    latents = run.start(noise, image)
    seen = []
    for step in range(begin, num_steps):
        prediction = predict(run.scale(latents, step), run.time(step) * scale)
        fresh = torch.randn(SHAPE, generator=generator) if run.takes_noise(step) else None
        latents, x0 = run.advance(latents, prediction, step, fresh)
        seen.append(x0)
    return latents, seen


def theirs(
    scheduler: Any,
    run: SolverRun,
    num_steps: int,
    seed: int,
    *,
    begin: int = 0,
    image: Tensor | None = None,
    scale: float,
) -> Tensor:
    """The same run by a scheduler of diffusers, whose timesteps are set."""
    predict = model(5)
    noise, generator = noise_of(seed)
    if begin:
        scheduler.set_begin_index(begin)
    if image is None:
        latents = noise * scheduler.init_noise_sigma if hasattr(scheduler, "init_noise_sigma") else noise
    else:
        add = getattr(scheduler, "scale_noise", None)
        at = scheduler.timesteps[begin : begin + 1]
        latents = add(image, at, noise) if add is not None else scheduler.add_noise(image, noise, at)
    latents = latents[None]
    for step in range(begin, num_steps):
        time = scheduler.timesteps[step]
        given = scheduler.scale_model_input(latents, time) if hasattr(scheduler, "scale_model_input") else latents
        prediction = predict(given, run.time(step) * scale)
        takes = "generator" in type(scheduler).step.__code__.co_varnames
        extra = {"generator": generator} if takes else {}
        latents = scheduler.step(prediction, time, latents, return_dict=False, **extra)[0]
    return latents[0]


def set_up(config: Mapping[str, Any], num_steps: int, spacing: Spacing) -> Any:
    """As the pipelines set their schedulers up, for a picture of `SHAPE`."""
    scheduler = getattr(diffusers, config["_class_name"]).from_config(config)
    extra: dict[str, Any] = {}
    if config["_class_name"].startswith("FlowMatch") and spacing == "steps":
        extra["sigmas"] = np.linspace(1.0, 1 / num_steps, num_steps)
    if config.get("use_dynamic_shifting"):
        known = scheduler.config
        numbers = ((256, 4096, 0.5, 1.15), ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"))
        extra["mu"] = calculate_shift(12, *(known.get(key, value) for value, key in zip(*numbers)))
    if "sigmas" in extra:
        scheduler.set_timesteps(**extra)
    else:
        scheduler.set_timesteps(num_steps, **extra)
    return scheduler


CASES: dict[str, tuple[dict[str, Any], Spacing]] = {
    "euler": (config_of("FlowMatchEulerDiscreteScheduler"), "steps"),
    "euler_shift": (config_of("FlowMatchEulerDiscreteScheduler", shift=3.0), "steps"),
    "euler_sd3": (config_of("FlowMatchEulerDiscreteScheduler", shift=3.0), "train"),
    "euler_flux": (config_of("FlowMatchEulerDiscreteScheduler", **FLUX), "steps"),
    "euler_sd35": (config_of("FlowMatchEulerDiscreteScheduler", **FLUX), "train"),
    "euler_linear": (config_of("FlowMatchEulerDiscreteScheduler", **FLUX, time_shift_type="linear"), "steps"),
    "euler_qwen": (config_of("FlowMatchEulerDiscreteScheduler", **QWEN), "steps"),
    "euler_karras": (config_of("FlowMatchEulerDiscreteScheduler", use_karras_sigmas=True), "steps"),
    "euler_exponential": (config_of("FlowMatchEulerDiscreteScheduler", use_exponential_sigmas=True), "train"),
    "lcm_flow": (config_of("FlowMatchLCMScheduler", shift=2.0), "steps"),
    "dpmpp": (config_of("DPMSolverMultistepScheduler", **SD), "steps"),
    "dpmpp_heun": (config_of("DPMSolverMultistepScheduler", **SD, solver_type="heun", euler_at_final=True), "steps"),
    "dpmpp_karras": (config_of("DPMSolverMultistepScheduler", **SD, use_karras_sigmas=True), "steps"),
    "dpmpp_exponential": (config_of("DPMSolverMultistepScheduler", **SD, use_exponential_sigmas=True), "steps"),
    "dpmpp_v": (
        config_of("DPMSolverMultistepScheduler", **SD, prediction_type="v_prediction", timestep_spacing="trailing",
                  rescale_betas_zero_snr=True), "steps",
    ),
    "dpmpp_sample": (
        config_of("DPMSolverMultistepScheduler", prediction_type="sample", timestep_spacing="leading", steps_offset=1,
                  beta_schedule="squaredcos_cap_v2"), "steps",
    ),
    "dpmpp_least": (
        config_of("DPMSolverMultistepScheduler", **SD, final_sigmas_type="sigma_min", lower_order_final=False), "steps",
    ),
    "dpmpp_first_order": (config_of("DPMSolverMultistepScheduler", **SD, solver_order=1), "steps"),
    "dpmpp_flow": (
        config_of("DPMSolverMultistepScheduler", use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction"),
        "steps",
    ),
    "dpmpp_flow_dynamic": (
        config_of("DPMSolverMultistepScheduler", use_flow_sigmas=True, prediction_type="flow_prediction",
                  use_dynamic_shifting=True), "steps",
    ),
    "unipc": (config_of("UniPCMultistepScheduler", **SD), "steps"),
    "unipc_bh1": (
        config_of("UniPCMultistepScheduler", **SD, solver_type="bh1", disable_corrector=[0, 3],
                  final_sigmas_type="sigma_min"), "steps",
    ),
    "unipc_karras_v": (
        config_of("UniPCMultistepScheduler", **SD, use_karras_sigmas=True, prediction_type="v_prediction"), "steps",
    ),
    "unipc_exponential": (config_of("UniPCMultistepScheduler", **SD, use_exponential_sigmas=True), "steps"),
    "unipc_flow": (
        config_of("UniPCMultistepScheduler", use_flow_sigmas=True, flow_shift=5.0, prediction_type="flow_prediction"),
        "steps",
    ),
    "unipc_flow_dynamic": (
        config_of("UniPCMultistepScheduler", use_flow_sigmas=True, use_dynamic_shifting=True, shift_terminal=0.05,
                  prediction_type="flow_prediction"), "steps",
    ),
    "lcm": (config_of("LCMScheduler"), "steps"),
    "lcm_v_clip": (config_of("LCMScheduler", prediction_type="v_prediction", clip_sample=True), "steps"),
    "ancestral": (config_of("EulerAncestralDiscreteScheduler", **SD), "steps"),
    "ancestral_v": (
        config_of("EulerAncestralDiscreteScheduler", **SD, prediction_type="v_prediction", timestep_spacing="leading",
                  steps_offset=1), "steps",
    ),
    "ancestral_trailing": (config_of("EulerAncestralDiscreteScheduler", timestep_spacing="trailing"), "steps"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:__array__", "ignore:invalid value")  # diffusers' own
@pytest.mark.parametrize("name", CASES)
def test_as_diffusers_has_it(name: str) -> None:
    config, spacing = CASES[name]
    schedule = Schedule.from_config(config, spacing=spacing)
    solver = schedule.solvers[0]
    flow = schedule.kind == "flow"
    scale = 1.0 if flow else 0.001
    for num_steps in STEPS:
        run = begin_solver(schedule)(order(solver, num_steps), SHAPE)
        made, seen = ours(run, num_steps, 3, scale=scale)
        assert made.isfinite().all() and len(seen) == num_steps
        if num_steps == 1 and schedule.options.get("shift_terminal"):
            continue  # there theirs divides by zero
        scheduler = set_up(config, num_steps, spacing)
        said = scheduler.timesteps.double() / (1000 if flow else 1)
        told = torch.tensor([run.time(step) for step in range(num_steps)], dtype=torch.float64)
        cut = 0.001 if flow and solver in ("dpmpp_2m", "unipc") else 1.0 if "exponential" in name else 0.0
        assert (said - told).abs().max() <= cut + (3e-7 if flow else 2e-5)
        wanted = theirs(scheduler, run, num_steps, 3, scale=scale)
        assert (made - wanted).abs().max() <= 3e-6 * wanted.abs().max(), num_steps
        if hasattr(scheduler, "sigmas"):
            # Their weights are worked out in fp32. Given the same levels in fp64 they are as exact as ours.
            sigmas = torch.tensor(run.plan.sigmas, dtype=torch.float64)  # type: ignore[attr-defined]
            scheduler = set_up(config, num_steps, spacing)
            assert torch.allclose(sigmas, scheduler.sigmas.double(), rtol=3e-7, atol=1e-7)
            scheduler.sigmas = sigmas
            wanted = theirs(scheduler, run, num_steps, 3, scale=scale)
        # In fp32, two roundings a step.
        assert (made - wanted).abs().max() <= (1e-6 if num_steps < 50 else 2e-6) * wanted.abs().max(), num_steps


@pytest.mark.filterwarnings("ignore:__array__")
@pytest.mark.parametrize("name", ["euler_flux", "dpmpp", "dpmpp_flow", "unipc", "unipc_flow", "lcm", "ancestral"])
def test_from_an_image(name: str) -> None:
    config, spacing = CASES[name]
    schedule = Schedule.from_config(config, spacing=spacing)
    solver = schedule.solvers[0]
    scale = 1.0 if schedule.kind == "flow" else 0.001
    image = torch.randn(SHAPE, generator=torch.Generator().manual_seed(8))
    for num_steps, begin in ((4, 3), (20, 8), (20, 0)):
        run = begin_solver(schedule)(order(solver, num_steps, begin), SHAPE)
        scheduler = set_up(config, num_steps, spacing)
        if hasattr(scheduler, "sigmas"):
            scheduler.sigmas = torch.tensor(run.plan.sigmas).double()  # type: ignore[attr-defined]
        if not begin:
            scheduler.set_begin_index(0)
        made, _ = ours(run, num_steps, 3, begin=begin, image=image, scale=scale)
        wanted = theirs(scheduler, run, num_steps, 3, begin=begin, image=image, scale=scale)
        error = (made - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-6, (num_steps, begin)


@pytest.mark.filterwarnings("ignore:__array__")
@pytest.mark.parametrize("source", ["dpmpp", "unipc", "ancestral", "ancestral_trailing", "dpmpp_karras"])
def test_another_solver_reads_the_config_as_its_class_does(source: str) -> None:
    classes = {
        "dpmpp_2m": "DPMSolverMultistepScheduler",
        "unipc": "UniPCMultistepScheduler",
        "euler_ancestral": "EulerAncestralDiscreteScheduler",
    }
    config, _ = CASES[source]
    schedule = Schedule.from_config(config)
    assert sorted(schedule.solvers) == sorted(classes)
    for solver in schedule.solvers[1:]:
        other = {**config, "_class_name": classes[solver]}
        other.pop("use_karras_sigmas" if solver == "euler_ancestral" else "", None)
        for num_steps in (3, 20):
            run = begin_solver(schedule)(order(solver, num_steps), SHAPE)
            made, _ = ours(run, num_steps, 3, scale=0.001)
            wanted = theirs(set_up(other, num_steps, "steps"), run, num_steps, 3, scale=0.001)
            assert (made - wanted).abs().max() <= 3e-6 * wanted.abs().max(), (solver, num_steps)


def test_higher_orders_come_closer() -> None:
    """On Flux's levels: twenty steps of each against a thousand of Euler's."""
    schedule = Schedule.from_config(CASES["euler_flux"][0])
    assert schedule.solvers == ("euler", "dpmpp_2m", "unipc", "lcm")
    begin = begin_solver(schedule)
    goal, _ = ours(begin(order("euler", 1000), SHAPE), 1000, 3)
    away = {}
    for solver in ("euler", "dpmpp_2m", "unipc"):
        made, _ = ours(begin(order(solver, 20), SHAPE), 20, 3)
        away[solver] = float((made - goal).abs().mean())
    assert away["dpmpp_2m"] < 0.3 * away["euler"] and away["unipc"] < 0.2 * away["euler"], away


@pytest.mark.parametrize("name", [*CASES, "given"])
def test_who_knows_the_picture_sees_it_at_every_step(name: str) -> None:
    """x0 of a perfect model is the picture, and so is what every solver ends with."""
    few = config_of("FlowMatchEulerDiscreteScheduler")
    schedule = Schedule.from_config(few, sigmas=(1.0, 0.5)) if name == "given" else Schedule.from_config(CASES[name][0])
    image = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).clamp(-0.9, 0.9)
    for solver in schedule.solvers:
        num_steps = 2 if name == "given" else 7
        run = begin_solver(schedule)(order(solver, num_steps), SHAPE)
        noise, generator = noise_of(2)
        latents = run.start(noise, None)
        for step in range(num_steps):
            at = run.plan.level(step)  # type: ignore[attr-defined]
            x = run.scale(latents, step)
            there = (x - at.alpha * image) / at.sigma
            kind = run.plan.prediction  # type: ignore[attr-defined]
            say = {"epsilon": there, "sample": image, "flow_prediction": there - image}
            say["v_prediction"] = at.alpha * there - at.sigma * image
            fresh = torch.randn(SHAPE, generator=generator) if run.takes_noise(step) else None
            latents, x0 = run.advance(latents, say[kind], step, fresh)
            far = run.time(step) if solver == "lcm" and schedule.kind == "vp" else math.inf
            size = float(latents.abs().max()) + 1 / (1e-4 + at.alpha)
            assert torch.allclose(x0, image, atol=3e-6 * size + 0.3 / (1 + far)), (solver, step)
        if schedule.options.get("final_sigmas_type") != "sigma_min" and schedule.scheduler != "LCMScheduler":
            assert torch.allclose(latents, image, atol=1e-4), solver


def test_few_steps_are_taken_as_the_card_has_them() -> None:
    sigmas = (1.0, 0.75, 0.5, 0.25)
    schedule = Schedule.from_config(config_of("FlowMatchEulerDiscreteScheduler", **FLUX), sigmas=sigmas)
    begin = begin_solver(schedule)
    for solver in ("euler", "lcm", "dpmpp_2m"):
        plan = begin(order(solver, 4), SHAPE).plan  # type: ignore[attr-defined]
        assert plan.sigmas == (*sigmas, 0.0) and plan.times == sigmas
    assert begin(order("unipc", 4), SHAPE).plan.sigmas[0] == pytest.approx(1 - 1e-6, abs=1e-7)  # type: ignore[attr-defined]
    made, _ = ours(begin(order("euler", 4), SHAPE), 4, 3)
    predict, latents = model(5), noise_of(3)[0]
    for sigma in sigmas:
        latents = latents - 0.25 * predict(latents, sigma)
    assert torch.allclose(made, latents, atol=1e-6)
    with pytest.raises(InvalidRequest, match="takes 4, got 5"):
        begin(order("euler", 5), SHAPE)


def test_tokens_shift_the_levels() -> None:
    begin = begin_solver(Schedule.from_config(CASES["euler_flux"][0]))
    small, large = (begin(order("euler", 10), (16, side, side)).plan.sigmas for side in (32, 128))  # type: ignore[attr-defined]
    assert all(a < b for a, b in zip(small[1:-1], large[1:-1]))
    for side, sigmas in ((32, small), (128, large)):
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(CASES["euler_flux"][0])
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.1, 10), mu=calculate_shift(side * side // 4))
        assert torch.equal(torch.tensor(sigmas), scheduler.sigmas)


# ------------------------------------------------------------------------------------------------------------- rows


def mixed_runs() -> list[tuple[str, SolverRun, int, int]]:
    """Name, run, steps and first step of pictures that meet in one batch."""
    picked = [("euler_flux", "euler", 7, 0), ("euler_flux", "unipc", 5, 2), ("euler_qwen", "dpmpp_2m", 9, 0)]
    picked += [
        ("euler", "lcm", 4, 0),
        ("unipc", "unipc", 6, 0),
        ("ancestral", "euler_ancestral", 5, 1),
        ("lcm", "lcm", 3, 0),
    ]
    made = []
    for name, solver, num_steps, first in picked:
        begin = begin_solver(Schedule.from_config(CASES[name][0]))
        made.append((name, begin(order(solver, num_steps, first), SHAPE), num_steps, first))
    return made


def walk_together(bad: int | None = None) -> list[Tensor]:
    """All of `mixed_runs`, a step of each in turn; the prediction of one of them goes wrong half way."""
    image = torch.ones(SHAPE)
    runs = mixed_runs()
    drawn = [noise_of(row) for row in range(len(runs))]
    at = [first for _, _, _, first in runs]
    latents = [run.start(drawn[row][0], image if at[row] else None) for row, (_, run, _, _) in enumerate(runs)]
    predict = model(5)
    while any(at[row] < runs[row][2] for row in range(len(runs))):
        for row, (_, run, num_steps, _) in enumerate(runs):
            if at[row] == num_steps:
                continue
            prediction = predict(run.scale(latents[row], at[row]), run.time(at[row]) / 1000)
            if row == bad and at[row] == 2:
                prediction[0, 0, 0] = math.nan
            fresh = torch.randn(SHAPE, generator=drawn[row][1]) if run.takes_noise(at[row]) else None
            latents[row], _ = run.advance(latents[row], prediction, at[row], fresh)
            at[row] += 1
    return latents


def test_pictures_do_not_meet() -> None:
    together = walk_together()
    for row, (_, run, num_steps, first) in enumerate(mixed_runs()):
        image = torch.ones(SHAPE) if first else None
        alone, _ = ours(run, num_steps, row, begin=first, image=image, scale=0.001)
        assert torch.equal(alone, together[row])
    for bad in (0, 4, 5):
        spoilt = walk_together(bad)
        for row, picture in enumerate(spoilt):
            assert picture.isnan().any() if row == bad else torch.equal(picture, together[row])


def test_rows_mix_as_alone() -> None:
    """Weights of each row's own; a row of not-a-numbers stays what it is."""
    runs = [run for name, run, _, _ in mixed_runs() if name.startswith(("euler_", "unipc"))]
    plans = [run.plan for run in runs]  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(len(plans), *SHAPE, generator=generator) for _ in range(4)]
    rows[0][1] = math.nan
    steps = (2, 3, 4, 5)[: len(plans)]
    for weigh in (
        lambda plan, step: (*dpmpp_weights(plan.level(step - 1), plan.level(step), plan.level(step + 1)), 0.0),
        lambda plan, step: unipc_weights(plan.level(step - 2), plan.level(step - 1), plan.level(step), correct=True),
        lambda plan, step: (*x0_weights(plan.prediction, plan.level(step)), 0.0, 0.0),
        lambda plan, step: (*ancestral_weights(plan.sigmas[step - 1], plan.sigmas[step]), 0.0),
    ):
        weights = [weigh(plan, step - 1 if step == plan.num_steps else step) for plan, step in zip(plans, steps)]
        together = mix(rows, list(torch.tensor(weights, dtype=torch.float64).T))
        assert together.dtype == torch.float32
        for row, own in enumerate(weights):
            alone = mix([tensor[row] for tensor in rows], own)
            assert alone.isnan().all() if row == 1 else torch.allclose(alone, together[row], rtol=1e-6, atol=1e-6)


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "expected one of FlowMatchEulerDiscreteScheduler, .*, got 'None'"),
        (config_of("PNDMScheduler"), "got 'PNDMScheduler'"),
        (config_of("FlowMatchEulerDiscreteScheduler", invert_sigmas=True), "invert_sigmas: served is False, got 'True'"),
        (config_of("FlowMatchEulerDiscreteScheduler", stochastic_sampling=True), "stochastic_sampling"),
        (config_of("FlowMatchEulerDiscreteScheduler", use_beta_sigmas=True), "use_beta_sigmas"),
        (config_of("FlowMatchEulerDiscreteScheduler", shift="3"), "shift: not a value that can be: '3'"),
        (config_of("FlowMatchEulerDiscreteScheduler", shift=0), "shift"),
        (config_of("FlowMatchEulerDiscreteScheduler", shift=math.nan), "shift"),
        (config_of("FlowMatchEulerDiscreteScheduler", shift_terminal=1.0), "shift_terminal"),
        (config_of("FlowMatchEulerDiscreteScheduler", warp=3), "has no option 'warp'; it has base_image_seq_len"),
        (config_of("FlowMatchEulerDiscreteScheduler", time_shift_type="cubic"), "served is exponential, linear"),
        (config_of("FlowMatchEulerDiscreteScheduler", use_dynamic_shifting=1), "use_dynamic_shifting"),
        (
            config_of("FlowMatchEulerDiscreteScheduler", use_dynamic_shifting=True, max_image_seq_len=256),
            "base_image_seq_len and max_image_seq_len are equal",
        ),
        (
            config_of("FlowMatchEulerDiscreteScheduler", use_karras_sigmas=True, use_exponential_sigmas=True),
            "exclude each other",
        ),
        (config_of("FlowMatchLCMScheduler", scale_factors=[0.5]), "scale_factors"),
        (config_of("DPMSolverMultistepScheduler", algorithm_type="sde-dpmsolver++"), r"served is dpmsolver\+\+, got 'sde"),
        (config_of("DPMSolverMultistepScheduler", solver_order=3), "solver_order: served is 1, 2, got '3'"),
        (config_of("DPMSolverMultistepScheduler", solver_type="bh2"), "solver_type: served is midpoint, heun"),
        (config_of("DPMSolverMultistepScheduler", use_lu_lambdas=True), "use_lu_lambdas"),
        (config_of("DPMSolverMultistepScheduler", thresholding=True), "thresholding"),
        (config_of("DPMSolverMultistepScheduler", num_train_timesteps=10**9), "num_train_timesteps"),
        (config_of("DPMSolverMultistepScheduler", beta_start=0.5, beta_end=0.1), "beta_start"),
        (config_of("DPMSolverMultistepScheduler", use_flow_sigmas=True), "go together"),
        (config_of("DPMSolverMultistepScheduler", prediction_type="flow_prediction"), "go together"),
        (config_of("UniPCMultistepScheduler", predict_x0=False), "predict_x0"),
        (config_of("UniPCMultistepScheduler", use_dynamic_shifting=True), "go with use_flow_sigmas"),
        (config_of("UniPCMultistepScheduler", disable_corrector=["first"]), "disable_corrector"),
        (
            config_of("UniPCMultistepScheduler", use_flow_sigmas=True, prediction_type="flow_prediction",
                      use_karras_sigmas=True),
            "evenly spaced",
        ),
        (config_of("LCMScheduler", original_inference_steps=2000), "original_inference_steps"),
        (config_of("LCMScheduler", prediction_type="flow_prediction"), "prediction_type"),
        (config_of("EulerAncestralDiscreteScheduler", prediction_type="sample"), "prediction_type"),
        (config_of("EulerAncestralDiscreteScheduler", trained_betas=[0.1]), "trained_betas"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelLoadError, match=why):
        Schedule.from_config(config)


def test_sigmas_are_checked() -> None:
    flow = config_of("FlowMatchEulerDiscreteScheduler")
    for sigmas in ((0.5, 0.5), (0.2, 0.5), (1.5, 0.5), (0.5, 0.0), (math.nan,)):
        with pytest.raises(ModelLoadError, match="falling"):
            Schedule.from_config(flow, sigmas=sigmas)
    with pytest.raises(ModelLoadError, match="only models of flow"):
        Schedule.from_config(config_of("LCMScheduler"), sigmas=(1.0,))


def test_steps_that_cannot_be_cut() -> None:
    begin = begin_solver(Schedule.from_config(config_of("LCMScheduler", original_inference_steps=8)))
    with pytest.raises(InvalidRequest, match="made for up to 8, got 9"):
        begin(order("lcm", 9), SHAPE)
    begin = begin_solver(Schedule.from_config(config_of("EulerAncestralDiscreteScheduler")))
    with pytest.raises(InvalidRequest, match="expected 1 to 1000, got 1001"):
        begin(order("euler_ancestral", 1001), SHAPE)
    for num_steps in (1, 2, 3, 7, 199, 200):
        for name in CASES:
            if name.startswith("lcm") and num_steps > 50:
                continue
            schedule = Schedule.from_config(CASES[name][0], spacing=CASES[name][1])
            for solver in schedule.solvers:
                plan = begin_solver(schedule)(order(solver, num_steps), SHAPE).plan  # type: ignore[attr-defined]
                assert len(plan.sigmas) == num_steps + 1 == len(plan.times) + 1
                assert all(a > b >= 0 for a, b in zip(plan.sigmas, plan.sigmas[1:])), (name, solver, num_steps)


def test_configs_of_known_models() -> None:
    """As their repositories have them, with what they carry along."""
    stale = {"skip_prk_steps": True, "set_alpha_to_one": False, "interpolation_type": "linear", "clip_sample": False}
    for config in (
        config_of("FlowMatchEulerDiscreteScheduler", base_image_seq_len=256, base_shift=0.5, max_image_seq_len=4096,
                  max_shift=1.15, num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=True),
        config_of("FlowMatchEulerDiscreteScheduler", num_train_timesteps=1000, shift=3.0),
        config_of("FlowMatchEulerDiscreteScheduler", base_image_seq_len=256, base_shift=0.5, invert_sigmas=False,
                  max_image_seq_len=8192, max_shift=0.9, num_train_timesteps=1000, shift=1.0, shift_terminal=0.02,
                  stochastic_sampling=False, time_shift_type="exponential", use_beta_sigmas=False,
                  use_dynamic_shifting=True, use_exponential_sigmas=False, use_karras_sigmas=False),
        config_of("EulerAncestralDiscreteScheduler", **SD, **stale, sample_max_value=1.0, timestep_spacing="leading",
                  steps_offset=1, use_karras_sigmas=False),
    ):  # fmt: skip
        assert Schedule.from_config(config).plan("dpmpp_2m", 28, 4096).num_steps == 28
