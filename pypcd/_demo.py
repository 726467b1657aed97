"""The experiment behind `pypcd demo`: one retrieval task, four ways of decoding, paired counts.

Every prompt is evaluated once; each method starts from the same cache. Knows nothing of the terminal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pypcd._config import PCDConfig
from pypcd._engine import token_bytes
from pypcd._llama import Llama
from pypcd._method import log_softmax
from pypcd._prompt import prompt_tokens
from pypcd.evaluation import Sample
from pypcd.methods import PCD, Control, Method, Plain, Session

__all__ = ["CONTROL", "METHODS", "PLAIN", "Answer", "Step", "answer_all"]

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
    session = Session(llm)
    paper = PCDConfig.paper()
    control = Control(tuple(sample.prompt for sample in pool), beta=paper.beta, gamma=paper.gamma)
    control.means(session, chat=False)
    session.finish()
    progress(len(pool))

    made = {name: Method(name, Plain() if config is None else PCD(config)) for name, config in methods.items()}
    made[CONTROL] = Method(CONTROL, control)
    answers = []
    for sample in samples:
        n_max = len(llm.tokenize(sample.answers[0].encode(), add_bos=False)) + 2
        texts = {}
        for name, method in made.items():
            reply = method.generate(session, sample.prompt, max_tokens=n_max)
            texts[name] = reply.text.strip()
            if name == PLAIN:
                plain = reply.tokens
        answer = Answer(sample, texts)
        if not answer.is_right(PLAIN):
            answer.step = _first_wrong_step(session, sample, plain)
        answers.append(answer)
        progress(1)
    return answers


def _first_wrong_step(session: Session, sample: Sample, plain: Sequence[int]) -> Step | None:
    """PCD's candidates at plain decoding's first departure from the right answer."""
    llm, right, written = session.llm, sample.answers[0], ""
    stream = PCD(METHODS["PCD"] or PCDConfig()).open(session, sample.prompt, prompt_tokens(llm, sample.prompt))
    try:
        for token in (*plain, llm.token_eos()):
            written = (written + token_bytes(llm, token).decode("utf-8", "replace")).lstrip()
            if not right.startswith(written) or session.is_end(token):
                rows = llm.pcd_logits()
                return Step(_candidates(llm, rows.standard), _candidates(llm, rows.contrasted))
            stream.step({0: token})
    finally:
        session.finish()
    return None


def _candidates(llm: Llama, row: npt.NDArray[np.float32], n: int = 4) -> list[tuple[str, float]]:
    p = np.exp(log_softmax(row))
    best = np.argsort(-p, kind="stable")[:n]
    return [(token_bytes(llm, int(i)).decode("utf-8", "replace").strip() or "(end)", float(p[i])) for i in best]
