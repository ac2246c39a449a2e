"""What ranks say to each other: the only folder that calls a collective. It imports nothing of dpfuse but errors.

Read `collective` first: it starts every collective. `waiting` bounds the wait for one, and has the board that the
heartbeat reads. `work` makes one work of several collectives. `abilities` keeps what a process group can do, and
`ability_trials` finds it out. `votes` lets all ranks agree, or raise together. `failed` marks the errors that a
collective has raised. `flat_broadcast` sends many tensors as one, `completion` calls back when a work has landed, and
`registered_memory` makes buffers that the back end has registered.
"""
