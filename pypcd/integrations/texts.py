"""Several texts at once in one context: how probable given texts are, and answers, as benchmarks of others ask for them.

    texts = Texts(llm, n=8)
    texts.score([(context, continuation), ...])    # log-probabilities
    texts.answers([prompt, ...], max_tokens=64)    # each as soon as it is written

Texts are tokens. Sequence 0 holds the context that was read last: what the next one begins with in the same way is not read
again. The others continue it, all in one batch. With n=1 there is sequence 0 alone, as recurrent models need it.

Under PCD an answer's rows (logits) are those of generation. The rows that score a given text are not: there the plausible
tokens are all tokens (`scoring`), since generation puts the others about 60 behind, which says nothing of a text. It does
not know files, tasks or metrics.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from pypcd import engine
from pypcd.decode.search import Greedy
from pypcd.decode.session import Logits
from pypcd.errors import InputError, PCDError
from pypcd.settings.config import PCDConfig
from pypcd.settings.formula import log_softmax, plausible

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["Texts", "choice", "scoring"]

Choose = Callable[[Logits], int]
_Item = TypeVar("_Item")

_PART = 64  # rows of a batch: each row is n_vocab numbers, and with PCD each has a twin


def scoring(config: PCDConfig, n_vocab: int) -> PCDConfig:
    """The setting whose rows score a given text: the same contrast, without a cut.

    So a row is a whole distribution, log-softmax((1 + beta) L - beta L*), in which each token has its place. What says
    where PCD contrasts at all (min_context, min_entropy, min_first_entropy) stays.

    Raises:
        ValueError: the setting contrasts no sequence here.
    """
    if config.sequences != "all":
        raise InputError(
            f"sequences is {config.sequences!r}, which contrasts nothing here; allowed: 'all'; leave sequences out"
        )
    return config.replace(gamma=n_vocab, relative_top=0.0).repeatable()


def choice(standard: Logits, contrasted: Logits, config: PCDConfig) -> int:
    """The token that greedy decoding chooses: the best contrasted one among the plausible tokens of the setting.

    Args:
        standard: L.
        contrasted: the row without a cut.
    """
    kept = plausible(standard, gamma=config.gamma, relative_top=config.relative_top)
    return int(kept[contrasted[kept].argmax()]) if len(kept) else int(standard.argmax())


class Texts:
    """A model's context, with room for n texts beside each other.

    Args:
        n: how many; the model needs n_seq_max = n + 1 if it is more than 1.
        config: the PCD setting of answers; scores follow from it, see scoring(). None: plain.

    Attributes:
        n_read: tokens of contexts evaluated so far; less than there were where they begin alike.

    Raises:
        UnsupportedError: this model cannot run the setting, or not beside others.
        ValueError: the setting contrasts nothing here.
    """

    def __init__(self, llm: Llama, n: int = 1, config: PCDConfig | None = None) -> None:
        engine.check_decoder(llm)
        self.llm, self.n_read = llm, 0
        self._config = config and config.repeatable()
        self._scoring = config and scoring(config, llm.n_vocab())
        self._slots = [0] if n == 1 else list(range(1, n + 1))
        self._held: list[int] = []  # in sequence 0

    # -- given texts -------------------------------------------------------------------------------------------------------

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[tuple[int, float, bool]]:
        """The log-probability of each continuation behind its context, and whether greedy decoding would write it.

        With PCD a context is a prompt, and its continuation the answer: min_first_entropy looks at the row that the
        continuation's first token comes from.

        Args:
            pairs: context and continuation, each of at least one token; together at most n_ctx + 1.

        Yields:
            (index, log-probability, whether each token is the one that greedy decoding chooses behind those before it), in
            the order in which they are done.

        Raises:
            ValueError: a pair is empty or too long.
        """
        for context, continuation in pairs:
            n = len(context) + len(continuation)
            if not context or not continuation or n > self.llm.n_ctx() + 1:
                raise InputError(
                    f"a text has {len(context)} tokens of context and {len(continuation)} to be scored; allowed: at least "
                    f"one of each, {self.llm.n_ctx() + 1} together"
                )
        # neighbours begin alike
        order = sorted(range(len(pairs)), key=lambda i: (list(pairs[i][0]), list(pairs[i][1])))
        given = [_Given(i, list(pairs[i][0]), list(pairs[i][1])) for i in order]
        yield from self._running(self._scoring, self._scores(given))

    def _scores(self, left: list[_Given]) -> Iterator[tuple[int, float, bool]]:
        while left:
            n = self._n_fitting([(one.prompt, len(one.tokens) - 1) for one in left[: len(self._slots)]])
            block, left = left[:n], left[n:]
            for one, slot in zip(block, self._slots):
                self._open(slot, one.prompt)
            # row i is that behind i tokens
            todo = ((one, slot, i) for one, slot in zip(block, self._slots) for i in range(len(one.tokens)))
            while part := list(itertools.islice(todo, self._n_part)):
                self._decode(
                    (one.tokens[i - 1] if i else one.prompt[-1], len(one.prompt) - 1 + i, slot, True)
                    for one, slot, i in part
                )
                for at, (one, _, i) in enumerate(part):
                    row, best = self._scored(at)
                    one.log_probability += float(log_softmax(row)[one.tokens[i]])
                    one.is_greedy &= best == one.tokens[i]
            self._close(self._slots[:n])
            for one in block:
                yield one.index, one.log_probability, one.is_greedy

    def _scored(self, at: int) -> tuple[Logits, int]:
        """The row with this number in the last batch, and the token that greedy decoding chooses there."""
        if self._config is None or self.llm.pcd is None:  # None: PYPCD_DISABLE
            row = engine.row(self.llm, at)
            return row, int(row.argmax())
        rows = self.llm.pcd_logits(at)
        row = rows.contrasted
        return row, int(row.argmax()) if rows.beta is None else choice(rows.standard, row, self._config)

    # -- answers -----------------------------------------------------------------------------------------------------------

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        stops: Sequence[str] = (),
        ends: Sequence[int] = (),
        chooser: Callable[[int], Choose] | None = None,
    ) -> Iterator[tuple[int, str]]:
        """Answers to prompts, greedy ones unless there is a chooser.

        Args:
            max_tokens: of an answer; a prompt and its answer fit in n_ctx together.
            stops: texts that end an answer and are no part of it.
            ends: tokens that do, besides the model's own.
            chooser: called with the index of a prompt; returns what chooses each token of its answer from its row.

        Yields:
            (index, text), in the order in which they are done.

        Raises:
            ValueError: a prompt is empty, or does not fit.
        """
        for prompt in prompts:
            if not prompt or len(prompt) + max_tokens > self.llm.n_ctx():
                raise InputError(
                    f"a prompt has {len(prompt)} tokens; allowed: at least one, and with an answer of {max_tokens} "
                    f"{self.llm.n_ctx()}"
                )
        stopping = [stop.encode() for stop in stops if stop]
        yield from self._running(self._config, self._answers(prompts, max_tokens, stopping, set(ends), chooser))

    def _answers(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        stops: Sequence[bytes],
        ends: set[int],
        chooser: Callable[[int], Choose] | None,
    ) -> Iterator[tuple[int, str]]:
        left = sorted(range(len(prompts)), key=lambda i: list(prompts[i]))
        going: list[_Answer] = []
        while left or going:
            while left and len(going) < len(self._slots):
                known = [(answer.prompt, max_tokens) for answer in going]
                if going and self._n_fitting([*known, (list(prompts[left[0]]), max_tokens)]) <= len(going):
                    break
                free = next(slot for slot in self._slots if slot not in {answer.slot for answer in going})
                i = left.pop(0)
                going.append(_Answer(i, list(prompts[i]), free, chooser(i) if chooser else Greedy().chooser(b"")))
                self._open(free, going[-1].prompt)
            self._decode((answer.last, answer.n_past, answer.slot, True) for answer in going)
            for at, answer in enumerate(going):
                answer.add(answer.choose(engine.row(self.llm, at)), self.llm, max_tokens, stops, ends)
            for answer in going:
                if answer.is_over:
                    self._close([answer.slot])
                    yield answer.index, answer.text.decode("utf-8", "replace")
            going = [answer for answer in going if not answer.is_over]

    # -- the context -------------------------------------------------------------------------------------------------------

    @property
    def _n_part(self) -> int:
        return max(1, min(_PART, self.llm.n_batch // 2))

    def _running(self, config: PCDConfig | None, work: Iterator[_Item]) -> Iterator[_Item]:
        """The items of `work`, made under a setting in an empty memory that is empty again afterwards."""
        before = self.llm.pcd
        self._clear()
        self.llm.pcd = config
        try:
            yield from work
        finally:
            self._clear()
            self.llm.pcd = before

    def _clear(self) -> None:
        engine.clear(self.llm)
        self._held = []

    def _n_fitting(self, texts: Sequence[tuple[Sequence[int], int]]) -> int:
        """How many of these (prompt, further tokens) fit beside each other, at least one. What they share counts once."""
        # twins are in the memory while they are evaluated
        room = self.llm.n_ctx() - (self._n_part if self._config else 0)
        for n in range(2, len(texts) + 1):
            prompts = sorted([self._held, *(list(prompt) for prompt, _ in texts[:n])])
            shared = sum(map(self.llm.longest_token_prefix, prompts, prompts[1:]))
            if sum(map(len, prompts)) - shared + sum(more for _, more in texts[:n]) > room:
                return n - 1
        return max(1, len(texts))

    def _open(self, slot: int, prompt: Sequence[int]) -> None:
        """Read a prompt but for its last token, whose row is the first of what follows, and have a sequence continue it."""
        n = min(self.llm.longest_token_prefix(self._held, prompt), len(prompt) - 1)
        if not engine.rewind(self.llm, n, 0):  # a recurrent state cannot go back
            engine.rewind(self.llm, 0, 0)
            n = 0
        rest = prompt[n : len(prompt) - 1]
        for begin in range(0, len(rest), self.llm.n_batch):
            part = rest[begin : begin + self.llm.n_batch]
            self._decode((token, n + begin + i, 0, False) for i, token in enumerate(part))
        self._held = list(prompt[:-1])
        self.n_read += len(rest)
        if slot:
            engine.copy_sequence(self.llm, 0, slot)
        if self.llm.pcd is not None:
            engine.pcd(self.llm).begin_answer(len(prompt) - 1, slot)

    def _close(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot:
                engine.rewind(self.llm, 0, slot)

    def _decode(self, entries: Iterable[tuple[int, int, int, bool]]) -> None:
        """Evaluate (token, position, sequence, whether its logits are wanted), all in one batch."""
        if not engine.decode(self.llm, list(entries)):
            raise PCDError(
                f"the context of {self.llm.n_ctx()} tokens is full with {len(self._slots)} texts at once; have fewer at "
                "once, or load the model with a larger n_ctx"
            )


# -- inside ------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Given:
    """A text that is scored behind a prompt."""

    index: int
    prompt: list[int]
    tokens: list[int]
    log_probability: float = 0.0
    is_greedy: bool = True


@dataclasses.dataclass
class _Answer:
    """An answer that is being written."""

    index: int
    prompt: list[int]
    slot: int
    choose: Choose
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: bytes = b""
    is_over: bool = False

    @property
    def last(self) -> int:
        """The token that is evaluated next."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def n_past(self) -> int:
        return len(self.prompt) + len(self.tokens) - 1

    def add(self, token: int, llm: Llama, max_tokens: int, stops: Sequence[bytes], ends: set[int]) -> None:
        if engine.is_end(llm, token) or token in ends:
            self.is_over = True
            return
        self.tokens.append(token)
        self.text += engine.token_bytes(llm, token)
        places = [at for at in map(self.text.find, stops) if at >= 0]
        if places:
            self.text = self.text[: min(places)]
        self.is_over = bool(places) or len(self.tokens) == max_tokens
