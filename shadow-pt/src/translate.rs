//! One guest entry in, one shadow entry or a denial out.
