"""How well a voice is understood: the held-out sentences, spoken from raw text, read back by Whisper base.

    python demo/recipes/voice_wer.py [VOICE] [--teacher] [--count 10] [--keep FOLDER] [--seed 0]

VOICE is a folder that voice_pack.py made, or a model id (default: motet-voice, as installed). The word error rate is over the
normalized words of what should be said (Whisper's own English normalizer: "20" and "twenty" are equal, and so are 10:45 pm,
1045 p.m. and "ten forty five p m"). `--teacher` scores flite's voice in the same way, from the sentences as spoken. Greedy
decoding of Whisper, beam 1.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer
from voice_speech import VOICE, held_out_sentences

from motet import Speech, Transcription
from motet.deploy.speech_demo import word_errors
from motet.pipelines.media import SAMPLE_RATE, decode_audio

EARS = "whisper-base"


class Words:
    """Text in the form in which it is compared."""

    def __init__(self) -> None:
        self._normalize = EnglishTextNormalizer({})

    def __call__(self, text: str) -> str:
        text = self._normalize(text.lower().replace("p.m.", "pm").replace("a.m.", "am"))
        text = re.sub(r"(?<=\d)[ :]+(?=\d)", "", text)
        return re.sub(r"\b([ap]) m\b", r"\1m", text)


def teacher_says(text: str) -> NDArray[np.float32]:
    """float32 [T] at 16 kHz."""
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        subprocess.run(["flite", "-voice", VOICE, "-t", text, "-o", file.name], check=True)
        return decode_audio(file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Word error rate of a voice.")
    parser.add_argument("voice", nargs="?", default="motet-voice")
    parser.add_argument("--teacher", action="store_true")
    parser.add_argument("--count", type=int, default=50, help="of the sentences (default: all fifty)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the sounds there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--threads", type=int, default=0, help="default: all cores")
    options = parser.parse_args()
    plain = Words()
    sentences = held_out_sentences()[: options.count]
    sounds: list[NDArray[np.float32]] = []
    if options.teacher:
        sounds = [teacher_says(spoken) for _, spoken in sentences]
    else:
        chosen = {} if options.temperature is None else {"temperature": options.temperature}
        with Speech(options.voice, threads=options.threads) as speech, tempfile.TemporaryDirectory() as folder:
            for at, (typed, _) in enumerate(sentences):
                path = (options.keep or Path(folder)) / f"{at:02d}.wav"
                path.parent.mkdir(parents=True, exist_ok=True)
                speech(typed, seed=options.seed, **chosen).save(path)
                sounds.append(decode_audio(path))
    errors = words = 0
    with Transcription(EARS, threads=options.threads) as ears:
        for (typed, spoken), sound in zip(sentences, sounds, strict=True):
            heard = ears(sound, language="en", sample_rate=SAMPLE_RATE, temperature=0.0).text.strip()
            wrong, count = word_errors(plain(spoken), plain(heard))
            errors, words = errors + wrong, words + count
            if wrong:
                print(f"{wrong}/{count}  {typed}\n      {heard}")
    seconds = sum(map(len, sounds)) / SAMPLE_RATE
    print(f"WER {errors / words:.1%} ({errors} of {words} words), {seconds:.0f} s of speech, heard by {EARS}")


if __name__ == "__main__":
    main()
