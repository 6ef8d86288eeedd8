"""Language models of several codebooks per position, over the paged cache: CSM, and what is shaped like it.

A backbone (a Llama) reads one row per position, the sum of its codes' embeddings, and names codebook 0 of the next one. A small
depth decoder (another Llama) then names codebooks 1, 2, ... of that position, one after the other: it reads the backbone's row,
the code of codebook 0, of codebook 1 and so on, and forgets all of it before the next position (Sesame's CSM; the shape is that
of RQ-Transformer, Lee et al. 2022).

Ids. A position's *primary* id is what the engine counts, hashes and stops on; its other codes are *side* ids:

    0 .. num_codes - 1   codebook 0 of a frame of audio; side ids are its codes of codebooks 1..
    num_codes            the end: a frame whose codes all are the checkpoint's end code (the last codebook may be anything)
    num_codes + 1 + t    the text token t; side ids mean nothing

Letters: R rows, n sampled rows, E hidden size, K codebooks, C codes of one codebook, V = C + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ..engine.errors import ModelLoadError
from ..kernels.attention import PagedBatch
from ..kernels.linear import LinearWeight, linear
from .decoder import Decoder
from .decoder_config import DecoderConfig
from .layer_stack import make_stack
from .layers import Linear
from .loader import WeightSource, check_names
from .parameters import Shapes, TensorSource, parameter_shapes
from .spec import WHOLE, KVSpec, Shard
from .weight_reader import Quantize, Rows, WeightReader

MULTI_CODEBOOK = frozenset({"csm"})  # model types that are read here
_CODEC = "codec_model."  # the checkpoint holds its codec too; that is another model's business
_AUDIO = "backbone_model.embed_tokens.embed_audio_tokens"
_DEPTH_AUDIO = "depth_decoder.model.embed_tokens"

Draw = Callable[[torch.Tensor, int], torch.Tensor]


class _Stack(Decoder):
    """The layers of a decoder and its last norm; embedding and head lie with the model around it."""

    def load_layers(self, reader: WeightReader, prefix: str) -> None:
        """Layers and norm from `prefix`.layers.N and `prefix`.norm."""
        for layer, block in enumerate(self.blocks):
            block.load(reader, f"{prefix}.layers.{layer}")
        self.norm.load(reader, prefix + ".norm")
        self.stack = make_stack(self)


class DepthDecoder:
    """Codebooks 1.. of a position, from the backbone's row and codebook 0. Each row is a sequence of K positions at most, in a
    page of its own that is written over at the next call."""

    def __init__(
        self, config: DecoderConfig, num_codebooks: int, num_codes: int, dtype: torch.dtype, device: str
    ) -> None:
        self.num_codebooks = num_codebooks
        self.num_codes = num_codes
        self.layers = _Stack(config, dtype=dtype, device=device)
        self.projection = Linear()
        self.heads: list[LinearWeight] = []  # of codebook 1, 2, ...: [C, depth hidden size]
        # Positions of a page: a power of two, K or more, and no fewer than the kernels of any device take.
        self.page = max(16, 1 << (num_codebooks - 1).bit_length())
        self._kvs: list[torch.Tensor] = []
        self._groups = [0] * config.num_layers
        self._batches: dict[int, list[PagedBatch]] = {}

    def forward(self, hidden: torch.Tensor, first: torch.Tensor, table: torch.Tensor, draw: Draw) -> torch.Tensor:
        """hidden [n, E] of the backbone and codes [n] of codebook 0 -> codes [n, K] of all codebooks.

        `table` [K * C, E] embeds code c of codebook k as row k * C + c; `draw` turns logits [n, C] of a codebook into codes.
        """
        codes = [first]
        rows = torch.stack((hidden, F.embedding(first, table)), dim=1).flatten(0, 1)  # two rows for each position
        for number, batch in enumerate(self._batches_of(len(first)), start=1):
            out = self.layers.forward(self.projection.forward(rows), batch, self._kvs, self._groups)
            logits = linear(out[1::2] if number == 1 else out, self.heads[number - 1], out_dtype=torch.float32)
            codes.append(draw(logits, number))
            rows = F.embedding(codes[-1] + number * self.num_codes, table)
        return torch.stack(codes, dim=1)

    def _batches_of(self, n: int) -> list[PagedBatch]:
        """The K - 1 batches of n positions: two rows each at first, then one. Row i lives in page i."""
        if not self._kvs or self._kvs[0].shape[0] < n:
            attention = self.layers.blocks[0].attention
            shape = (max(8, 2 * n), 2, attention.num_kv_heads, self.page, attention.head_dim)
            self._kvs = [torch.zeros(shape, dtype=self.layers.dtype, device=self.layers.device) for _ in self._groups]
        if n not in self._batches:
            device = self.layers.device
            index, pages = torch.arange(n, device=device), torch.arange(n, dtype=torch.int32, device=device)[:, None]
            batches = []
            for last in range(1, self.num_codebooks):  # position of the newest row
                count = 2 if last == 1 else 1
                seq = index.repeat_interleave(count)
                position = torch.arange(last + 1 - count, last + 1, device=device).repeat(n)
                batches.append(
                    PagedBatch(
                        seq=seq,
                        position=position,
                        slots=(seq * self.page + position,),
                        num_visible=position + 1,
                        block_tables=(pages,),
                        kv_lens=torch.full((n,), last + 1, device=device),
                        row_starts=torch.arange(n + 1, device=device) * count,
                        mark="decode" if count == 1 else "mixed" if n > 1 else "prefill",
                        max_kv_len=last + 1,
                        block_size=self.page,
                        row_starts_list=tuple(range(0, count * n + 1, count)),
                        kv_lens_list=(last + 1,) * n,
                    )
                )
            self._batches[n] = batches
        return self._batches[n]


class MultiCodebookModel:
    """Backbone, depth decoder and what lies around them. Call under `torch.inference_mode()`."""

    def __init__(
        self,
        backbone: DecoderConfig,
        depth: DecoderConfig,
        *,
        num_codebooks: int,
        num_codes: int,
        num_text: int,
        end_code: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self.num_codebooks = num_codebooks
        self.num_codes = num_codes
        self.num_text = num_text
        self.end_code = end_code
        self.end_id = num_codes
        self.eos_ids = (self.end_id,)
        self.vocab_size = num_codes + 1 + num_text
        self.hidden_size = backbone.hidden_size
        self.max_position = backbone.max_position
        self.backbone = _Stack(backbone, dtype=dtype, device=device)
        self.depth = DepthDecoder(depth, num_codebooks, num_codes, dtype, str(device))
        self.text_table = self.audio_table = self.depth_table = torch.empty(0)
        self.head: LinearWeight | None = None
        self.weight_bytes = 0
        self._offsets = torch.arange(num_codebooks, device=self.device) * num_codes

    def text_id(self, token: int) -> int:
        """The primary id of a text token of the checkpoint's tokenizer."""
        return self.num_codes + 1 + token

    def kv_specs(self) -> list[KVSpec]:
        """Of the backbone: the depth decoder's few positions never leave it."""
        return self.backbone.kv_specs()

    def embed(
        self,
        ids: torch.Tensor,
        side: tuple[torch.Tensor, torch.Tensor] | None = None,
        side_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """ids [R] int64 with side ids [R, K - 1] (None: zeros) -> [R, E]. `side` replaces rows as `Decoder.embed` does."""
        if side is not None:
            ids = ids.index_fill(0, side[0], self.end_id)  # never looked up
        if side_ids is None:
            side_ids = ids.new_zeros(len(ids), self.num_codebooks - 1)
        is_text = ids > self.end_id
        first = torch.where(ids >= self.end_id, self.end_code, ids)
        codes = torch.cat((first[:, None], side_ids), dim=1) + self._offsets
        audio = F.embedding_bag(codes, self.audio_table, mode="sum")
        text = F.embedding((ids - self.end_id - 1).clamp_(min=0), self.text_table)
        hidden = torch.where(is_text[:, None], text, audio)
        return hidden if side is None else hidden.index_copy_(0, side[0], side[1].to(hidden.dtype))

    def forward(
        self,
        hidden: torch.Tensor,
        batch: PagedBatch,
        kvs: Sequence[torch.Tensor],
        groups: Sequence[int],
        *,
        aux_hidden: tuple[int, ...] | None = None,
    ) -> Any:
        """As `Decoder.forward`, of the backbone."""
        if aux_hidden is None:
            return self.backbone.forward(hidden, batch, kvs, groups)
        return self.backbone.forward(hidden, batch, kvs, groups, aux_hidden=aux_hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden rows [n, E] -> fp32 [n, V] of codebook 0; the end is never sampled, it is read off a whole frame."""
        assert self.head is not None
        return F.pad(linear(hidden, self.head, out_dtype=torch.float32), (0, 1), value=-torch.inf)

    def finish_position(self, hidden: torch.Tensor, ids: torch.Tensor, draw: Draw) -> torch.Tensor:
        """See engine/side_ids.py. The rows [n, E], codes [n] of codebook 0 -> ids [n, K], the end in column 0 where it is."""
        first = torch.where(ids == self.end_id, self.end_code, ids)
        codes = self.depth.forward(hidden, first, self.depth_table, draw)
        ended = (codes[:, : self.num_codebooks - 1] == self.end_code).all(dim=1)
        codes[:, 0] = torch.where(ended, self.end_id, codes[:, 0])
        return codes


def load_multi_codebook(
    config: Mapping[str, Any],
    source: WeightSource,
    *,
    shard: Shard = WHOLE,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    quantize: Quantize | None = None,
    invariant: bool = False,
) -> MultiCodebookModel:
    """The model of a CSM config dict and checkpoint, as `transformers` writes them; its codec's weights are passed over.

    Raises ModelLoadError for an unusable config, missing or unexpected weights, or a shard.
    """
    if shard.tp_size != 1 or shard.layers is not None:
        raise ModelLoadError(
            "multi_codebook with tensor_parallel is refused: the depth decoder is not split over ranks"
        )
    try:
        inner = config["depth_decoder_config"]
        num_codebooks, num_codes = int(config["num_codebooks"]), int(config["vocab_size"])
        num_text, end_code = int(config["text_vocab_size"]), config["codebook_eos_token_id"]
        backbone, depth = (
            DecoderConfig.from_dict(
                {"rope_theta": 500_000.0, **part, "model_type": "llama", "vocab_size": num_codes}
                | {"tie_word_embeddings": False}
            )
            for part in (config, inner)
        )
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:  # a stranger's file
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"csm config: {error.__class__.__name__}: {error}") from None
    if (
        num_codebooks < 2
        or depth.max_position < num_codebooks
        or not (isinstance(end_code, int) and 0 <= end_code < num_codes)
    ):
        raise ModelLoadError(
            f"csm config: expected 2 codebooks or more, positions for each in the depth decoder and an end code of a "
            f"codebook, got {num_codebooks}, {depth.max_position} and {str(end_code)[:40]}"
        )
    model = MultiCodebookModel(
        backbone,
        depth,
        num_codebooks=num_codebooks,
        num_codes=num_codes,
        num_text=num_text,
        end_code=end_code,
        dtype=dtype,
        device=device,
    )
    shapes = _shapes(model, backbone, depth)
    names = {name for name in source.names() if not name.startswith(_CODEC)}
    # One table serves both decoders where they are tied; a file holds it under either name, or under both.
    held = {name for name in (_AUDIO + ".weight", _DEPTH_AUDIO + ".weight") if name in names}
    tied = config.get("tie_codebooks_embeddings", True) and bool(held)
    check_names((set(shapes) - {_AUDIO + ".weight", _DEPTH_AUDIO + ".weight"}) | held if tied else shapes, names)
    reader = WeightReader(source, shapes, dtype=dtype, device=device, quantize=quantize, invariant=invariant)
    model.backbone.load_layers(reader, "backbone_model")
    model.depth.layers.load_layers(reader, "depth_decoder.model")
    model.depth.projection.load(reader, [Rows("depth_decoder.model.inputs_embeds_projector")])
    model.head = reader.matrix([Rows("lm_head")], is_head=True)[0]
    model.text_table = _table(reader, "embed_text_tokens", num_text)
    rows = num_codebooks * num_codes
    audio = _AUDIO if _AUDIO + ".weight" in names else _DEPTH_AUDIO
    model.audio_table = model.depth_table = _table(reader, audio, rows)
    if not config.get("tie_codebooks_embeddings", True):
        model.depth_table = _table(reader, _DEPTH_AUDIO, rows)
    stacked = source.get("depth_decoder.codebooks_head.weight")
    assert isinstance(stacked, torch.Tensor)  # safetensors hold no blocks
    if list(stacked.shape) != [num_codebooks - 1, depth.hidden_size, num_codes]:
        raise ModelLoadError(
            f"depth_decoder.codebooks_head.weight: expected shape {[num_codebooks - 1, depth.hidden_size, num_codes]}, "
            f"got {list(stacked.shape)}"
        )
    heads = {f"{number}.weight": stacked[number].T.contiguous() for number in range(num_codebooks - 1)}
    split = WeightReader(
        TensorSource(heads),
        {name: tuple(head.shape) for name, head in heads.items()},
        dtype=dtype,
        device=device,
        quantize=quantize,
        invariant=invariant,
    )
    model.depth.heads = [split.matrix([Rows(str(number))], is_head=True)[0] for number in range(num_codebooks - 1)]
    model.weight_bytes = reader.num_bytes + split.num_bytes
    return model


def _shapes(model: MultiCodebookModel, backbone: DecoderConfig, depth: DecoderConfig) -> Shapes:
    """Every parameter that the checkpoint must hold, its codec's left out, and both names of the tied table."""
    hidden, rows = model.hidden_size, model.num_codebooks * model.num_codes
    shapes: Shapes = {
        "lm_head.weight": (model.num_codes, hidden),
        "embed_text_tokens.weight": (model.num_text, hidden),
        _AUDIO + ".weight": (rows, hidden),
        _DEPTH_AUDIO + ".weight": (rows, hidden),
        "depth_decoder.model.inputs_embeds_projector.weight": (depth.hidden_size, hidden),
        "depth_decoder.codebooks_head.weight": (model.num_codebooks - 1, depth.hidden_size, model.num_codes),
    }
    for config, prefix in ((backbone, "backbone_model."), (depth, "depth_decoder.model.")):
        for name, shape in parameter_shapes(config).items():
            if name.startswith(("model.layers.", "model.norm.")):
                shapes[prefix + name.removeprefix("model.")] = shape
    return shapes


def _table(reader: WeightReader, name: str, rows: int) -> torch.Tensor:
    """An embedding table [rows, E] in the model's dtype."""
    return reader.table(name, 0, rows).tensors["weight"]
