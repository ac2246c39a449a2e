"""The one error class of the library. Imports nothing."""

__all__ = ["DPFuseError"]


class DPFuseError(RuntimeError):
    """Misuse in time, or ranks that do not agree; wrong arguments raise `ValueError` or `TypeError`.

    Its text says what happened, what was got, what was expected and what to do, and names the parameter
    and the rank where there is one.

    Example:
        >>> from dpfuse import DPFuseError
        >>> issubclass(DPFuseError, RuntimeError)
        True
    """

    ranks: tuple[int, ...] = ()  # of the group, that are to blame, where it is an end or a silence of a peer
