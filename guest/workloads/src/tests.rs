//! The tests, one per file. A test takes the rig and the options of its command, and returns additional key-value pairs
//! for the result line.

pub mod all;
pub mod channels;
pub mod compare;
pub mod copy;
pub mod counted;
pub mod dataflow;
pub mod faulty;
pub mod faulty_kernels;
pub mod fences;
pub mod library;
pub mod map;
pub mod moves;
pub mod procs;
pub mod query;
pub mod residue;
pub mod rogue;
pub mod share;
pub mod stream;
pub mod stress;
pub mod sweep;
pub mod timed;
pub mod workload;

/// Additional key-value pairs for the result line.
pub type Facts = Vec<(&'static str, String)>;
