"""Rule S-13: the cached blocks that a new request may reuse."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

ROOT_KEY = hashlib.sha256(b"paged-mla prefix root").digest()


def block_key(parent: bytes, tokens: Sequence[int], extra_keys: Sequence[str] = ()) -> bytes:
    """Return the key of one full block, 32 bytes (S-13).

    The key identifies everything on which a cached latent depends: all tokens before the block
    (through `parent`), all tokens of the block, and other inputs that change the model's output.

    Parameters
    ----------
    parent : bytes
        Key of the preceding block; :data:`ROOT_KEY` for the first block.
    tokens : sequence of int
        Token ids of the block, in order.
    extra_keys : sequence of str
        Adapter, cache salt or hashes of images, always in the same order.

    Notes
    -----
    Each part is hashed with its length in front, so that different inputs have different encodings.
    """
    parts = [parent, *(token.to_bytes(8, "little", signed=True) for token in tokens)]
    parts += [b"extra", *(key.encode() for key in extra_keys)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


@dataclass(frozen=True)
class BlockContent:
    """The content of a full block: everything that its key identifies."""

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
        """Return the content of the block that follows `previous`; ``None`` precedes the first."""
        parent = ROOT_KEY if previous is None else previous.key
        return cls(parent, tuple(tokens), tuple(extra_keys))


def block_contents(
    tokens: Sequence[int], block_size: int, extra_keys: Sequence[str] = ()
) -> list[BlockContent]:
    """Return the contents of a request's full blocks in order, without a partial block (S-13)."""
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
    """Blocks with known contents, indexed by key.

    An entry stores the content of its block. Two contents with the same key are an error and not a
    hit.

    Parameters
    ----------
    block_size : int
        Tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._entries: dict[bytes, tuple[BlockContent, int]] = {}

    def insert(self, content: BlockContent, block_id: int) -> int:
        """Add a full block; return the block that holds `content`, an older block if there is one.

        Raises
        ------
        RuntimeError
            A block with another content has the same key.
        """
        holder = self.find(content)
        if holder is None:
            self._entries[content.key] = content, block_id
            return block_id
        return holder

    def evict(self, content: BlockContent) -> None:
        """Remove a block whose content is about to change.

        Raises
        ------
        KeyError
            No block with this content is known.
        """
        del self._entries[content.key]

    def find(self, content: BlockContent) -> int | None:
        """Return the block that holds `content`, or ``None`` if there is none.

        Raises
        ------
        RuntimeError
            A block with another content has the same key.
        """
        entry = self._entries.get(content.key)
        if entry is None:
            return None
        if entry[0] != content:
            raise RuntimeError(f"block {entry[1]} has another content with the same key")
        return entry[1]

    def lookup(self, tokens: Sequence[int], extra_keys: Sequence[str] = ()) -> list[int]:
        """Return the cached blocks that a request may reuse, in order (S-13).

        These are the longest run of known blocks from the first block on, before the block of the
        last token. That token is always computed, because the request needs its output.
        """
        return self.longest(block_contents(tokens[:-1], self.block_size, extra_keys))

    def longest(self, contents: Iterable[BlockContent]) -> list[int]:
        """Return the blocks of the longest run of known contents, from the first content on."""
        found: list[int] = []
        for content in contents:
            block_id = self.find(content)
            if block_id is None:
                break
            found.append(block_id)
        return found
