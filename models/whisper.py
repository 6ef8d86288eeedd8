"""Whisper: log-mel windows to features, features and tokens to logits, many transcripts at once.

    model = load_whisper(path, dtype=torch.bfloat16)
    cache = model.new_cache(num_slots=8)
    model.set_audio(cache, [0, 1], model.encode(model.log_mel([pcm_a, pcm_b])))
    hidden = model.decode(ids, slots, positions, cache)      # rows of any slots: prompts and single tokens together
    logits = model.logits(hidden)

A *slot* is a transcript being written, an *audio slot* the window it reads; several slots (beams, samples) may read one.
Attention goes through the paged door (kernels/attention.py) with one block per slot. Knows no rules of decoding, no
requests and no files but those of its weights.

Letters: B windows, M mel bins, T frames, D hidden size, H heads, d head dim, R rows, S slots, V vocabulary, A alignment
heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engine.errors import ModelLoadError
from ..kernels.activation import gelu
from ..kernels.attention import (
    PagedBatch,
    dense_attention,
    dequantize_rows,
    paged_attention,
    row_width,
    store_kv,
)
from ..kernels.linear import embedding, linear, torch_multiplies_bf16
from . import ctranslate2
from .loader import WeightSource, check_names, open_weights, read_config
from .weight_reader import WeightReader
from .whisper_config import WhisperConfig, WhisperRules, read_rules
from .whisper_mel import LogMel
from .whisper_tokenizer import WhisperTokenizer, load_whisper_tokenizer
from .whisper_tokens import WhisperTokens
from .whisper_weights import (
    optional_names,
    parameter_shapes,
    read_decoder_layer,
    read_encoder_layer,
    read_head,
    read_norm,
)


class WhisperCache:
    """What decoding remembers. Made by `Whisper.new_cache`; a slot's rows above its length are garbage, never read.

    self_kv     per layer [S, 2, H, 448, d]
    cross_kv    per layer [audio slots, 2, H, 1500, d]; with `cross_int8` an int8 cache (kernels/attention.py), which
                makes a step over many windows a fifth shorter
    queries     [S, 448, A, d] cross-attention queries of the alignment heads
    audio_length  [audio slots] positions of the window that count, 1500 but for windows that were cut short
    audio_slot  [S] which window a slot reads; at first its own number (modulo the number of audio slots)
    """

    def __init__(
        self,
        config: WhisperConfig,
        num_slots: int,
        num_audio: int,
        num_aligned: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        cross_int8: bool = False,
    ) -> None:
        self.num_slots = num_slots
        self.num_audio = num_audio

        def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(*shape, row_width(config.head_dim, dtype), dtype=dtype, device=device)

        self.self_kv = [make(num_slots, 2, config.heads, config.num_text_positions) for _ in range(config.layers)]
        windows = (num_audio, 2, config.heads, config.num_audio_positions)
        self.cross_kv = [make(*windows, dtype=torch.int8 if cross_int8 else dtype) for _ in range(config.layers)]
        self.queries = make(num_slots, config.num_text_positions, num_aligned)
        self.audio_length = [config.num_audio_positions] * num_audio
        self.audio_slot = [slot % num_audio for slot in range(num_slots)]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.self_kv, *self.cross_kv, self.queries))


@dataclass(frozen=True)
class _Rows:
    """Index tensors of one decode."""

    flat: Tensor  # [R] slot * 448 + position
    batch: PagedBatch  # over self_kv
    cross: PagedBatch  # over cross_kv


class Whisper:
    """The model. Not thread-safe; methods run without gradients."""

    def __init__(
        self,
        config: WhisperConfig,
        reader: WeightReader,
        *,
        tokens: WhisperTokens,
        tokenizer: WhisperTokenizer,
        rules: WhisperRules,
    ) -> None:
        """Raises ModelLoadError for weights that do not fit."""
        self.config = config
        self.tokens = tokens
        self.tokenizer = tokenizer
        self.suppress_tokens = rules.suppress_tokens
        self.begin_suppress = rules.begin_suppress
        self.alignment_heads = list(rules.alignment_heads)
        self.dtype = reader.dtype
        self.device = reader.device
        self.cross_int8 = False  # how new caches keep the keys and values of windows
        self._heads_of = [
            torch.tensor([h for at, h in rules.alignment_heads if at == layer], dtype=torch.int64, device=self.device)
            for layer in range(config.layers)
        ]
        self._mel = LogMel(config.num_mels, self.device)
        encoder, decoder = "model.encoder.", "model.decoder."
        # Torch's own bf16 convolution may be scalar code.
        wide = self.dtype is torch.bfloat16 and self.device.type == "cpu" and not torch_multiplies_bf16()
        conv_dtype = torch.float32 if wide else self.dtype
        self._convs = [
            (
                reader.vector(f"{encoder}conv{n}.weight").to(conv_dtype),
                reader.vector(f"{encoder}conv{n}.bias").to(conv_dtype),
            )
            for n in (1, 2)
        ]
        self._audio_positions = reader.vector(encoder + "embed_positions.weight").float()
        self._encoder = [read_encoder_layer(reader, f"{encoder}layers.{at}.") for at in range(config.encoder_layers)]
        self._encoder_norm = read_norm(reader, encoder + "layer_norm")
        self._embedding = read_head(reader, decoder + "embed_tokens")
        self._text_positions = reader.vector(decoder + "embed_positions.weight").float()
        self._decoder = [read_decoder_layer(reader, f"{decoder}layers.{at}.") for at in range(config.layers)]
        self._decoder_norm = read_norm(reader, decoder + "layer_norm")
        self.weight_bytes = reader.num_bytes

    # ----------------------------------------------------------------------------------------------------------- audio

    def log_mel(self, pcm: Sequence[Tensor]) -> Tensor:
        """Clips of 16 kHz mono, each fp32 [n] of at most 30 s -> fp32 [B, M, 3000]. The floor is taken per window."""
        return self._mel(pcm)

    def encode(self, mel: Tensor) -> Tensor:
        """Log-mel [B, M, 3000] -> features [B, 1500, D] in the model's dtype.

        Fewer frames (an even number) give half as many features and cost less, but the model was trained on whole
        windows. tiny.en, greedy, on 90 clips of 1 to 30 s: 4.6 % of words wrong with whole windows, 4.8 % with 10 s of
        silence kept after the speech, 53 % with 4 s (some transcripts never end). So: 10 s, and only for text that is
        not final. On a CPU a window's numbers never depend on its batch.
        """
        longest = 2 * self.config.num_audio_positions
        if (
            mel.dim() != 3
            or not mel.shape[0]
            or mel.shape[1] != self.config.num_mels
            or mel.shape[2] not in range(2, longest + 1, 2)
        ):
            raise ValueError(f"expected mel [B, {self.config.num_mels}, {longest} or fewer], got {list(mel.shape)}")
        if self.device.type != "cpu" or mel.shape[0] == 1:
            return self._encode(mel)
        # One window fills the cores; two would not fit the caches.
        return torch.cat([self._encode(window[None]) for window in mel])

    def _encode(self, mel: Tensor) -> Tensor:
        x = mel.to(self.device, self._convs[0][0].dtype)
        for stride, (weight, bias) in enumerate(self._convs, start=1):
            x = gelu(F.conv1d(x, weight, bias, stride=stride, padding=1))
        num_windows, hidden, num_frames = x.shape
        x = x.transpose(1, 2).contiguous() + self._audio_positions[:num_frames]  # fp32 [B, T, D]: the residual stream
        heads, dtype = self.config.encoder_heads, self.dtype
        for layer in self._encoder:
            qkv = layer.qkv(layer.norm(x, dtype)).view(num_windows, num_frames, 3, heads, hidden // heads)
            x += layer.out(dense_attention(*qkv.unbind(2), scale=(hidden // heads) ** -0.5))
            x += layer.down(gelu(layer.up(layer.ffn_norm(x, dtype))))
        return self._encoder_norm(x, dtype)

    # ----------------------------------------------------------------------------------------------------------- cache

    def new_cache(
        self, num_slots: int, num_audio: int | None = None, *, cross_int8: bool | None = None
    ) -> WhisperCache:
        """Room for `num_slots` transcripts that read `num_audio` windows (default: one each), kept as the cache says."""
        return WhisperCache(
            self.config,
            num_slots,
            num_audio or num_slots,
            len(self.alignment_heads),
            dtype=self.dtype,
            device=self.device,
            cross_int8=self.cross_int8 if cross_int8 is None else cross_int8,
        )

    def set_audio(self, cache: WhisperCache, audio_slots: Sequence[int], features: Tensor) -> None:
        """Put windows into audio slots: features [B, 1500 or fewer, D] -> keys and values of every cross attention."""
        heads, dim = self.config.heads, self.config.head_dim
        for layer, kv in zip(self._decoder, cache.cross_kv):
            for at, slot in enumerate(audio_slots):
                k, v = layer.cross_kv(features[at]).view(-1, 2, heads, dim).unbind(1)
                first = slot * self.config.num_audio_positions
                store_kv(k, v, kv, torch.arange(first, first + k.shape[0], device=self.device))
        for slot in audio_slots:
            cache.audio_length[slot] = features.shape[1]

    def copy_slots(self, cache: WhisperCache, src: Sequence[int], dst: Sequence[int], num_tokens: int) -> None:
        """What slots src know of their first `num_tokens` positions, into slots dst; all is read before it is written.

        For beams and samples: `dst` then reads the windows that `src` reads.
        """
        moved = [(a, b) for a, b in zip(src, dst) if a != b]
        if not moved:
            return
        index = torch.tensor([a for a, _ in moved], device=self.device)
        into = torch.tensor([b for _, b in moved], device=self.device)
        for kv in cache.self_kv:
            kv[into, :, :, :num_tokens] = kv[index, :, :, :num_tokens]
        cache.queries[into, :num_tokens] = cache.queries[index, :num_tokens]
        audio = [cache.audio_slot[a] for a, _ in moved]
        for (_, b), slot in zip(moved, audio):
            cache.audio_slot[b] = slot

    # ---------------------------------------------------------------------------------------------------------- decode

    def decode(
        self, ids: Sequence[int] | Tensor, slots: Sequence[int], positions: Sequence[int], cache: WhisperCache
    ) -> Tensor:
        """One row per token [R] -> hidden [R, D] after the last norm, in the model's dtype.

        A row sees its slot's positions up to its own; keys and values are stored. Rows of one slot lie together, in
        rising positions that continue what the slot holds. Rows of slots that read one window share its cost when they
        lie together too.
        """
        rows = self._rows(slots, positions, cache)
        ids = torch.as_tensor(ids, dtype=torch.int64, device=self.device)
        heads, dim, hidden, dtype = self.config.heads, self.config.head_dim, self.config.hidden, self.dtype
        scale, num_rows = dim**-0.5, rows.flat.shape[0]
        x = embedding(ids, self._embedding, dtype) + self._text_positions[rows.batch.position]  # fp32 [R, D]
        aligned: list[Tensor] = []
        for at, layer in enumerate(self._decoder):
            q, k, v = layer.qkv(layer.norm(x, dtype)).view(num_rows, 3, heads, dim).unbind(1)
            store_kv(k, v, cache.self_kv[at], rows.flat)
            mixed = paged_attention(q, cache.self_kv[at], rows.batch, 0, scale=scale)
            x = x + layer.out(mixed.view(num_rows, hidden))
            q = layer.cross_q(layer.cross_norm(x, dtype)).view(num_rows, heads, dim)
            if self._heads_of[at].numel():
                aligned.append(q.index_select(1, self._heads_of[at]))
            mixed = paged_attention(q, cache.cross_kv[at], rows.cross, 0, scale=scale)
            x = x + layer.cross_out(mixed.view(num_rows, hidden))
            x = x + layer.down(gelu(layer.up(layer.ffn_norm(x, dtype))))
        cache.queries.flatten(0, 1).index_copy_(0, rows.flat, torch.cat(aligned, dim=1))
        return self._decoder_norm(x, dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, D] -> fp32 [n, V]."""
        return linear(hidden, self._embedding, out_dtype=torch.float32)

    def _rows(self, slots: Sequence[int], positions: Sequence[int], cache: WhisperCache) -> _Rows:
        """Index tensors; runs of rows of a slot are the sequences of self attention, runs of a window those of cross."""
        length, num_audio = self.config.num_text_positions, self.config.num_audio_positions
        if len(slots) != len(positions) or not slots:
            raise ValueError(
                f"expected as many slots as positions, at least one; got {len(slots)} and {len(positions)}"
            )
        if not (0 <= min(positions) and max(positions) < length and 0 <= min(slots) and max(slots) < cache.num_slots):
            raise ValueError(f"expected positions below {length} and slots below {cache.num_slots}")
        audio = [cache.audio_slot[slot] for slot in slots]
        visible = [position + 1 for position in positions]
        batch = self._batch(list(slots), visible, length)
        if len(set(slots)) != len(batch.kv_lens_list):
            raise ValueError("expected the rows of a slot to lie together")
        flat = torch.tensor([s * length + p for s, p in zip(slots, positions)], device=self.device)
        return _Rows(
            flat=flat, batch=batch, cross=self._batch(audio, [cache.audio_length[at] for at in audio], num_audio)
        )

    def _batch(self, blocks: list[int], visible: list[int], block_size: int) -> PagedBatch:
        """Runs of equal `blocks` are sequences of one block; row r sees kv indices [0, visible[r]) of it."""
        starts, lens, table, seq = [0], list[int](), list[int](), list[int]()
        for row, block in enumerate(blocks):
            if not table or block != table[-1]:
                if table:
                    starts.append(row)
                table.append(block)
                lens.append(0)
            seq.append(len(table) - 1)
            lens[-1] = max(lens[-1], visible[row])
        starts.append(len(blocks))
        device = self.device
        num_visible = torch.tensor(visible, device=device)
        return PagedBatch(
            seq=torch.tensor(seq, device=device),
            position=num_visible - 1,
            slots=(),
            num_visible=num_visible,
            block_tables=(torch.tensor(table, dtype=torch.int32, device=device)[:, None],),
            kv_lens=torch.tensor(lens, device=device),
            row_starts=torch.tensor(starts, device=device),
            mark="decode" if len(table) == len(blocks) else "mixed",
            max_kv_len=max(lens),
            block_size=block_size,
            row_starts_list=tuple(starts),
            kv_lens_list=tuple(lens),
        )

    # ------------------------------------------------------------------------------------------------------- alignment

    def alignment(self, cache: WhisperCache, slot: int, num_tokens: int, num_frames: int, *, start: int = 0) -> Tensor:
        """Where the words are: attention of the alignment heads, fp32 [A, num_tokens, num_frames].

        Rows are positions start..start + num_tokens; row p was computed when token p was read, so it speaks of the
        token that follows. `num_frames` (20 ms each) of real audio: the softmax is over them alone. A in the order of
        `alignment_heads`.
        """
        audio = cache.audio_slot[slot]
        num_frames = max(1, min(num_frames, cache.audio_length[audio]))
        queries = cache.queries[slot, start : start + num_tokens].float().transpose(0, 1)  # [A, tokens, d]
        keys = torch.cat(
            [
                dequantize_rows(kv[audio, 0, :, :num_frames].index_select(0, heads))
                for kv, heads in zip(cache.cross_kv, self._heads_of)
                if heads.numel()
            ]
        )
        return torch.softmax(torch.matmul(queries, keys.transpose(1, 2)) * self.config.head_dim**-0.5, dim=-1)


# ------------------------------------------------------------------------------------------------------------- loading


def load_whisper(
    path: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    quantize: Literal["int8"] | None = None,
    invariant: bool = False,
) -> Whisper:
    """From a transformers directory (safetensors) or a CTranslate2 one (`model.bin`). Raises ModelLoadError.

    `quantize` makes float matrices int8 while loading (the encoder's only where that is faster: bfloat16 on CPUs, C++
    kernels); matrices stored as int8 stay so where the compute type is bfloat16. `invariant` (fp32, C++ kernels): a
    row's numbers never depend on the other rows.
    """
    path = Path(path)
    source: WeightSource
    if (path / ctranslate2.FILE).is_file() and not any(path.glob("*.safetensors")):
        source = ctranslate2.CTranslate2WhisperSource(path)
        config = _config_of(source)
    else:
        config = WhisperConfig.from_dict(read_config(path))
        source = open_weights(path)
    tokens = WhisperTokens.of_vocabulary(config.vocab_size)
    tokenizer = load_whisper_tokenizer(path, tokens)
    rules = read_rules(path, config, tokens, tokenizer.non_speech_tokens(), tokenizer.encode(" "))
    shapes = parameter_shapes(config)
    names = source.names()
    check_names(shapes, names, optional=optional_names(names))
    reader = WeightReader(source, shapes, dtype=dtype, device=device, quantize=quantize, invariant=invariant)
    return Whisper(config, reader, tokens=tokens, tokenizer=tokenizer, rules=rules)


def _config_of(source: ctranslate2.CTranslate2WhisperSource) -> WhisperConfig:
    """Sizes from the weights: a CTranslate2 directory states none."""
    shape, scalar = source.shape, source.file.scalar
    if not all(source.num_layers.values()):
        raise ModelLoadError(f"{source.file.name}: expected layers, got {source.num_layers}")
    try:
        (vocab_size, hidden), (hidden_too, num_mels, _) = (
            shape("model.decoder.embed_tokens.weight"),
            shape("model.encoder.conv1.weight"),
        )
        return WhisperConfig(
            num_mels=num_mels,
            hidden=hidden,
            heads=scalar("decoder/num_heads", hidden // 64),
            layers=source.num_layers["decoder"],
            encoder_heads=scalar("encoder/num_heads", hidden_too // 64),
            encoder_layers=source.num_layers["encoder"],
            decoder_ffn=shape("model.decoder.layers.0.fc1.weight")[0],
            encoder_ffn=shape("model.encoder.layers.0.fc1.weight")[0],
            vocab_size=vocab_size,
            num_audio_positions=shape("model.encoder.embed_positions.weight")[0],
            num_text_positions=shape("model.decoder.embed_positions.weight")[0],
        )
    except (ValueError, IndexError) as error:
        raise (
            error
            if isinstance(error, ModelLoadError)
            else ModelLoadError(f"{source.file.name}: the weights have unexpected shapes")
        ) from None
