"""Objects that own kernels, graphs or handles, which a copy of them would share."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from paged_mla_shared.errors import Unsupported


class Uncopied:
    """Base of classes whose instances ``copy``, ``deepcopy`` and ``pickle`` refuse.

    A copy would go on with the buffers, handles and encoded addresses of the original, and the two
    would overwrite each other's steps.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse what ``copy`` and ``pickle`` ask for.

        Raises
        ------
        Unsupported
            Always.
        """
        name = type(self).__name__
        raise Unsupported(
            f"a copy or a pickle of a {name}, which owns buffers and kernels on a device: "
            f"make another {name} with the arguments that this one was made with"
        )
