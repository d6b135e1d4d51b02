//! One shadow table.
