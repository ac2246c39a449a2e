"""PyTorch's own tests of DistributedDataParallel, run against ours.

They ship inside the torch wheel, in `torch.testing._internal.distributed.distributed_test`; 102 of them wrap a module.
Most ask for GPUs in their decorators only. `without_gpu` takes these away, and lets every device they name be the
CPU. A test counts if torch's class passes it that way, on two ranks over gloo; `lists` says of each what is expected
of ours, and why:

- 50 tests of public behaviour: all pass.
- 27 tests that look at private parts: 15 pass.
- 7 tests that assert a refusal where ours gives the mean: each is replaced by one of ours, in `test_means`.
- 18 tests do not count: torch's class does not pass them here.

`test_torch_suite` holds both classes to that, so a test that begins or ceases to pass fails. Every run has fresh
processes, forked from a server that has imported torch already, and a time limit; one that hangs is a failure with
the stacks of its ranks. `make test` runs the tests in `lists.QUICK`, `make test-all` all of them.

One test by name, for debugging: `python -m tests.torch_suite test_ddp_namedtuple [--face torch] [--limit SECONDS]`.
"""
