"""Windows of speech in, token ids with times and scores out: one continuous batch over the slots of a Whisper model.

A *job* is one window of at most 30 s. It is encoded once and holds an audio slot until it is decided; an *attempt* is one
try at one temperature and holds a text slot for each of its hypotheses, which share the audio slot. A failed attempt is
followed by the next temperature on the same encoding, while the others go on. Each `step` is one bounded piece of work:
an encoder batch, or one token for every running hypothesis, with the prompts of newcomers in the same forward pass. Where a
job brings a draft (text_draft.py), its greedy attempt verifies several tokens in that pass.

It knows no requests, no voice activity and no wall clock; the owner decides what to do with a window's ids.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from .beam_search import BeamSearch, Hypothesis
from .decode_job import Attempt, Decoded, DecodeJob, Finished, shortened
from .decode_queue import DecodeQueue
from .decoding_rules import compression_ratio, cut_loop, loop_period, needs_fallback
from .text_draft import TextDraft
from .token_choice import TokenChoice
from .word_times import alignment_matrix, monotone_path

_SAME = 3  # tries that give the same words settle it
_PROVISIONAL_FRAMES = 1000  # of 10 ms that follow the audio of text that will be said again
_FRAME_SAMPLES = 320  # of one encoder frame


class SegmentDecoder:
    """The batch. `model` is models/whisper.py's Whisper or anything that answers alike."""

    def __init__(
        self, model: Any, *, num_slots: int, num_audio: int = 0, encoder_batch: int = 1, max_prompt_rows: int = 512
    ) -> None:
        self.model = model
        self.num_slots = num_slots
        num_audio = num_audio or num_slots
        self._encoder_batch = encoder_batch
        self._max_prompt_rows = max_prompt_rows
        self._tokens = model.tokens
        self._device = torch.device(getattr(model, "device", "cpu"))
        self._cache = model.new_cache(num_slots, num_audio)
        self._choice = TokenChoice(model)
        self._free_text = list(range(num_slots))
        self._free_audio = list(range(num_audio))
        self._waiting = DecodeQueue()  # not yet encoded
        self._ready = DecodeQueue()  # encoded, without text slots
        self._running: list[Attempt] = []
        self._num_jobs = 0
        self._just_encoded = False
        self.counters = dict.fromkeys(("windows", "encoder_batches", "decode_steps", "rows", "fallbacks"), 0)

    # ---------------------------------------------------------------------------------------------------- the queue

    def add(self, job: DecodeJob) -> None:
        """Queue a window."""
        self._num_jobs += 1
        job.order = self._num_jobs
        self._waiting.push(job)

    def drop(self, owner: Any) -> None:
        """Forget all windows of an owner; their slots are free at once."""
        for queue in (self._waiting, self._ready):
            gone = queue.of(owner)
            queue.remove(gone)
            for job in gone:
                self._release_audio(job)
        for attempt in [a for a in self._running if a.job.owner is owner]:
            self._end(attempt)
            self._release_audio(attempt.job)

    def adopt(self, job: DecodeJob, owner: Any, due: float) -> None:
        """A window that is on its way, wherever it is, becomes another owner's and is due at another time."""
        queue = next((queue for queue in (self._waiting, self._ready) if job in queue), None)
        if queue is not None:
            queue.remove([job])
        job.owner, job.due = owner, due
        if queue is not None:
            queue.push(job)

    def has_work(self) -> bool:
        return bool(self._waiting or self._ready or self._running)

    def earliest_due(self) -> float:
        """Of all windows that are not decided; infinity when nobody waits for one."""
        return min(self.earliest_running(), self.waiting_due())

    def final_due(self) -> float:
        """The same of those that are encoded and whose text will be final."""
        encoded = [*self._ready, *(attempt.job for attempt in self._running)]
        return min((job.due for job in encoded if not job.options.provisional), default=math.inf)

    def earliest_running(self) -> float:
        """The same of the windows that are being decoded."""
        return min((attempt.job.due for attempt in self._running), default=math.inf)

    def waiting_due(self) -> float:
        """Of the windows that have no text slot yet; infinity when nobody waits for one."""
        return min(self._waiting.earliest_due(), self._ready.earliest_due())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._ready)

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Prompt tokens read and tokens said, ever."""
        return self._choice.num_prompt_tokens, self._choice.num_tokens

    @property
    def cache_bytes(self) -> int:
        return int(self._cache.num_bytes)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free(self) -> tuple[int, int]:
        """Free text and audio slots."""
        return len(self._free_text), len(self._free_audio)

    def step(self, *, max_windows: int | None = None) -> list[Finished]:
        """One encoder batch or one decode step. `max_windows` bounds the batch."""
        batch = [] if self._just_encoded and self._decode_next() else self._to_encode(max_windows)
        self._just_encoded = bool(batch)
        if batch:
            return self._encode(batch)
        self._start_attempts()
        return self._decode(self._running)

    def _decode_next(self) -> bool:
        """After an encoder batch: whether somebody waits for encoded text more than for what is to be encoded.

        Then encoder and decoder take turns: a crowd of newcomers must not stop it. Final text goes before provisional text.
        """
        if self.final_due() < math.inf:
            return True
        final_waits = self._waiting and not self._waiting.first().options.provisional
        return not final_waits and min(self.earliest_running(), self._ready.earliest_due()) < math.inf

    # ---------------------------------------------------------------------------------------------------- encoding

    def _to_encode(self, max_windows: int | None) -> list[DecodeJob]:
        """The windows to encode now, or none: then it is better to decode first."""
        room = min(len(self._free_audio), self._encoder_batch, max_windows or self._encoder_batch)
        able = self._waiting.able(self._encoder_batch) if room and self._waiting else []
        count = min(room, len(able))
        if not count:
            return []
        busy = len(self._running) + len(self._ready)
        urgent = able[0].due < math.inf
        # A lone window in a full batch waits for company, unless somebody waits for it.
        if busy and not urgent and count < min(len(able), self._encoder_batch) and busy > self.num_slots // 2:
            return []
        chosen = able[:count]
        self._waiting.remove(chosen)
        return chosen

    def _encode(self, jobs: list[DecodeJob]) -> list[Finished]:
        slots = self._free_audio[-len(jobs) :]
        try:
            mel = self.model.log_mel([job.load() for job in jobs])
            if all(job.options.provisional for job in jobs):
                mel = mel[..., : max(job.num_samples for job in jobs) // 320 * 2 + _PROVISIONAL_FRAMES]
            features = self.model.encode(mel)
            self.model.set_audio(self._cache, slots, features)
        except Exception as error:
            if len(jobs) == 1:
                return [Finished(job=jobs[0], error=error)]
            return [finished for job in jobs for finished in self._encode([job])]  # find the one to blame
        del self._free_audio[-len(jobs) :]
        for job, slot in zip(jobs, slots, strict=True):
            job.audio = slot
            if job.language.code is None:
                job.language.busy = True
            self._ready.push(job)
        self.counters["encoder_batches"] += 1
        self.counters["windows"] += len(jobs)
        return []

    # ---------------------------------------------------------------------------------------------------- decoding

    def _start_attempts(self) -> None:
        """Give text slots to encoded windows, in order, while there are enough for the next."""
        fresh = sum(len(attempt.prompt) for attempt in self._running if not attempt.fed)
        while self._ready:
            job = self._ready.first()
            attempt = self._attempt(job)
            if len(self._free_text) < attempt.width:
                return
            if fresh and fresh + len(attempt.prompt) > self._max_prompt_rows:
                return
            fresh += len(attempt.prompt)
            self._ready.pop()
            attempt.slots = [self._take_slot(job) for _ in range(attempt.width)]
            self._running.append(attempt)

    def _attempt(self, job: DecodeJob) -> Attempt:
        tokens, options = self._tokens, job.options
        if job.language.code is None:
            return Attempt(job=job, purpose="detect", slots=[], prompt=[tokens.sot])
        previous = [tokens.startofprev, *options.prompt] if options.prompt else []
        start = tokens.prompt(job.language.code, translate=options.translate, timestamps=options.timestamps)
        temperature = options.temperatures[job.next_temperature]
        attempt = Attempt(
            job=job, purpose="decode", slots=[], prompt=[*previous, *start], sot=len(previous), temperature=temperature
        )
        if temperature == 0 and options.beam_size > 1:
            attempt.beams = BeamSearch(beam_size=options.beam_size, patience=options.patience, eot=tokens.eot)
        else:
            count = options.best_of if temperature > 0 else 1
            attempt.hypotheses = [Hypothesis() for _ in range(count)]
            attempt.open = [True] * count
            if temperature == 0 and job.draft:
                end = self._tokens.eot if not options.timestamps else self.model.config.vocab_size
                draft = [i for i in job.draft if i < end]
                attempt.draft = TextDraft(draft, timestamp_begin=self._tokens.timestamp_begin)
        return attempt

    def _take_slot(self, job: DecodeJob) -> int:
        slot = self._free_text.pop()
        self._cache.audio_slot[slot] = job.audio
        return slot

    def _end(self, attempt: Attempt) -> None:
        """The attempt leaves the batch; its text slots are free."""
        self._running.remove(attempt)
        self._free_text.extend(attempt.slots)
        if attempt.purpose == "detect":
            attempt.job.language.busy = False

    def _release_audio(self, job: DecodeJob) -> None:
        if job.audio >= 0:
            self._free_audio.append(job.audio)
            job.audio = -1
        if job.language.code is None:
            job.language.busy = False

    def _decode(self, attempts: Sequence[Attempt]) -> list[Finished]:
        """One forward pass over all rows of these attempts."""
        attempts = list(attempts)
        if not attempts:
            return []
        try:
            logits, wanted = self._forward(attempts)
        except Exception as error:
            if len(attempts) == 1:
                return [self._fail(attempts[0], error)]
            # Rows that are computed twice store the same: each alone, to find the one to blame.
            return [finished for attempt in attempts for finished in self._decode([attempt])]
        self._choice.choose(attempts, logits, wanted)
        self._reorder(attempts)
        finished: list[Finished] = []
        for attempt in attempts:
            first, attempt.fed = not attempt.fed, True
            finished.extend(self._after(attempt, first))
        return finished

    def _forward(self, attempts: list[Attempt]) -> tuple[torch.Tensor, list[list[int]]]:
        """Logits [n, V] fp32 of the rows that somebody needs, and for each attempt the indices of its own."""
        for attempt in attempts:
            attempt.offered = self._offer(attempt)
        ids: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        needed: list[int] = []
        wanted: list[list[int]] = []
        for attempt in attempts:
            mine: list[int] = []
            for slot, first, row_ids in attempt.rows():
                begin = len(ids)
                ids.extend(row_ids)
                slots.extend([slot] * len(row_ids))
                positions.extend(range(first, first + len(row_ids)))
                if attempt.purpose == "align":
                    continue
                if not attempt.fed and attempt.purpose == "decode" and attempt.sot != len(attempt.prompt) - 1:
                    mine.append(len(needed))
                    needed.append(begin + attempt.sot)
                last = range(len(ids) - 1 - len(attempt.offered), len(ids))  # of the text so far, and of the draft
                mine.extend(range(len(needed), len(needed) + len(last)))
                needed.extend(last)
            wanted.append(mine)
        hidden = self.model.decode(ids, slots, positions, self._cache)
        self.counters["decode_steps"] += 1
        self.counters["rows"] += len(ids)
        if not needed:
            return hidden.new_empty(0, 0), wanted
        return self.model.logits(hidden[torch.tensor(needed, device=self._device)]), wanted

    def _offer(self, attempt: Attempt) -> list[int]:
        """Ids to verify in this step. Asking twice gives the same."""
        if attempt.draft is None or attempt.purpose != "decode":
            return []
        return attempt.draft.offer(self._choice.room(attempt) - len(attempt.hypotheses[0].ids))

    def _reorder(self, attempts: Sequence[Attempt]) -> None:
        """Bring the past of each live beam into a slot of its own."""
        for attempt in attempts:
            if moved := attempt.moved:
                known = len(attempt.prompt) + len(attempt.live[0].ids) - 1
                self.model.copy_slots(self._cache, [a for a, _ in moved], [b for _, b in moved], known)
                attempt.moved = []

    # --------------------------------------------------------------------------------------------------- deciding

    def _after(self, attempt: Attempt, first: bool) -> list[Finished]:
        """What a step means for an attempt: it goes on, or it is over and something follows."""
        job = attempt.job
        if attempt.broken:
            return [self._fail(attempt, ArithmeticError("the decoder gave numbers that are none"))]
        if attempt.purpose == "detect":
            self._end(attempt)
            if job.language.code is not None:
                self._ready.push(job)
            else:  # unsure: another window of this request is asked, this one comes again
                self._release_audio(job)
                job.order += 1 << 40
                self._waiting.push(job)
            return []
        if attempt.purpose == "align":
            assert attempt.chosen is not None
            return [self._finish(attempt, attempt.chosen, attempt.slots[0], complete=True)]
        if attempt.beams is not None:
            live = attempt.beams.live
            if not attempt.beams.done and live and len(live[0].ids) < self._choice.room(attempt):
                return []
            winner, slot = attempt.beams.best(job.options.length_penalty), -1
        else:
            if first and len(attempt.slots) > 1:  # the other samples continue from the same prompt
                rest = attempt.slots[1:]
                self.model.copy_slots(self._cache, attempt.slots[:1] * len(rest), rest, len(attempt.prompt))
            if any(attempt.open):
                return []
            index = max(
                range(len(attempt.hypotheses)),
                key=lambda at: attempt.hypotheses[at].score(job.options.length_penalty),
            )
            winner, slot = attempt.hypotheses[index], attempt.slots[index]
        return self._judge(attempt, winner, slot)

    def _judge(self, attempt: Attempt, winner: Hypothesis, slot: int) -> list[Finished]:
        """Good enough, or the next temperature; after the last, the best there was."""
        job, options = attempt.job, attempt.job.options
        eot = self._tokens.eot
        text_ids = [i for i in winner.ids if i < eot]
        text = self.model.tokenizer.decode(text_ids).strip()
        looped = loop_period(text_ids) > 0
        decoded = Decoded(
            ids=list(winner.ids),
            logprobs=list(winner.logprobs),
            text=text,
            avg_logprob=winner.avg_logprob,
            compression_ratio=compression_ratio(text),
            no_speech_prob=attempt.no_speech_prob,
            temperature=attempt.temperature,
            num_fallbacks=job.next_temperature,
        )
        failed = needs_fallback(
            ratio=decoded.compression_ratio,
            avg_logprob=decoded.avg_logprob,
            no_speech_prob=decoded.no_speech_prob,
            looped=looped,
            ratio_threshold=options.compression_ratio_threshold,
            logprob_threshold=options.logprob_threshold,
            no_speech_threshold=options.no_speech_threshold,
        )
        if not failed:
            return self._accept(attempt, decoded, slot)
        job.candidates.append(decoded)
        # Speech that repeats itself is said again and again alike: more noise will not make other words of it.
        alike = sum(_bare(candidate.text) == _bare(text) for candidate in job.candidates)
        settled = not looped and alike >= _SAME
        if job.next_temperature + 1 < len(options.temperatures) and not settled:
            self.counters["fallbacks"] += 1
            job.next_temperature += 1
            self._end(attempt)
            self._ready.push(job)
            return []
        plain = [c for c in job.candidates if c.compression_ratio <= options.compression_ratio_threshold]
        best = max(plain or job.candidates, key=lambda c: c.avg_logprob)
        cut = cut_loop(best.ids, eot)
        if len(cut) < len(best.ids):
            best = shortened(best, cut, self.model.tokenizer.decode([i for i in cut if i < eot]).strip())
        return self._accept(attempt, best, slot if best is decoded else -1)

    def _accept(self, attempt: Attempt, decoded: Decoded, slot: int) -> list[Finished]:
        """Done, unless word times are wanted and the slot that knew them is another's by now: then its rows once more."""
        if not attempt.job.options.alignment or not decoded.text:
            return [self._finish(attempt, decoded, -1, complete=False)]
        if slot >= 0:
            fed = len(decoded.ids) < self._choice.room(attempt)
            return [self._finish(attempt, decoded, slot, complete=fed)]
        attempt.purpose, attempt.chosen, attempt.fed = "align", decoded, False
        start = attempt.prompt
        attempt.prompt = [*start, *decoded.ids][: self.model.config.num_text_positions]
        attempt.sot = len(start)  # from here on: where the ids begin
        return []

    def _finish(self, attempt: Attempt, decoded: Decoded, slot: int, *, complete: bool) -> Finished:
        job = attempt.job
        try:
            if slot >= 0:
                first = attempt.sot if attempt.purpose == "align" else len(attempt.prompt)
                decoded = dataclasses.replace(decoded, begins=self._begins(job, decoded, slot, first, complete))
        except Exception as error:
            return self._fail(attempt, error)
        self._end(attempt)
        self._release_audio(job)
        return Finished(job=job, result=decoded)

    def _begins(self, job: DecodeJob, decoded: Decoded, slot: int, first: int, complete: bool) -> list[int]:
        """The frame at which each text token begins, and the end. `first` is the position of ids[0]."""
        num_frames = max(1, min(math.ceil(job.num_samples / _FRAME_SAMPLES), 1500))
        total = first + len(decoded.ids)
        # The row that predicted a token is the one before it; the text is not empty, so there is one.
        rows = [first + at - 1 for at, i in enumerate(decoded.ids) if i < self._tokens.eot]
        if complete:
            rows.append(total - 1)
        start = rows[0]
        weights = self.model.alignment(self._cache, slot, rows[-1] + 1 - start, num_frames, start=start)
        matrix = alignment_matrix(weights[:, torch.tensor(rows, device=weights.device) - start])
        begins: list[int] = monotone_path(matrix).tolist()
        return begins if complete else [*begins, num_frames]

    def _fail(self, attempt: Attempt, error: Exception) -> Finished:
        self._end(attempt)
        self._release_audio(attempt.job)
        return Finished(job=attempt.job, error=error)


def _bare(text: str) -> str:
    return "".join(letter for letter in text.casefold() if letter.isalnum())
