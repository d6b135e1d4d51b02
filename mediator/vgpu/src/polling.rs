//! Doorbells that are no messages: they lie under an aperture that the client maps, where somebody has to look.

use super::device::{Core, MediatedVm};
use std::sync::Arc;
use std::time::Duration;

/// Time between two looks for doorbells that are no messages, while some are found.
const POLL: Duration = Duration::from_micros(200);
/// The same when none have been found for long. nouveau has the page of a channel's doorbell in the mapped part of an aperture and
/// rings it elsewhere.
const POLL_SELDOM: Duration = Duration::from_millis(20);

impl MediatedVm {
    /// Looks for doorbells under mapped apertures, as long as there may be any. Returns whether one was found; `None` when there are
    /// none.
    fn poll(&self) -> Option<bool> {
        let core = &mut *self.core();
        // Whom the card was given to looks for them himself.
        core.polls = self.host().failure().is_none() && core.backend.work().polled().next().is_some();
        // What is rung now might be in no part of what is written down.
        if core.polls && self.host().lock().stands_still() {
            return Some(false);
        }
        core.polls.then(|| {
            let found = core.backend.poll();
            core.finish_access();
            found
        })
    }

    /// Starts to look for doorbells under mapped apertures, where there are any and nobody does.
    pub(super) fn start_polling(this: &Arc<Self>, core: &mut Core) {
        if core.polls || core.backend.work().polled().next().is_none() {
            return;
        }
        let vm = Arc::downgrade(this);
        let body = move || {
            let mut pause = POLL;
            while let Some(found) = vm.upgrade().and_then(|vm| vm.poll()) {
                pause = if found { POLL } else { (2 * pause).min(POLL_SELDOM) };
                locks::sleep(pause);
            }
        };
        match std::thread::Builder::new().name(format!("doorbells-{}", this.vm)).spawn(body) {
            Ok(_) => core.polls = true,
            Err(error) => tracing::error!(%error, "doorbells under a mapped aperture are not seen: no thread"),
        }
    }
}
