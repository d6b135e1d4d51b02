//! Polls doorbells under apertures that the client maps, because such doorbells cause no messages.

use super::device::{Core, MediatedVm};
use std::sync::Arc;
use std::time::Duration;

/// Poll interval while polls find doorbells.
const POLL_INTERVAL: Duration = Duration::from_micros(200);
/// Maximum poll interval. The interval doubles with each poll that finds no doorbell. nouveau maps a channel's doorbell
/// page in the mapped part of an aperture, but rings the doorbell elsewhere.
const POLL_SELDOM: Duration = Duration::from_millis(20);

impl MediatedVm {
    /// Polls doorbells under mapped apertures. Returns true if a doorbell was rung, or `None` if polling is no longer
    /// needed.
    fn poll(&self) -> Option<bool> {
        let core = &mut *self.core();
        // The guest rang the deferred doorbell before any doorbell that this poll finds.
        core.complete_deferred();
        // After a handover, the next process polls.
        core.polls = self.host().failure().is_none() && core.backend.work().polled().next().is_some();
        // While the card is quiescent, a doorbell consumed now might be missing from the saved state.
        if core.polls && self.host().lock().stands_still() {
            return Some(false);
        }
        core.polls.then(|| {
            let found = core.backend.poll();
            core.finish_access();
            found
        })
    }

    /// Starts the thread that polls doorbells under mapped apertures, if there are any such doorbells and the thread is
    /// not running.
    pub(super) fn start_polling(this: &Arc<Self>, core: &mut Core) {
        if core.polls || core.backend.work().polled().next().is_none() {
            return;
        }
        let vm = Arc::downgrade(this);
        let body = move || {
            let mut pause = POLL_INTERVAL;
            while let Some(found) = vm.upgrade().and_then(|vm| vm.poll()) {
                pause = if found { POLL_INTERVAL } else { (2 * pause).min(POLL_SELDOM) };
                locks::sleep(pause);
            }
        };
        match std::thread::Builder::new().name(format!("doorbells-{}", this.vm)).spawn(body) {
            Ok(_) => core.polls = true,
            Err(error) => {
                tracing::error!(%error, "cannot start a thread, so doorbells under a mapped aperture are not polled")
            }
        }
    }
}
