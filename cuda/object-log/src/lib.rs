//! The log of a guest program's CUDA objects. A new worker replays the log, and the program continues in that worker.
//!
//! - [`Log`] has one entry for each call that created or changed a live object, or an object that a live object depends
//!   on. `cuda_calls::replay` defines how each call is handled. The log is compacted as it grows, and its size is
//!   bounded.
//! - [`SavedState`] is a worker's log and other state in a file. The next worker decodes it, and trusts it no more than
//!   the guest's ring.
//!
//! The crate does not call the driver or perform I/O. The log does not contain memory contents.

#![forbid(unsafe_code)]

mod log;
mod saved;

pub use log::{Log, Outcome, created_by};
pub use saved::{Image, Malformed, SavedBlob, SavedState, Step, StepKind};

use cuda_calls::CALLS;
use worker_link::Obstacle;

/// Describes an obstacle for operators, with the name of the call.
pub fn describe(obstacle: Obstacle) -> String {
    match obstacle {
        Obstacle::Object(op) => {
            let call = usize::try_from(op).ok().and_then(|op| CALLS.get(op));
            let name = call.map_or("an unknown call", |call| call.name.trim_end_matches(['+', '-']));
            format!("it has an object of {name}, which cannot be created again")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_an_obstacle_names_the_call() {
        let op = cuda_calls::find("cuMemCreate").expect("described");
        let text = describe(Obstacle::Object(u32::try_from(op).expect("small")));
        assert_eq!(text, "it has an object of cuMemCreate, which cannot be created again");
        assert!(describe(Obstacle::Object(u32::MAX)).contains("an unknown call"));
        assert_eq!(describe(Obstacle::Busy), Obstacle::Busy.to_string());
    }
}
