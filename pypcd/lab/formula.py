"""Formulas: ways to contrast recorded rows (`recorded`), with expressions where PCDConfig has numbers.

    pcd:window:beta=5*jsd:relative_top=0.1          the strength follows how much the rows disagree (AdaCAD's idea)
    pcd:window:beta=2.5:where=rank>1                only where L*'s best token is another than L's
    pcd:window:beta=2.5*(l>s):relative_top=0.1      only for tokens that L* finds less probable

An expression has numbers, + - * / **, comparisons, `and`, `or`, `not`, the functions in FUNCTIONS, and these names. Of a
step: those in NAMES. Of each token at a step: `l` and `s`, its log-probabilities under L and L* (natural logarithms), and `seen`,
which is 1 if the prompt has it and else 0.

With a strength that is a number this is `method.contrast`, but for tokens masked in L*, whose logit is compared with the
others' after normalisation. Knows nothing of models.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pypcd.checks import Integer
from pypcd.config import PCDConfig
from pypcd.decode import PCD, setting_of
from pypcd.errors import InputError, did_you_mean
from pypcd.lab.recorded import view_of

__all__ = ["FUNCTIONS", "NAMES", "Formula", "Rows"]

Array = npt.NDArray[Any]

NAMES: Mapping[str, str] = {
    "jsd": "Jensen-Shannon divergence of the two softmax rows, in bits, 0 to 1",
    "jsd_kept": "the same of the plausible tokens alone, both rows normalised over them",
    "entropy": "of softmax L, in bits",
    "entropy_s": "of softmax L*, in bits",
    "first": "the entropy of softmax L at the answer's first token, in bits",
    "first_word": "the same at the first step whose best token has a letter or a digit; 0 before it",
    "most": "the highest entropy so far at such steps, in bits; 0 before them",
    "top": "the highest probability under L",
    "top_s": "the highest probability under L*",
    "margin": "log-probability of L's best token less that of its second",
    "rank": "the rank in L* of L's best token; 1 where the rows agree on it",
    "rank_back": "the rank in L of L*'s best token",
    "step": "tokens of the answer before this one",
    "context": "tokens before this one, the prompt's included",
}
"""What an expression may call a step's values."""

FUNCTIONS: Mapping[str, np.ufunc] = {
    "min": np.minimum,
    "max": np.maximum,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log2": np.log2,
}

_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.Not: np.logical_not,
    ast.And: np.logical_and,
    ast.Or: np.logical_or,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_TOKENS = ("l", "s", "seen")  # names of what each token has
_TIE = 1e-9  # contrasted logits nearer than this are equal but for rounding; the lower id goes first


@dataclasses.dataclass(frozen=True)
class Rows:
    """Steps with their rows, the k most probable tokens of L each, best first.

    Attributes:
        ids: int[n, k].
        l, s: log-probabilities under L and L*, float64[n, k]; -inf: masked.
        seen: whether the prompt has the token, bool[n, k].
        values: NAMES without jsd_kept, float64[n] each.
    """

    ids: Array
    l: Array
    s: Array
    seen: Array
    values: Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class Formula:
    """A way to contrast the rows of a view.

    Args:
        view: what makes L*; None: plain decoding, whatever the rest says.
        beta: the strength, an expression.
        gamma: how many of the most probable tokens of L stay in play.
        relative_top: the cut, an expression without l, s, seen and jsd_kept.
        where: an expression; where it is false the strength is 0. Empty: everywhere.

    Raises:
        ValueError: an expression has something that is not allowed, or gamma is no integer of at least 1.
    """

    view: PCDConfig | None
    beta: str = "2.5"
    gamma: int = 30
    relative_top: str = "0"
    where: str = ""

    def __post_init__(self) -> None:
        Integer(1)("gamma", self.gamma)
        steps = {name for name in NAMES if name != "jsd_kept"}
        for name, allowed in (("beta", {*NAMES, *_TOKENS}), ("relative_top", steps), ("where", {*NAMES, *_TOKENS})):
            if getattr(self, name) or name != "where":
                _check(name, getattr(self, name), allowed)

    @classmethod
    def parse(cls, text: str) -> Formula:
        """A formula from a method's name, "greedy" or "pcd:…", with expressions as values where a formula has them.

        Raises:
            ValueError: it is not one.
        """
        own: dict[str, Any] = {}
        rest = []
        for word in text.strip().split(":"):
            name, _, value = word.partition("=")
            if name == "where" or (name in ("beta", "relative_top") and not _is_number(value)):
                own[name] = value.strip()
            else:
                rest.append(word)
        formula = cls.of(setting_of(":".join(rest)))
        if own and (formula.view is None or formula.where or ("beta" in own and "*" in formula.beta)):
            raise InputError(
                f"formula is {text!r}; allowed: expressions for a setting of pcd without adaptive and floors; write "
                "beta=5*jsd, where=context>=512 and entropy>=2"
            )
        return dataclasses.replace(formula, **own)

    @classmethod
    def of(cls, config: PCDConfig | None) -> Formula:
        """The formula of a setting."""
        if config is None:
            return cls(None)
        beta = f"{config.beta:.9g}" + (f"*{config.adaptive}" if config.adaptive else "")
        context = "context-step" if config.min_first_entropy else "context"  # a whole answer's, or each token's
        floors = {context: config.min_context, "entropy": config.min_entropy, "first": config.min_first_entropy}
        where = " and ".join(f"{name}>={least:.9g}" for name, least in floors.items() if least)
        return cls(view_of(config), beta, config.gamma, f"{config.relative_top:.9g}", where)

    @property
    def name(self) -> str:
        """As parse() reads it, the same for equal formulas; "greedy" for plain decoding."""
        if self.view is None:
            return "greedy"
        own = {name: getattr(self, name) for name in ("beta", "gamma", "relative_top", "where")}
        default = Formula(None)
        words = [f"{name}={value}" for name, value in own.items() if value != getattr(default, name)]
        return ":".join([PCD(self.view).name, *words])

    @property
    def config(self) -> PCDConfig | None:
        """The setting that decodes by this formula; None where the engine has none, or where it is plain decoding."""
        if self.view is None:
            return None
        beta, _, measure = self.beta.partition("*")
        floors = _floors(self.where)
        if floors is None:
            return None
        fields: dict[str, Any] = {"gamma": self.gamma, "adaptive": measure.strip() or None, **floors}
        try:
            return self.view.replace(beta=float(beta), relative_top=float(self.relative_top), **fields)
        except ValueError:  # an expression that PCDConfig has no field for
            return None

    def choose(self, rows: Rows) -> Array:
        """The best token of each step: its place among the k, int[n]. gamma may be up to k."""
        k = rows.l.shape[1]
        if self.view is None:
            return np.zeros(len(rows.l), int)
        names = {name: value[:, None] for name, value in rows.values.items()}
        kept = (np.arange(k) < self.gamma) & (rows.l > -np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            cut = np.log(np.asarray(_value(_tree(self.relative_top), names), float))
            kept &= rows.l >= rows.l[:, :1] + np.where(np.isnan(cut), -np.inf, cut)
            kept[:, 0] = True
            names |= {"l": rows.l, "s": rows.s, "seen": rows.seen}
            if "jsd_kept" in self.beta + self.where:
                names["jsd_kept"] = _jsd(rows.l, rows.s, kept)[:, None]
            strength = np.asarray(_value(_tree(self.beta), names), float)
            if self.where:
                strength = np.where(_value(_tree(self.where), names), strength, 0.0)
            contrast = rows.l + np.where(strength == 0.0, 0.0, strength * (rows.l - rows.s))
        contrast = np.where(rows.s > -np.inf, contrast, rows.l)
        contrast = np.where(kept, contrast, -np.inf)
        best = contrast.max(1, keepdims=True)
        return np.argmin(np.where(contrast >= best - _TIE, rows.ids, rows.ids.max(initial=0) + 1), 1)


def _floors(where: str) -> dict[str, float] | None:
    """The fields that leave plain what an expression does, and nothing else; None: there are none."""
    found: dict[str, str] = {}
    for part in where.split(" and ") if where else ():
        match = re.fullmatch(
            r" *(context|context *- *step|entropy|first) *>= *((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?) *", part
        )
        if match is None or (name := match[1].replace(" ", "")) in found:
            return None
        found[name] = match[2]
    own, others = ("context-step", "context") if float(found.get("first", 0)) else ("context", "context-step")
    if others in found or not found.get(own, "0").isdigit():
        return None
    fields = {"min_entropy": found.get("entropy", 0), "min_first_entropy": found.get("first", 0)}
    return {"min_context": int(found.get(own, 0)), **{name: float(value) for name, value in fields.items()}}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _jsd(l: Array, s: Array, kept: Array) -> Array:
    """The divergence of the plausible tokens, in bits, float64[n]."""

    def normalised(row: Array) -> Array:
        row = np.where(kept, row, -np.inf)
        row = np.exp(row - np.maximum(row.max(1, keepdims=True), -1e30))
        return row / np.maximum(row.sum(1, keepdims=True), 1e-300)

    p, q = normalised(l), normalised(s)
    m = (p + q) / 2
    parts = [np.where(x > 0, x * np.log2(np.where(x > 0, x, 1) / np.where(m > 0, m, 1)), 0.0) for x in (p, q)]
    return np.asarray(np.clip(0.5 * (parts[0] + parts[1]).sum(1), 0.0, 1.0))


# -- expressions -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _tree(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _check(field: str, text: str, names: set[str]) -> None:
    """
    Raises:
        ValueError: the expression has something that is not allowed.
    """
    try:
        nodes = list(ast.walk(_tree(text)))
    except SyntaxError:
        raise InputError(f"{field} is {text!r}, which is not an expression; write it as 2.5 or 5*jsd") from None
    called = {node.func for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Name):
            known = FUNCTIONS if node in called else names
            if node.id not in known:
                raise InputError(
                    f"{field} is {text!r}; there is no {node.id!r}{did_you_mean(node.id, known)}; allowed: "
                    f"{', '.join(sorted(known))}"
                )
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, bool) or not isinstance(node.value, (int, float)):
                raise InputError(f"{field} is {text!r}; allowed: numbers, not {node.value!r}")
        elif isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.keywords:
                raise InputError(f"{field} is {text!r}; allowed: calls of {', '.join(FUNCTIONS)}")
            n = FUNCTIONS[node.func.id].nin if node.func.id in FUNCTIONS else len(node.args)
            if len(node.args) != n:
                raise InputError(f"{field} is {text!r}; {node.func.id} takes {n} value{'s' * (n > 1)}")
        elif not isinstance(
            node,
            (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Load, *_OPERATORS),  # type: ignore[arg-type]
        ):
            raise InputError(f"{field} is {text!r}, with a {type(node).__name__}; allowed: arithmetic and comparisons")


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return np.asarray(node.value, float)[()]  # whose 1/0 is infinite, and no error
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        return FUNCTIONS[node.func.id](*(_value(argument, names) for argument in node.args))
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand, names))
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.BoolOp):
        return functools.reduce(_OPERATORS[type(node.op)], (_value(value, names) for value in node.values))
    assert isinstance(node, ast.Compare)
    sides = [_value(side, names) for side in (node.left, *node.comparators)]
    pairs = (_OPERATORS[type(op)](a, b) for op, a, b in zip(node.ops, sides, sides[1:]))
    return functools.reduce(np.logical_and, pairs)
