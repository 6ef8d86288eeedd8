"""Speech to learn from: sentences spoken by flite (voice rms), with the phones it spoke and when, at 24 kHz.

    python demo/recipes/voice_speech.py FOLDER --hours 12 [--pronounced 40000] [--seed 7] [--jobs 2]

Needs Debian's flite (the engine and the rms voice are under BSD-like licences that allow any use of what they produce;
`motet-voice.md` quotes them). Writes into FOLDER: `speech.s16` (all utterances one behind the other, 16-bit, 24 kHz mono)
and `speech.tsv` (first sample, samples, each phone with its end in seconds, text). Goes on where it stopped; the same seed
gives the same speech. `pronounced.tsv` has the phones of further sentences that nobody speaks (phones, text): they cost a
tenth, and how English is pronounced takes more of it to learn than how a phone sounds.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import soxr
from numpy.typing import NDArray
from voice_text import sentences

VOICE, QUICK_VOICE = "rms", "kal"
SAMPLE_RATE = 24_000
LOUDNESS = 0.1  # root mean square of every utterance
SILENCE = 200 / 32768  # quieter than this at the edges is cut
LEAD_S, TAIL_S = 0.05, 0.1  # silence kept
LONGEST_S = 9.0
HELD_OUT = Path(__file__).with_name("voice_heldout.tsv")  # the test: as typed, tab, as spoken; never learned from
MEAN_S = 2.7  # of an utterance, to know how many sentences so many hours are

Samples = NDArray[np.int16]


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """Where an utterance lies in `speech.s16`, in samples, and what is said."""

    start: int
    length: int
    phones: tuple[str, ...]
    ends_s: tuple[float, ...]  # when each phone ends
    text: str


def speak(text: str) -> tuple[Samples, str] | None:
    """int16 [samples] at 24 kHz and its phones, "hh:0.21 ax:0.26 ..."; None for silence and what takes too long."""
    with tempfile.NamedTemporaryFile(suffix=".wav", dir=_scratch()) as file:
        told = subprocess.run(
            ["flite", "-voice", VOICE, "-psdur", "-t", text, "-o", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
        with wave.open(file.name) as reader:
            rate = reader.getframerate()
            sound = np.frombuffer(reader.readframes(reader.getnframes()), np.int16).astype(np.float32) / 32768
    loud = np.flatnonzero(np.abs(sound) > SILENCE)
    if not len(loud):
        return None
    first = max(0, loud[0] - round(LEAD_S * rate))
    sound = sound[first : loud[-1] + round(TAIL_S * rate)]
    length_s = len(sound) / rate
    phones: list[str] = []
    for name, _, end in (item.partition(":") for item in told.stdout.split()):
        end_s = min(max(float(end) - first / rate, 0.0), length_s)
        if end_s > 0.0:  # else it lay in what was cut
            phones.append(f"{name}:{end_s:.3f}")
    sound = soxr.resample(sound, rate, SAMPLE_RATE)
    if len(sound) > LONGEST_S * SAMPLE_RATE:
        return None
    sound *= LOUDNESS / (np.sqrt(np.mean(sound**2)) + 1e-5)
    return (np.clip(sound, -0.99, 0.99) * 32767).astype(np.int16), " ".join(phones)


def pronounce(text: str) -> str | None:
    """The phones of a text, "pau dh ax ...", by a smaller voice of the same dictionary; None where the two would differ."""
    told = subprocess.run(
        ["flite", "-voice", QUICK_VOICE, "-ps", "-t", text, "-o", "none"], capture_output=True, text=True, check=True
    )
    phones = " ".join(told.stdout.split())
    # The only difference: rms says "of" with another vowel.
    num_of = sum(word.strip(",.?'") == "of" for word in text.split())
    return phones.replace("aa v", "ah v") if phones.count("aa v") == num_of else None


def _scratch() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def synthesize(folder: Path, hours: float, *, seed: int, jobs: int, without: frozenset[str] = frozenset()) -> float:
    """Speak until there are so many hours; returns how many there are. Resumes."""
    folder.mkdir(parents=True, exist_ok=True)
    pcm, table = folder / "speech.s16", folder / "speech.tsv"
    done = read_table(folder) if table.is_file() else []
    known = {utterance.text for utterance in done}
    at = done[-1].start + done[-1].length if done else 0
    with pcm.open("r+b" if done else "wb") as file:
        file.truncate(at * 2)  # what an interrupted run wrote after its last line
    texts = sentences(round(hours * 3600 / MEAN_S * 1.15), seed, without=without)
    todo = [text for text in texts if text not in known]
    began = time.monotonic()
    with pcm.open("ab") as sound, table.open("a") as lines, Pool(jobs) as pool:
        for text, made in zip(todo, pool.imap(speak, todo, chunksize=16)):
            if made is None:
                continue
            samples, phones = made
            sound.write(samples.tobytes())
            lines.write(f"{at}\t{len(samples)}\t{phones}\t{text}\n")
            at += len(samples)
            if at >= hours * 3600 * SAMPLE_RATE:
                pool.terminate()
                break
    print(f"speech: {at / SAMPLE_RATE / 3600:.2f} h, {time.monotonic() - began:.0f} s", flush=True)
    return at / SAMPLE_RATE / 3600


def pronounce_more(folder: Path, count: int, *, seed: int, jobs: int, without: frozenset[str]) -> None:
    """Write `pronounced.tsv` unless it is there: `count` sentences other than those of `speech.tsv`."""
    path = folder / "pronounced.tsv"
    if path.is_file() or not count:
        return
    spoken = {utterance.text for utterance in read_table(folder)}
    texts = sentences(count + len(spoken), seed + 1, without=without | spoken)[:count]
    began = time.monotonic()
    with Pool(jobs) as pool:
        phones = pool.map(pronounce, texts, chunksize=64)
    path.with_suffix(".tmp").write_text("".join(f"{p}\t{text}\n" for p, text in zip(phones, texts) if p is not None))
    path.with_suffix(".tmp").rename(path)
    print(f"pronounced: {sum(p is not None for p in phones)} sentences, {time.monotonic() - began:.0f} s", flush=True)


def read_pronounced(folder: Path) -> list[tuple[list[str], str]]:
    """Phones and text of each sentence of `pronounced.tsv`; nothing where it is missing."""
    path = folder / "pronounced.tsv"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [(phones.split(), text) for phones, text in (line.split("\t") for line in lines)]


def read_table(folder: Path) -> list[Utterance]:
    """What `speech.s16` holds."""
    return list(_lines(folder / "speech.tsv"))


def _lines(path: Path) -> Iterator[Utterance]:
    for line in path.read_text().splitlines():
        start, length, phones, text = line.split("\t")
        pairs = [item.partition(":") for item in phones.split()]
        yield Utterance(
            start=int(start),
            length=int(length),
            phones=tuple(name for name, _, _ in pairs),
            ends_s=tuple(float(end) for _, _, end in pairs),
            text=text,
        )


def held_out_sentences() -> list[tuple[str, str]]:
    """The test's sentences, as people type them and as they are spoken."""
    return [(typed, spoken) for typed, spoken in (line.split("\t") for line in HELD_OUT.read_text().splitlines())]


def samples_of(folder: Path) -> Samples:
    """All of `speech.s16`, mapped, not read."""
    return np.memmap(folder / "speech.s16", np.int16, "r")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make speech for the demo voice to learn from.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hours", type=float, default=12.0)
    parser.add_argument(
        "--pronounced", type=int, default=40_000, help="further sentences of which only phones are kept"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    held_out = frozenset(spoken for _, spoken in held_out_sentences())
    synthesize(options.folder, options.hours, seed=options.seed, jobs=options.jobs, without=held_out)
    pronounce_more(options.folder, options.pronounced, seed=options.seed, jobs=options.jobs, without=held_out)


if __name__ == "__main__":
    main()
