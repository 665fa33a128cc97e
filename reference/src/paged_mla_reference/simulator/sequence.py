"""The state that an engine keeps for one request."""

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
        Number of tokens that the engine has: the prompt and the sampled tokens.
    computed : int
        Number of leading tokens whose latents are in the cache, in ``blocks``.
    target : int
        Prefill ends when this number of tokens is computed.
    window_due : bool
        Whether accepted tokens of the last verified tree must still be written to their own slots
        (S-16).
    published : int
        Number of leading blocks that are in the prefix index.
    preempted : bool
        Whether the request ran before and lost its blocks.
    blocks : list of int
        Block ids of the request.
    branches : list of tuple of int
        Drafts that ran through the cache and are verified next.
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
        """True until all tokens that were known at the admission are computed."""
        return self.computed < self.target

    @property
    def finished(self) -> bool:
        """True if every token of the output was sampled."""
        return self.known == len(self.request.tokens)

    def truth(self, count: int) -> tuple[int, ...]:
        """Return the next tokens that the model will generate, at most `count` of them."""
        return self.request.tokens[self.known : self.known + count]

    def reveal(self, count: int) -> None:
        """Sample `count` more tokens, or the rest of the output if it is shorter."""
        self.known = min(self.known + count, len(self.request.tokens))

    def content(self, block: int, span: int) -> BlockContent:
        """Return the content of the request's full block number `block`, with `span` tokens."""
        while len(self._contents) <= block:
            start = len(self._contents) * span
            previous = self._contents[-1] if self._contents else None
            tokens = self.request.tokens[start : start + span]
            self._contents.append(BlockContent.after(previous, tokens, self.request.extra_keys))
        return self._contents[block]
