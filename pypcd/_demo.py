"""The experiment behind `pypcd demo`: one retrieval task, four ways of decoding, paired counts.

Every prompt is evaluated once; each method starts from the same cache. Knows nothing of the terminal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd._config import PCDConfig
from pypcd._llama import Llama
from pypcd._method import contrast
from pypcd.evaluation._sample import Sample

__all__ = ["CONTROL", "METHODS", "PLAIN", "Answer", "Step", "answer_all"]

Array = npt.NDArray[np.float64]

PLAIN = "plain"
CONTROL = "control"

# the settings that are compared, beside the control
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
        return self.texts[method] == self.sample.answers[0]


def answer_all(
    llm: Llama,
    samples: Sequence[Sample],
    pool: Sequence[Sample],
    progress: Callable[[int], None] = lambda n: None,
    methods: Mapping[str, PCDConfig | None] = METHODS,
) -> list[Answer]:
    """Answer every sample with every method, greedily.

    Args:
        pool: other samples of the same kind, for the control alone.
        progress: told how many samples have just been finished, the pool's included.
        methods: settings by name, METHODS among them.
    """
    prior = _prior(llm, pool, progress)
    answers = []
    for sample in samples:
        prompt, n_max = _prompt(llm, sample)
        texts = {}
        for name, config in methods.items():
            llm.pcd = config
            texts[name] = _text(llm, [token for token, _ in _greedy(llm, prompt, n_max)])
        llm.pcd = None
        texts[CONTROL] = _text(llm, [token for token, _ in _greedy(llm, prompt, n_max, prior)])
        answer = Answer(sample, texts)
        if not answer.is_right(PLAIN):
            answer.step = _first_wrong_step(llm, prompt, sample.answers[0], n_max)
        answers.append(answer)
        progress(1)
    return answers


def _prior(llm: Llama, pool: Sequence[Sample], progress: Callable[[int], None]) -> Callable[[int, Array], Array]:
    """The position-free control: in place of L* the mean log-probabilities that other samples have at the same step.

    It knows nothing of the question or of positions, so a gain that it shares with PCD is no matter of position.
    """
    llm.pcd = None
    steps: list[list[Array]] = []
    for sample in pool:
        for t, (_, row) in enumerate(_greedy(llm, *_prompt(llm, sample))):
            steps += [[]] if t == len(steps) else []
            steps[t].append(row)
        progress(1)
    means = [np.mean(rows, axis=0) for rows in steps]
    config = PCDConfig.paper()

    def change(t: int, row: Array) -> Array:
        return contrast(row, means[min(t, len(means) - 1)], beta=config.beta, gamma=config.gamma)

    return change


def _prompt(llm: Llama, sample: Sample) -> tuple[list[int], int]:
    """The prompt's tokens, and how many the answer may take."""
    n_answer = len(llm.tokenize(sample.answers[0].encode(), add_bos=False))
    return llm.tokenize(sample.prompt.text.encode(), special=False), n_answer + 2


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
    shared = min(llm.longest_token_prefix(llm._input_ids.tolist(), prompt), len(prompt) - 1)
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
