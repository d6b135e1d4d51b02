//! Calls whose reply is sent when work on the card completes. The worker polls for completion between messages, so a
//! waiting call never blocks calls of other threads.

use cuda_ring::{Words as _, control};

use crate::driver::{NOT_READY, Needed};
use crate::executor::{Broken, Executor};
use crate::pending::{MAX_WAITS, Origin, PieceUse, Wait};

impl Executor {
    /// Starts a wait, or replies immediately.
    pub(crate) fn begin_wait(&mut self, origin: Origin, mut wait: Wait) -> Result<(), Broken> {
        match self.poll_wait(&mut wait) {
            Some(code) => self.finish(origin, code, &[]),
            None if self.waits.calls.len() >= MAX_WAITS => return Err(Broken::Limit),
            None => self.waits.calls.push((origin, wait)),
        }
        Ok(())
    }

    /// Returns the result of a wait if it has completed.
    fn poll_wait(&mut self, wait: &mut Wait) -> Option<i32> {
        let (query, wait_for, object) = match wait {
            Wait::Stream(stream) => (Needed::StreamQuery, Needed::StreamSynchronize, *stream),
            Wait::Event(event) => (Needed::EventQuery, Needed::EventSynchronize, *event),
            Wait::Context(streams) => {
                while let Some(stream) = streams.last() {
                    match self.driver.invoke(Needed::StreamQuery, &[*stream]) {
                        // The stream is idle, or has been destroyed.
                        0 | 400 => drop(streams.pop()),
                        NOT_READY => return None,
                        _ => break,
                    }
                }
                // The call does not block: no work is in flight, or the driver immediately returns an error.
                let code = self.driver.invoke(Needed::Synchronize, &[]);
                self.output.collect(&self.control);
                return Some(code);
            }
        };
        match self.driver.invoke(query, &[object]) {
            NOT_READY => None,
            0 if !self.output.has_printed() => Some(0),
            // Call the synchronizing function itself: it writes the output of kernels, its error may differ from the
            // query's, and it may affect a capture.
            _ => Some(self.driver.invoke(wait_for, &[object])),
        }
    }

    /// Returns true if calls are waiting or staging buffers are in use.
    pub(crate) fn has_waits(&self) -> bool {
        !self.waits.is_empty()
    }

    /// Replies to the calls whose work has completed. Returns true if calls are still waiting or staging buffers are
    /// still in use.
    pub(crate) fn poll_waits(&mut self) -> bool {
        self.poll_pieces();
        let mut at = 0;
        while let Some((origin, wait)) = self.waits.calls.get(at).cloned() {
            let mut wait = wait;
            // In relaxed capture mode, a query does not disturb other threads' captures.
            self.set_mode(2);
            let result = match self.enter(origin.route.context) {
                Ok(()) => self.poll_wait(&mut wait),
                Err(code) => Some(code),
            };
            if let Some(code) = result {
                self.waits.calls.swap_remove(at);
                self.finish(origin, code, &[]);
            } else {
                if let Some((_, place)) = self.waits.calls.get_mut(at) {
                    *place = wait;
                }
                at += 1;
            }
        }
        !self.waits.is_empty()
    }

    /// Records that the last copy in a stream uses a staging buffer.
    pub(crate) fn use_piece(&mut self, piece: u64, stream: u64, context: u32) {
        let mut event =
            self.waits.events.iter().position(|(of, _)| *of == context).map(|at| self.waits.events.swap_remove(at).1);
        if event.is_none() {
            let mut made = 0u64;
            // Create an event without timing.
            let code = self.driver.invoke(Needed::EventCreate, &[(&raw mut made).addr() as u64, 2]);
            event = (code == 0).then_some(made);
        }
        match event {
            Some(event) if self.driver.invoke(Needed::EventRecord, &[event, stream]) == 0 => {
                self.waits.pieces.push_back(PieceUse { piece, event, context });
            }
            _ => {
                self.driver.invoke(Needed::StreamSynchronize, &[stream]);
                self.release_piece(piece);
            }
        }
    }

    /// Allows the guest to reuse a staging buffer.
    pub(crate) fn release_piece(&self, piece: u64) {
        let word = control::PIECES + 8 * piece;
        self.control.store(word, self.control.load(word).wrapping_add(1));
    }

    fn poll_pieces(&mut self) {
        // Check uses in order, although copies in different streams may complete in another order.
        while let Some(first) = self.waits.pieces.front().copied() {
            self.set_mode(2);
            if self.enter(first.context).is_ok() && self.driver.invoke(Needed::EventQuery, &[first.event]) == NOT_READY
            {
                break;
            }
            self.waits.pieces.pop_front();
            self.waits.events.push((first.context, first.event));
            self.release_piece(first.piece);
        }
    }
}
