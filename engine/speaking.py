"""One request to a voice while it lives: its utterances, its listener's clock, what it needs next. No tensors, no clocks.

An utterance goes through the phases of its format (models/speech_format.py), one LM sequence each; its codes become frames,
its frames audio. The codec speaks the first utterance of `utterances` while the LM may already be at a later one; audio
leaves in order.

The listener's clock starts with the first audio: what was sent is played from then on, so the time at which it runs out
(`runs_out`) is known. Whoever is late is told so once, and its clock begins again, as a player's would.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..models.speech_format import SpeechFormat
from .silence import SilenceTrimmer
from .types import AnyEvent, SpeechRequest, Usage


@dataclass(kw_only=True, eq=False)
class Utterance:
    """`outputs` holds what each phase has said so far; the last of them, once there are all, are the codes."""

    number: int
    prompt: list[int]
    outputs: list[list[int]] = field(default_factory=list)
    generated: bool = False  # the LM is done with it
    cut: bool = False  # it reached the length guard
    num_pushed: int = 0  # frames that the codec got
    trimmer: SilenceTrimmer | None = None


@dataclass(kw_only=True, eq=False)
class Speaking:
    """State of one request."""

    request: SpeechRequest
    format: SpeechFormat
    order: int
    seed: int
    arrival: float
    closed: bool  # no utterance will come any more
    input_since: float
    due: float  # when the first audio of this spell is wanted
    since: float  # when this spell of speech began to be wanted
    utterances: deque[Utterance] = field(default_factory=deque)
    num_utterances: int = 0
    admitted: bool = False  # holds a stream of the codec
    codec_open: bool = False
    lm_id: str = ""  # the LM sequence that runs for it
    carried: list[int] = field(default_factory=list)  # earlier speech that stands in front of the next prompt
    carried_s: float = 0.0
    # the listener's clock
    started: float | None = None
    sent_s: float = 0.0  # since `started`
    # totals
    total_s: float = 0.0
    first_scheduled: float | None = None
    first_audio: float | None = None
    was_cut: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_events: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def sort_key(self) -> tuple[int, int]:
        return (self.request.priority, self.order)

    def add(self, prompt: list[int]) -> None:
        self.utterances.append(Utterance(number=self.num_utterances, prompt=prompt))
        self.num_utterances += 1
        self.num_prompt_tokens += len(prompt)

    # -------------------------------------------------------------------------------------------------- its work

    @property
    def to_generate(self) -> Utterance | None:
        """The utterance that the LM is at, or the next one for it."""
        return next((one for one in self.utterances if not one.generated), None)

    def codes(self, utterance: Utterance) -> list[int]:
        """The codes that are there."""
        return utterance.outputs[-1] if len(utterance.outputs) == len(self.format.phases) else []

    def num_ready(self, utterance: Utterance) -> int:
        """Whole frames that the codec has not got yet."""
        return len(self.codes(utterance)) // self.format.num_places - utterance.num_pushed

    def tokens_to_audio(self) -> int:
        """Tokens that the LM has about to say before there can be more audio: none of a frame that waits, a frame's in the
        midst of an utterance, at its beginning all that comes before its sound."""
        one = self.utterances[0]
        if one.generated or self.num_ready(one) > 0:
            return 0
        if one.num_pushed:
            return self.format.num_places
        said = sum(map(len, one.outputs))
        before = len(one.prompt) if len(self.format.phases) > 1 else 0  # about a phone for each letter
        return max(0, before - said) + 4 * self.format.num_places

    @property
    def frame_s(self) -> float:
        return self.format.frame_samples / self.format.sample_rate

    def runs_out(self) -> float:
        """When the listener has heard all that was sent; before the first audio, when that is due."""
        return self.due if self.started is None else self.started + self.sent_s

    def lead(self, now: float) -> float:
        """Seconds until nothing is left to play, counting the frames that wait for the codec; 0 before the first audio."""
        if self.started is None:
            return 0.0
        waiting = sum(max(0, self.num_ready(one)) for one in self.utterances)
        return self.runs_out() - now + waiting * self.frame_s

    def chunk(self, now: float, first: int, most: int) -> int:
        """Frames that are worth a step of the codec: few while little is left to play, half of what is left later on."""
        if self.started is None:
            return first if self.utterances[0].num_pushed == 0 else 1
        return max(1, min(most, int((self.runs_out() - now) / 2 / self.frame_s)))

    # ------------------------------------------------------------------------------------------------- its clock

    def want(self, now: float, goal_s: float) -> None:
        """Speech is wanted again, after a pause in which nothing was left to say."""
        if self.started is None or now >= self.runs_out():
            self.started, self.sent_s = None, 0.0
            self.since, self.due = now, now + goal_s

    def send(self, seconds: float, now: float) -> float:
        """Audio leaves. Gives the seconds for which the listener had nothing to play (0 where there is no gap)."""
        late = 0.0
        if self.started is None:
            self.started, self.sent_s = now, 0.0
        elif (late := max(0.0, now - self.runs_out())) > 0:
            self.started = now - self.sent_s
        self.sent_s += seconds
        self.total_s += seconds
        return late

    # ------------------------------------------------------------------------------------------------- its words

    def carry(self, utterance: Utterance) -> None:
        """Remember what was spoken for the prompts that follow, up to the format's `carry_s`. The text goes with its codes."""
        most = self.format.carry_s
        if most <= 0:
            return
        codes = self.codes(utterance)
        seconds = len(codes) / self.format.tokens_per_s
        # The former speech stays in front where it fits, so that the cache knows all of it; else it begins with this one.
        ids = self.format.spoken(utterance.prompt, codes)
        fits = self.carried_s + seconds <= most
        self.carried = (self.carried if fits else []) + (ids if seconds <= most else [])
        self.carried_s = (self.carried_s if fits else 0.0) + (seconds if seconds <= most else 0.0)

    def usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
        )

    def stamp(self, event: AnyEvent) -> AnyEvent:
        """Number an event."""
        event.attempt = self.request.attempt
        event.seq = self.num_events
        self.num_events += 1
        return event
