"""What of a model is watched, and where numbers that are not finite are meant."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn

from .row import NOTHING, NonFinite

__all__ = ["NonFiniteName", "Policy", "Rule", "Selector"]

Selector = str | type[nn.Module]
NonFiniteName = Literal["nan", "inf", "-inf"]
KINDS: dict[str, NonFinite] = {"nan": NonFinite.NAN, "inf": NonFinite.POSINF, "-inf": NonFinite.NEGINF}


class Rule(NamedTuple):
    """How a line is treated."""

    is_shown: bool
    allowed: NonFinite
    """What it may hold without making its frame bad."""


class Policy:
    """What of a model is watched, and where numbers that are not finite are meant.

        >>> Policy(exclude=["encoder.layer.*.dropout", nn.Identity])
        >>> Policy(include=["decoder"], allow={":input[attention_mask]": "-inf", "*.pad:output": ["nan", "inf"]})

    A *selector* is a module class, which stands for the modules of that class and its subclasses; or a text
    `module:line`. The module part is a qualified name and stands for that module and all that is in it; in the line
    part is what a report calls the line: `weight`, `input[0]`, `output[logits]`. In both, `*` stands for any text, dots
    included, and `?` for one character; a part that is left out stands for all.

    Args:
        include: selectors of what is watched; None for everything.
        exclude: of what is not, of what `include` takes. Lines that are not watched are not read either. A module of
            which nothing is watched gets no hook.
        allow: for selectors, the kinds of numbers that are meant there: "nan", "inf", "-inf", or several of them. Such
            lines are shown and not judged by these.

    Raises:
        TypeError, ValueError: a selector is neither, or has no such kind.
    """

    def __init__(
        self,
        *,
        include: Collection[Selector] | None = None,
        exclude: Collection[Selector] = (),
        allow: Mapping[Selector, NonFiniteName | Collection[NonFiniteName]] | None = None,
    ) -> None:
        self._include = None if include is None else _patterns("include", include)
        self._exclude = _patterns("exclude", exclude)
        if not isinstance(allow or {}, Mapping):
            raise TypeError(f"allow={allow!r}: must map selectors to kinds of numbers, not {type(allow).__name__}")
        self._allow = [(_pattern("allow", selector), _kinds(kinds)) for selector, kinds in (allow or {}).items()]

    def watches(self, name: str, module: nn.Module) -> bool:
        """Whether any line of a module may be shown."""
        if self._include is not None and not any(pattern.has(name, module) for pattern in self._include):
            return False
        return not any(pattern.line is None and pattern.has(name, module) for pattern in self._exclude)

    def rule(self, name: str, module: nn.Module, label: str) -> Rule:
        """For one of its lines. A weight of a child is also a line of that, by its own name."""
        places = [(name, module, label), *_in_child(name, module, label)]

        def has(pattern: _Pattern) -> bool:
            return any(pattern.has(*place) for place in places)

        is_shown = (self._include is None or any(map(has, self._include))) and not any(map(has, self._exclude))
        allowed = NOTHING
        for pattern, kinds in self._allow:
            if has(pattern):
                allowed |= kinds
        return Rule(is_shown, allowed)


@dataclass(frozen=True)
class _Pattern:
    """None stands for all."""

    module: re.Pattern[str] | type[nn.Module] | None
    line: re.Pattern[str] | None

    def has(self, name: str, module: nn.Module, label: str | None = None) -> bool:
        if label is not None and self.line is not None and not self.line.fullmatch(label):
            return False
        if self.module is None:
            return True
        if isinstance(self.module, type):
            return isinstance(module, self.module)
        return any(self.module.fullmatch(each) for each in _with_ancestors(name))


def _in_child(name: str, module: nn.Module, label: str) -> list[tuple[str, nn.Module, str]]:
    """Where a line `child.weight` would be if the child itself showed it; nothing for other lines."""
    child_name, _, line = label.partition(".")
    child = module._modules.get(child_name)
    weight = line.partition(".")[0]
    if child is None or not any(weight in own for own in (child._parameters, child._buffers, child.__dict__)):
        return []  # as `output.logits`, where the child `output` has no such weight
    return [(f"{name}.{child_name}".lstrip("."), child, line)]


def _with_ancestors(name: str) -> Iterable[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _patterns(argument: str, selectors: object) -> list[_Pattern]:
    if not isinstance(selectors, Collection) or isinstance(selectors, (str, bytes)):
        raise TypeError(f"{argument}={selectors!r}: must be a list of selectors, not {type(selectors).__name__}")
    return [_pattern(argument, selector) for selector in selectors]


def _pattern(argument: str, selector: object) -> _Pattern:
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return _Pattern(selector, None)
    if not isinstance(selector, str):
        raise TypeError(f"{argument}: {selector!r} is neither a text nor a class of modules")
    module, colon, line = selector.partition(":")
    if colon and not line:
        raise ValueError(f"{argument}: {selector!r} names no line behind its colon")
    return _Pattern(_glob(module) if module or not colon else None, _glob(line) if colon else None)


def _glob(text: str) -> re.Pattern[str]:
    """Unlike fnmatch's, which takes brackets for sets of characters."""
    return re.compile("".join({"*": ".*", "?": "."}.get(character, re.escape(character)) for character in text))


def _kinds(kinds: object) -> NonFinite:
    names = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(names, Collection):
        raise TypeError(f"allow: {kinds!r} is no kind of number, nor a list of them")
    for name in names:
        if name not in KINDS:
            raise ValueError(f"allow: {name!r} is not one of {', '.join(map(repr, KINDS))}")
    found = NOTHING
    for name in names:
        found |= KINDS[name]
    return found
