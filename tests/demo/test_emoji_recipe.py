"""The recipe of the demo picture model: its captions mean one thing, its fast network is diffusers' one, its score can fail."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from motet.engine.diffusion_load import picture_model
from motet.engine.painter import Rows
from motet.engine.picture_request import check_order
from motet.engine.types import ImageRequest

RECIPES = Path(__file__).parents[2] / "demo" / "recipes"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of demo/recipes, which are scripts and no package."""
    monkeypatch.syspath_prepend(str(RECIPES))
    yield importlib.import_module


def made_up_art(scenes: Any) -> dict[int, np.ndarray[Any, Any]]:
    """Drawings for the table's emoji: a few squares of colour in a disc, the same at every side."""
    rng = np.random.default_rng(0)
    found = {}
    cells = rng.integers(0, 256, (len(scenes.emojis()), 8, 8, 3))
    for side in sorted(set(scenes.SIDES.values())):
        at = np.arange(side) * 8 // side
        away = np.hypot(*(np.indices((side, side)) - (side - 1) / 2))
        alpha = np.broadcast_to(np.where(away < side / 2, 255, 0)[None, ..., None], (len(cells), side, side, 1))
        found[side] = np.concatenate([cells[:, at][:, :, at] * alpha // 255, alpha], -1).astype(np.uint8)
    return found


@pytest.fixture
def scenes(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Scenes of made-up drawings: no package is fetched."""
    module = recipe("emoji_scenes")
    drawings = made_up_art(module)
    monkeypatch.setattr(module, "art", lambda folder=None: drawings)
    return module.Scenes()


def test_the_held_out_captions_mean_their_scenes(recipe: Any) -> None:
    module = recipe("emoji_scenes")
    kept = module.held_out()
    assert len(kept) == len({scene for _, scene in kept}) == module.NUM_HELD_OUT >= 200
    assert all(module.parse(said) == scene for said, scene in kept)
    known = set(module.vocabulary())
    assert all(set(said.split()) <= known for said, _ in kept)


@pytest.mark.parametrize(
    ("caption", "meant"),
    [
        ("a cat", {"emoji": "cat"}),
        ("a red apple on a blue background", {"emoji": "red apple", "background": "blue"}),
        ("two small purple puppies on the left", {"emoji": "dog", "count": 2, "size": "small", "tint": "purple"}),
        ("An orange orange on an orange background.", {"emoji": "tangerine", "tint": "orange", "background": "orange"}),
        ("big wolves on the top on a white background", {"emoji": "wolf", "position": "top"}),
    ],
)
def test_parse(recipe: Any, caption: str, meant: dict[str, Any]) -> None:
    scene = recipe("emoji_scenes").parse(caption)
    assert {name: getattr(scene, name) for name in meant} == meant


@pytest.mark.parametrize("caption", ["", "a wyvern", "a cat on a pink background", "a cat on the ceiling", "cat dog"])
def test_parse_refuses(recipe: Any, caption: str) -> None:
    with pytest.raises(ValueError, match="no such"):
        recipe("emoji_scenes").parse(caption)


def test_drawn_scenes_are_said_unambiguously_and_never_held_out(recipe: Any, scenes: Any) -> None:
    module = recipe("emoji_scenes")
    kept = {scene for _, scene in module.held_out()}
    rng = random.Random(0)
    for index in range(500):
        scene = scenes.draw(1, index)
        assert scene == scenes.draw(1, index)
        assert scene not in kept
        assert module.parse(module.words(scene, rng)) == scene


def test_every_corner_shows_the_background(recipe: Any, scenes: Any) -> None:
    module = recipe("emoji_scenes")
    for index in range(60):
        scene = scenes.draw(2, index)
        picture, edge = scenes.picture(scene), module.EDGE
        assert picture.shape == (64, 64, 3)
        for rows in (slice(None, edge), slice(-edge, None)):
            for columns in (slice(None, edge), slice(-edge, None)):
                assert (picture[rows, columns] == module.COLOURS[scene.background]).all()


def test_the_score_finds_what_is_wrong(recipe: Any, scenes: Any) -> None:
    score = recipe("emoji_score").score
    asked = [replace(scenes.draw(3, index), background="white", tint="", count=1) for index in range(40)]
    names = list(scenes.index)

    def of(**changes: str) -> Any:
        return score(scenes, asked, [scenes.picture(replace(scene, **changes)) for scene in asked])

    true = of()
    assert true.background == true.top1 == 1.0
    assert true.position > 0.95
    assert true.size > 0.95
    assert of(background="green").background == 0.0
    assert of(position="top").position < 0.5
    assert of(size="small").size < 0.8
    assert of(emoji=names[0]).top1 < 0.2


def test_the_fast_network_is_the_one_that_ships(recipe: Any) -> None:
    module = recipe("emoji_denoiser")
    torch.manual_seed(0)
    model = module.denoiser()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.08)
    lengths = torch.tensor([2, 16, 9])
    latents, read, caption = torch.randn(3, 64, 16), torch.randn(3, module.LENGTH, module.WIDTH), torch.randn(3, 192)
    times = torch.tensor([0.1, 0.55, 1.0])
    places = torch.zeros(64, 3)
    places[:, 1], places[:, 2] = torch.arange(8).repeat_interleave(8), torch.arange(8).repeat(8)
    with torch.no_grad():
        fast = module.fast_forward(model, latents, read, caption, times, module.hidden_after(lengths), module.angles())
        for at, length in enumerate(lengths.tolist()):
            row = slice(at, at + 1)
            alone = model(
                hidden_states=latents[row],
                encoder_hidden_states=read[row, :length],
                pooled_projections=caption[row],
                timestep=times[row],
                img_ids=places,
                txt_ids=torch.zeros(length, 3),
            ).sample
            torch.testing.assert_close(fast[row], alone, atol=2e-5, rtol=1e-5)


def test_packing_is_undone(recipe: Any) -> None:
    module = recipe("emoji_denoiser")
    latents = torch.randn(2, 4, 16, 16)
    rows = module.packed(latents)
    flux = latents.view(2, 4, 8, 2, 8, 2).permute(0, 2, 4, 1, 3, 5).reshape(2, 64, 16)
    assert torch.equal(rows, flux)
    assert torch.equal(module.unpacked(rows), latents)


def test_the_tokenizer_that_ships_gives_the_trained_ids(recipe: Any) -> None:
    module, captions = recipe("emoji_text"), [said for said, _ in recipe("emoji_scenes").held_out()[:50]]
    ids, lengths = module.tokens(captions, module.word_ids())
    ships = module.tokenizer()
    for caption, row, length in zip(captions, ids.tolist(), lengths.tolist(), strict=True):
        assert ships(caption)["input_ids"] == row[:length]
    assert ships("A Cat, on a blue background!")["input_ids"] == ships("a cat on a blue background")["input_ids"]


def test_what_is_packed_paints_as_the_recipe_does(recipe: Any, tmp_path: Path) -> None:
    """Random parts, packed, through Motet's engine room and through the libraries' own classes: the same picture."""
    network, text, packing = recipe("emoji_denoiser"), recipe("emoji_text"), recipe("emoji_pack")
    torch.manual_seed(0)
    model = network.denoiser()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.08)
    model.save_pretrained(tmp_path / "made" / "transformer")
    model.save_pretrained(tmp_path / "made" / "transformer_turbo")
    recipe("emoji_codec").autoencoder().save_pretrained(tmp_path / "made" / "vae")
    text.encoder().save_pretrained(tmp_path / "made" / "text_encoder")
    packing.pack(tmp_path / "made", tmp_path / "out", torch.float8_e4m3fn)
    cpu = torch.device("cpu")
    for name, guided, steps in (("motet-emoji", True, 3), ("motet-emoji-turbo", False, 4)):
        painter = recipe("emoji_score").Painter(tmp_path / "out" / name)
        (wanted,) = painter.paint(["a red apple"], steps=steps if guided else 0, seed=5)
        ours = picture_model(tmp_path / "out" / name, dtype=torch.float32, devices=(cpu, cpu, cpu))
        assert ours.rules.few_step is not guided
        order = check_order(ImageRequest(request_id="", model="", prompt="a red apple", num_steps=steps), ours.rules)
        run = ours.begin_solver(order, ours.painter.latent_shape(64, 64))
        conds = ours.painter.encode(["a red apple", ""] if guided else ["a red apple"])
        tokens = torch.randn(64, 16, generator=torch.Generator().manual_seed(5))  # the recipe draws them packed
        latents = run.start(network.unpacked(tokens[None])[0], None)
        for step in range(steps):
            rows = Rows(
                latents=latents.expand(len(conds), -1, -1, -1), times=torch.full((len(conds),), run.time(step)),
                guidance=torch.ones(len(conds)), conds=conds, width=64, height=64,
            )  # fmt: skip
            said = ours.painter.forward(rows)
            latents, _ = run.advance(latents, said[-1] + order.guidance_scale * (said[0] - said[-1]), step, None)
        apart = (ours.painter.decode(latents[None])[0].int() - torch.from_numpy(wanted).int()).abs()
        assert wanted.std() > 3
        assert apart.max() <= 1 and apart.float().mean() < 0.01
