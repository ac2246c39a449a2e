"""The errors and warnings of the library. Imports nothing."""

__all__ = ["DPFuseError", "DPFuseWarning", "LoopWarning", "WeightsWarning"]


class DPFuseError(RuntimeError):
    """A call at a wrong time, or ranks that do not agree. Wrong arguments raise `ValueError` or `TypeError`.

    Its text says what happened, what was got, what was expected and what to do, and names the parameter
    and the rank where there is one.

    Example:
        >>> from dpfuse import DPFuseError
        >>> issubclass(DPFuseError, RuntimeError)
        True
    """

    ranks: tuple[int, ...] = ()  # of the group, that have ended or are silent; else empty
    code: str = ""  # of a finding that has a page section, such as "DPF-W01"; its text begins with it
    _lines: tuple[str, ...] = ()  # of rank 0 and of a rank that differs, where texts were compared


class DPFuseWarning(UserWarning):
    """What a check has seen in a program, with a code that stays the same between releases.

    Args:
        text: begins with the code.
        code: such as "DPF-W01"; a section of a page has the same title.

    Example:
        >>> import warnings
        >>> from dpfuse import DPFuseWarning
        >>> warnings.simplefilter("ignore", DPFuseWarning)  # hears none of them
    """

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


class WeightsWarning(DPFuseWarning):
    """Weights or buffers of the ranks differ, though training keeps them equal.

    Example:
        >>> import warnings
        >>> from dpfuse import WeightsWarning
        >>> warnings.simplefilter("error", WeightsWarning)  # makes each an error on every rank
    """


class LoopWarning(DPFuseWarning):
    """What a training loop does on every rank, and hardly ever means to do.

    Example:
        >>> import warnings
        >>> from dpfuse import LoopWarning
        >>> warnings.simplefilter("ignore", LoopWarning)
    """
