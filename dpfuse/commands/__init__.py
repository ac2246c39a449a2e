"""The commands `dpfuse plan`, `dpfuse tune` and `dpfuse bench`; imported by nothing but the doors to them."""
