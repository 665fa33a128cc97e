"""Rule S-13: which cached blocks a new request may reuse."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

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


def block_keys(
    tokens: Sequence[int], block_size: int, extra_keys: Sequence[str] = ()
) -> list[bytes]:
    """Return the keys of a request's full blocks; a last, partial block has none (S-13)."""
    keys: list[bytes] = []
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = keys[-1] if keys else ROOT_KEY
        keys.append(block_key(parent, tokens[end - block_size : end], extra_keys))
    return keys


class PrefixIndex:
    """Blocks that hold known tokens, by key.

    Parameters
    ----------
    block_size : int
        Tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: dict[bytes, int] = {}

    def insert(self, key: bytes, block_id: int) -> int:
        """Remember a full block; return the block that holds `key`, the older one if known."""
        return self._blocks.setdefault(key, block_id)

    def evict(self, key: bytes) -> None:
        """Forget a block whose contents are about to change."""
        del self._blocks[key]

    def lookup(self, tokens: Sequence[int], extra_keys: Sequence[str] = ()) -> list[int]:
        """Return the blocks a request may start from, in order (S-13).

        The longest run of known blocks from the first on, of at most ``n - 1`` tokens: the
        last token of a prompt is always computed, since its output is what was asked for.
        """
        most = max(len(tokens) - 1, 0)
        found: list[int] = []
        for key in block_keys(tokens[:most], self.block_size, extra_keys):
            if key not in self._blocks:
                break
            found.append(self._blocks[key])
        return found
