"""Rule S-13: which cached blocks a new request may reuse."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

ROOT_KEY = hashlib.sha256(b"paged-mla prefix root").digest()


def block_key(parent: bytes, tokens: Sequence[int], extra_keys: Sequence[str] = ()) -> bytes:
    """Return the key of one full block, 32 bytes (S-13).

    The key stands for everything a cached latent depends on: all tokens before the block (by
    `parent`), every token in it, and what else changes the model's answer.

    Parameters
    ----------
    parent : bytes
        Key of the block before, :data:`ROOT_KEY` for the first.
    tokens : sequence of int
        Token ids of the block, in order.
    extra_keys : sequence of str
        Adapter, cache salt, hashes of images: in an order the engine keeps.

    Notes
    -----
    Each part is written with its length in front, so that no two inputs share an encoding.
    """
    parts = [parent, *(token.to_bytes(8, "little", signed=True) for token in tokens)]
    parts += [b"extra", *(key.encode() for key in extra_keys)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


@dataclass(frozen=True)
class BlockContent:
    """What a full block holds: everything its key stands for."""

    parent: bytes
    tokens: tuple[int, ...]
    extra_keys: tuple[str, ...] = ()

    @cached_property
    def key(self) -> bytes:
        """The block's key (S-13)."""
        return block_key(self.parent, self.tokens, self.extra_keys)

    @classmethod
    def after(
        cls,
        previous: BlockContent | None,
        tokens: Sequence[int],
        extra_keys: Sequence[str] = (),
    ) -> BlockContent:
        """Return the contents of the block that follows `previous`, ``None`` for the first."""
        parent = ROOT_KEY if previous is None else previous.key
        return cls(parent, tuple(tokens), tuple(extra_keys))


def block_contents(
    tokens: Sequence[int], block_size: int, extra_keys: Sequence[str] = ()
) -> list[BlockContent]:
    """Return a request's full blocks in order; a last, partial block is none (S-13)."""
    contents: list[BlockContent] = []
    for end in range(block_size, len(tokens) + 1, block_size):
        previous = contents[-1] if contents else None
        contents.append(BlockContent.after(previous, tokens[end - block_size : end], extra_keys))
    return contents


def block_keys(
    tokens: Sequence[int], block_size: int, extra_keys: Sequence[str] = ()
) -> list[bytes]:
    """Return the keys of a request's full blocks (S-13)."""
    return [content.key for content in block_contents(tokens, block_size, extra_keys)]


class PrefixIndex:
    """Blocks whose contents are known, by key.

    An entry keeps what its block holds, and a key that stands for two different contents is an
    error, not a hit.

    Parameters
    ----------
    block_size : int
        Tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._entries: dict[bytes, tuple[BlockContent, int]] = {}

    def insert(self, content: BlockContent, block_id: int) -> int:
        """Remember a full block; return the block that holds `content`, the older one if known."""
        holder = self.find(content)
        if holder is None:
            self._entries[content.key] = content, block_id
            return block_id
        return holder

    def evict(self, content: BlockContent) -> None:
        """Forget a block whose contents are about to change."""
        del self._entries[content.key]

    def find(self, content: BlockContent) -> int | None:
        """Return the block that holds `content`, ``None`` if no block does.

        Raises
        ------
        RuntimeError
            The key is that of a block with other contents.
        """
        entry = self._entries.get(content.key)
        if entry is None:
            return None
        if entry[0] != content:
            raise RuntimeError(f"block {entry[1]}: one key for two contents")
        return entry[1]

    def lookup(self, tokens: Sequence[int], extra_keys: Sequence[str] = ()) -> list[int]:
        """Return the blocks a request may start from, in order (S-13).

        The longest run of known blocks from the first on, of at most ``n - 1`` tokens: the
        last token of a prompt is always computed, since its output is what was asked for.
        """
        return self.longest(block_contents(tokens[:-1], self.block_size, extra_keys))

    def longest(self, contents: Iterable[BlockContent]) -> list[int]:
        """Return the blocks of the longest run of known contents, from the first on."""
        found: list[int] = []
        for content in contents:
            block_id = self.find(content)
            if block_id is None:
                break
            found.append(block_id)
        return found
