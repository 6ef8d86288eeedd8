"""The demo picture model's text encoder: a CLIP text model of 2 layers over words, and how it starts.

Its first lesson is to say what a caption means, from the one vector that steers the denoiser: which emoji, which tint, how
many, how big, where, on what, and a thumbnail of the emoji. Only then it learns on with the denoiser. Without that, the name,
one to three of a dozen words, takes a denoiser of this size long to find (a pilot: not at all within 25,000 pictures).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from emoji_clock import Stage
from emoji_scenes import COLOURS, POSITIONS, SIZES, TINTS, Scene, Scenes, emojis, vocabulary, words
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

# The end is not 2: a CLIP whose end is 2 takes the caption's vector from its highest id instead (its first configs had it wrong).
PAD, START, UNKNOWN, END = 0, 1, 2, 3
SPECIAL = ("<pad>", "<s>", "<unk>", "</s>")
WIDTH = 192
LENGTH = 16  # ids of a caption with start and end: the longest has 15
THUMBNAIL = 8
BATCH = 128
READ_RIGHTLY = 0.998  # of the captions, each part: then the first lesson ends


def word_ids() -> dict[str, int]:
    return {word: at for at, word in enumerate((*SPECIAL, *vocabulary()))}


def tokenizer() -> PreTrainedTokenizerFast:
    """Lower case, without punctuation, split at spaces; a word is an id."""
    words_only = Tokenizer(WordLevel(word_ids(), unk_token="<unk>"))
    marks = normalizers.Replace(Regex(r"[.,;:!?\"]"), " ")
    words_only.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase(), marks])
    words_only.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words_only.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", START), ("</s>", END)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words_only,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=LENGTH,
    )


def tokens(captions: Sequence[str], ids: dict[str, int]) -> tuple[Tensor, Tensor]:
    """int64 [B, LENGTH], padded after the end, and the lengths [B]. The same as `tokenizer()`, without its weight."""
    rows = [[START, *(ids[word] for word in caption.split()), END] for caption in captions]
    padded = torch.tensor([row + [PAD] * (LENGTH - len(row)) for row in rows])
    return padded, torch.tensor([len(row) for row in rows])


def encoder() -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=len(word_ids()),
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=WIDTH // 64,
        max_position_embeddings=LENGTH,
        hidden_act="gelu",
        projection_dim=WIDTH,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
    )
    model = CLIPTextModel(config)
    # Twenty times what CLIP starts with: a word's own part has to outweigh its place from the first step on.
    nn.init.normal_(model.get_input_embeddings().weight, std=0.4)
    return model


def encode(model: CLIPTextModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The words [B, LENGTH, WIDTH] and the caption [B, WIDTH]. What is after the end has no part in either: CLIP is causal."""
    out = model(input_ids=ids)
    return out.last_hidden_state, out.pooler_output


class Meaning(nn.Module):
    """Reads a scene off the caption's vector. Only for training."""

    def __init__(self, scenes: Scenes) -> None:
        super().__init__()
        self.sizes = (len(emojis()), len(TINTS) + 1, 2, len(SIZES), len(POSITIONS), len(COLOURS))
        self.heads = nn.Linear(WIDTH, sum(self.sizes))
        self.thumbnail = nn.Linear(WIDTH, THUMBNAIL * THUMBNAIL * 4)
        drawings = torch.from_numpy(scenes.drawings("", 40)).float() / 255
        small = F.avg_pool2d(drawings.permute(0, 3, 1, 2), 40 // THUMBNAIL).flatten(1)
        self.register_buffer("thumbnails", (small - small.mean(0)) / small.std(), persistent=False)
        self.index = scenes.index

    def labels(self, shown: Sequence[Scene]) -> Tensor:
        """int64 [B, 6]."""
        colours = tuple(COLOURS)
        return torch.tensor(
            [
                (
                    self.index[scene.emoji],
                    TINTS.index(scene.tint) + 1 if scene.tint else 0,
                    scene.count - 1,
                    SIZES.index(scene.size),
                    POSITIONS.index(scene.position),
                    colours.index(scene.background),
                )
                for scene in shown
            ]
        )

    def forward(self, caption: Tensor, labels: Tensor) -> Tensor:
        """[B, WIDTH], [B, 6] -> the loss."""
        total = (self.thumbnail(caption) - cast(Tensor, self.thumbnails)[labels[:, 0]]).square().mean()
        for logits, label in zip(self.heads(caption).split(self.sizes, dim=1), labels.T):
            total = total + F.cross_entropy(logits, label)
        return total

    def right(self, caption: Tensor, labels: Tensor) -> Tensor:
        """bool [B, 6]: what is read rightly."""
        read = [logits.argmax(1) for logits in self.heads(caption).split(self.sizes, dim=1)]
        return torch.stack(read, 1) == labels


def first_lesson(model: CLIPTextModel, meaning: Meaning, scenes: Scenes, folder: Path, *, minutes: float) -> None:
    """Train both until everything is read rightly, at most for so many minutes (`FOLDER/text.ckpt`)."""
    both = nn.ModuleDict({"text": model, "meaning": meaning})
    stage = Stage("text", folder, both, minutes=minutes, rate=2e-3, weight_decay=0.01, mean_decay=0.98, warm_up=30)
    ids = word_ids()
    device = next(model.parameters()).device
    rng = random.Random(stage.steps)
    found: deque[Tensor] = deque(maxlen=20)

    def step() -> tuple[Tensor, int]:
        shown = [scenes.draw(3, stage.seen + at) for at in range(BATCH)]
        labels = meaning.labels(shown).to(device)
        read, _ = tokens([words(scene, rng) for scene in shown], ids)
        _, caption = encode(model, read.to(device))
        found.append(meaning.right(caption.detach(), labels).float().mean(0))
        return meaning(caption, labels), BATCH

    stage.run(step, until=lambda: len(found) == 20 and float(torch.stack(list(found)).mean(0).min()) > READ_RIGHTLY)
    if found:
        shown = " ".join(f"{float(share):.3f}" for share in torch.stack(list(found)).mean(0))
        print(f"text: emoji, tint, count, size, position, background read rightly: {shown}", flush=True)


def save(model: Any, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """`text_encoder` and `tokenizer` in the folder."""
    model.to(dtype).save_pretrained(folder / "text_encoder")
    tokenizer().save_pretrained(folder / "tokenizer")
