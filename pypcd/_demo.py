"""The experiment behind `pypcd demo`: one retrieval task, four ways of decoding, paired counts.

Every prompt is evaluated once; each method starts from the same cache. Knows nothing of the terminal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd._config import PCDConfig
from pypcd._llama import Llama
from pypcd._method import contrast
from pypcd._tasks import Sample

__all__ = ["CONTROL", "METHODS", "PLAIN", "Answer", "Step", "answer_all"]

Array = npt.NDArray[np.float64]

PLAIN = "plain"
CONTROL = "control"

# the settings that are compared; the control subtracts other samples' mean log-probabilities in place of L*
METHODS: dict[str, PCDConfig | None] = {
    PLAIN: None,
    "PCD": PCDConfig.paper(),
    "window": PCDConfig.windowed(),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """The candidates at one generated token: text and probability, best first, before and after the contrast."""

    before: list[tuple[str, float]]
    after: list[tuple[str, float]]


@dataclasses.dataclass
class Answer:
    """What each method answered to one sample.

    Attributes:
        texts: answer by method.
        step: the PCD candidates where plain decoding first leaves the right answer; None if it never does.
    """

    sample: Sample
    texts: dict[str, str]
    step: Step | None = None

    def is_right(self, method: str) -> bool:
        return self.texts[method] == self.sample.answer


def answer_all(llm: Llama, samples: Sequence[Sample], progress: Callable[[int], None] = lambda n: None) -> list[Answer]:
    """Answer every sample with every method, greedily.

    Args:
        progress: told the number of samples just finished; each is visited twice.
    """
    answers: list[Answer] = []
    plain_rows: list[list[Array]] = []  # log-probabilities along plain decoding's own path

    for sample in samples:
        prompt = llm.tokenize(sample.prompt.encode(), special=False)
        n_max = len(llm.tokenize(sample.answer.encode(), add_bos=False)) + 2
        texts, rows = {}, []
        for name, config in METHODS.items():
            llm.pcd = config
            path = list(_greedy(llm, prompt, n_max))
            texts[name] = _text(llm, [token for token, _ in path])
            if name == PLAIN:
                rows = [row for _, row in path]
        answer = Answer(sample, texts)
        if texts[PLAIN] != sample.answer:
            answer.step = _first_wrong_step(llm, prompt, sample.answer, n_max)
        answers.append(answer)
        plain_rows.append(rows)
        progress(1)

    # the control knows nothing of the question or of positions: what other samples make likely at this step
    config = METHODS["PCD"]
    assert config is not None
    n_steps = max(len(rows) for rows in plain_rows)
    sums = [np.sum([rows[t] for rows in plain_rows if t < len(rows)], axis=0) for t in range(n_steps)]
    counts = [sum(t < len(rows) for rows in plain_rows) for t in range(n_steps)]
    llm.pcd = None
    for answer, rows in zip(answers, plain_rows):

        def control(t: int, row: Array, own: list[Array] = rows) -> Array:
            t = min(t, n_steps - 1)
            mine = own[t] if t < len(own) else 0.0
            others = counts[t] - (t < len(own))
            return contrast(row, (sums[t] - mine) / others, beta=config.beta, gamma=config.gamma) if others else row

        prompt = llm.tokenize(answer.sample.prompt.encode(), special=False)
        n_max = len(llm.tokenize(answer.sample.answer.encode(), add_bos=False)) + 2
        answer.texts[CONTROL] = _text(llm, [token for token, _ in _greedy(llm, prompt, n_max, control)])
        progress(1)
    return answers


def _greedy(
    llm: Llama, prompt: list[int], n_max: int, change: Callable[[int, Array], Array] = lambda t, row: row
) -> Iterator[tuple[int, Array]]:
    """Tokens and the row each was chosen from (log-probabilities), up to the end of the answer."""
    _rewind(llm, prompt)
    tokens = prompt[llm.n_tokens :]
    for t in range(n_max):
        llm.eval(tokens)
        row = change(t, _log_softmax(_last_row(llm)))
        token = int(row.argmax())
        if llama_cpp.llama_vocab_is_eog(llm._model.vocab, token):
            return
        yield token, row
        tokens = [token]


def _rewind(llm: Llama, prompt: list[int]) -> None:
    """Keep what the cache shares with the prompt, all but its last token."""
    shared = min(llm.longest_token_prefix(llm._input_ids, prompt), len(prompt) - 1)
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(llm._ctx.ctx), -1, shared, -1)
    llm.n_tokens = shared


def _first_wrong_step(llm: Llama, prompt: list[int], right: str, n_max: int) -> Step | None:
    """PCD's candidates at plain decoding's first departure from the right answer."""
    llm.pcd = METHODS["PCD"]
    _rewind(llm, prompt)
    tokens, written = prompt[llm.n_tokens :], ""
    for _ in range(n_max):
        llm.eval(tokens)
        rows = llm.pcd_logits()
        token = int(rows.standard.argmax())
        piece = _text(llm, [token])
        if not right.startswith(written + piece) or llama_cpp.llama_vocab_is_eog(llm._model.vocab, token):
            return Step(_candidates(llm, rows.standard), _candidates(llm, rows.contrasted))
        written += piece
        tokens = [token]
    return None


def _candidates(llm: Llama, row: npt.NDArray[np.float32], n: int = 4) -> list[tuple[str, float]]:
    p = np.exp(_log_softmax(row.astype(np.float64)))
    return [(_text(llm, [int(token)]) or "(end)", float(p[token])) for token in np.argsort(-p)[:n]]


def _last_row(llm: Llama) -> Array:
    return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).astype(np.float64)


def _log_softmax(row: Array) -> Array:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def _text(llm: Llama, tokens: list[int]) -> str:
    return llm.detokenize(tokens).decode("utf-8", "replace").strip()
