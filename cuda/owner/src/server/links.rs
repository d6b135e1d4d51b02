//! Links to the owners of other cards, in the serving thread.

use super::{Event, Serving};
use gang::{CardId, Message};
use owner_host::{LinkEvent, OwnerLinks};
use rustix::event::PollFd;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The links, if this owner listens for other owners.
#[derive(Default)]
pub(super) struct Links(Option<OwnerLinks>);

impl Links {
    pub(super) fn begin(&mut self, links: OwnerLinks) {
        self.0 = Some(links);
    }

    pub(super) fn set_peers(&mut self, peers: &BTreeMap<CardId, PathBuf>) {
        self.0.iter_mut().for_each(|links| links.set_peers(peers));
    }

    pub(super) fn polled(&self, now: u64) -> impl Iterator<Item = PollFd<'_>> {
        self.0.iter().flat_map(move |links| links.polled(now))
    }

    pub(super) fn next_due(&self, now: u64) -> Option<u64> {
        self.0.as_ref()?.next_due(now)
    }

    pub(super) fn send(&mut self, card: CardId, message: Message, now: u64) {
        self.0.iter_mut().for_each(|links| links.send(card, message, now));
    }

    fn serve(&mut self, now: u64, is_ready: bool) -> Vec<LinkEvent> {
        self.0.as_mut().map_or_else(Vec::new, |links| links.serve(now, is_ready))
    }
}

impl Serving {
    /// Handles news of the owners of other cards.
    pub(super) fn serve_links(&mut self, is_ready: bool) {
        for news in self.links.serve(self.now(), is_ready) {
            self.handle(Event::Link(news));
        }
    }
}
