//! Turns and memory that would depend on a signal, or on a program that lies, stops or exits.
