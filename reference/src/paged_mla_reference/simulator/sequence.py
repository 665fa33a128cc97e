"""What an engine keeps about one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from paged_mla_reference.rules.prefix import BlockContent
from paged_mla_reference.simulator.request import Request


@dataclass(eq=False)
class Sequence:
    """Progress of a request.

    Parameters
    ----------
    request : Request
    known : int
        Tokens the engine has: the prompt, and what it sampled.
    computed : int
        Leading tokens whose latents are in the cache, in ``blocks``.
    target : int
        Prefill lasts until so many tokens are computed.
    window_due : bool
        The last verified tree left tokens to be written to their own slots (S-16).
    published : int
        Leading blocks that were made known.
    preempted : bool
        It ran before and lost its blocks.
    blocks : list of int
    branches : list of tuple of int
        Drafts that went through the cache and are to be verified next.
    """

    request: Request
    known: int
    computed: int = 0
    target: int = 0
    window_due: bool = False
    published: int = 0
    preempted: bool = False
    blocks: list[int] = field(default_factory=list)
    branches: list[tuple[int, ...]] = field(default_factory=list)
    _contents: list[BlockContent] = field(default_factory=list)

    @property
    def prefilling(self) -> bool:
        """True until the tokens it was admitted with are computed."""
        return self.computed < self.target

    @property
    def finished(self) -> bool:
        """True when every token of the output was sampled."""
        return self.known == len(self.request.tokens)

    def truth(self, count: int) -> tuple[int, ...]:
        """Return the next tokens that the model will say, `count` of them at most."""
        return self.request.tokens[self.known : self.known + count]

    def reveal(self, count: int) -> None:
        """Sample `count` more tokens, or as many as the output has left."""
        self.known = min(self.known + count, len(self.request.tokens))

    def content(self, block: int, span: int) -> BlockContent:
        """Return what the request's full block number `block` holds."""
        while len(self._contents) <= block:
            start = len(self._contents) * span
            previous = self._contents[-1] if self._contents else None
            tokens = self.request.tokens[start : start + span]
            self._contents.append(BlockContent.after(previous, tokens, self.request.extra_keys))
        return self._contents[block]
