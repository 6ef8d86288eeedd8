"""Which token each row of a decode step gets: raw looks at logits, bans, sampling, the beams' choice. Knows no slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.sampling import SamplingRows, sample
from .decode_job import Attempt
from .decoding_rules import DecodingRules, loop_period

_LOOP_CHECK = 16  # tokens between two looks for a loop


class TokenChoice:
    """The rules of one model, applied to attempts in place. `num_tokens` and `num_prompt_tokens` only grow."""

    def __init__(self, model: Any) -> None:
        self._tokens = model.tokens
        self._device = torch.device(getattr(model, "device", "cpu"))
        self._num_positions = int(model.config.num_text_positions)
        self._language_ids = list(model.tokens.languages.values())
        self._language_codes = list(model.tokens.languages)
        self.num_tokens = 0
        self.num_prompt_tokens = 0
        self.num_drafted = self.num_accepted = 0  # draft ids computed, and those that were said
        self._rules = DecodingRules(
            vocab_size=model.config.vocab_size,
            eot=model.tokens.eot,
            no_timestamps=model.tokens.no_timestamps,
            timestamp_begin=model.tokens.timestamp_begin,
            suppress=model.suppress_tokens,
            begin_suppress=model.begin_suppress,
            device=self._device,
        )

    def room(self, attempt: Attempt) -> int:
        """Tokens that a hypothesis of this attempt may have."""
        return min(attempt.job.options.max_tokens, self._num_positions - len(attempt.prompt))

    def choose(self, attempts: list[Attempt], logits: torch.Tensor, wanted: list[list[int]]) -> None:
        """Look at raw rows where they are needed, ban what may not be said, pick tokens."""
        rows: list[int] = []
        sampled: list[list[int]] = []
        places: list[
            tuple[Attempt, int, int]
        ] = []  # of each row: whose, which hypothesis, how many draft ids it has read
        for attempt, mine in zip(attempts, wanted, strict=True):
            if attempt.purpose == "align":
                continue
            if attempt.purpose == "detect":
                self._detect(attempt, logits[mine[0]])
                continue
            if not attempt.fed:
                self.num_prompt_tokens += len(attempt.prompt)
                raw = logits[mine[0]]
                attempt.no_speech_prob = float((raw[self._tokens.no_speech] - raw.logsumexp(-1)).exp())
            if attempt.beams is not None:
                chosen = mine[-len(attempt.beams.live) :]
                live = list(range(len(chosen)))
            elif not attempt.fed:
                live = list(range(len(attempt.hypotheses)))
                chosen = mine[-1:] * len(live)  # all samples start from one row
            else:
                live = [at for at, is_open in enumerate(attempt.open) if is_open]
                chosen = mine
            hypotheses = attempt.live
            if attempt.offered:
                depths = range(len(attempt.offered) + 1)
                rows.extend(mine[-len(depths) :])
                sampled.extend([*hypotheses[0].ids, *attempt.offered[:depth]] for depth in depths)
                places.extend((attempt, 0, depth) for depth in depths)
                continue
            rows.extend(chosen)
            sampled.extend(hypotheses[at].ids for at in live)
            places.extend((attempt, at, 0) for at in live)
        if not rows:
            return
        if rows != list(range(logits.shape[0])):
            logits = logits[torch.tensor(rows, device=logits.device)]
        self._rules.apply(
            logits,
            sampled,
            timestamps=[attempt.job.options.timestamps for attempt, _, _ in places],
            suppress=[attempt.job.options.suppress for attempt, _, _ in places],
        )
        logprobs = logits.log_softmax(-1)
        self._pick_beams(places, logprobs)
        self._pick_tokens(places, logits, logprobs)

    def _detect(self, attempt: Attempt, raw: torch.Tensor) -> None:
        probs = raw[torch.tensor(self._language_ids, device=raw.device)].softmax(-1).tolist()
        attempt.broken = any(math.isnan(p) for p in probs)
        if not attempt.broken:
            attempt.job.language.observe(dict(zip(self._language_codes, probs, strict=True)))

    def _pick_tokens(
        self, places: list[tuple[Attempt, int, int]], logits: torch.Tensor, logprobs: torch.Tensor
    ) -> None:
        mine = [row for row, (attempt, _, _) in enumerate(places) if attempt.beams is None]
        if not mine:
            return
        if len(mine) < len(places):
            index = torch.tensor(mine, device=logits.device)
            logits, logprobs = logits[index], logprobs[index]
        chosen = [places[row] for row in mine]
        hot = [attempt.temperature for attempt, _, _ in chosen]
        ids = sample(
            logits,
            SamplingRows(
                temperature=torch.tensor(hot, dtype=torch.float32, device=logits.device),
                top_k=self._ints([0] * len(hot)),
                top_p=torch.ones(len(hot), device=logits.device),
                min_p=torch.zeros(len(hot), device=logits.device),
                noise_seed=self._ints([attempt.noise_seed + at for attempt, at, _ in chosen]),
                noise_position=self._ints([len(attempt.hypotheses[at].ids) + depth for attempt, at, depth in chosen]),
                any_random=any(t > 0 for t in hot),
                any_top_k=False,
                any_top_p=False,
                any_min_p=False,
            ),
        )
        said = logprobs.gather(1, ids[:, None])[:, 0].tolist()
        drafted: dict[int, tuple[Attempt, int]] = {}  # attempts that verify, and where their new ids begin
        for (attempt, at, depth), token, logprob in zip(chosen, ids.tolist(), said, strict=True):
            if attempt.offered:
                begin = drafted.setdefault(id(attempt), (attempt, len(attempt.hypotheses[0].ids)))[1]
                if depth and not self._verified(attempt, begin, depth):
                    continue  # this row has read what was not said
            self._extend(attempt, at, token, logprob)
        for attempt, begin in drafted.values():
            self._observe(attempt, attempt.hypotheses[0].ids[begin:])

    @staticmethod
    def _verified(attempt: Attempt, begin: int, depth: int) -> bool:
        said = attempt.hypotheses[0].ids
        return attempt.open[0] and len(said) == begin + depth and said[-1] == attempt.offered[depth - 1]

    def _observe(self, attempt: Attempt, said: list[int]) -> None:
        assert attempt.draft is not None
        self.num_drafted += len(attempt.offered)
        self.num_accepted += sum(a == b for a, b in zip(attempt.offered, said, strict=False))
        attempt.draft.observe(said, len(attempt.offered))

    def _extend(self, attempt: Attempt, at: int, token: int, logprob: float) -> None:
        if math.isnan(logprob):
            attempt.broken = True
            return
        hypothesis = attempt.hypotheses[at]
        hypothesis.total += logprob
        if token == self._tokens.eot:
            attempt.open[at] = False
            return
        self.num_tokens += 1
        hypothesis.ids.append(token)
        hypothesis.logprobs.append(logprob)
        count = len(hypothesis.ids)
        if count >= self.room(attempt):
            attempt.open[at] = False
        if count % _LOOP_CHECK == 0 and loop_period([i for i in hypothesis.ids if i < self._tokens.eot]):
            attempt.open[at] = False

    def _pick_beams(self, places: list[tuple[Attempt, int, int]], logprobs: torch.Tensor) -> None:
        begin = 0
        while begin < len(places):
            attempt = places[begin][0]
            end = begin + 1
            while end < len(places) and places[end][0] is attempt:
                end += 1
            if attempt.beams is not None:
                size = attempt.job.options.beam_size + 1
                best = logprobs[begin:end].topk(size, dim=-1)
                values = best.values.tolist()
                if any(math.isnan(v) for row in values for v in row):
                    attempt.broken = True
                else:
                    parents = attempt.beams.advance(best.indices.tolist(), values)
                    self.num_tokens += len(parents)
                    attempt.follow(parents)
            begin = end

    def _ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
