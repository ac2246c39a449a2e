"""`dpfuse.DistributedDataParallel` does what torch's class does."""
