"""Captions and the pictures they mean: what the demo picture model learns from, and what it is asked for.

    python demo/recipes/emoji_scenes.py sheet.png [--count 40] [--seed 0]     # look at some
    python demo/recipes/emoji_scenes.py --write-heldout                       # heldout.jsonl, as it lies beside this file

A caption is `[a|an|one|two] [small|big] [tint] NAME [on the left|right|top|bottom] on a COLOUR background`; parts may be
missing, and then mean: one, big, its own colours, in the middle, on white. So every caption means exactly one picture, 64 x 64:
`parse(caption)` gives its `Scene`, `Scenes.picture(scene)` its pixels, `words(scene, rng)` one way to say it. The four 4 x 4
corners always show the background. `Scenes.draw(seed, index)` is a random scene that is not in the held-out list and that can
be told from its background: the same for the same two numbers on every machine.

NAME is the CLDR short name or a synonym, of `emoji_names.tsv`; "two" takes its plural. A tint is one of six of the colours.
The drawings are Microsoft's Fluent Emoji (flat; MIT) as packed by Iconify in the npm package @iconify-json/fluent-emoji-flat,
drawn by resvg. Needs `pip install resvg-py pillow` and npm, once: what comes out is kept in `emoji_art.npz`.
"""

from __future__ import annotations

import argparse
import base64
import functools
import hashlib
import io
import json
import os
import random
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
NAMES, HELD_OUT = HERE / "emoji_names.tsv", HERE / "heldout.jsonl"
NUM_HELD_OUT = 240

PACKAGE = "@iconify-json/fluent-emoji-flat@1.2.6"
INTEGRITY = "RY47RgPb47fYUiyrA64sIOL0+UU02s29sXpNBbIQRBUlPlfNFTKUmZDERGuxDs/7yNGWqQYvuaSYM1M4fRXlUw=="  # SHA-512

SIDE = 64  # of a picture, in pixels
EDGE = 4  # between an emoji and the edge: so wide are the corners that always show the background
# The side of one emoji by (how many, how big). With EDGE every box begins 4 pixels after a multiple of 8, wherever it stands:
# a token of the model (8 x 8 pixels) sees each part of an emoji in few ways, which saves it most of the learning.
SIDES = {(1, "big"): 40, (1, "small"): 24, (2, "big"): 24, (2, "small"): 16}
DRAWN = 240  # what resvg draws: a multiple of each of those sides
GAP = 8  # between two

COLOURS = {
    "red": (0xE5, 0x39, 0x35),
    "orange": (0xFB, 0x8C, 0x00),
    "yellow": (0xFD, 0xD8, 0x35),
    "green": (0x43, 0xA0, 0x47),
    "blue": (0x1E, 0x88, 0xE5),
    "purple": (0x8E, 0x24, 0xAA),
    "white": (0xFF, 0xFF, 0xFF),
    "black": (0x11, 0x11, 0x11),
}
TINTS = ("red", "orange", "yellow", "green", "blue", "purple")
SIZES = ("small", "big")
POSITIONS = ("left", "right", "top", "bottom", "")  # "": in the middle

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Scene:
    """What a caption means."""

    emoji: str  # its CLDR short name
    count: int = 1
    size: str = "big"
    tint: str = ""
    position: str = ""
    background: str = "white"


@dataclass(frozen=True, slots=True)
class Emoji:
    icon: str  # its key in the package
    name: str
    synonyms: tuple[str, ...]


@functools.cache
def emojis() -> tuple[Emoji, ...]:
    """The table, in its order."""
    rows = [line.split("\t") for line in NAMES.read_text("utf-8").splitlines()[1:]]
    return tuple(Emoji(row[0], row[1], tuple(row[2].split(", ")) if len(row) > 2 else ()) for row in rows)


# -------------------------------------------------------------------------------------------------------------- captions

_PLURALS = {
    "mouse": "mice",
    "wolf": "wolves",
    "fish": "fish",
    "leaf": "leaves",
    "loaf": "loaves",
    "ear of corn": "ears of corn",
    "hourglass done": "hourglasses done",
    "ox": "oxen",
    "mango": "mangoes",
    "tomato": "tomatoes",
    "potato": "potatoes",
}


def plural(name: str) -> str:
    """Of a name: its last word's, with the few that English spells otherwise."""
    if name in _PLURALS:
        return _PLURALS[name]
    first, space, last = name.rpartition(" ")
    if space:
        return f"{first} {plural(last)}"
    if last in ("grapes", "cherries", "fries", "scissors", "jeans", "trousers", "glasses", "locked"):
        return last
    if last.endswith(("s", "x", "z", "ch", "sh")):
        return last + "es"
    if last.endswith("y") and last[-2] not in "aeiou":
        return last[:-1] + "ies"
    return last + "s"


@functools.cache
def _meanings() -> dict[str, str]:
    """Every way to name an emoji, singular and plural -> its CLDR name."""
    found: dict[str, str] = {}
    for emoji in emojis():
        for name in (emoji.name, *emoji.synonyms):
            for form in (name, plural(name)):
                assert found.setdefault(form, emoji.name) == emoji.name, f"{form} names two emoji"
    return found


def parse(caption: str) -> Scene:
    """The scene a caption means. Upper case and a final full stop do not matter.

    Raises:
        ValueError: what is not of the grammar, or names no emoji of the table.
    """
    left = caption.lower().rstrip(". ").split()
    background, position, count, size, tint = "white", "", 1, "big", ""
    if left[-1:] == ["background"]:
        if len(left) < 4 or left[-4] != "on" or left[-3] not in ("a", "an") or left[-2] not in COLOURS:
            raise ValueError(f"no such background: {caption!r}")
        background, left = left[-2], left[:-4]
    if left[-3:-1] == ["on", "the"]:
        position, left = left[-1], left[:-3]
        if position not in POSITIONS:
            raise ValueError(f"no such position: {caption!r}")
    if left and left[0] in ("a", "an", "one", "two"):
        count, left = 2 if left[0] == "two" else 1, left[1:]
    if left and left[0] in SIZES:
        size, left = left[0], left[1:]
    # A name goes before a tint: "red apple" is an emoji, "red cat" a tinted one.
    if " ".join(left) not in _meanings() and left and left[0] in TINTS:
        tint, left = left[0], left[1:]
    name = _meanings().get(" ".join(left))
    if name is None:
        raise ValueError(f"no such emoji: {caption!r}")
    return Scene(name, count, size, tint, position, background)


def words(scene: Scene, rng: random.Random) -> str:
    """One way to say it: name or synonym, and what is understood without being said is said half of the time."""
    emoji = next(emoji for emoji in emojis() if emoji.name == scene.emoji)
    name = rng.choice((emoji.name, *emoji.synonyms))
    noun = plural(name) if scene.count == 2 else name
    said = [scene.size] if scene.size == "small" or rng.random() < 0.5 else []
    said += [scene.tint] if scene.tint else []
    said.append(noun)
    if scene.count == 2:
        said.insert(0, "two")
    elif (roll := rng.random()) < 0.85:
        said.insert(0, "one" if roll < 0.1 else "an" if said[0][0] in "aeiou" and not said[0].startswith("u") else "a")
    if scene.position:
        said += ["on", "the", scene.position]
    if scene.background != "white" or rng.random() < 0.5:
        said += ["on", "an" if scene.background == "orange" else "a", scene.background, "background"]
    return " ".join(said)


def sayable(scene: Scene) -> bool:
    """Whether every wording means this scene: not that of an apple tinted red, since "red apple" is a name."""
    emoji = next(emoji for emoji in emojis() if emoji.name == scene.emoji)
    return not any(f"{scene.tint} {name}" in _meanings() for name in (emoji.name, *emoji.synonyms))


def vocabulary() -> list[str]:
    """Every word of a caption, sorted."""
    grammar = "a an one two on the background".split()
    names = [word for name in _meanings() for word in name.split()]
    return sorted({*grammar, *SIZES, *COLOURS, *(position for position in POSITIONS if position), *names})


# -------------------------------------------------------------------------------------------------------------- drawings


def art_folder() -> Path:
    """Where `emoji_art.npz` is kept: $MOTET_CHECKPOINTS/emoji, by default under ~/.cache/motet/checkpoints."""
    checkpoints = Path(os.environ.get("MOTET_CHECKPOINTS") or Path.home() / ".cache" / "motet" / "checkpoints")
    return checkpoints / "emoji"


def _fetch() -> dict[str, str]:
    """The package's drawings as SVG, by icon."""
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(
            ["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, capture_output=True, text=True
        )
        archive = Path(folder, packed.stdout.split()[-1])
        if base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode() != INTEGRITY:
            raise ValueError(f"{PACKAGE} is not the one this was written for")
        with tarfile.open(archive) as tar:
            member = tar.extractfile("package/icons.json")
            assert member is not None
            icons = json.load(member)
    head = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    found = {}
    for key, icon in icons["icons"].items():
        box = f"0 0 {icon.get('width', icons['width'])} {icon.get('height', icons['height'])}"
        found[key] = f'{head} viewBox="{box}" width="{DRAWN}" height="{DRAWN}">{icon["body"]}</svg>'
    return found


def _shrink(drawing: Pixels, side: int) -> Pixels:
    """[240, 240, 4], premultiplied -> [side, side, 4], the mean of each square. Whole numbers only: exact everywhere."""
    step = DRAWN // side
    sums = drawing.reshape(side, step, side, step, 4).astype(np.int64).sum((1, 3))
    return ((sums + step * step // 2) // (step * step)).astype(np.uint8)


def art(folder: Path | None = None) -> dict[int, Pixels]:
    """Side (40, 24, 16) -> the emoji of the table, uint8 [N, side, side, 4], colours premultiplied by the alpha.

    Read from `emoji_art.npz` in the folder (`art_folder()` by default), which is made first where it is missing or of another
    table. Raises ImportError, OSError or CalledProcessError where it cannot be made.
    """
    path = (folder or art_folder()) / "emoji_art.npz"
    key = hashlib.sha256("\n".join([PACKAGE, *(emoji.icon for emoji in emojis())]).encode()).hexdigest()
    if path.is_file():
        with np.load(path) as kept:
            if str(kept["key"]) == key:
                return {side: kept[f"side{side}"] for side in sorted(set(SIDES.values()))}
    import resvg_py
    from PIL import Image

    icons = _fetch()
    made: dict[int, list[Pixels]] = {side: [] for side in sorted(set(SIDES.values()))}
    for emoji in emojis():
        png = bytes(resvg_py.svg_to_bytes(svg_string=icons[emoji.icon]))
        drawing = np.asarray(Image.open(io.BytesIO(png)).convert("RGBA")).astype(np.int64)
        drawing[..., :3] = (drawing[..., :3] * drawing[..., 3:] + 127) // 255
        for side, drawings in made.items():
            drawings.append(_shrink(drawing.astype(np.uint8), side))
    arrays = {side: np.stack(drawings) for side, drawings in made.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f"{path.stem}.{os.getpid()}.npz")
    np.savez_compressed(whole, key=key, **{f"side{side}": array for side, array in arrays.items()})
    whole.rename(path)
    return arrays


def tinted(drawings: Pixels, tint: str) -> Pixels:
    """[..., 4] premultiplied -> the same with the tint's hue: dark parts dark, the middle the tint itself, the lightest pale."""
    colour = np.array(COLOURS[tint], np.float64)
    alpha = drawings[..., 3:].astype(np.float64)
    own = drawings[..., :3] * 255.0 / np.maximum(alpha, 1)
    light = (own @ np.array([0.299, 0.587, 0.114]) / 255)[..., None].clip(0, 1)
    dark = colour * (0.3 + light)
    pale = colour + (255 - colour) * (light - 0.7) * 2
    ramp = np.where(light < 0.7, dark, pale).clip(0, 255)
    rgb = np.floor((0.85 * ramp + 0.15 * own).clip(0, 255) * alpha / 255 + 0.5)
    return np.concatenate([rgb, alpha], -1).astype(np.uint8)


def boxes(scene: Scene) -> list[tuple[int, int, int]]:
    """Where its emoji stand: (top, left, side) of each. Two stand one above the other at the left and right, else in a row."""
    side = SIDES[scene.count, scene.size]
    stacked = scene.position in ("left", "right")
    long = scene.count * side + (scene.count - 1) * GAP
    height, width = (long, side) if stacked else (side, long)
    top = {"top": EDGE, "bottom": SIDE - EDGE - height}.get(scene.position, (SIDE - height) // 2)
    left = {"left": EDGE, "right": SIDE - EDGE - width}.get(scene.position, (SIDE - width) // 2)
    step = side + GAP
    return [(top + at * step * stacked, left + at * step * (not stacked), side) for at in range(scene.count)]


# ---------------------------------------------------------------------------------------------------------------- scenes


def held_out() -> list[tuple[str, Scene]]:
    """The fixed list: captions and scenes that no training sees."""
    rows = [json.loads(line) for line in HELD_OUT.read_text("utf-8").splitlines()]
    return [(row.pop("caption"), Scene(**row)) for row in rows]


class Scenes:
    """Draws scenes and paints them."""

    def __init__(self, folder: Path | None = None, *, kept_out: Sequence[Scene] | None = None) -> None:
        """Args: folder: of the art. kept_out: scenes never drawn (default: the held-out list)."""
        plain = art(folder)
        self.index = {emoji.name: at for at, emoji in enumerate(emojis())}
        self._art = {("", side): drawings for side, drawings in plain.items()}
        self._art |= {(tint, side): tinted(drawings, tint) for tint in TINTS for side, drawings in plain.items()}
        self._kept_out = frozenset(kept_out if kept_out is not None else (scene for _, scene in held_out()))
        self._visible: dict[tuple[str, str, str], bool] = {}

    def drawings(self, tint: str, side: int) -> Pixels:
        """All emoji of a tint ("": none) and side: uint8 [N, side, side, 4], premultiplied."""
        return self._art[tint, side]

    def visible(self, scene: Scene) -> bool:
        """Whether most of the emoji differs from the background: no white ghost on white."""
        key = scene.emoji, scene.tint, scene.background
        if key not in self._visible:
            drawing = self._art[scene.tint, 40][self.index[scene.emoji]].astype(np.int64)
            solid = drawing[drawing[..., 3] > 127]
            apart = np.abs(solid[:, :3] - np.array(COLOURS[scene.background])).max(-1) > 40
            self._visible[key] = bool(apart.mean() > 0.6)
        return self._visible[key]

    def picture(self, scene: Scene) -> Pixels:
        """uint8 [64, 64, 3]."""
        canvas = np.empty((SIDE, SIDE, 3), np.int64)
        canvas[:] = COLOURS[scene.background]
        for top, left, side in boxes(scene):
            drawing = self._art[scene.tint, side][self.index[scene.emoji]].astype(np.int64)
            spot = canvas[top : top + side, left : left + side]
            spot[:] = (drawing[..., :3] + (spot * (255 - drawing[..., 3:]) + 127) // 255).clip(0, 255)
        return canvas.astype(np.uint8)

    def draw(self, seed: int, index: int) -> Scene:
        """The scene of this number in the stream of this seed."""
        rng = random.Random(f"{seed}/{index}")
        while True:
            scene = Scene(
                emoji=rng.choice(emojis()).name,
                count=2 if rng.random() < 0.12 else 1,
                size="small" if rng.random() < 0.35 else "big",
                tint=rng.choice(TINTS) if rng.random() < 0.15 else "",
                position=rng.choice(POSITIONS),
                background=rng.choice(tuple(COLOURS)),
            )
            if scene not in self._kept_out and sayable(scene) and self.visible(scene):
                return scene

    def stream(self, seed: int, start: int = 0) -> Iterator[tuple[str, Pixels]]:
        """(caption, picture) without end."""
        index = start
        while True:
            scene = self.draw(seed, index)
            yield words(scene, random.Random(f"words/{seed}/{index}")), self.picture(scene)
            index += 1


def write_held_out() -> None:
    scenes, chosen = Scenes(kept_out=()), dict[Scene, str]()
    index = 0
    while len(chosen) < NUM_HELD_OUT:
        scene = scenes.draw(20_261_201, index)
        chosen.setdefault(scene, words(scene, random.Random(f"held out/{index}")))
        index += 1
    lines = [json.dumps({"caption": said, **asdict(scene)}) for scene, said in chosen.items()]
    HELD_OUT.write_text("\n".join(lines) + "\n", "utf-8")


def sheet(pictures: Sequence[Pixels], columns: int = 8) -> Pixels:
    """Pictures in rows, white between them."""
    rows = -(-len(pictures) // columns)
    whole = np.full((rows * (SIDE + 2), columns * (SIDE + 2), 3), 255, np.uint8)
    for at, picture in enumerate(pictures):
        top, left = at // columns * (SIDE + 2), at % columns * (SIDE + 2)
        whole[top : top + SIDE, left : left + SIDE] = picture
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description="Look at scenes, or write the held-out list.")
    parser.add_argument("path", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write-heldout", action="store_true")
    options = parser.parse_args()
    if options.write_heldout:
        write_held_out()
    if options.path:
        from PIL import Image

        stream = Scenes().stream(options.seed)
        drawn = [next(stream) for _ in range(options.count)]
        Image.fromarray(sheet([picture for _, picture in drawn])).save(options.path)
        print("\n".join(caption for caption, _ in drawn))


if __name__ == "__main__":
    main()
