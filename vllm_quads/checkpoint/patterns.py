# SPDX-License-Identifier: Apache-2.0
"""Patterns over module names: those that foreign ignore lists hold, and short lists that describe a given set.

ModelOpt's `exclude_modules` are globs on module names; compressed-tensors' `ignore` holds exact names and `re:`
regular expressions, matched from the start of the name. Both exclude everything below a named module.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def excludes(pattern: str, module: str) -> bool:
    """True if a foreign ignore pattern covers the module."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern or module.startswith(pattern + ".") or fnmatch.fnmatchcase(module, pattern)


def describe(modules: Iterable[str], others: Iterable[str]) -> list[str]:
    """A short list of globs that together match all `modules` and none of `others`.

    For each module the widest of these is taken: the parent in all layers, the parent, the module in all layers, its
    exact name. Parents come first because vLLM asks about fused modules (`qkv_proj`, `experts`) by their own names.
    """
    rest = sorted(others)
    clash: dict[str, bool] = {}
    patterns: dict[str, None] = {}
    for module in sorted(modules):
        if any(fnmatch.fnmatchcase(module, p) for p in patterns):
            continue
        for candidate in _candidates(module):
            if candidate not in clash:
                clash[candidate] = any(fnmatch.fnmatchcase(name, candidate) for name in rest)
            if not clash[candidate]:
                patterns[candidate] = None
                break
    return list(patterns)


def _candidates(module: str) -> list[str]:
    parent = module.partition(".experts.")[0] + ".experts" if ".experts." in module else module.rpartition(".")[0]
    found = []
    if parent.count(".") >= 3:  # model.layers.N.something: never a whole layer, nor the whole model
        found += [_NUMBER.sub("*", parent + ".").removesuffix(".") + "*", parent + "*"]
    return [*found, _NUMBER.sub("*", module), module]


def to_regex(glob: str) -> str:
    """A glob as compressed-tensors writes it: an exact name, or `re:` and an anchored regular expression."""
    if "*" not in glob:
        return glob
    return "re:" + ".*".join(re.escape(part) for part in glob.split("*")) + ("" if glob.endswith("*") else "$")
