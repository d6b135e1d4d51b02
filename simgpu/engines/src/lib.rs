//! The engines of the software card.
//!
//! - [`engines`]: copy engines and M2MF, and the interface that the host unit uses to execute methods
//! - [`compute`]: compute grids and the interpreter for shader code
//!
//! The crate does not schedule channels: the `simgpu` crate decides which engine executes which methods.

pub mod compute;
pub mod engines;
