//! Any sequence of accesses against a mediated VM.
