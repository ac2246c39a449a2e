"""Programs in the shape of public ones, and test scripts of libraries, beside torch's class: `make test-clients`."""
