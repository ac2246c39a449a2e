"""`paddle.static`: programs, executors and scopes.

Read `program` first (a graph of named variables), then how one is made: `guard` with `variable` records operations.
`scope` holds parameters. `replica` runs a program on one device, for `executor` and, on several devices, for
`parallel_executor` (with `replica_set`, `trainers`, `seeds` and `device_thread`). `feed` and `fetch` check what goes in
and out.
"""

from dpfuse.paddle.counterparts import lacks
from dpfuse.paddle.static.executor import Executor
from dpfuse.paddle.static.guard import data, default_main_program, default_startup_program, program_guard
from dpfuse.paddle.static.input_spec import InputSpec
from dpfuse.paddle.static.parallel_executor import ParallelExecutor
from dpfuse.paddle.static.places import CPUPlace, CUDAPlace, cpu_places, cuda_places
from dpfuse.paddle.static.program import Program
from dpfuse.paddle.static.scope import Scope, global_scope, scope_guard
from dpfuse.paddle.static.strategies import BuildStrategy, ExecutionStrategy
from dpfuse.paddle.static.variable import Variable

__all__ = [
    "BuildStrategy",
    "CPUPlace",
    "CUDAPlace",
    "ExecutionStrategy",
    "Executor",
    "InputSpec",
    "ParallelExecutor",
    "Program",
    "Scope",
    "Variable",
    "cpu_places",
    "cuda_places",
    "data",
    "default_main_program",
    "default_startup_program",
    "global_scope",
    "program_guard",
    "scope_guard",
]

__getattr__ = lacks(__name__)
