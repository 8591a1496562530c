"""Policies by name: what a user writes on a command line, and the policy it means.

Owns the names and the little language of specs, which is parsed, never evaluated.
Never decides an order.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxserve.scheduling import predictors
from jaxserve.scheduling.policies import imported
from jaxserve.scheduling.policies.base import Policy
from jaxserve.scheduling.policies.combine import bounded_wait, chain
from jaxserve.scheduling.policies.fair_share import fair_share
from jaxserve.scheduling.policies.mlfq import mlfq
from jaxserve.scheduling.policies.prefix import prefix_affinity, prefix_sjf
from jaxserve.scheduling.policies.queues import edf, fcfs, priority
from jaxserve.scheduling.policies.sjf import hrrn, sjf, srpt

POLICIES: dict[str, Callable[..., Policy]] = {
    "bounded_wait": bounded_wait,
    "chain": chain,
    "edf": edf,
    "fair_share": fair_share,
    "fcfs": fcfs,
    "hrrn": hrrn,
    "mlfq": mlfq,
    "prefix_affinity": prefix_affinity,
    "prefix_sjf": prefix_sjf,
    "priority": priority,
    "sjf": sjf,
    "srpt": srpt,
}

PREDICTORS = ("history", "oracle", "prompt_signals")
"""Functions of `scheduling.predictors` that specs may name."""

_OPEN, _CLOSE = "([{", ")]}"


def get_policy(spec: str, *, truth: Mapping[int, int] | None = None) -> Policy:
    """The policy that a spec means.

    Args:
      spec: a name of POLICIES, alone or called: `fcfs`, `mlfq(quanta=(32, 128))`.
        Arguments are literals, predictors or policies: `sjf(oracle(noise=1.0))`,
        `chain(priority, sjf(history))`. `sjf:oracle` is short for `sjf(oracle)`.
        `module:attribute` or `path/to/file.py:attribute` is a policy of the user's, or
        a function, called or not, that returns one; a file of the current directory
        needs no path: `my_file:my_policy(x=1)`.
      truth: output tokens by submission index, which `oracle` predicts from.

    Raises:
      ValueError: the spec means no policy; the message says what would.
    """
    return _Spec(spec, truth).policy()


def split_specs(text: str) -> list[str]:
    """The specs of a list, split at the commas that stand in no bracket or quotes.

    Raises:
      ValueError: a spec is empty, or a bracket or quote is left open.
    """
    cuts = [-1, *_outside(text, ","), len(text)]
    pieces = zip(cuts, cuts[1:], strict=False)
    specs = [text[a + 1 : b].strip() for a, b in pieces]
    if not all(specs):
        raise ValueError(
            f"policies={text!r} must hold a policy before and after each ,"
        )
    return specs


def _outside(text: str, mark: str) -> Iterator[int]:
    """Where `mark` stands outside of brackets and quotes."""
    depth, quote = 0, ""
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == mark and depth == 0:
            yield i
        else:
            depth += (char in _OPEN) - (char in _CLOSE)
    if depth or quote:
        raise ValueError(
            f"scheduling_policy={text!r} must close each bracket and quote that it "
            "opens"
        )


class _Spec:
    """One spec being read; every error names it."""

    def __init__(self, text: str, truth: Mapping[int, int] | None):
        self._text = text
        self._truth = truth

    def policy(self) -> Policy:
        if not isinstance(self._text, str) or not self._text.strip():
            raise self._error(f"must be a policy; known are {sorted(POLICIES)}")
        colon = next(_outside(self._text, ":"), None)
        if colon is None:
            made = self._value(self._parse(self._text))
        else:
            head, tail = self._text[:colon].strip(), self._text[colon + 1 :].strip()
            if head in POLICIES:
                made = self._call(
                    head, POLICIES[head], [self._value(self._parse(tail))]
                )
            else:
                made = self._users(head, self._parse(tail))
        if not isinstance(made, Policy):
            raise self._error(
                f"gives {made!r}, which is no Policy; known are {sorted(POLICIES)}"
            )
        return made

    def _error(self, what: str) -> ValueError:
        return ValueError(f"scheduling_policy={self._text!r} {what}")

    def _parse(self, text: str) -> ast.expr:
        try:
            return ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError) as error:
            raise self._error(
                f"must be like fcfs, mlfq(quanta=(32, 128)), sjf:oracle or "
                f"my_file:my_policy; {text!r} cannot be read: {error}"
            ) from error

    def _value(self, node: ast.expr) -> Any:
        """A literal, or what a known name makes."""
        if isinstance(node, ast.Name | ast.Call):
            name = self._name(node)
            return self._call(name, self._known(name), *self._arguments(node))
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError) as error:
            raise self._error(
                f"must hold literals, predictors and policies alone; "
                f"{ast.unparse(node)!r} is none"
            ) from error

    def _name(self, node: ast.expr) -> str:
        made = node.func if isinstance(node, ast.Call) else node
        if not isinstance(made, ast.Name):
            raise self._error(f"must call names alone; {ast.unparse(node)!r} is none")
        return made.id

    def _known(self, name: str) -> Callable[..., Any]:
        if name in POLICIES:
            return POLICIES[name]
        if name not in PREDICTORS:
            raise self._error(
                f"is unknown: no policy or predictor is called {name!r}; known are "
                f"{sorted(POLICIES)} and the predictors {list(PREDICTORS)}; your own "
                "is my_file:my_policy"
            )
        if name != "oracle":
            return getattr(predictors, name)
        if self._truth is None:
            raise self._error(
                "needs the true output lengths, which only an experiment knows (and "
                "gives to get_policy as truth); predict with history or prompt_signals"
            )
        return functools.partial(predictors.oracle, self._truth)

    def _arguments(self, node: ast.expr) -> tuple[list[Any], dict[str, Any]]:
        if not isinstance(node, ast.Call):
            return [], {}
        keywords = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self._error("must name each keyword argument; ** is not read")
            keywords[keyword.arg] = self._value(keyword.value)
        return [self._value(argument) for argument in node.args], keywords

    def _call(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: list[Any],
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = keywords or {}
        signature = inspect.signature(function)
        try:
            signature.bind(*arguments, **keywords)
        except TypeError as error:
            hint = ""
            if "predictor" in signature.parameters:
                hint = f", with a predictor of {list(PREDICTORS)}: {name}:history"
            shown = ", ".join(map(_shown, signature.parameters.values()))
            raise self._error(f"must call {name}({shown}){hint}; {error}") from error
        return function(*arguments, **keywords)

    def _users(self, where: str, node: ast.expr) -> Any:
        name = self._name(node)
        try:
            found = imported.find(where, name)
        except ValueError as error:
            message = f"{error}; known are {sorted(POLICIES)}"
            raise self._error(message) from error.__cause__
        if isinstance(found, Policy) and isinstance(node, ast.Name):
            return found
        if isinstance(found, Policy) or not callable(found):
            raise self._error(
                f"must name a Policy, or call a function that returns one; {name!r} is "
                f"a {type(found).__name__}"
            )
        return self._call(name, found, *self._arguments(node))


def _shown(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    shown = stars.get(parameter.kind, "") + parameter.name
    if parameter.default is parameter.empty:
        return shown
    return f"{shown}={parameter.default!r}"
