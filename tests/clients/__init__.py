"""Programs beside torch's class: in the shape of public ones, and around public libraries; scripts of accelerate.

`make test-clients` and `make test-public` run them.
"""
