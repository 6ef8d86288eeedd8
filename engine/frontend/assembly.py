"""One choice's tokens into text: detokenize, watch for stop strings, keep text, ids and logprobs cut at the same point.

No I/O and no clock. Tokens are looked at one by one, however many come at once, so a multi-token step (speculation)
stops where single tokens would have stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...models.tokenizer import Tokenizer
from ..types import TokenLogprob
from .events import TextDelta, TextLogprob
from .stop import StopAutomaton, StopMatch, StopMatcher


class TextAssembly:
    """State of one choice. After `push` or `finish` returned, `stopped` tells whether a stop string was found.

    A token is given out once the first character of its text is certain; held are at most the tokens of a tail that may
    become a stop string and of an unfinished character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        index: int,
        automaton: StopAutomaton | None,
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._index = index
        self._matcher = StopMatcher(automaton) if automaton is not None else None
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._decoder = tokenizer.incremental(skip_special_tokens=skip_special_tokens)
        self._held_text = ""
        self._held: deque[tuple[int, int, TextLogprob | None]] = deque()  # (id, where its text starts, logprob)
        self._length = 0  # characters decoded
        self._sent = 0  # characters given out
        self._num_seen = 0  # tokens pushed
        self.num_kept = 0  # tokens given out
        self.stopped: StopMatch | None = None

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> TextDelta | None:
        """New tokens; what can be given out now. After a stop everything further is ignored."""
        if self._matcher is None and logprobs is None and len(token_ids) == 1 and not self._held:
            return self._pass_on(token_ids[0])
        for at, token_id in enumerate(token_ids):
            if self.stopped is not None:
                break
            logprob = to_text_logprob(self._tokenizer, logprobs[at]) if logprobs is not None else None
            self._num_seen += 1
            self._held.append((token_id, self._length, logprob))
            self._take(self._decoder.feed((token_id,)))
        return self._give(final=False, logprobs=logprobs is not None)

    def _pass_on(self, token_id: int) -> TextDelta | None:
        """One token with nothing held and nothing to watch for: as the long way, at a fraction of its cost."""
        self._num_seen += 1
        text = self._decoder.feed((token_id,))
        if not text:
            self._held.append((token_id, self._length, None))
            return None
        self._length += len(text)
        self._sent = self._length
        self.num_kept += 1
        return TextDelta(index=self._index, text=text, token_ids=[token_id], logprobs=None)

    def finish(self, *, logprobs: bool) -> TextDelta | None:
        """The end of the stream: everything held goes out, unless its last characters complete a stop string."""
        if self.stopped is None:
            self._take(self._decoder.flush())
        return self._give(final=True, logprobs=logprobs)

    def _take(self, text: str) -> None:
        if not text:
            return
        self._held_text += text
        self._length += len(text)
        if self._matcher is None:
            return
        if self._num_seen <= self._min_tokens:
            self._matcher.skip(text)
        else:
            self.stopped = self._matcher.feed(text)

    def _give(self, *, final: bool, logprobs: bool) -> TextDelta | None:
        if self.stopped is not None:
            until, final = (self.stopped.end if self._include_stop else self.stopped.start), False
        elif final or self._matcher is None:
            until = self._length
        else:
            until = self._length - self._matcher.num_held
        text, self._held_text = self._held_text[: until - self._sent], self._held_text[until - self._sent :]
        self._sent = until
        ids: list[int] = []
        details: list[TextLogprob] = []
        while self._held and (final or self._held[0][1] < until):
            token_id, _, detail = self._held.popleft()
            ids.append(token_id)
            if detail is not None:
                details.append(detail)
        self.num_kept += len(ids)
        if not text and not ids:
            return None
        return TextDelta(index=self._index, text=text, token_ids=ids, logprobs=details if logprobs else None)


def to_text_logprob(tokenizer: Tokenizer, logprob: TokenLogprob) -> TextLogprob:
    """The engine's numbers with the tokens' text."""
    top = tuple(
        TextLogprob(token_id, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id), value, rank)
        for rank, (token_id, value) in enumerate(zip(logprob.top_ids, logprob.top_logprobs, strict=True), 1)
    )
    token_id = logprob.token_id
    return TextLogprob(
        token_id, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id), logprob.logprob, logprob.rank, top
    )
