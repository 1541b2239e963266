"""The verdict of a rule: the path that was accepted, and the token that ends it."""

from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar


class Chosen(Protocol):
    """What a rule reads of a choice. The sampler's ``Choice`` is one."""

    @property
    def token(self) -> int:
        """The chosen token."""
        ...


C = TypeVar("C", bound=Chosen)


@dataclass(frozen=True, slots=True)
class Verdict(Generic[C]):
    """Outcome of one tree: between 1 and depth + 1 tokens.

    Attributes:
        path: accepted rows, from a child of the root downwards; empty if the first level was rejected.
        choices: the target's choice at the root and at every accepted row; ``choices[i].token`` is the token of
            ``path[i]``, and the last one is the correction or the bonus, unless the text ended before.
        ended: ``bonus`` if the path ends in a leaf, so that the last choice is an extra token; ``correction`` if the
            last choice took the place of the children that were drafted there; ``accepted`` if the text ends with the
            last row of the path.
    """

    path: tuple[int, ...]
    choices: tuple[C, ...]
    ended: Literal["accepted", "correction", "bonus"]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens to emit, in order."""
        return tuple(choice.token for choice in self.choices)
