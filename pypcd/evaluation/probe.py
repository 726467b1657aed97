"""Finds the heads of a model that retrieve, by questions whose answers are known.

CoRe's rule (arXiv 2510.02219): a head counts by the share that the paragraph with the answer gets of a softmax over what it pays to each
paragraph, averaged over questions. Half of the questions are reworded, so that no word of theirs stands in that paragraph: else heads would
be chosen that compare words, as keyword search does. The right paragraph stands at every depth of a text.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pypcd.decode import Session
from pypcd.evaluation.tasks.public import articles, reworded
from pypcd.find import Asked
from pypcd.find.attention import NULL, attended
from pypcd.find.heads import Heads
from pypcd.llama import Llama
from pypcd.prompt import Prompt, has_template

__all__ = ["N_HEADS", "probe"]

N_HEADS = 8
N_TEXTS = 2
N_PARAGRAPHS = 20  # of each text; two questions on each
TEMPERATURE = 0.01  # of the softmax


def probe(llm: Llama, progress: Callable[[int, int], object] = lambda n, total: None) -> Heads:
    """The N_HEADS heads that retrieve best.

    Args:
        progress: called with the number of questions that are done, and that of all.

    Raises:
        UnsupportedError: the model's attention cannot be read, or its context is shorter than the questions' texts.
    """
    rng = random.Random("probe")
    paragraphs, other_words = [p for article in articles("first") for p in article], reworded()
    rng.shuffle(paragraphs)
    chosen = [p for p in paragraphs if any(qa["id"] in other_words for qa in p["qas"])][: N_TEXTS * N_PARAGRAPHS]
    shares: list[list[npt.NDArray[np.float64]]] = []  # of each question, layer by layer
    session = Session(llm)
    try:
        for i in range(N_TEXTS):
            own = chosen[i::N_TEXTS]
            text = tuple(f"{p['context'].strip()}\n\n" for p in own)
            asked = Asked(llm, Prompt(segments=text, after="?"), has_template(llm), session.attention)
            null = attended(asked, NULL)
            questions = [
                (k, other_words.get(qa["id"], qa["question"]))
                for k, p in enumerate(own)
                for qa in sorted(p["qas"], key=lambda qa: qa["id"] not in other_words)[:2]
            ]
            for k, question in questions:
                pays = attended(asked, question)
                shares.append([_share(pays[il] - null[il], k) for il in sorted(pays)])
                progress(len(shares), N_TEXTS * 2 * N_PARAGRAPHS)
            layers = sorted(null)
    finally:
        session.finish()
    mean = np.mean(shares, axis=0)
    heads: dict[int, list[int]] = {}
    for at in np.argsort(-mean, axis=None, kind="stable")[:N_HEADS]:
        i, head = divmod(int(at), mean.shape[1])
        heads.setdefault(layers[i], []).append(head)
    return {il: sorted(some) for il, some in sorted(heads.items())}


def _share(pays: npt.NDArray[np.float64], gold: int) -> npt.NDArray[np.float64]:
    """What the right paragraph gets of each head's softmax; float64[n_heads]."""
    x = pays / TEMPERATURE
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return np.asarray(e[:, gold] / e.sum(axis=1))
