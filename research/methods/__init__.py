"""The decoding methods that the paper compares with, in the table of pypcd.decode once this is imported: a file for each."""

from __future__ import annotations

import functools

from pypcd.decode import register
from research.methods import beam, cad, dola, edits, mspoe, selfextend

register("beam", "search", beam.parse)
register("cad", "rows", cad.parse)
register("dola", "rows", dola.parse)
register("dola-low", "rows", functools.partial(dola.parse, layers="low"))
register("dola-high", "rows", functools.partial(dola.parse, layers="high"))
register("self-extend", "rows", selfextend.parse)
register("ms-poe", "rows", mspoe.parse)
register("ms-poe-outlier", "rows", functools.partial(mspoe.parse, order="outlier"))
register("segr", "edit", edits.parse_sort)
register("segr-ends", "edit", functools.partial(edits.parse_sort, ends=True))
register("segr-vote", "edit", edits.parse_vote)
register("rephrase", "edit", edits.parse_rephrase)
