"""The rules about a training: a file for each code, with which its name begins, and one for each without a code.

A rule is pure: it reads numbers and names that were written down, and returns what it has seen. It has its limits, its
words and its remedy, and imports no torch. A checked training asks rules about what it hears (`dpfuse.loop`), the
doctor asks them about traces. Read `seen`, `windows` (backwards before a step) and `calls_around_steps`, then any rule.
Only the doctor asks rules without a code.
"""
