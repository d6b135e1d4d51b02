//! Records captured work in the log.

use cuda_calls::{Arg, Call, Handles as _, Kind, Prepared, own};

use crate::executor::Executor;
use crate::pending::Origin;

/// Returns the handle of the stream that a message adds work to.
fn stream_of(op: u16, words: &[u64]) -> Option<u64> {
    let at = match op {
        own::LAUNCH => 5,
        own::COPY_IN | own::COPY_OUT => 3,
        own::COPY_INLINE => 2,
        own::COPY_BOX => 1,
        own::HOST_FUNCTION => 0,
        _ => return None,
    };
    words.get(at).copied()
}

impl Executor {
    /// Returns true if the stream of a described call is being captured.
    pub(crate) fn is_captured(&self, call: &Call, prepared: &Prepared) -> bool {
        if self.captures == 0 {
            return false;
        }
        let at = call.args.iter().position(|arg| *arg == Arg::Handle(Kind::Stream));
        at.and_then(|at| prepared.values.get(at)).is_some_and(|stream| self.is_capturing(*stream))
    }

    /// Records a successful message that is not a described call, if its work has been captured.
    pub(crate) fn record_captured(&mut self, origin: Origin, words: &[u64]) {
        let op = origin.header.op;
        let stream = stream_of(op, words).and_then(|stream| self.objects.find(Kind::Stream, stream).ok());
        if !stream.is_some_and(|stream| self.is_capturing(stream)) {
            return;
        }
        if matches!(op, own::LAUNCH | own::HOST_FUNCTION) {
            self.log.own(op, origin.route, words, None, None);
        } else {
            // The staging buffer may have been overwritten since the copy, so the capture cannot be repeated.
            self.log.break_captures();
        }
    }
}
