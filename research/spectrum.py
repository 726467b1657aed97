"""One layer's attention, split into its frequency blocks, before and after over-rotation.

A block is a pair of dimensions that RoPE rotates together, with one frequency theta_j. The score of a query and a key at
distance k is a sum over the blocks, A_j cos(k theta_j + phi_j) (Lemma A.2). Over-rotation changes theta_j to
rho_j theta_j and leaves A_j and phi_j. Knows nothing of models.

    python -m research.spectrum MODEL --help
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from pypcd.cli import _loading, _options, _terminal
from pypcd.errors import InputError
from pypcd.evaluation import ModelTokenizer, task
from pypcd.prompt import Prompt, prompt_tokens
from pypcd.settings.formula import rho
from pypcd.settings.ranges import Integer
from research import files, plots
from research.command import command
from research.layers import PAIRINGS, read_layers

__all__ = ["Side", "Spectrum", "block_scores", "spectrum"]

Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Side:
    """A layer's attention with one table of frequencies; means over its heads. A bin is a range of distances.

    Attributes:
        score: float64[n_bins], the mean score, scaled as in attention.
        contribution: float64[n_bins, n_blocks], the mean contribution of each block to it.
        share: float64[n_bins, n_blocks], each block's share of the sum of the blocks' absolute values; rows sum to 1.
        attention: float64[n_bins], the attention weight of each bin; sums to 1.
        reach: the mean distance weighted by attention, in tokens.
    """

    score: Array
    contribution: Array
    share: Array
    attention: Array
    reach: float


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """The effect of over-rotation on a layer.

    Attributes:
        edges: int64[n_bins + 1]: bin i holds the distances edges[i] to edges[i + 1] - 1.
        before: with theta.
        after: with rho theta.
        reach_alone: float64[n_blocks], the reach when only this block is over-rotated. If it is less than before.reach,
            the block moves attention to nearer tokens; if it is more, to farther ones.
    """

    edges: npt.NDArray[np.int64]
    before: Side
    after: Side
    reach_alone: Array


def block_scores(
    q: npt.ArrayLike, k: npt.ArrayLike, distance: npt.ArrayLike, theta: npt.ArrayLike, *, pairing: str = "neox"
) -> Array:
    """The contribution of each frequency block to the score of one query and every key.

    Args:
        q: float[d], before rotation.
        k: float[n_keys, d], before rotation.
        distance: [n_keys], the query's position minus the key's.
        theta: float[n_blocks], radians per position; the dimensions after the first 2 n_blocks are not rotated.
        pairing: by llama.cpp's names: "norm": dimensions 2j and 2j + 1 are a block; "neox": j and j + n_blocks.

    Returns:
        float64[n_keys, n_blocks], not scaled; with a last column for the dimensions that are not rotated, if any.

    Raises:
        ValueError: shapes do not fit, or there is no such pairing.
    """
    query, keys = np.asarray(q, np.float64), np.asarray(k, np.float64)
    table, gap = np.asarray(theta, np.float64), np.asarray(distance, np.float64)
    n = 2 * len(table)
    if keys.ndim != 2 or query.shape != keys.shape[1:] or n > len(query) or gap.shape != keys.shape[:1]:
        raise InputError(
            f"q has the shape {query.shape}, k {keys.shape}, distance {gap.shape}, theta {table.shape}; allowed: [d], "
            "[n_keys, d], [n_keys] and at most [d/2]"
        )
    a, b = (_blocks(x[..., :n], pairing) for x in (query, keys))
    # |q_j| |k_j| cos(k theta_j + phi_j), as the real part of a product of complex numbers
    turned = (a * np.conj(b) * np.exp(1j * np.multiply.outer(gap, table))).real
    if n == len(query):
        return turned
    return np.concatenate([turned, (keys[:, n:] @ query[n:])[:, None]], axis=1)


def _blocks(x: Array, pairing: str) -> npt.NDArray[np.complex128]:
    if pairing not in PAIRINGS:
        raise InputError(f"pairing is {pairing!r}; allowed: {', '.join(map(repr, PAIRINGS))}")
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if pairing == "norm" else (x[..., :half], x[..., half:])
    return first + 1j * second


def spectrum(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    theta: npt.ArrayLike,
    rho: npt.ArrayLike,
    *,
    pairing: str = "neox",
    scale: float | None = None,
    n_bins: int = 24,
) -> Spectrum:
    """Split the attention of the last position into its frequency blocks.

    Args:
        q: float[n_heads, d], the last position's queries before rotation.
        k: float[n_keys, n_heads_kv, d], all positions' keys before rotation, the last position's own included;
            n_heads is a multiple of n_heads_kv, and each key head serves n_heads / n_heads_kv adjacent query heads.
        theta: float[n_blocks], the model's frequencies, radians per position.
        rho: float[n_blocks], the factor by which each frequency is over-rotated.
        pairing: see block_scores().
        scale: factor of the scores; None: 1 / sqrt(d).
        n_bins: number of bins of equal width in ln(1 + distance); empty ones are left out.

    Raises:
        ValueError: shapes do not fit.
    """
    queries, keys = np.asarray(q, np.float64), np.asarray(k, np.float64)
    slow, turned = np.asarray(theta, np.float64), np.asarray(rho, np.float64)
    if queries.ndim != 2 or keys.ndim != 3 or not len(keys) or len(queries) % keys.shape[1]:
        raise InputError(
            f"q has the shape {queries.shape} and k {keys.shape}; allowed: [n_heads, d] and [n_keys, n_heads_kv, d], "
            "n_heads a multiple of n_heads_kv"
        )
    if slow.shape != turned.shape:
        raise InputError(f"theta has the shape {slow.shape} and rho {turned.shape}; allowed: [n_blocks] for both")
    Integer(1)("n_bins", n_bins)
    scale = queries.shape[1] ** -0.5 if scale is None else scale
    distance = np.arange(len(keys))[::-1]
    edges = _edges(len(keys), n_bins)
    where = np.searchsorted(edges, distance, side="right") - 1
    n_heads, group = len(queries), len(queries) // keys.shape[1]

    sums = [_Sums(), _Sums()]
    alone: Array | float = 0.0
    for head, query in enumerate(queries):
        shared = keys[:, head // group]
        parts = [
            scale * block_scores(query, shared, distance, table, pairing=pairing) for table in (slow, slow * turned)
        ]
        for total, part in zip(sums, parts):
            total.add(part, distance, where, len(edges) - 1)
        changed = parts[0].sum(axis=1)[:, None] + (parts[1] - parts[0])[:, : len(slow)]
        alone = alone + distance @ _softmax(changed) / n_heads
    before, after = (total.side(n_heads) for total in sums)
    return Spectrum(edges, before, after, np.asarray(alone))


class _Sums:
    """Sums a side's figures head by head: all heads at once would take too much memory."""

    def __init__(self) -> None:
        self.parts: list[tuple[Array, Array, Array, float]] = []

    def add(self, part: Array, distance: npt.NDArray[np.int64], where: npt.NDArray[np.int64], n_bins: int) -> None:
        sizes = np.abs(part)
        share = sizes / np.maximum(sizes.sum(axis=1, keepdims=True), np.finfo(float).tiny)
        p = _softmax(part.sum(axis=1))
        one_hot = where == np.arange(n_bins)[:, None]
        mean = one_hot / one_hot.sum(axis=1, keepdims=True)
        self.parts.append((mean @ part, mean @ share, one_hot @ p, float(distance @ p)))

    def side(self, n_heads: int) -> Side:
        contribution, share, attention, reach = (sum(items) / n_heads for items in zip(*self.parts))
        return Side(contribution.sum(axis=1), contribution, share, attention, reach)


def _softmax(scores: Array) -> Array:
    """Over the first axis."""
    p = np.exp(scores - scores.max(axis=0))
    return p / p.sum(axis=0)


def _edges(n_keys: int, n_bins: int) -> npt.NDArray[np.int64]:
    """Bin edges from distance 0 to n_keys, none of them empty."""
    ideal = np.expm1(np.linspace(0, np.log(n_keys + 1), n_bins + 1))
    return np.unique(np.round(ideal).astype(np.int64))


# -- the command --------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m research.spectrum MODEL [-f FILE] [options]"
    parser.epilog = (
        "Reach is the mean distance, in tokens, over which the last token attends, averaged over heads. A block is a pair "
        "of dimensions that is rotated with one frequency. It sharpens if over-rotating it alone lowers the reach by more than "
        "one token, and blurs if that raises the reach by more than one token."
    )
    _options.add_model(parser)
    add = parser.add_argument
    add("-f", "--file", metavar="FILE", type=pathlib.Path, help="a text (default: a question of --task)")
    add("--task", metavar="NAME", help="as in `pypcd eval` (default: kv; for demo kv-short)")
    add("--length", metavar="N", default="1k", help="tokens of the question (default %(default)s)")
    add("--pcd", metavar="SETTING", default="paper", help="paper:alpha=0.3:base_ratio=1e-3 ... (default %(default)s)")
    add("--seed", metavar="N", type=_options.at_least(0), default=0, help="another question (default %(default)s)")
    _options.add_machine(parser)
    add("--out", metavar="DIR", type=pathlib.Path, help="where to write a picture and the data of each layer")
    add("--format", choices=plots.FORMATS, default="png", help="format of the pictures (default %(default)s)")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    config = _options.pcd_setting(args.pcd, args.model)
    if config is None or config.perturbation != "over-rotation":
        raise InputError(f"--pcd is {args.pcd!r}, which over-rotates nothing; allowed: on, or values such as alpha=0.3")
    if args.out is not None:
        plots.require()
        files.open_folder(args.out)
    lengths = _options.lengths(args.length)
    if len(lengths) != 1:
        raise InputError(f"--length is {args.length!r}; allowed: one length")
    length = lengths[0]
    text = args.file.read_text(encoding="utf-8", errors="replace") if args.file else ""
    size = max(2 * length, len(text.encode()) + 8)  # a token has a byte at least
    llm = _loading.open_model(args.model, n_ctx=size, n_batch=size, n_ubatch=size, **_options.machine_options(args))
    prompt = Prompt(after=text)
    if not args.file:
        name = args.task or _options.default_task(args.model)
        prompt = task(name).samples(4, length, ModelTokenizer(llm), args.seed)[1].prompt
    tokens = prompt_tokens(llm, prompt)

    made: dict[int, Spectrum] = {}
    how = {"alpha": config.alpha, "base_ratio": config.base_ratio, "transition": config.transition}
    with _terminal.Bar(None, "analysing layers", unit=" layers") as bar:
        for il, layer in read_layers(llm, tokens).items():
            table = rho(2 * len(layer.theta), **how)
            made[il] = spectrum(layer.q, layer.k, layer.theta, table, pairing=layer.pairing)
            bar.update(1)

    if args.out is not None:
        from research import figures  # which draws what this module measures

        for il, result in made.items():
            plots.save(figures.spectrum(result), args.out / f"layer-{il}.{args.format}")
        files.write_json(args.out / "spectrum.json", {"layers": {str(il): _record(s) for il, s in made.items()}})
    if args.json:
        print(
            json.dumps(
                {"model": args.model, "n_tokens": len(tokens), "layers": {il: _record(s) for il, s in made.items()}}
            )
        )
        return 0
    print(f"{args.model}, attention of the last of {len(tokens)} tokens; reach in tokens\n")
    print(f"{'layer':>5} {'before':>8} {'after':>8}   {'sharpening blocks':<20} {'blurring blocks':<20}")
    for il, result in made.items():
        change = result.reach_alone - result.before.reach
        near, far = (_ranges(np.flatnonzero(which) + 1) for which in (change < -1, change > 1))
        print(f"{il:>5} {result.before.reach:>8.1f} {result.after.reach:>8.1f}   {near:<20} {far:<20}".rstrip())
    print(
        f"\nblock 1 is the fastest, {len(change)} the slowest; listed: those that alone change the reach by more than a token"
    )
    return 0


def _ranges(numbers: Any) -> str:
    """1, 2, 3, 7 as "1-3 7"."""
    parts: list[list[int]] = []
    for n in map(int, numbers):
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return " ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts) or "-"


def _record(result: Spectrum) -> dict[str, Any]:
    return {
        "edges": result.edges.tolist(),
        "reach_before": result.before.reach,
        "reach_after": result.after.reach,
        "reach_alone": result.reach_alone.tolist(),
        "attention_before": result.before.attention.tolist(),
        "attention_after": result.after.attention.tolist(),
        "contribution_before": result.before.contribution.tolist(),
        "contribution_after": result.after.contribution.tolist(),
    }


if __name__ == "__main__":
    sys.exit(command("spectrum", add_arguments, run))
