"""Fresh processes for one of torch's tests, and what came of it."""

from __future__ import annotations

from tests.ranks import RankError, RankPool
from tests.torch_suite.case import WORLD_SIZE, run_test

__all__ = ["failure"]

SECONDS = 90


def failure(name: str, face: str, limit: float = SECONDS) -> str:
    """Run the test `name` with a wrapper class; what went wrong on which rank, or nothing.

    Args:
        name: of the test's function.
        face: `"torch"` or `"dpfuse"`.
        limit: in seconds, after which a test has failed.
    """
    pool = RankPool(WORLD_SIZE, preload="tests.torch_suite.preload")
    try:
        pool.run(run_test, name, face, timeout=limit)
    except RankError as error:
        return str(error)
    finally:
        pool.kill()
    return ""
