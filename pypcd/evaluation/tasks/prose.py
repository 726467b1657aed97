"""Unrelated text: plain English sentences about a small town, drawn from a seed. It answers no question."""

from __future__ import annotations

import random
from collections.abc import Iterator

__all__ = ["paragraphs", "sentence_about", "sentences"]

_WHO = (
    "the baker", "the old gardener", "a young teacher", "the postman", "our neighbour", "the librarian", "a tired driver",
    "the mayor", "the tall carpenter", "a group of students", "the owner of the mill", "the nurse from the next street",
    "a visitor from the coast", "the woman with the green hat", "the boy on the bridge", "the clockmaker",
)  # fmt: skip
_DID = (
    "carried a basket of wood", "repaired the fence", "read the newspaper", "painted the door", "waited for the ferry",
    "looked for a lost key", "opened the shop", "talked about the harvest", "walked along the canal", "swept the yard",
    "moved the heavy table", "watched the boats", "wrote a short letter", "watered the roses", "counted the empty jars",
    "listened to the radio", "planted a row of trees", "closed the shutters", "drank a glass of water", "fed the geese",
)  # fmt: skip
_WHERE = (
    "behind the church", "near the station", "in the narrow lane", "on the market square", "beside the river", "at the mill",
    "in front of the school", "under the chestnut trees", "by the old wall", "at the edge of the forest",
)  # fmt: skip
_WHEN = (
    "early in the morning", "after lunch", "before the rain began", "late in the evening", "on a quiet afternoon",
    "when the bells rang", "at the end of the week", "during the long winter", "as soon as the fog was gone", "at noon",
)  # fmt: skip
_REMARKS = (
    "Nobody was in a hurry.", "The wind had changed.", "It was not the first time.", "The light was soft.",
    "A dog barked somewhere.", "There was little else to do.", "The road was still wet.", "People nodded and went on.",
    "The air smelled of smoke.", "That was how it had always been.",
)  # fmt: skip


def sentences(rng: random.Random) -> Iterator[str]:
    """Sentences without end."""
    while True:
        who, did, where, when = (rng.choice(words) for words in (_WHO, _DID, _WHERE, _WHEN))
        form = rng.randrange(4)
        if form == 0:
            yield f"{when[0].upper()}{when[1:]} {who} {did} {where}."
        elif form == 1:
            yield f"{who[0].upper()}{who[1:]} {did} {where} {when}."
        elif form == 2:
            other = rng.choice([name for name in _WHO if name != who])
            yield f"{where[0].upper()}{where[1:]} {who} {did}, and {other} {rng.choice(_DID)}."
        else:
            yield f"{who[0].upper()}{who[1:]} {did} {when}. {rng.choice(_REMARKS)}"


def sentence_about(who: str, rng: random.Random) -> str:
    """One sentence about somebody, in one of four forms."""
    did, where, when = (rng.choice(words) for words in (_DID, _WHERE, _WHEN))
    forms = (
        f"{when[0].upper()}{when[1:]} {who} {did} {where}.",
        f"{where[0].upper()}{where[1:]} {who} {did} {when}.",
        f"{who[0].upper()}{who[1:]} {did} {where} {when}.",
        f"{when[0].upper()}{when[1:]} {who} was {where} and {did}.",
    )
    return rng.choice(forms)


def paragraphs(sentences: list[str], n_sentences: int = 5) -> str:
    """The sentences as text, five in a paragraph."""
    starts = range(0, len(sentences), n_sentences)
    return "\n\n".join(" ".join(sentences[i : i + n_sentences]) for i in starts)
