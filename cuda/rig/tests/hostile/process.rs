//! A program's own process: signals, children, limits and memory of others.
