//! Links to the owners of other cards, in the serving thread.

use super::{Event, Serving};

impl Serving {
    /// Handles connections to, and messages from, the owners of other cards.
    pub(super) fn serve_links(&mut self, is_ready: bool) {
        for news in self.links.serve(self.now(), is_ready) {
            self.handle(Event::Link(news));
        }
    }
}
