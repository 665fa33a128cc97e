"""A base class of objects whose kernels, graphs or handles must not be shared with a copy."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from paged_mla_shared.errors import Unsupported


class Uncopied:
    """Base class of instances that ``copy``, ``deepcopy`` and ``pickle`` reject.

    A copy would share the buffers, handles and encoded addresses of the original. Then the copy
    and the original would overwrite each other's steps.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Reject ``copy`` and ``pickle``, which call this method.

        Raises
        ------
        Unsupported
            Always.
        """
        name = type(self).__name__
        raise Unsupported(
            f"a copy or a pickle of a {name}, which owns buffers and kernels on a device, is not "
            f"supported; make another {name} with the arguments of this one"
        )
